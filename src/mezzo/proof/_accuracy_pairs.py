"""Pairs the tensors of two runs, finds what each was computed from, and bounds the error of rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mezzo.proof._accuracy_numbers import Difference, difference, norm
from mezzo.proof._accuracy_rows import AccuracyRow, Flow, Kind, RowPlace, compared_row, uncompared_row
from mezzo.proof._accuracy_run import (
    AccuracyRun,
    ModuleCall,
    Output,
    ParameterGrad,
    TensorRecord,
    coarsest,
    unit_roundoff,
)

ROUNDINGS_PER_LAYER = 4.0
"""Allowed roundings per layer: of its input, its weights, its result, and one as a margin. Healthy networks were measured
at up to a third of `output_limit` and nine tenths of `gradient_limit`."""

CANCELS = "the sum is smaller than the rounding error of its terms"


def output_limit(dtype: str, num_layers: int) -> float:
    """Return the largest error that rounding in `num_layers` layers explains.

    The layers' errors are independent, so their squares add up: the limit grows with the square root of the number.

    >>> output_limit("float16", 4) == 4 * 2.0**-11 * 2
    True
    """
    return ROUNDINGS_PER_LAYER * unit_roundoff(dtype) * math.sqrt(num_layers)


def gradient_limit(dtype: str, num_layers: int) -> float:
    """Return the largest error of a gradient that rounding explains.

    An error e moves about a share e of the elements across the kink of a ReLU, or to another maximum of a pool. The
    gradients of these elements appear or vanish, which is an error of sqrt(e).
    """
    return math.sqrt(output_limit(dtype, num_layers))


@dataclass(frozen=True, slots=True, eq=False)
class _PairedOutput:
    """An output in both runs; `other` is None if the second run has none."""

    call: ModuleCall
    output: Output
    other: Output | None
    depth: int


class Pairing:
    """Two runs of one model.

    Raises:
        ValueError: The runs are of different models, or keep samples of different sizes.
    """

    def __init__(self, a: AccuracyRun, b: AccuracyRun) -> None:
        _refuse_other_model(a, b)
        self.a, self.b = a, b
        self.rounding = coarsest(a.dtype, b.dtype)
        self._differences: dict[tuple[int, int], Difference] = {}
        self._calls_b = {(call.path, call.occurrence): call for call in b.calls}
        self._parameters_a, self._parameters_b = ({each.name: each.grad for each in run.parameters} for run in (a, b))
        self._calls_a: dict[str, list[ModuleCall]] = {}
        for call in a.calls:
            self._calls_a.setdefault(call.path, []).append(call)
        self._pairs = list(self._pair_outputs())
        self._takers: dict[int, list[ModuleCall]] = {}
        for call in a.calls:
            for record in {id(each): each for each in call.inputs}.values():
                self._takers.setdefault(id(record), []).append(call)

    def rows(self) -> list[AccuracyRow]:
        """Return outputs in the order of the forward pass, then gradients in the order of the backward pass."""
        outputs = [*self._output_rows(), *self._extra_rows()]
        return [*outputs, *self._gradient_rows()] if self.has_gradients else outputs

    @property
    def has_gradients(self) -> bool:
        """Whether both runs have gradients."""
        return all(_has_gradients(run) for run in (self.a, self.b))

    def inputs_error(self) -> float:
        """Return the largest error of the inputs of the whole model."""
        outer = [call for call in self.a.calls if call.path == ""]
        flows = [flow for call in outer for flow in self._flows(call.inputs, self._inputs_in_b(call))]
        return max((flow.difference.error for flow in flows), default=0.0)

    # The forward

    def _pair_outputs(self) -> Iterator[_PairedOutput]:
        depth = 0
        for call in self.a.calls:
            in_b = self._call_in_b(call)
            for output in call.outputs:
                other = _at(in_b, output.place)
                if not output.is_passed_on or (other is not None and not other.is_passed_on):
                    depth += 1
                    yield _PairedOutput(call, output, other, depth)

    def _output_rows(self) -> Iterator[AccuracyRow]:
        rounding = "float64"
        for each in self._pairs:
            call, in_b = each.call, self._call_in_b(each.call)
            rounding = coarsest(rounding, call.rounding, in_b.rounding if in_b else call.rounding)
            place = RowPlace(
                kind="output",
                name=_name(call, each.output),
                module=call.kind,
                order=each.depth,
                depth=each.depth,
                rounding=rounding,
                limit=output_limit(rounding, each.depth),
            )
            flows = [*self._flows(call.inputs, self._inputs_in_b(call)), *self._inner_flows(call)]
            yield self._row(place, each.output.value, each.other.value if each.other else None, flows)

    def _extra_rows(self) -> Iterator[AccuracyRow]:
        """Yield rows for calls that only the second run made."""
        called = {(call.path, call.occurrence) for call in self.a.calls}
        order = len(self._pairs)
        for call in self.b.calls:
            for output in call.outputs if (call.path, call.occurrence) not in called else ():
                order += 1
                place = RowPlace("output", _name(call, output), call.kind, order, 0, call.rounding, 0.0)
                yield self._row(place, None, output.value, [])

    def _inner_flows(self, call: ModuleCall) -> Iterator[Flow]:
        """Yield the outputs of the calls inside a call: a container adds only the error of its own code."""
        for position in call.inner:
            inner = self.a.calls[position]
            for output in inner.outputs:
                other = _at(self._call_in_b(inner), output.place)
                if other is not None:
                    yield from self._flows([output.value], [other.value])

    # The backward

    def _gradient_rows(self) -> Iterator[AccuracyRow]:
        found: list[tuple[int, _PairedOutput | ParameterGrad]] = [
            (each.output.grad_order, each)
            for each in self._pairs
            if each.output.grad or (each.other and each.other.grad)
        ]
        found += [(each.order, each) for each in self.a.parameters]
        found += [(len(found) + each.order, each) for each in self._extra_parameters()]
        previous: list[Flow] = []
        for order, (_, entry) in enumerate(sorted(found, key=lambda pair: pair[0]), start=1):
            if isinstance(entry, ParameterGrad):
                yield self._parameter_row(entry, order)
            else:
                yield self._output_gradient_row(entry, order, previous)
                previous = self._gradient_flows([entry]) or previous

    def _output_gradient_row(self, each: _PairedOutput, order: int, previous: list[Flow]) -> AccuracyRow:
        call, output, other = each.call, each.output, each.other
        place = self._gradient_place(order, "output gradient", _name(call, output), call.kind, each.depth)
        flows = self._gradients_after(output) or previous
        if other is not None:  # the gradient also depends on the value of the tensor
            flows = [*flows, *self._flows([output.value], [other.value])]
        return self._row(place, output.grad, other.grad if other else None, flows)

    def _gradients_after(self, output: Output) -> list[Flow]:
        """Return the output gradients of the innermost calls that take an output, without their containers."""
        takers = [
            call for call in self._takers.get(id(output.value), ()) if all(out is not output for out in call.outputs)
        ]
        innermost = [call for call in takers if not call.inner] or takers
        return self._gradient_flows(
            [
                _PairedOutput(call, out, _at(self._call_in_b(call), out.place), 0)
                for call in innermost
                for out in call.outputs
            ]
        )

    def _parameter_row(self, entry: ParameterGrad, order: int) -> AccuracyRow:
        of_a, of_b = self._parameters_a.get(entry.name), self._parameters_b.get(entry.name)
        calls = self._calls_of_owner(entry.owner)
        inputs = [flow for call in calls for flow in self._flows(call.inputs, self._inputs_in_b(call))]
        outputs = [
            _PairedOutput(call, out, _at(self._call_in_b(call), out.place), 0) for call in calls for out in call.outputs
        ]
        terms = self._gradient_flows(outputs)
        depth = max((each.depth for each in self._pairs if each.call in calls), default=0)
        kind = self.a.modules.get(entry.owner, "")
        place = self._gradient_place(order, "parameter gradient", entry.name, kind, depth)
        row = self._row(place, of_a, of_b, [*inputs, *terms])
        return self._excused(row, of_a, of_b, terms) if of_a and of_b else row

    def _extra_parameters(self) -> list[ParameterGrad]:
        """Return the gradients that only the second run has."""
        return [each for each in self.b.parameters if each.name not in self._parameters_a]

    def _calls_of_owner(self, path: str) -> list[ModuleCall]:
        """Return the calls of a parameter's module, or of the nearest enclosing module that was called."""
        while path and path not in self._calls_a:
            path = path.rpartition(".")[0]
        return self._calls_a.get(path, [])

    def _excused(self, row: AccuracyRow, a: TensorRecord, b: TensorRecord, terms: list[Flow]) -> AccuracyRow:
        """Accept a bias gradient whose terms cancel: relative to a small sum, the rounding of its terms is large.

        If the true sum is smaller than that rounding, as for a bias before BatchNorm, both runs hold noise: no harm.
        """
        if row.is_bad or row.note or len(row.shape) > 1 or not terms or not (row.diverges or row.harm > 0):
            return row
        allowed = row.limit * max(norm(flow.a) for flow in terms)
        if self._difference(a, b).distance > allowed:
            return row
        is_noise = norm(a) <= allowed
        return replace(row, diverges=False, harm=0.0 if is_noise else row.harm, note=CANCELS if is_noise else "")

    def _gradient_place(self, order: int, kind: Kind, name: str, module: str, depth: int) -> RowPlace:
        coarser = self.b if unit_roundoff(self.b.dtype) >= unit_roundoff(self.a.dtype) else self.a
        return RowPlace(
            kind=kind,
            name=name,
            module=module,
            order=order,
            depth=depth,
            rounding=self.rounding,
            limit=gradient_limit(self.rounding, len(self._pairs) + order),
            scale_b=self.b.loss_scale,
            ulp_scale=coarser.loss_scale,
        )

    def _gradient_flows(self, outputs: Iterable[_PairedOutput]) -> list[Flow]:
        pairs = [(each.output.grad, each.other.grad) for each in outputs if each.other is not None]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        return self._flows([a for a, _ in both], [b for _, b in both])

    # Both

    def _row(self, place: RowPlace, a: TensorRecord | None, b: TensorRecord | None, flows: list[Flow]) -> AccuracyRow:
        if a is None or b is None:
            there, gone = (self.a.name, self.b.name) if b is None else (self.b.name, self.a.name)
            return uncompared_row(place, a, b, f"in {there}, not in {gone}")
        if a.shape != b.shape:
            return uncompared_row(place, a, b, f"shape {list(a.shape)} against {list(b.shape)}")
        return compared_row(place, Flow(a, b, self._difference(a, b)), flows)

    def _flows(self, of_a: Iterable[TensorRecord], of_b: Iterable[TensorRecord]) -> list[Flow]:
        """Return tensors in pairs; tensors of different shapes are left out."""
        pairs = list(zip(of_a, of_b, strict=False))
        return [Flow(a, b, self._difference(a, b)) for a, b in pairs if a.shape == b.shape]

    def _difference(self, a: TensorRecord, b: TensorRecord) -> Difference:
        key = (id(a), id(b))
        if key not in self._differences:
            self._differences[key] = difference(a, b)
        return self._differences[key]

    def _call_in_b(self, call: ModuleCall) -> ModuleCall | None:
        return self._calls_b.get((call.path, call.occurrence))

    def _inputs_in_b(self, call: ModuleCall) -> tuple[TensorRecord, ...]:
        in_b = self._call_in_b(call)
        return in_b.inputs if in_b else ()


def _has_gradients(run: AccuracyRun) -> bool:
    return bool(run.parameters) or any(output.grad is not None for call in run.calls for output in call.outputs)


def _at(call: ModuleCall | None, place: str) -> Output | None:
    return next((output for output in call.outputs if output.place == place), None) if call else None


def _name(call: ModuleCall, output: Output) -> str:
    times = f"#{call.occurrence}" if call.occurrence > 1 else ""
    return f"{call.path or '(model)'}{times}{output.place}"


def _refuse_other_model(a: AccuracyRun, b: AccuracyRun) -> None:
    for path in (*a.modules, *b.modules):
        kind_a, kind_b = a.modules.get(path), b.modules.get(path)
        if kind_a != kind_b:
            found = [f"{kind or 'nothing'} in {run.name!r}" for run, kind in ((a, kind_a), (b, kind_b))]
            raise ValueError(f"the runs are of different models: {path or '(model)'!r} is {found[0]} and {found[1]}")
    if a.max_elements != b.max_elements:
        raise ValueError(
            f"the runs keep samples of different sizes: max_elements is {a.max_elements} in {a.name!r}, {b.max_elements} in "
            f"{b.name!r}; use the same value for both"
        )
