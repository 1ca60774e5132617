"""Somebody else's run folder through `mezzo tipc report`, and TIPC texts that try to write outside of the output folder."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from posixpath import join, normpath
from xml.etree import ElementTree

from fuzzing import Target
from mutate import TEXTS, mutate_bytes, mutate_text, mutate_tree

from mezzo.errors import MezzoError
from mezzo.tipc import (
    PROFILES,
    RECORDS,
    RUN,
    Allowances,
    Record,
    RunInfo,
    adapt_plan,
    check_folder_names,
    check_output_paths,
    make_plan,
    merge_reports,
    run_folder,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tipc"))  # the seeds are those of the tests
from report_runs import REPORT, TABLE, losses
from tipc_plans import CONFIG, MODE

SECRET = "PRIVATE KEY OF THE USER"
_INFO = asdict(
    RunInfo(
        config="c.txt", mode=MODE, profile="mezzo", model="net", command_line=("mezzo",), start="", end="", result=0,
        machine={"GPUs": "none"}, versions={"torch": "2"}, hashes={},
    )
)  # fmt: skip
_CHECK = {"name": "loss", "passed": True, "measured": 0.1, "limit": "1", "text": "fine"}


def _record(step: str, cwd: str, log: str) -> dict[str, object]:
    kind = step.partition("-")[0]
    labels = {"devices": "0", "precision": "fp16", "device": "cpu", "batch": "1", "trainer": "amp_train"}
    return asdict(
        Record(
            step=step, kind=kind, model="net", mode=MODE, labels=labels, command=f"python {kind}.py --amp_level O1",
            status="failed" if kind == "eval" else "passed", reason="exit status 1", argv=("python",), cwd=cwd,
            start="2026-01-01T00:00:00+00:00", end="", seconds=1.5, code=0, log=log,
        )
    )  # fmt: skip


def make_report(rng: random.Random, folder: Path) -> Path:
    run, secret = folder / "net", folder / "home" / "key"
    run.mkdir()
    secret.parent.mkdir()
    secret.write_text(SECRET)
    (run / "train-1.log").write_text(losses(2.0, 1.0) + TABLE)
    (run / "infer-1.log").write_bytes(mutate_bytes(rng, REPORT.encode()))
    (run / "link.log").symlink_to(secret)
    (run / "folder").symlink_to(secret.parent)
    logs = [
        "train-1.log",
        "infer-1.log",
        "link.log",
        "folder/key",
        str(secret),
        "../home/key",
        "key",
        ".",
        rng.choice(TEXTS),
    ]
    places = [str(run), str(folder), str(secret.parent), "/", "", "..", rng.choice(TEXTS)]
    steps = [_record(step, rng.choice(places), rng.choice(logs)) for step in ("train-1", "eval-1", "infer-1")]
    damaged = rng.randrange(8)
    lines = [json.dumps(mutate_tree(rng, step) if damaged == 1 else step) for step in steps]
    (run / RUN).write_text(json.dumps(mutate_tree(rng, _INFO) if damaged == 2 else _INFO))
    text = "\n".join(lines) + "\n"
    (run / RECORDS).write_bytes(mutate_bytes(rng, text.encode()) if damaged == 3 else text.encode())
    certificate = {"checks": [_CHECK]}
    (run / "certificate.json").write_text(json.dumps(mutate_tree(rng, certificate) if damaged == 0 else certificate))
    return run


def read_report(path: Path) -> None:
    try:
        junit, page = merge_reports([path], path.parent / "out")
    except ValueError as error:  # the command makes one line of it
        if str(path) not in str(error):
            raise AssertionError(f"the folder is not named: {error}") from error
        raise MezzoError(str(error)) from error
    for text in (junit.read_text("utf-8"), page.read_text("utf-8")):
        assert SECRET not in text, "the report discloses a file outside of the run"
        assert "\x1b" not in text
    ElementTree.parse(junit)


_WAYS = ("../../../x", "/etc/x", "a/../../../../x", "..", ".", "/", "x/../../..", "\x1b[31m", "a b", "$(x)", "~")


def make_places(rng: random.Random, folder: Path) -> Path:
    lines = CONFIG.split("\n")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(lines))
        key, colon, value = lines[at].partition(":")
        lines[at] = f"{key}{colon}{rng.choice(('', value, value + '|'))}{rng.choice(_WAYS)}"
    text = "\n".join(lines)
    text = mutate_text(rng, text) if rng.random() < 0.3 else text
    mode = rng.choice((MODE, MODE, "whole_infer", "whole_train_whole_infer", "klquant_whole_infer", rng.choice(_WAYS)))
    path = folder / "a.json"
    path.write_text(json.dumps({"text": text, "mode": mode, "profile": rng.choice(sorted(PROFILES))}))
    return path


def read_places(path: Path) -> None:
    given, root = json.loads(path.read_text()), Path("/work tree/repo")
    plan = make_plan(given["text"], given["mode"], PROFILES[given["profile"]], str(root))
    check_folder_names(plan)
    check_output_paths(plan, root)
    folder = run_folder(plan, Path("a.txt"))
    allow = Allowances(shell=True, unknown_mode=True)
    plan = adapt_plan(plan, root=root, gpus=1, allow=allow, folder=folder, works=lambda word, ours: True)
    written = [folder, plan.status_file, *(place for step in plan.steps for place in (step.log, *step.known_as))]
    for place in written:
        inside = normpath(join(str(root), place))
        assert inside.startswith(f"{root}/"), f"{place} is written outside of the repository"


TARGETS = [Target("tipc-report", make_report, read_report), Target("tipc-places", make_places, read_places)]
