"""A Job for Kubernetes that certifies configurations: a template to apply, one pod per configuration."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

IMAGE = "registry.example/mezzo:latest"
CLAIM = "mezzo-repository"
_FOLDER = "/work"
_RETRIES = 3  # of a pod that was lost; a failed step is a result and ends its pod for good
_HEAD = f"""\
# Replace the image ({IMAGE}) and the claim ({CLAIM}): a volume with the repository that the pods share.
# Afterwards, in that folder: mezzo tipc report test_tipc/output
"""


def job_template(
    configs: Sequence[Path],
    mode: str,
    *,
    check: bool = False,
    step_limit: float | None = None,
    memory_mb: int | None = None,
    history: Path | None = None,
) -> str:
    """Return an indexed Job (batch/v1) as YAML, which needs Kubernetes 1.31.

    Args:
        configs: The texts, as paths in the repository or names of recipes.
        mode: The mode of all runs.
        check: Add the checks of a certificate.
        step_limit: Seconds for one step.
        memory_mb: Memory of each pod in MiB.
        history: The history of the runs, or `off`; None: the default one.

    """
    options = ["--check"] if check else []
    options += [] if step_limit is None else ["--step-limit", f"{step_limit:g}"]
    options += [] if history is None else ["--history", str(history)]
    run = shlex.join(["mezzo", "tipc", "run", "--resume", *options])
    texts = shlex.join(str(config) for config in configs)
    script = f'configs=({texts})\nexec {run} -- "${{configs[$JOB_COMPLETION_INDEX]}}" {shlex.quote(mode)}\n'
    script = re.sub(r"\$(?=[$(])", "$$", script)  # Kubernetes expands $(NAME), and makes $ of $$
    requests, limits = {"cpu": "2"}, {"nvidia.com/gpu": "1"}
    if memory_mb is not None:
        requests["memory"] = limits["memory"] = f"{memory_mb}Mi"
    container: dict[str, Any] = {
        "name": "mezzo",
        "image": IMAGE,
        "workingDir": _FOLDER,
        "command": ["bash", "-c", script],
        "resources": {"requests": requests, "limits": limits},
        "volumeMounts": [{"name": "repository", "mountPath": _FOLDER}],
    }
    # Exit status 1 is a failed step, 2 bad input, 3 nothing to do: running the pod again would not change them.
    result = {"containerName": "mezzo", "operator": "In", "values": [1, 2, 3]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"generateName": "mezzo-tipc-"},
        "spec": {
            "completionMode": "Indexed",
            "completions": len(configs),
            "parallelism": len(configs),
            "backoffLimitPerIndex": _RETRIES,
            "podFailurePolicy": {"rules": [{"action": "FailIndex", "onExitCodes": result}]},
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [container],
                    "volumes": [{"name": "repository", "persistentVolumeClaim": {"claimName": CLAIM}}],
                }
            },
        },
    }
    return _HEAD + yaml.safe_dump(job, sort_keys=False, width=100).rstrip()
