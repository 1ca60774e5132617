"""The checks of a certificate: what they add to a plan, and how they judge a run.

`add_checks` makes mixed-precision trainings print their operators and adds the same training in float32.
`write_certificate` compares loss curves, operators, exported models, CPU and GPU, memory and speed.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from mezzo.errors import MezzoError
from mezzo.files import write_text
from mezzo.tipc._load import busy_reason, spread_reason
from mezzo.tipc._logs import one_line, read_log
from mezzo.tipc._measures import is_mixed, loss_curve, operator_table, throughputs
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._record import Record
from mezzo.tipc._run_folder import CERTIFICATE, CertificateCheck, RecordedRun, load_run

LOSS_BAND = 0.15
"""Largest difference of the last losses, as a share of the float32 loss or of its fall, whichever is larger.

Trainings of a few dozen steps with batches of two images differ by a few per cent from seed to seed. A wrong scale or a
lost gradient shows as a curve that does not fall or is not finite.
"""
HALF_SHARE = 0.95
"""Smallest share of convolutions (or matrix products) in half: a list may exclude a few."""
AGREEMENT = 0.99
"""Smallest share of equal classes on CPU and GPU: TF32 and another order of sums change pixels at borders."""
NOT_MEANINGFUL = "not meaningful"
_END_PARTS = 5  # the last one of so many parts of a curve is its end
_LEVEL = re.compile(r"(--amp[_-]level[= ])(\S+)")
_PRECISION = re.compile(r"(--precision[= ])(\S+)")
_PARITY = re.compile(r"maximum error of \S+: ([0-9][0-9.eE+-]*)")
_MEMORY = re.compile(r"max_mem(?:ory)?[^0-9]*([0-9.]+) ?([MG]i?B)")
Checks = Iterable[CertificateCheck]


def add_checks(plan: Plan) -> Plan:
    """Return the plan with the steps that the checks need; plans of other repositories are not changed."""
    if not PROFILES[plan.profile].runs_mezzo:
        return plan
    steps: list[PlanStep] = []
    for step in plan.steps:
        level = _LEVEL.search(step.bare)
        if step.kind == "train" and level is not None and level[2] != "O0":
            steps += [step.with_arguments("--log_ops"), _in_float32(step)]
        else:
            steps.append(step)
    return replace(plan, steps=tuple(steps))


def _in_float32(step: PlanStep) -> PlanStep:
    """Return the same training in float32, with its own folder for results."""
    bare = _PRECISION.sub(r"\g<1>fp32", _LEVEL.sub(r"\g<1>O0", step.bare))
    save, best, _ = step.checkpoint.partition("/best_model")
    if not best:
        save = str(Path(step.checkpoint).parent)
    save = save if save.startswith(("./", "/")) else f"./{save}"
    bare = bare.replace(save, f"{save}_float32")
    name = step.name.replace("train", "check")
    return replace(
        step,
        name=name,
        kind="check",
        text=bare,
        bare=bare,
        status=None,
        log=f"{Path(step.log).parent}/{name}.log",
        labels={**step.labels, "check": "float32", "of": step.name},
        fallback="",
        checkpoint="",
    )


def write_certificate(folder: Path, report: Callable[[str], object]) -> int:
    """Judge a run, write `certificate.json`, and return 1 if a check failed."""
    run = load_run(folder)
    checks = [*_losses(run), *_operators(run), *_parity(run), *_devices(run), *_speed_and_memory(run)]
    if not checks:
        checks = [_not_checked("chain", "no mixed training of mezzo's own in this run")]
    verdicts = {check.passed for check in checks}
    passed = False if False in verdicts else True if True in verdicts else None  # None: nothing could be checked
    content = {
        "model": run.info.model,
        "mode": run.info.mode,
        "config": run.info.config,
        "checks": [asdict(check) for check in checks],
        "passed": passed,
        "command_line": list(run.info.command_line),
        "commands": [{"step": each.step, "command": each.command, "status": each.status} for each in run.records],
        "machine": dict(run.info.machine),
        "versions": dict(run.info.versions),
        "hashes": dict(run.info.hashes),
    }
    write_text(folder / CERTIFICATE, json.dumps(content, indent=1) + "\n")
    for check in checks:
        word = (
            check.measured
            if check.measured == NOT_MEANINGFUL
            else "not checked"
            if check.passed is None
            else "passed"
            if check.passed
            else "FAILED"
        )
        report(f"certificate: {check.name}: {word}: {check.text}")
    return 1 if passed is False else 0


def _not_checked(name: str, text: str, measured: str = "", limit: str = "") -> CertificateCheck:
    return CertificateCheck(name=name, passed=None, measured=measured, limit=limit, text=text)


def _checked(name: str, passed: bool, text: str, measured: str, limit: str = "") -> CertificateCheck:
    return CertificateCheck(name=name, passed=passed, measured=measured, limit=limit, text=text)


def _pairs(run: RecordedRun) -> Iterable[tuple[Record, Record]]:
    """Yield mixed-precision trainings, each with its float32 training."""
    in_float32 = {record.labels.get("of", ""): record for record in run.records if record.kind == "check"}
    for record in run.records:
        if record.kind == "train" and is_mixed(record) and record.step in in_float32:
            yield record, in_float32[record.step]


def _log(run: RecordedRun, record: Record) -> str:
    path = run.log_of(record)
    return (read_log(path) or "") if path is not None and record.status == "passed" else ""


def _has_gpu(run: RecordedRun) -> bool:
    return run.info.machine.get("GPUs", "none") != "none"


def _losses(run: RecordedRun) -> Checks:
    for mixed, full in _pairs(run):
        name = f"loss curve of {mixed.step}"
        one, other = loss_curve(_log(run, mixed)), loss_curve(_log(run, full))
        if one is None or other is None or not one.points or not other.points:
            yield _not_checked(name, "no loss in one of the two logs")
            continue
        end, full_end = _end(one.points), _end(other.points)
        band = LOSS_BAND * max(abs(full_end), abs(other.points[0][1] - full_end))
        text = f"mixed {end:.4f}, float32 {full_end:.4f} at the end, band {band:.4f}"
        text += f", {one.num_bad} lines not finite" if one.num_bad else ""
        difference = abs(end - full_end)
        yield _checked(name, difference <= band and not one.num_bad, text, f"{difference:.4f}", f"{band:.4f}")


def _end(points: tuple[tuple[int, float], ...]) -> float:
    last = points[-max(1, len(points) // _END_PARTS) :]
    return sum(value for _, value in last) / len(last)


def _operators(run: RecordedRun) -> Checks:
    for record in run.records:
        if record.kind != "train" or not is_mixed(record) or "--log_ops" not in record.command:
            continue
        name = f"white operators of {record.step} in half"
        table = operator_table(_log(run, record))
        products = [row for row in table.rows if row.is_product] if table else []
        # Convolutions decide if there are any: some matrix products are gradients of upsampling, in float32.
        convolutions = [row for row in products if "conv" in row.name]
        what, rows = ("convolutions", convolutions) if convolutions else ("matrix products", products)
        half, full = sum(row.fp16 + row.bf16 for row in rows), sum(row.fp32 + row.other for row in rows)
        if not half + full:
            yield _not_checked(name, "no table of operators in the log")
            continue
        share = half / (half + full)
        text = f"{what}: {half} calls in half, {full} in float32"
        if not share and not _has_gpu(run):
            text += "; this CPU has no half arithmetic: white operators take and return half, and compute in float32"
            yield _not_checked(name, text, f"{share:.3f}", f"{HALF_SHARE}")
        else:
            yield _checked(name, share >= HALF_SHARE, text, f"{share:.3f}", f"{HALF_SHARE}")


def _parity(run: RecordedRun) -> Checks:
    for record in run.records:
        if record.kind != "export":
            continue
        name = f"parity of {record.step}"
        if record.status != "passed":
            yield _not_checked(name, f"the export {record.status}: {record.reason}")
            continue
        errors = [error for word in _PARITY.findall(_log(run, record)) if (error := _number(word)) is not None]
        if not errors:
            yield _not_checked(name, "the log of the export names no error")
            continue
        text = f"largest error {max(errors):.2e}; beyond its tolerance the export itself fails"
        yield _checked(name, True, text, f"{max(errors):.2e}", "the export's tolerance")


def _devices(run: RecordedRun) -> Checks:
    """Compare the classes that an exported model predicts on the CPU and on the GPU."""
    for record in run.records:
        if record.kind != "export" or record.status != "passed":
            continue
        name = f"CPU against GPU of {record.step}"
        if not _has_gpu(run):
            yield _not_checked(name, "no GPU on this machine")
            continue
        from mezzo.tipc._agreement import agreement, exported_folder

        folder = exported_folder(record)
        if folder is None:
            yield _not_checked(name, "no exported model in the folder that the command names")
            continue
        try:
            share, images = agreement(folder)
        except (MezzoError, RuntimeError, ValueError, OSError) as error:  # the other checks still count
            yield _not_checked(name, f"could not be compared: {one_line(str(error), 200)}")
            continue
        text = f"{share:.4%} of the classes of {images} images are equal (ONNX Runtime on the CPU, torch on the GPU)"
        yield _checked(name, share >= AGREEMENT, text, f"{share:.4f}", f"{AGREEMENT}")


def _speed_and_memory(run: RecordedRun) -> Checks:
    for mixed, full in _pairs(run):
        logs = _log(run, mixed), _log(run, full)
        yield _speed(f"speed of {mixed.step}", (mixed, full), logs)
        memory, full_memory = (_last_number(_MEMORY, log) for log in logs)
        if memory is not None and full_memory:
            text = f"{memory:g} mixed, {full_memory:g} in float32; reported, no limit"
            yield _checked(f"memory of {mixed.step}", True, text, f"{memory / full_memory:.2f}x")


def _speed(name: str, records: tuple[Record, Record], logs: tuple[str, str]) -> CertificateCheck:
    """Return the ratio of the two speeds, or why it means nothing."""
    speeds = [throughputs(log) for log in logs]
    if not all(speeds):
        return _not_checked(name, "no speed in one of the two logs")
    mixed, full = (statistics.median(each) for each in speeds)
    text = f"{mixed:.1f} samples/s mixed, {full:.1f} in float32"
    faults = [
        f"{record.step}: {fault}"
        for record, values in zip(records, speeds, strict=True)
        for fault in (busy_reason(record.load), spread_reason(values))
        if fault
    ]
    if faults:
        return _not_checked(name, f"{'; '.join(faults)}; the logs have {text}", NOT_MEANINGFUL)
    return _checked(name, True, f"{text}; reported, no limit", f"{mixed / full:.2f}x")


def _last_number(pattern: re.Pattern[str], text: str) -> float | None:
    """Return the number in the last match of a pattern."""
    matches = list(pattern.finditer(text))
    groups = matches[-1].groups(default="") if matches else ()
    return next((number for group in groups if (number := _number(group)) is not None), None)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
