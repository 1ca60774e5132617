"""Memory and GPU load of a block of code, sampled by a thread.

What cannot be measured is None, never an error: no psutil and no /proc, no pynvml, no driver, a card that does not say.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

INTERVAL_S = 0.2
START_TIMEOUT_S = 2.0  # a sleeping driver needs time to start
STOP_TIMEOUT_S = 1.0

_STATM = Path("/proc/self/statm")
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Resources that a block of code used; None if a figure was not measured or a sample failed."""

    mean_rss_mb: float | None = None
    """Resident memory of this process, in MiB."""

    peak_rss_mb: float | None = None

    gpu_memory_mb: float | None = None
    """Peak memory of the whole GPU, over all processes, in MiB."""

    gpu_util: float | None = None
    """Mean utilisation of the whole GPU, in percent."""


class _Series:
    """Mean and peak of one figure, without storing samples."""

    def __init__(self, read: Callable[[], float] | None = None) -> None:
        self._read = read
        self._is_reading = False
        self._so_far = (0, 0.0, 0.0)  # count, sum, peak: one tuple, so that a reader gets consistent values

    def sample(self) -> None:
        if self._read is None:
            return
        self._is_reading = True
        try:
            value = self._read()
        except Exception:  # noqa: BLE001  a driver or /proc may raise anything: the figure is then None
            self.give_up()
            return
        count, total, peak = self._so_far
        self._so_far = (count + 1, total + value, max(peak, value))
        self._is_reading = False

    def give_up(self) -> None:
        """Drop the figure if a sample failed or did not return."""
        if self._is_reading:
            self._read = None

    @property
    def mean(self) -> float | None:
        count, total, _ = self._so_far
        return total / count if self._read and count else None

    @property
    def peak(self) -> float | None:
        count, _, peak = self._so_far
        return peak if self._read and count else None


class UsageSampler:
    """Samples memory and GPU load while its block runs: at its start, every `interval_s`, and at its end.

    Args:
        gpu: Which of the GPUs that CUDA_VISIBLE_DEVICES shows, from 0; None measures no GPU.
        interval_s: Time between two samples, over 0.

    >>> with UsageSampler() as sampler:
    ...     batch = bytearray(1000)
    >>> sampler.usage.gpu_memory_mb is None
    True
    """

    def __init__(self, gpu: int | None = None, *, interval_s: float = INTERVAL_S) -> None:
        if gpu is not None and gpu < 0:
            raise ValueError(f"gpu={gpu}: must be 0 or more, or None to measure no GPU")
        if not interval_s > 0:
            raise ValueError(f"interval_s={interval_s}: must be more than 0")
        self._gpu = gpu
        self._interval_s = interval_s
        self._rss, self._gpu_memory, self._gpu_util = _Series(), _Series(), _Series()
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        # A daemon thread, so that a hanging driver does not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="mezzo-usage", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._has_begun.wait(START_TIMEOUT_S)  # do not measure the loading of the driver's library
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(STOP_TIMEOUT_S)
        for series in self._all:
            series.give_up()

    @property
    def usage(self) -> Usage:
        """The usage so far; after the block, that of the whole block."""
        return Usage(
            mean_rss_mb=self._rss.mean,
            peak_rss_mb=self._rss.peak,
            gpu_memory_mb=self._gpu_memory.peak,
            gpu_util=self._gpu_util.mean,
        )

    @property
    def _all(self) -> tuple[_Series, ...]:
        return self._rss, self._gpu_memory, self._gpu_util

    def _run(self) -> None:
        self._rss = _Series(_rss_reader())
        with nullcontext() if self._gpu is None else nvml_session() as nvml:
            if nvml is not None and self._gpu is not None:
                self._open_gpu(nvml, self._gpu)
            self._sample()
            self._has_begun.set()
            while not self._is_over.wait(self._interval_s):
                self._sample()
            self._sample()

    def _open_gpu(self, nvml: Any, gpu: int) -> None:
        card = _find_card(nvml, gpu)
        if card is not None:
            self._gpu_memory = _Series(lambda: float(nvml.nvmlDeviceGetMemoryInfo(card).used) / _MIB)
            self._gpu_util = _Series(lambda: float(nvml.nvmlDeviceGetUtilizationRates(card).gpu))

    def _sample(self) -> None:
        for series in self._all:
            series.sample()


@contextmanager
def nvml_session() -> Iterator[Any]:
    """Yield the initialised pynvml module; None if it is not installed or finds no driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        with suppress(nvml.NVMLError):  # all values have been read
            nvml.nvmlShutdown()


def _find_card(nvml: Any, gpu: int) -> Any:
    """Return NVML's handle of a visible GPU, or None. NVML counts all GPUs, CUDA only the visible ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu)] if visible is None else [name.strip() for name in visible.split(",")][gpu : gpu + 1]
    for name in names:
        with suppress(nvml.NVMLError):
            return _card_by_name(nvml, name)
    return None


def _card_by_name(nvml: Any, name: str) -> Any:
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    with suppress(nvml.NVMLError):
        return nvml.nvmlDeviceGetHandleByUUID(name)
    return nvml.nvmlDeviceGetHandleByIndex(0)


def _rss_reader() -> Callable[[], float] | None:
    """Return a function that returns this process's resident memory in MiB; None if it cannot be measured."""
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        return _rss_of_proc if _STATM.exists() else None
    return lambda: float(psutil.Process().memory_info().rss) / _MIB


def _rss_of_proc() -> float:
    pages = int(_STATM.read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB
