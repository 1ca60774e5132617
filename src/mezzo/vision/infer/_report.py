"""The report of an inference benchmark: the lines that collectors of TIPC logs match by label, byte for byte.

Titles, labels (`drivier_version` is spelt so), rounding and order are AutoLog's, API version 1.0. What it has no label
for comes in a section of our own behind its last line, where its readers have stopped.
"""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from mezzo.errors import unknown_choice
from mezzo.vision.infer._stages import Percentiles, StageTimes
from mezzo.vision.infer._usage import Usage, nvml_session

LOG_API_VERSION = 1.0

ReportRow = dict[str, object]
"""Labels and values of one line."""

Section = tuple[str, list[ReportRow]]
"""A title with its dashes, and its lines."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkEnvironment:
    """The machine of a benchmark: system, drivers, torch and the engine; None means unknown."""

    os_version: str | None
    cuda_version: str | None
    cudnn_version: str | None
    driver_version: str | None
    torch_version: str
    torch_commit: str | None
    engine: str
    engine_version: str | None

    @classmethod
    def query(cls, *, engine: str, engine_version: str | None = None) -> BenchmarkEnvironment:
        """Return the environment of this process."""
        import torch

        return cls(
            os_version=_os_version(),
            cuda_version=torch.version.cuda,
            cudnn_version=_dotted(torch.backends.cudnn.version()),
            driver_version=_driver_version(),
            torch_version=str(torch.__version__),
            torch_commit=torch.version.git_version,
            engine=engine,
            engine_version=engine_version,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkReport:
    """The content of a report. None prints as `None`; each text is one line."""

    model_name: str
    """May be empty."""

    precision: str
    batch_size: int
    input_shape: str
    runtime_device: Literal["cpu", "gpu"]
    ir_optim: bool | None
    enable_memory_optim: bool | None
    enable_tensorrt: bool | None
    enable_mkldnn: bool | None
    cpu_threads: int | None
    usage: Usage
    times: StageTimes
    env: BenchmarkEnvironment
    warmup_runs: int = 0
    """Runs before the timer started: neither timed nor counted in `data_num`."""

    def __post_init__(self) -> None:
        if self.runtime_device not in ("cpu", "gpu"):
            raise ValueError(unknown_choice("runtime_device", self.runtime_device, ("cpu", "gpu")))
        for label, value in self.as_dict().items():
            if isinstance(value, str):
                _check_one_line(label, value)

    def lines(self, identifier: str = "") -> list[str]:
        """Return the lines of the report, without a logger's prefix.

        The first is empty: it sets the report off from what the program printed before.

        Args:
            identifier: Stands in brackets before every field, to tell several reports of one log apart.
        """
        _check_one_line("identifier", identifier)
        if "[" in identifier or "]" in identifier:
            raise ValueError(f"identifier={identifier!r}: must be without brackets; they are put around it")
        lead = f"[{identifier}]" if identifier else ""
        lines = [""]
        for title, rows in self._sections():
            lines += [title, *(f"{lead} {_format(row)}" for row in rows)]
        return lines

    def as_dict(self) -> dict[str, object]:
        """Return label and value of every field, rounded as they are printed, ready for JSON."""
        return {label: value for _, rows in self._sections() for row in rows for label, value in row.items()}

    def _sections(self) -> list[Section]:
        return [
            (_title("Env info", 22, 22), _one_a_line(self._env())),
            (_title("Paddle info", 22, 22), _one_a_line(self._framework())),
            (_title("Conf info", 23, 23), _one_a_line(self._conf())),
            (_title("Model info", 23, 22), _one_a_line({"model_name": self.model_name, "precision": self.precision})),
            (_title("Data info", 23, 23), _one_a_line(self._data())),
            (_title("Perf info", 23, 23), self._perf()),
            (_title("Torch info", 22, 22), self._extra()),
        ]

    def _env(self) -> ReportRow:
        return {
            "OS_version": self.env.os_version,
            "CUDA_version": self.env.cuda_version,
            "CUDNN_version": self.env.cudnn_version,
            "drivier_version": self.env.driver_version,
        }

    def _framework(self) -> ReportRow:
        return {
            "paddle_version": self.env.torch_version,
            "paddle_commit": self.env.torch_commit,
            "log_api_version": LOG_API_VERSION,
        }

    def _conf(self) -> ReportRow:
        return {
            "runtime_device": self.runtime_device,
            "ir_optim": self.ir_optim,
            "enable_memory_optim": self.enable_memory_optim,
            "enable_tensorrt": self.enable_tensorrt,
            "enable_mkldnn": self.enable_mkldnn,
            "cpu_math_library_num_threads": self.cpu_threads,
        }

    def _data(self) -> ReportRow:
        return {"batch_size": self.batch_size, "input_shape": self.input_shape, "data_num": self.times.cycles}

    def _perf(self) -> list[ReportRow]:
        memory_mb, util = _rounded(self.usage.gpu_memory_mb, 1), _rounded(self.usage.gpu_util, 1)
        return [
            {"cpu_rss(MB)": _rounded(self.usage.mean_rss_mb), "gpu_rss(MB)": memory_mb, "gpu_util": util},
            {"total time spent(s)": _rounded(self.times.total_s)},
            {
                "preprocess_time(ms)": _rounded(self.times.preprocess_ms),
                "inference_time(ms)": _rounded(self.times.inference_ms),
                "postprocess_time(ms)": _rounded(self.times.postprocess_ms),
            },
        ]

    def _extra(self) -> list[ReportRow]:
        return [
            {"torch_version": self.env.torch_version},
            {"torch_commit": self.env.torch_commit},
            {"engine": self.env.engine},
            {"engine_version": self.env.engine_version},
            {"cpu_peak_rss(MB)": _rounded(self.usage.peak_rss_mb)},
            {"warmup": self.warmup_runs + self.times.warmup},
            {"throughput(samples/s)": _rounded(self.times.samples_per_s)},
            _percentile_row("inference", self.times.inference),
            _percentile_row("cycle", self.times.cycle),
        ]


def _title(name: str, left: int, right: int) -> str:
    return f"{'-' * left} {name} {'-' * right}"


def _one_a_line(row: ReportRow) -> list[ReportRow]:
    return [{label: value} for label, value in row.items()]


def _format(row: ReportRow) -> str:
    return ", ".join(f"{label}: {value}{'%' if label == 'gpu_util' else ''}" for label, value in row.items())


def _percentile_row(what: str, of: Percentiles) -> ReportRow:
    named = (("p50", of.p50_ms), ("p95", of.p95_ms), ("p99", of.p99_ms))
    return {f"{what}_{name}(ms)": _rounded(time_ms) for name, time_ms in named}


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(float(value), digits)


def _check_one_line(label: str, text: str) -> None:
    if _CONTROL.search(text):
        raise ValueError(f"{label}={text!r}: must be one line without control characters")


def _os_version() -> str:
    try:
        release = platform.freedesktop_os_release()
    except OSError:  # not Linux, or a Linux without that file
        is_mac = platform.system() == "Darwin"
        return f"macOs {platform.mac_ver()[0]}" if is_mac else f"{platform.system()} {platform.release()}"
    return f"{release['NAME']} {release.get('VERSION_ID', '')}".strip()  # a rolling distribution has no version


def _dotted(cudnn: int | None) -> str | None:
    """Return cuDNN's number as text; its major version moved a digit to the left with 9.

    >>> _dotted(8907), _dotted(91002)
    ('8.9.7', '9.10.2')
    """
    if cudnn is None:
        return None
    major, rest = divmod(cudnn, 10_000 if cudnn >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _driver_version() -> str | None:
    with nvml_session() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError):
                return str(nvml.nvmlSystemGetDriverVersion())
    from mezzo.amp.hardware import query_nvidia_smi  # behind torch, as BenchmarkEnvironment.query is

    return next(iter(query_nvidia_smi("driver_version")), None)
