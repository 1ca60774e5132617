"""What makes a certificate mean something: checks of numbers, added to a plan before it is run and judged afterwards.

`add_checks` lets mixed trainings print their operators and puts a float32 training of the same command beside each;
`write_certificate` judges: loss curves, operators, export parity, CPU against GPU, memory and speed.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from mezzo.errors import MezzoError
from mezzo.files import write_text
from mezzo.tipc._logs import read_log
from mezzo.tipc._measures import is_mixed, loss_curve, operator_table
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._record import Record
from mezzo.tipc._run_folder import CERTIFICATE, CertificateCheck, RecordedRun, load_run

LOSS_BAND = 0.15
"""How far the loss at the end may lie from float32's, as a share of it or of its fall: whichever is larger.

Trainings of a few dozen steps on two images a batch differ by a few per cent from seed to seed; a wrong scale or a lost
gradient shows as a curve that does not fall, or as one that is not finite.
"""
HALF_SHARE = 0.95
"""Least share of convolutions (matrix products, where there are none) in half: all but a few that a list keeps out."""
AGREEMENT = 0.99
"""Least share of equal classes of CPU and GPU inference: TF32 and sums in another order move pixels on borders."""
_LAST = 5  # of so many parts of the curve the last one is the end
_LEVEL = re.compile(r"(--amp[_-]level[= ])(\S+)")
_PRECISION = re.compile(r"(--precision[= ])(\S+)")
_PARITY = re.compile(r"maximum error of \S+: ([0-9][0-9.eE+-]*)")
_SPEED = re.compile(r"\bips: ([0-9.]+)|avg_ips: ([0-9.]+)")
_MEMORY = re.compile(r"max_mem(?:ory)?[^0-9]*([0-9.]+) ?([MG]i?B)")


def add_checks(plan: Plan) -> Plan:
    """Return the plan with what the checks need; plans of other repositories stay as they are."""
    if not PROFILES[plan.profile].runs_mezzo:
        return plan
    steps: list[PlanStep] = []
    for step in plan.steps:
        if step.kind != "train" or not _is_mixed(step.bare):
            steps.append(step)
            continue
        steps.append(step.with_arguments("--log_ops"))
        steps.append(_in_float32(step))
    return replace(plan, steps=tuple(steps))


def _is_mixed(command: str) -> bool:
    level = _LEVEL.search(command)
    return level is not None and level[2] != "O0"


def _in_float32(step: PlanStep) -> PlanStep:
    """Return the same training in float32, into a folder of its own."""
    bare = _PRECISION.sub(r"\g<1>fp32", _LEVEL.sub(r"\g<1>O0", step.bare))
    save = (
        step.checkpoint.split("/best_model")[0]
        if "/best_model" in step.checkpoint
        else str(Path(step.checkpoint).parent)
    )
    save = save if save.startswith(("./", "/")) else f"./{save}"
    bare = bare.replace(save, f"{save}_float32")
    name = step.name.replace("train", "check")
    log = f"{Path(step.log).parent}/{name}.log"
    labels = {**step.labels, "check": "float32", "of": step.name}
    return replace(
        step,
        name=name,
        kind="check",
        text=bare,
        bare=bare,
        status=None,
        log=log,
        labels=labels,
        fallback="",
        checkpoint="",
    )


def write_certificate(folder: Path, say: Callable[[str], object]) -> int:
    """Judge a run, write `certificate.json` and return 1 if a check failed."""
    run = load_run(folder)
    checks = [*_losses(run), *_operators(run), *_parity(run), *_devices(run), *_ratios(run)]
    if not checks:
        checks = [
            CertificateCheck(
                name="chain", passed=None, measured="", limit="", text="no mixed training of mezzo's own in this run"
            )
        ]
    commands = [{"step": record.step, "command": record.command, "status": record.status} for record in run.records]
    content = {
        "model": run.info.model,
        "mode": run.info.mode,
        "config": run.info.config,
        "checks": [asdict(check) for check in checks],
        "passed": _passed(checks),
        "command_line": list(run.info.command_line),
        "commands": commands,
        "machine": dict(run.info.machine),
        "versions": dict(run.info.versions),
        "hashes": dict(run.info.hashes),
    }
    write_text(folder / CERTIFICATE, json.dumps(content, indent=1) + "\n")
    for check in checks:
        word = "not checked" if check.passed is None else "holds" if check.passed else "DOES NOT HOLD"
        say(f"certificate: {check.name}: {word}: {check.text}")
    return 1 if content["passed"] is False else 0


def _passed(checks: list[CertificateCheck]) -> bool | None:
    """Return the verdict on all: None where nothing could be checked, which is no success."""
    verdicts = {check.passed for check in checks}
    return False if False in verdicts else True if True in verdicts else None


def _pairs(run: RecordedRun) -> Iterable[tuple[Record, Record]]:
    """Return mixed trainings with their float32 twins."""
    twins = {record.labels.get("of", ""): record for record in run.records if record.kind == "check"}
    for record in run.records:
        if record.kind == "train" and is_mixed(record) and record.step in twins:
            yield record, twins[record.step]


def _log(run: RecordedRun, record: Record) -> str:
    path = run.log_of(record)
    return (read_log(path) or "") if path is not None and record.status == "passed" else ""


def _losses(run: RecordedRun) -> Iterable[CertificateCheck]:
    for mixed, full in _pairs(run):
        name = f"loss curve of {mixed.step}"
        one, other = loss_curve(_log(run, mixed)), loss_curve(_log(run, full))
        if one is None or other is None or not one.points or not other.points:
            yield CertificateCheck(name=name, passed=None, measured="", limit="", text="no loss in one of the two logs")
            continue
        last = [_end(curve.points) for curve in (one, other)]
        fall = abs(other.points[0][1] - last[1])
        difference, band = abs(last[0] - last[1]), LOSS_BAND * max(abs(last[1]), fall)
        text = f"mixed {last[0]:.4f}, float32 {last[1]:.4f} at the end, band {band:.4f}"
        text += f", {one.num_bad} lines not finite" if one.num_bad else ""
        passed = difference <= band and not one.num_bad
        yield CertificateCheck(name=name, passed=passed, measured=f"{difference:.4f}", limit=f"{band:.4f}", text=text)


def _end(points: tuple[tuple[int, float], ...]) -> float:
    last = points[-max(1, len(points) // _LAST) :]
    return sum(value for _, value in last) / len(last)


def _operators(run: RecordedRun) -> Iterable[CertificateCheck]:
    for record in run.records:
        if record.kind != "train" or not is_mixed(record) or "--log_ops" not in record.command:
            continue
        table = operator_table(_log(run, record))
        name = f"white operators of {record.step} in half"
        # Where there are convolutions they are judged: a few matrix products are the gradients of enlargements, in float32.
        rows = [row for row in table.rows if "conv" in row.name and row.is_product] if table else []
        what = "convolutions" if rows else "matrix products"
        rows = rows or [row for row in table.rows if row.is_product] if table else []
        half, full = sum(row.fp16 + row.bf16 for row in rows), sum(row.fp32 + row.other for row in rows)
        if not half + full:
            yield CertificateCheck(
                name=name, passed=None, measured="", limit="", text="no table of operators in the log"
            )
            continue
        share = half / (half + full)
        text = f"{what}: {half} calls in half, {full} in float32"
        if not share and run.info.machine.get("GPUs", "none") == "none":
            text += "; this CPU has no half arithmetic: white operators take and give half, and compute in float32"
            yield CertificateCheck(name=name, passed=None, measured=f"{share:.3f}", limit=f"{HALF_SHARE}", text=text)
            continue
        yield CertificateCheck(
            name=name, passed=share >= HALF_SHARE, measured=f"{share:.3f}", limit=f"{HALF_SHARE}", text=text
        )


def _parity(run: RecordedRun) -> Iterable[CertificateCheck]:
    for record in run.records:
        if record.kind != "export":
            continue
        name = f"parity of {record.step}"
        if record.status != "passed":
            yield CertificateCheck(
                name=name, passed=None, measured="", limit="", text=f"the export {record.status}: {record.reason}"
            )
            continue
        errors = [float(value) for value in _PARITY.findall(_log(run, record)) if _is_number(value)]
        if not errors:
            yield CertificateCheck(
                name=name, passed=None, measured="", limit="", text="the log of the export names no error"
            )
            continue
        text = f"largest error {max(errors):.2e}; beyond its tolerance the export fails by itself"
        yield CertificateCheck(
            name=name, passed=True, measured=f"{max(errors):.2e}", limit="the export's tolerance", text=text
        )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _devices(run: RecordedRun) -> Iterable[CertificateCheck]:
    """Compare what an exported model predicts on the CPU and on the GPU."""
    for record in run.records:
        if record.kind != "export" or record.status != "passed":
            continue
        name = f"CPU against GPU of {record.step}"
        if run.info.machine.get("GPUs", "none") == "none":
            yield CertificateCheck(name=name, passed=None, measured="", limit="", text="no GPU on this machine")
            continue
        from mezzo.tipc._agreement import agreement, exported_folder

        folder = exported_folder(record)
        if folder is None:
            yield CertificateCheck(
                name=name, passed=None, measured="", limit="", text="no exported model where the command says"
            )
            continue
        try:
            share, images = agreement(folder)
        except (MezzoError, RuntimeError, ValueError, OSError) as error:  # the rest of the certificate still counts
            text = f"could not be compared: {' '.join(str(error).split())[:200]}"
            yield CertificateCheck(name=name, passed=None, measured="", limit="", text=text)
            continue
        text = f"{share:.4%} of the classes of {images} images are equal (ONNX Runtime on the CPU, torch on the GPU)"
        yield CertificateCheck(
            name=name, passed=share >= AGREEMENT, measured=f"{share:.4f}", limit=f"{AGREEMENT}", text=text
        )


def _ratios(run: RecordedRun) -> Iterable[CertificateCheck]:
    for mixed, full in _pairs(run):
        speeds = [_number_after(_SPEED, _log(run, record)) for record in (mixed, full)]
        name = f"speed of {mixed.step}"
        if speeds[0] is None or not speeds[1]:
            yield CertificateCheck(
                name=name, passed=None, measured="", limit="", text="no speed in one of the two logs"
            )
        else:
            ratio = speeds[0] / speeds[1]
            text = f"{speeds[0]:.1f} samples/s mixed, {speeds[1]:.1f} in float32; reported, no limit"
            yield CertificateCheck(name=name, passed=True, measured=f"{ratio:.2f}x", limit="", text=text)
        memory = [_number_after(_MEMORY, _log(run, record)) for record in (mixed, full)]
        if memory[0] is not None and memory[1]:
            text = f"{memory[0]:g} mixed, {memory[1]:g} in float32; reported, no limit"
            yield CertificateCheck(
                name=f"memory of {mixed.step}",
                passed=True,
                measured=f"{memory[0] / memory[1]:.2f}x",
                limit="",
                text=text,
            )


def _number_after(pattern: re.Pattern[str], text: str) -> float | None:
    """Return the last number that a pattern finds."""
    found = pattern.findall(text)
    if not found:
        return None
    words = found[-1] if isinstance(found[-1], tuple) else (found[-1],)
    return next((float(word) for word in words if _is_number(word)), None)
