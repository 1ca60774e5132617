"""Numbers in logs: the loss of a training, the dtypes of its operators, the times of an inference.

Logs may hold anything. The result is empty if nothing is found, and nothing here raises because of a log.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mezzo.tipc._record import Record
from mezzo.vision.infer import parse_reports

MAX_POINTS = 400
"""Largest number of points of a curve; of a longer one, every n-th is kept."""

MAX_REPORTS = 64

_LARGEST = 3.4e38  # of float32; larger values count as infinite

_NUMBER = r"(-?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?(?:e[-+]?[0-9]{1,3})?|nan|inf(?:inity)?))(?![\w.])"
_LOSS = re.compile(rf"(?<![\w.])loss: ?{_NUMBER}", re.I)
_ITERATION = re.compile(r"\b(?:iter|global_step): ?([0-9]{1,12})(?:/([0-9]{1,12}))?", re.I)
_EPOCH = re.compile(r"\bepoch:? ?\[?([0-9]{1,9})", re.I)

_TABLE = re.compile(r"<-+ op list -+>")
_TABLE_END = re.compile(r"<-+ op count: [0-9]+ -+>")
_ROW = re.compile(r"\s+(\S{1,80})\s*" + r"\|\s*([0-9]{1,15})\s*" * 4)
# Matrix products and convolutions, which Tensor Cores compute; not 'convert', not upsampling.
_PRODUCT = re.compile(r"conv(?!ert)|matmul|attention|(?:^|_|::)(?:(?:add|addb|baddb|b)?mm|(?:add)?mv|linear)(?:$|_)")

_REPORT = re.compile(r"-{10} Env info -{10}")
_PERCENTILE = re.compile(rf"inference_(p50|p95)\(ms\): {_NUMBER}")

_SPEED = re.compile(rf"\b(?:avg_)?ips: {_NUMBER}", re.I)
_SCORE = re.compile(rf"\b(mIoU|top1|top-1|acc(?:uracy)?|acc1): ?{_NUMBER}", re.I)
_SCORE_NAMES = {"miou": "mIoU", "top1": "top-1", "top-1": "top-1", "acc1": "top-1"}  # others are an accuracy

_OFF = re.compile(r"amp[._-]?level[=\s]+[\"']?O0", re.I)
_FULL = re.compile(r"precision[=\s]+[\"']?(?:fp|float)32", re.I)
_MIXED = re.compile(r"amp[._-]?level[=\s]+[\"']?O[1-9D]|precision[=\s]+[\"']?b?(?:fp|f|float)16", re.I)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurve:
    """Loss over the steps of a training."""

    points: tuple[tuple[int, float], ...]
    """Step and finite loss. Steps are counted on if the log starts again from 0 in each epoch."""
    num_bad: int = 0
    """Number of lines whose loss is not finite."""

    @property
    def last(self) -> float | None:
        """The last finite loss."""
        return self.points[-1][1] if self.points else None

    def thinned(self, count: int) -> tuple[tuple[int, float], ...]:
        """Return about so many points: every n-th, and the last one."""
        return _thinned(self.points, count)


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """The calls of an operator by dtype."""

    name: str
    fp16: int
    bf16: int
    fp32: int
    other: int

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return _PRODUCT.search(self.name) is not None


@dataclass(frozen=True, slots=True)
class OperatorTable:
    """The operators of one recorded training step."""

    rows: tuple[OperatorCalls, ...]

    def calls(self, *, products: bool) -> OperatorCalls:
        """Return the sum over all rows, or over the matrix products and convolutions."""
        rows = [row for row in self.rows if row.is_product or not products]
        columns = [[row.fp16, row.bf16, row.fp32, row.other] for row in rows]
        sums = [sum(column) for column in zip(*columns, strict=True)] or [0, 0, 0, 0]
        return OperatorCalls("matrix products and convolutions" if products else "all operators", *sums)

    @property
    def half_share(self) -> float | None:
        """Share of matrix products and convolutions in half precision; None where there are none."""
        sums = self.calls(products=True)
        total = sums.fp16 + sums.bf16 + sums.fp32 + sums.other
        return (sums.fp16 + sums.bf16) / total if total else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """Mean times per cycle of an inference; None or empty if the report does not have them."""

    preprocess_ms: float | None
    inference_ms: float
    postprocess_ms: float | None
    p50_ms: float | None = None
    p95_ms: float | None = None
    model: str = ""
    device: str = ""
    precision: str = ""
    batch: str = ""
    warnings: tuple[str, ...] = ()


def is_mixed(record: Record) -> bool:
    """Return whether a step trains in mixed precision: by its command, otherwise by the name of its trainer.

    >>> is_mixed(Record("train-1", "train", "m", "x", {"trainer": "amp_train"}, "python train.py", "passed"))
    True
    >>> is_mixed(Record("train-1", "train", "m", "x", {}, "python train.py --amp_level=O0", "passed"))
    False
    """
    command = record.command
    if _OFF.search(command):
        return False
    if _MIXED.search(command):
        return True
    return not _FULL.search(command) and "amp" in record.labels.get("trainer", "").lower()


def loss_curve(text: str) -> LossCurve | None:
    """Return the loss curve in a log of mezzo or of a Paddle repository; None if there is none."""
    points: list[tuple[int, float]] = []
    num_bad = 0
    for step, loss in _losses(text):
        if abs(loss) < _LARGEST:
            points.append((step, loss))
        else:
            num_bad += 1
    if not points and not num_bad:
        return None
    return LossCurve(points=_thinned(points, MAX_POINTS), num_bad=num_bad)


def _thinned(points: Sequence[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    stride = -(-len(points) // count)
    kept = list(points[:: max(stride, 1)])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return tuple(kept)


def _losses(text: str) -> Iterator[tuple[int, float]]:
    offset, last_epoch, last = 0, 0, -1
    for line in text.split("\n"):
        loss, iteration = _LOSS.search(line), _ITERATION.search(line)
        if loss is None or iteration is None or "[eval]" in line.lower():
            continue
        epoch, step = _EPOCH.search(line), int(iteration[1])
        if epoch is not None:
            if int(epoch[1]) > last_epoch and step <= last:
                offset += int(iteration[2]) if iteration[2] else last + 1
            last_epoch = int(epoch[1])
        last = step
        yield offset + step, float(loss[1])


def operator_table(text: str) -> OperatorTable | None:
    """Return the first table of operators and dtypes in a log (`--log_ops`, `GLOG_v=5`); None if there is none."""
    start = _TABLE.search(text)
    if start is None:
        return None
    end = _TABLE_END.search(text, start.end())
    lines = text[start.end() : end.start() if end else len(text)].split("\n")
    rows = [OperatorCalls(row[1], *map(int, row.groups()[1:])) for line in lines if (row := _ROW.fullmatch(line))]
    return OperatorTable(tuple(rows)) if rows else None


def throughputs(text: str) -> list[float]:
    """Return the samples per second in the lines of a training's log; the first line, which has the warm-up, only if alone.

    >>> throughputs("iter: 1, ips: 2.5 samples/sec\\niter: 2, ips: 10 samples/sec\\n[Epoch 1] avg_ips: 11.0 images/sec.")
    [10.0, 11.0]
    """
    speeds = [speed for word in _SPEED.findall(text) if (speed := _finite(float(word))) is not None and speed > 0]
    return speeds[1:] or speeds


def accuracy(text: str) -> tuple[str, float] | None:
    """Return the name and value of the last evaluation in a log: mIoU, top-1 or accuracy; None if there is none.

    >>> accuracy("[EVAL] #Images: 4 mIoU: 0.5123 Acc: 0.9 Kappa: 0.1"), accuracy("[Eval] top1: 0.25000, top5: 0.75000")
    (('mIoU', 0.5123), ('top-1', 0.25))
    """
    lines = [line for line in text.split("\n") if "eval" in line.lower() and _SCORE.search(line)]
    found = _SCORE.search(lines[-1]) if lines else None
    value = _finite(float(found[2])) if found else None
    return (_SCORE_NAMES.get(found[1].lower(), "accuracy"), value) if found and value is not None else None


def latencies(text: str) -> list[Latency]:
    """Return the benchmark reports in a log, of mezzo and of AutoLog; reports without an inference time are left out."""
    starts = [match.start() for match in _REPORT.finditer(text)]
    pieces = [text[start:end] for start, end in pairwise([*starts, len(text)])]
    return [found for piece in pieces[:MAX_REPORTS] for found in _latency(piece)]


def _latency(piece: str) -> Iterator[Latency]:
    percentiles = {name: _finite(float(value)) for name, value in _PERCENTILE.findall(piece)}
    for report in parse_reports(piece):
        inference_ms = _finite(report.get("inference_time(ms)"))
        if inference_ms is None:
            continue
        warnings = report["warnings"]
        yield Latency(
            preprocess_ms=_finite(report.get("preprocess_time(ms)")),
            inference_ms=inference_ms,
            postprocess_ms=_finite(report.get("postprocess_time(ms)")),
            p50_ms=percentiles.get("p50"),
            p95_ms=percentiles.get("p95"),
            model=_word(report.get("model_name")),
            device=_word(report.get("runtime_device")),
            precision=_word(report.get("precision")),
            batch=_word(report.get("batch_size")),
            warnings=tuple(map(str, warnings)) if isinstance(warnings, list) else (),
        )


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


def _word(value: object) -> str:
    return "" if value is None else str(value)
