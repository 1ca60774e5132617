"""Facts about this machine and its software, for plans and reports."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mezzo._version import version_of
from mezzo.files import open_regular

_SKIPPED = {"node_modules", "build", "output", "extra_output", "log", "data", "site-packages", "__pycache__"}
_COMMIT = re.compile("[0-9a-f]{40,64}")
_HASHED = {".py", ".yml", ".yaml", ".sh", ".txt", ".cpp", ".cu"}


@dataclass(frozen=True)
class MachineInfo:
    """Devices and versions of a machine."""

    gpus: int
    cores: int
    facts: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


def this_machine(root: Path | None = None) -> MachineInfo:
    """Return facts about this machine, and the commit of a repository; imports torch."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    names = [torch.cuda.get_device_name(index) for index in range(gpus)]
    facts = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(cores),
        "GPUs": ", ".join(names) or "none",
    }
    versions = {
        "mezzo": version_of() or "from its sources",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
    }
    for package in ("onnxruntime", "openvino", "numpy"):
        if (version := version_of(package)) is not None:
            versions[package] = version
    if driver := _driver():
        versions["driver"] = driver
    if root is not None and (commit := commit_of(root)):
        versions["commit"] = commit
    return MachineInfo(gpus, cores, facts, versions)


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty if there is none."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""  # no such driver, or not Linux


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in a folder; empty if it is not in a git repository, or git is missing.

    Changed files are not noticed: the hash of the code tells them apart.
    """
    command = ["git", "-C", str(folder), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    word = ended.stdout.strip()
    return word if ended.returncode == 0 and _COMMIT.fullmatch(word) else ""


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def text_hash(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def code_hash(root: Path) -> str:
    """Return one hash of all source files below a folder, except results, data and hidden folders."""
    total = hashlib.sha256()
    for path in sorted(_sources(root)):
        total.update(str(path.relative_to(root)).encode())
        with open_regular(path) as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        kept = (name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        folders[:] = [name for name in kept if not (Path(folder) / name / "pyvenv.cfg").exists()]
        for name in names:
            path = Path(folder) / name
            if path.suffix in _HASHED and path.is_file() and os.access(path, os.R_OK):
                yield path
