"""A recorded run: outputs of all module calls and gradients, as numbers on the CPU."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mezzo.checkpoint import read_torch_file
from mezzo.files import FileError, plain, read_bytes, write_file

T = TypeVar("T")

FORMAT = "mezzo accuracy run"
VERSION = 1

SAMPLE_SEED = 20260
"""Seed of the samples of large tensors."""

_NOT_CALLABLE = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")

#: Bits of the significand (with the hidden bit) and exponent of the smallest number, the coarsest dtype first.
GRIDS: dict[str, tuple[int, int]] = {
    "float8_e5m2": (3, -16),
    "float8_e4m3fn": (4, -9),
    "bfloat16": (8, -133),
    "float16": (11, -24),
    "tensorfloat32": (11, -136),
    "float32": (24, -149),
    "float64": (53, -1074),
}


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of rounding to a dtype.

    >>> unit_roundoff("float16") == 2.0**-11
    True
    """
    return 2.0 ** -GRIDS[dtype][0] if dtype in GRIDS else 0.0


def coarsest(*dtypes: str) -> str:
    """Return the dtype with the largest rounding error.

    >>> coarsest("float32", "bfloat16", "float16")
    'bfloat16'
    """
    return max(dtypes, key=unit_roundoff)


@dataclass(frozen=True, slots=True, eq=False)
class TensorRecord:
    """The record of a tensor. `values` may be a sample; counts and the largest magnitude cover the whole tensor."""

    shape: tuple[int, ...]
    dtype: str
    num_nan: int
    num_inf: int
    max_abs: float
    """Over the finite elements; 0.0 if there are none."""
    values: Tensor
    """Flat, float32, on the CPU: all elements, or those at `sample_places`. Gradients are unscaled."""

    @property
    def num_bad(self) -> int:
        """Number of NaN and infinite elements."""
        return self.num_nan + self.num_inf

    @property
    def is_sampled(self) -> bool:
        """Whether `values` is a sample."""
        return self.values.numel() < math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One floating tensor in the result of a call."""

    place: str
    """Position in the result: empty, `[0]`, `['logits']`, `.hidden`."""
    value: TensorRecord
    grad: TensorRecord | None = None
    grad_order: int = -1
    """Position in the backward pass; -1 without a gradient."""
    is_passed_on: bool = False
    """Whether another call made it: containers, `Identity`, `Dropout` in evaluation mode."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """One call of one module."""

    path: str
    kind: str
    """Name of the module's class."""
    occurrence: int
    """1 for the first call of this module."""
    rounding: str
    """The coarsest dtype of inputs, parameters, results and the active region."""
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[Output, ...]
    inner: tuple[int, ...]
    """Positions of the calls made inside."""


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGrad:
    """The gradient of a parameter."""

    name: str
    owner: str
    """Path of its module."""
    order: int
    """Position in the backward pass."""
    grad: TensorRecord


@dataclass(frozen=True, slots=True, eq=False)
class AccuracyRun:
    """One recorded step, from `record_run`, `run_at` or `load_run`."""

    name: str
    loss: float | None
    """The unscaled loss."""
    loss_scale: float
    """Gradients were divided by it."""
    max_elements: int
    """Larger tensors are kept as a sample of this size."""
    modules: dict[str, str]
    """Path and class of every module, called or not."""
    calls: tuple[ModuleCall, ...]
    """In the order in which they ended."""
    parameters: tuple[ParameterGrad, ...]
    """In the order of the backward pass."""

    @property
    def dtype(self) -> str:
        """The coarsest dtype of the run."""
        return coarsest("float64", *(call.rounding for call in self.calls))

    def never_called(self) -> list[str]:
        """Return the paths of modules that the step did not call, without containers such as ModuleList."""
        called = {call.path for call in self.calls}
        return [path for path, kind in self.modules.items() if path not in called and kind not in _NOT_CALLABLE]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a file, atomically; `load_run` reads it back.

        Raises:
            RunError: The file cannot be written.
        """
        buffer = io.BytesIO()
        torch.save(_Packer().pack(self), buffer)
        write_file(Path(path), buffer.getvalue())


def sample_places(numel: int, max_elements: int) -> Tensor | None:
    """Return the positions of the kept elements of a flat tensor, in order; None for all.

    The tensor is split into `max_elements` equal parts, and one element is drawn from each by a separate generator: the
    positions depend only on the two sizes, so both runs keep the same elements.
    """
    if numel <= max_elements:
        return None
    generator = torch.Generator().manual_seed(SAMPLE_SEED)
    drawn = torch.rand(max_elements, dtype=torch.float64, generator=generator)
    parts = torch.arange(max_elements, dtype=torch.float64)
    return ((parts + drawn) * (numel / max_elements)).long().clamp_(max=numel - 1)


def load_run(path: str | os.PathLike[str]) -> AccuracyRun:
    """Read a run that `AccuracyRun.save` wrote. Untrusted files are safe: nothing in them is executed.

    Raises:
        ValueError: The file cannot be read or is not a run.
    """
    try:
        data = read_bytes(path)
    except FileError as error:
        raise ValueError(str(error)) from error
    try:
        return _Unpacker(read_torch_file(data)).run()
    except Exception as error:  # a damaged or hostile file may raise anything
        reason = plain(str(error)).split("\n")[0][:200]
        raise ValueError(f"{path}: not a run of AccuracyRun.save: {reason or type(error).__name__}") from error


class _Packer:
    """Packs a run as tensors and plain types; shared records are stored once."""

    def __init__(self) -> None:
        self._records: list[TensorRecord] = []
        self._places: dict[int, int] = {}

    def pack(self, run: AccuracyRun) -> dict[str, Any]:
        calls = [
            {
                "path": call.path,
                "kind": call.kind,
                "occurrence": call.occurrence,
                "rounding": call.rounding,
                "inputs": [self._place(record) for record in call.inputs],
                "outputs": [self._output(output) for output in call.outputs],
                "inner": list(call.inner),
            }
            for call in run.calls
        ]
        parameters = [
            {"name": each.name, "owner": each.owner, "order": each.order, "grad": self._place(each.grad)}
            for each in run.parameters
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": run.name,
            "loss": run.loss,
            "loss_scale": run.loss_scale,
            "max_elements": run.max_elements,
            "modules": dict(run.modules),
            "calls": calls,
            "parameters": parameters,
            "records": [
                [list(each.shape), each.dtype, each.num_nan, each.num_inf, each.max_abs] for each in self._records
            ],
            "values": torch.cat([torch.empty(0), *(each.values for each in self._records)]),
        }

    def _place(self, record: TensorRecord) -> int:
        if id(record) not in self._places:
            self._places[id(record)] = len(self._records)
            self._records.append(record)
        return self._places[id(record)]

    def _output(self, output: Output) -> dict[str, Any]:
        return {
            "place": output.place,
            "value": self._place(output.value),
            "grad": None if output.grad is None else self._place(output.grad),
            "grad_order": output.grad_order,
            "is_passed_on": output.is_passed_on,
        }


class _Unpacker:
    """Unpacks a run; checks every type and size."""

    def __init__(self, payload: Any) -> None:
        whole = _checked(payload, dict, "the file")
        if whole.get("format") != FORMAT or whole.get("version") != VERSION:
            raise ValueError(f"its format is {whole.get('format')!r}, version {whole.get('version')!r}")
        self._whole: dict[str, Any] = whole
        self._max_elements = _checked(whole["max_elements"], int, "max_elements")
        self._loss_scale = _checked(whole["loss_scale"], float, "loss_scale")
        if self._max_elements < 1 or not (0 < self._loss_scale < math.inf):
            raise ValueError(f"max_elements is {self._max_elements}, loss_scale {self._loss_scale}")
        values = _checked(whole["values"], Tensor, "values")
        # With a stride of zero a small file could claim any size.
        if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
            raise ValueError("values are not one flat float32 tensor")
        self._records = list(self._read_records(values))

    def run(self) -> AccuracyRun:
        whole = self._whole
        modules = _checked(whole["modules"], dict, "modules")
        calls = _checked(whole["calls"], list, "calls")
        return AccuracyRun(
            name=_checked(whole["name"], str, "name"),
            loss=None if whole["loss"] is None else _checked(whole["loss"], float, "loss"),
            loss_scale=self._loss_scale,
            max_elements=self._max_elements,
            modules={_checked(k, str, "a path"): _checked(v, str, "a class") for k, v in modules.items()},
            calls=tuple(self._call(call, position) for position, call in enumerate(calls)),
            parameters=tuple(self._parameter(each) for each in _checked(whole["parameters"], list, "parameters")),
        )

    def _read_records(self, values: Tensor) -> Iterator[TensorRecord]:
        start = 0
        for entry in _checked(self._whole["records"], list, "records"):
            sizes, dtype, num_nan, num_inf, max_abs = _checked(entry, list, "a record")
            shape = tuple(_checked(size, int, "a size") for size in _checked(sizes, list, "a shape"))
            if min(shape, default=0) < 0 or math.prod(shape) >= 2**63:
                raise ValueError(f"a shape is {shape}")
            kept = min(math.prod(shape), self._max_elements)
            if start + kept > values.numel():
                raise ValueError("values are missing")
            yield TensorRecord(
                shape=shape,
                dtype=_checked(dtype, str, "a dtype"),
                num_nan=_checked(num_nan, int, "a count"),
                num_inf=_checked(num_inf, int, "a count"),
                max_abs=_checked(max_abs, float, "a magnitude"),
                values=values[start : start + kept],
            )
            start += kept

    def _record(self, place: Any) -> TensorRecord:
        return self._records[_index(place, len(self._records))]

    def _call(self, entry: Any, position: int) -> ModuleCall:
        call = _checked(entry, dict, "a call")
        rounding = _checked(call["rounding"], str, "a dtype")
        return ModuleCall(
            path=_checked(call["path"], str, "a path"),
            kind=_checked(call["kind"], str, "a class"),
            occurrence=_checked(call["occurrence"], int, "an occurrence"),
            rounding=rounding,
            inputs=tuple(self._record(place) for place in _checked(call["inputs"], list, "inputs")),
            outputs=_all(call["outputs"], self._output),
            inner=_all(call["inner"], lambda place: _index(place, position)),
        )

    def _output(self, entry: Any) -> Output:
        output = _checked(entry, dict, "an output")
        return Output(
            place=_checked(output["place"], str, "a place"),
            value=self._record(output["value"]),
            grad=None if output["grad"] is None else self._record(output["grad"]),
            grad_order=_checked(output["grad_order"], int, "an order"),
            is_passed_on=_checked(output["is_passed_on"], bool, "is_passed_on"),
        )

    def _parameter(self, entry: Any) -> ParameterGrad:
        each = _checked(entry, dict, "a parameter")
        return ParameterGrad(
            name=_checked(each["name"], str, "a name"),
            owner=_checked(each["owner"], str, "a path"),
            order=_checked(each["order"], int, "an order"),
            grad=self._record(each["grad"]),
        )


def _checked(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{what}: {type(value).__name__} in place of {kind.__name__}")
    return value


def _index(value: Any, end: int) -> int:
    place = _checked(value, int, "a position")
    if not 0 <= place < end:
        raise ValueError(f"a position is {place} of {end}")
    return place


def _all(values: Any, read: Callable[[Any], T]) -> tuple[T, ...]:
    return tuple(read(value) for value in _checked(values, list, "a list"))
