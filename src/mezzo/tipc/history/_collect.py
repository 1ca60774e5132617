"""Make the rows of a history from the folder of a run: verdicts, times, and the numbers in the logs."""

import hashlib
import json
import os
import re
import statistics
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePath

from mezzo.tipc._load import busy_reason, spread_reason
from mezzo.tipc._logs import one_line, read_log
from mezzo.tipc._matrix import verdict
from mezzo.tipc._measures import accuracy, is_mixed, latencies, throughputs
from mezzo.tipc._record import Record
from mezzo.tipc._run_folder import RecordedRun, RunFolderError, load_run
from mezzo.tipc.history._rows import HistoryRun, HistoryStep, Series
from mezzo.tipc.history._store import AddedRun, add_rows

CERTIFICATE = "certificate"
"""Kind of the rows that hold the checks of a certificate."""
_LEVEL = re.compile(r"amp[._-]?level[=\s]+[\"']?(O[1-9D])", re.I)
_DTYPE = re.compile(r"precision[=\s]+[\"']?(b?f(?:p|loat)?16)", re.I)
_TRAINED = ("train", "check", "eval", "quantise")
_LONGEST = 300  # characters of a name or a reason


def add_run(path: Path, folder: Path) -> AddedRun:
    """Add the run of a folder to a history; see `add_rows` for a run that is in it already.

    Raises:
        RunFolderError: The folder cannot be read.
        HistoryError: The history cannot be used.
    """
    return add_rows(path, *collect(load_run(folder)))


def collect(run: RecordedRun) -> tuple[HistoryRun, list[HistoryStep]]:
    """Return the rows of a run; its logs are read."""
    info = run.info
    gpu = info.machine.get("GPUs", "none")
    has_gpu = gpu not in ("", "none")
    steps = [_step(run, record, has_gpu) for record in run.records]
    steps += [
        _check_row(run, check.name, "skipped" if check.passed is None else "passed" if check.passed else "failed", text)
        for check in run.checks
        for text in (one_line(f"{check.measured} {check.text}".strip(), _LONGEST),)
    ]
    statuses = [step.status for step in steps]
    state = verdict(statuses)
    if info.result is None and state != "failed":
        state = "unfinished"
    row = HistoryRun(
        id=0,
        key=_key(run),
        network=_short(info.model),
        mode=_short(info.mode),
        config=_short(PurePath(info.config).stem),
        profile=_short(info.profile),
        folder=os.fsencode(run.directory.resolve()).decode(errors="backslashreplace"),
        started=_utc(run, info.start),
        ended=_utc(run, info.end) if info.end else "",
        result=info.result,
        verdict=state,
        machine=_short(
            gpu if has_gpu else f"{info.machine.get('processor', '')}, {info.machine.get('cores', '?')} cores"
        ),
        gpu=_short(gpu if has_gpu else ""),
        driver=_short(info.versions.get("driver", "")),
        mezzo=_short(info.versions.get("mezzo", "")),
        torch=_short(info.versions.get("torch", "")),
        commit_id=_short(info.versions.get("commit", "")),
        code=_short(info.hashes.get("code", "")),
        versions=json.dumps(dict(info.versions), sort_keys=True),
    )
    return row, _numbered(steps)


def _key(run: RecordedRun) -> str:
    """Return what is the same for two copies of a run: where and when it started, and what it ran."""
    info = run.info
    same = (info.config, info.mode, info.model, info.start, sorted(info.machine.items()), sorted(info.hashes.items()))
    return hashlib.sha256(repr(same).encode("utf-8", "surrogatepass")).hexdigest()


def _step(run: RecordedRun, record: Record, has_gpu: bool) -> HistoryStep:
    path = run.log_of(record)
    log = (read_log(path) or "") if path is not None and record.status == "passed" else ""
    reports = latencies(log) if record.kind == "infer" else []
    latency = (reports[0].p50_ms or reports[0].inference_ms) if reports else None
    speeds = throughputs(log) if record.kind in ("train", "check") else []
    speed = statistics.median(speeds) if speeds else None
    if latency and reports[0].batch.isdigit():
        speed = 1000 * int(reports[0].batch) / latency
    score = accuracy(log) if record.kind in _TRAINED else None
    labels = {_short(name): _short(value) for name, value in sorted(record.labels.items()) if value}
    return HistoryStep(
        series=Series(
            network=_short(run.info.model),
            mode=_short(run.info.mode),
            config=_short(PurePath(run.info.config).stem),
            kind=_short(record.kind),
            labels=json.dumps(labels, sort_keys=True, ensure_ascii=False),
            place=0,
            device=_short(_device(record, has_gpu)),
            precision=_short(_precision(record)),
        ),
        step=_short(record.step),
        status=record.status,
        reason=one_line(record.reason, _LONGEST),
        resumed=record.resumed,
        seconds=record.seconds,
        latency_ms=latency,
        throughput=speed,
        accuracy=score[1] if score else None,
        accuracy_name=score[0] if score else "",
        busy=_short(busy_reason(record.load) or spread_reason(speeds)),
        host=_short(record.host),
    )


def _check_row(run: RecordedRun, name: str, status: str, text: str) -> HistoryStep:
    config = _short(PurePath(run.info.config).stem)
    labels = json.dumps({"check": _short(name)}, ensure_ascii=False)
    series = Series(_short(run.info.model), _short(run.info.mode), config, CERTIFICATE, labels, 0, "", "")
    return HistoryStep(series, _short(name), status, text, False, 0.0, None, None, None, "")


def _numbered(steps: list[HistoryStep]) -> list[HistoryStep]:
    """Return the steps with a number for those that are equal in everything that makes a series."""
    seen: Counter[Series] = Counter()
    numbered = []
    for step in steps:
        numbered.append(replace(step, series=replace(step.series, place=seen[step.series])))
        seen[step.series] += 1
    return numbered


def _device(record: Record, has_gpu: bool) -> str:
    if device := record.labels.get("device", ""):
        return device.lower()
    return ("gpu" if has_gpu else "cpu") if record.kind in _TRAINED else ""


def _precision(record: Record) -> str:
    if precision := record.labels.get("precision", ""):
        return precision.lower()
    if record.kind not in ("train", "check"):
        return ""
    if record.kind == "check" or not is_mixed(record):
        return "fp32"
    level, dtype = _LEVEL.search(record.command), _DTYPE.search(record.command)
    words = [level[1].upper() if level else "mixed", dtype[1].lower() if dtype else ""]
    return " ".join(filter(None, words))


def _utc(run: RecordedRun, text: str) -> str:
    try:
        when = datetime.fromisoformat(text)
        return when.astimezone(UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError):
        raise RunFolderError(f"{run.directory}/run.json: {text[:60]!r} is not a time in ISO 8601") from None


def _short(text: str) -> str:
    return one_line(text, _LONGEST)
