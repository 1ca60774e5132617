"""The frame of all benchmarks: variants are measured one after another and become a table or JSON."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch

from mezzo.bench._machine import MachineClocks
from mezzo.errors import unknown_choice
from mezzo.record import Timing, release_memory, synchronize, time_calls

Progress = Callable[[str, int, int], None]
"""Called with the variant's name, the number of finished steps and the total number of steps."""

SettingsT = TypeVar("SettingsT")
ResultT = TypeVar("ResultT")
Variant = TypeVar("Variant")


def refuse_below_one(settings: Any, *names: str) -> None:
    """Raise ValueError, naming the option, if a setting is below 1; None is allowed."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1")


def choose(option: str, names: tuple[str, ...] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return `names`, or all `known` names for None; raise ValueError for an unknown name."""
    for name in names or ():
        if name not in known:
            raise ValueError(unknown_choice(option, name, known))
    return known if names is None else names


def simple_net_sizes(device: torch.device, size: int | None, batch_size: int | None) -> dict[str, int]:
    """Return `size` and `batch_size` of SimpleNet; None becomes the default of the device."""
    default_size, default_batch_size = (8192, 2048) if device.type == "cuda" else (256, 64)
    return {
        "size": default_size if size is None else size,
        "batch_size": default_batch_size if batch_size is None else batch_size,
    }


class Meter:
    """Times the steps of one variant, counts them for the progress bar and reads the peak memory."""

    def __init__(
        self,
        name: str,
        total: int,
        device: torch.device,
        progress: Progress | None,
        between_steps: Callable[[int], object] | None = None,
    ) -> None:
        """Measure a variant of `total` steps; `between_steps` gets the number of finished steps and is not timed."""
        self._name, self._total, self._device, self._progress = name, total, device, progress
        self._between_steps, self._done = between_steps, 0

    def advance(self) -> None:
        """Count one finished step."""
        self._done += 1
        if self._between_steps is not None:
            self._between_steps(self._done)
        if self._progress is not None:
            self._progress(self._name, self._done, self._total)

    def warm_up(self, step: Callable[[], object], steps: int) -> None:
        """Call `step` without timing it."""
        for _ in range(steps):
            step()
            synchronize(self._device)
            self.advance()

    def time(self, step: Callable[[], object], steps: int) -> Timing:
        """Time each of `steps` calls."""
        return time_calls(step, calls=steps, warmup_calls=0, device=self._device, after_call=self.advance)

    def reset_peak(self) -> None:
        """Start a new measurement of the peak memory."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_memory_bytes(self) -> int | None:
        """Return the highest memory in use since `reset_peak`; None on a CPU, where torch does not count it.

        CUDA graphs compute in memory of their own, which counts as free after the capture. It is added.
        """
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) + _free_memory_of_graphs(self._device)


def _free_memory_of_graphs(device: torch.device) -> int:
    """Return the bytes of CUDA graphs' own pools that no tensor holds: replays use them all the same."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def measure_each(
    variants: Iterable[Variant], measure: Callable[[Variant], ResultT], device: torch.device
) -> tuple[ResultT, ...]:
    """Measure the variants in order; each starts without the memory of the one before."""
    results = []
    for variant in variants:
        results.append(measure(variant))
        release_memory(device)
    return tuple(results)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench(abc.ABC, Generic[SettingsT, ResultT]):
    """The results of one run. A subclass defines the cells of the table and the computed figures of the JSON."""

    settings: SettingsT
    results: tuple[ResultT, ...]
    machine: MachineClocks

    @abc.abstractmethod
    def cells(self, result: ResultT) -> dict[str, str]:
        """Return one row of the table: the text of each column by its header."""

    @abc.abstractmethod
    def figures(self, result: ResultT) -> dict[str, Any]:
        """Return what the JSON has for a result besides its fields."""

    def table(self) -> list[list[str]]:
        """Return the header and one row per result."""
        rows = [self.cells(result) for result in self.results]
        return [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []

    def tables(self) -> list[list[list[str]]]:
        """Return all tables that a command prints, each with its header."""
        return [self.table()]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready data, times in seconds and memory in bytes."""
        data = asdict(self)
        for result, fields in zip(self.results, data["results"], strict=True):
            timing: Timing = result.timing  # type: ignore[attr-defined]
            fields |= {"timing": {"median_s": timing.median_s, "spread_s": timing.spread_s}, **self.figures(result)}
        return data


def milliseconds(seconds: float) -> str:
    """Return a duration as tables show it."""
    return f"{seconds * 1e3:.3f} ms"


def gibibytes(count: int | None) -> str:
    """Return a number of bytes as tables show it."""
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def ratio(value: float | None) -> str:
    """Return a quotient as tables show it."""
    return "-" if value is None else f"{value:.2f}"


def name_with_switches(name: str, switches: dict[str, bool]) -> str:
    """Return the name of a variant with its active switches."""
    return ", ".join([name, *(switch for switch, is_on in switches.items() if is_on)])
