"""Parse the benchmark reports of mezzo and of AutoLog in a program's log."""

from __future__ import annotations

import re

# Texts stay texts: as a number, version 12.10 would be 12.1, and a commit such as 1234e5 no commit any more.
_TEXTS = (
    "OS_version CUDA_version CUDNN_version drivier_version paddle_version paddle_commit "
    "runtime_device model_name precision input_shape"
).split()
_VALUES = (
    "log_api_version ir_optim enable_memory_optim enable_tensorrt enable_mkldnn "
    "cpu_math_library_num_threads batch_size data_num"
).split()
_STAGES = ("preprocess_time(ms)", "inference_time(ms)", "postprocess_time(ms)")
_TOTAL = "total time spent(s)"
_PERF = ("cpu_rss(MB)", "gpu_rss(MB)", "gpu_util", _TOTAL, *_STAGES)
_LAST = _STAGES[-1]

_LABELS = "|".join(re.escape(label) for label in (*_TEXTS, *_VALUES, *_PERF))
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_TITLE = re.compile(r"-{10} (?P<title>[A-Z][a-z]* info) -{10}")
# A blank separates identifier and label; a prefix such as [INFO] has that of the empty identifier besides its own.
_FIELD = re.compile(rf"(?:\[(?P<identifier>[^\[\]]*)\] |(?:^|(?<=\s)))(?P<label>{_LABELS}):(?=\s|$)(?P<value>.*)")
_NUMBER = re.compile(r"[+-]?[0-9]{1,300}(?P<fraction>\.[0-9]*)?(?P<exponent>e[+-]?[0-9]{1,4})?", re.I)

_WORDS: dict[str, bool | None] = {"None": None, "True": True, "False": False}
_TOLERANCE = 0.02  # the format allows this much between the total and its parts


def parse_reports(text: str, *, warmup: int = 0) -> list[dict[str, object]]:
    """Return all benchmark reports of a log, in order, each as a dict from label to value.

    Lines may carry any prefix and colours. `None` is None, `True` and `False` are booleans, numbers numbers, `gpu_util`
    one without its percent sign; names, versions and shapes stay text. Two keys are not labels: `identifier` (what
    stood in brackets before the fields, or None) and `warnings`, a list that tells what is wrong with the report.

    Args:
        text: The log; what is not part of a report is skipped.
        warmup: How many of `data_num` cycles the times leave out; only the report's program knows.

    >>> log = f"{'-' * 22} Env info {'-' * 22}\\n OS_version: Linux 6\\n data_num: 2\\n total time spent(s): 0.5\\n"
    >>> log += " preprocess_time(ms): 50.0, inference_time(ms): 190.0, postprocess_time(ms): 10.0"
    >>> [(report["OS_version"], report["warnings"]) for report in parse_reports(log)]
    [('Linux 6', [])]
    """
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: must be 0 or more")
    reader = _Reader()
    for line in _COLOUR.sub("", text).split("\n"):
        reader.read(line)
    return [_result(fields, warmup) for fields in reader.reports if any(label != "identifier" for label in fields)]


class _Reader:
    """Collects the raw text of every field, line by line."""

    def __init__(self) -> None:
        self.reports: list[dict[str, str]] = []
        self._label: str | None = None
        self._is_inside = False

    def read(self, line: str) -> None:
        field = _FIELD.search(line) if self._is_inside else None
        if field:
            self._read_field(field)
        elif title := _TITLE.search(line):
            self._read_title(title["title"])
        elif self._is_inside and self._label in _TEXTS:
            fields = self.reports[-1]
            fields[self._label] = f"{fields[self._label]}\n{line.strip()}".strip()

    def _read_title(self, title: str) -> None:
        self._label = None
        if title == "Env info":
            self.reports.append({})
            self._is_inside = True

    def _read_field(self, field: re.Match[str]) -> None:
        fields, label, value = self.reports[-1], field["label"], field["value"]
        self._label = label
        if field["identifier"]:
            fields["identifier"] = field["identifier"]
        if label not in _PERF:
            fields[label] = value.strip()
            return
        for part in f"{label}:{value}".split(","):
            name, _, number = part.partition(":")
            fields[name.strip()] = number.strip()
        self._is_inside = _LAST not in fields


def _result(fields: dict[str, str], warmup: int) -> dict[str, object]:
    identifier = fields.pop("identifier", None)
    values = {label: _value(label, text) for label, text in fields.items()}
    return {**values, "identifier": identifier, "warnings": _warnings(values, warmup)}


def _value(label: str, text: str) -> object:
    if label in _TEXTS:
        return None if text == "None" else text
    text = text.removesuffix("%")
    if text in _WORDS:
        return _WORDS[text]
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text
    return float(text) if number["fraction"] or number["exponent"] else int(text)


def _warnings(values: dict[str, object], warmup: int) -> list[str]:
    if _LAST not in values:
        return [f"the report is cut off: it has no {_LAST}"]
    labels = ("data_num", _TOTAL, *_STAGES)
    numbers = [number for label in labels if isinstance(number := values.get(label), int | float)]
    if len(numbers) < len(labels):
        return [f"total and stages cannot be compared: not all of {', '.join(labels)} are numbers"]
    count, total_s, *stages_ms = numbers
    cycles = max(count - warmup, 0)
    expected_s = sum(stages_ms) / 1e3 * cycles
    rounding_s = 5e-5 + len(stages_ms) * 5e-8 * cycles  # all are printed with four decimals
    if abs(total_s - expected_s) <= _TOLERANCE * expected_s + rounding_s:
        return []
    return [
        f"{_TOTAL} is {total_s}, but the stages of {cycles} cycles make {expected_s:.4f}; "
        f"check warmup={warmup}, the cycles that were left out"
    ]
