"""The judge of numbers: every operator and every idiom under `auto_cast`, beside stock `torch.autocast` and float64.

A case is wrong if `auto_cast` raises where stock does not, if it gives a non-finite number where stock is finite, or
if its error is more than three times the larger of stock's error and one unit of rounding of the half dtype. The unit
is the floor because a result of ours may be rounded to half once where stock keeps float32. A result need not be better
than plain float32, either: the gradient of a constant is noise. The error of a tensor is its largest deviation from
float64, relative to the largest magnitude in the float64 result.

Run it by hand to see all findings: `python tests/amp/sweep.py --help`.
"""

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import sys
import types
import unittest
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from idioms import IDIOMS, Idiom
from op_samples import SAMPLES
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from installed_kernels import uninstall_kernels
from mezzo.amp import auto_cast

#: How much worse than stock a result may be.
FACTOR = 3.0
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Where the backward pass runs: after the region or inside it, by autograd or by `torch.func.vjp`, or under `vmap`,
#: as `torch.func.jacrev` does it.
BACKWARDS = ("after", "inside", "func after", "func inside", "vmap inside")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call, with the inputs that each side gets; all sides see the same values."""

    name: str
    form: str
    call: Callable[[Sequence[Tensor]], Any]
    ours: list[Tensor]
    stock: list[Tensor]
    differentiable: tuple[int, ...] = ()
    """Positions of the inputs whose gradients are compared."""

    @property
    def exact(self) -> list[Tensor]:
        return [t.double() if t.dtype in _FLOATS else t for t in self.ours]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results and gradients of a call by name ('result 0', 'gradient 1'), or what it raised."""

    parts: Mapping[str, Tensor] = field(default_factory=dict)
    raised: str = ""


@dataclass(frozen=True, order=True, kw_only=True)
class Finding:
    """A case in which `auto_cast` is wrong and stock is not."""

    name: str
    level: str
    dtype: str
    form: str
    part: str
    ours: float
    """Relative error; infinite if the call raised or the result is not finite."""
    stock: float
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.level, self.dtype

    def __str__(self) -> str:
        figures = f"ours {self.ours:.2g}, stock {self.stock:.2g}"
        return f"{self.name} [{self.level} {self.dtype}, {self.form}] {self.part}: {self.note or figures}"


def _seed(seed: int) -> None:
    """Seed the generators in use; `torch.manual_seed` would keep a stack trace per call for a CUDA that never starts."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class _InFloat64(TorchFunctionMode):
    """Turn every conversion to a smaller float that the code asks for into one to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        args, kwargs = tree_map(_widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _FLOATS else value


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64():
            yield
    finally:
        torch.set_default_dtype(default)


def _cotangent(out: Tensor) -> Tensor:
    """Return a gradient of the result that every dtype holds exactly: it alternates between a few powers of two."""
    pattern = torch.tensor([1.0, -0.5, 0.25, 1.0, -1.0, 0.5, -0.25], dtype=torch.float64, device=out.device)
    return pattern.repeat(out.numel() // 7 + 1)[: out.numel()].reshape(out.shape).to(out.dtype)


def _tensors_of(result: Any) -> list[Tensor]:
    return [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]


def _run(case: Case, tensors: Sequence[Tensor], region: Callable[[], Any], backward: str = "after") -> Outcome:
    """Call a case on fresh copies of its inputs inside a region, and differentiate it."""
    _seed(0)
    tensors = [t.detach().clone() for t in tensors]
    differentiate = _by_autograd if backward in ("after", "inside") else _by_functions
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(region())
            outs, grads = differentiate(case, tensors, stack.close if backward.endswith("after") else None, backward)
    except Exception as error:  # noqa: BLE001 - what a call raises is the finding
        return Outcome(raised=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160])
    parts = {f"result {i}": out.detach() for i, out in enumerate(outs)}
    for position, grad in zip(case.differentiable, grads, strict=False):
        parts[f"gradient {position}"] = torch.zeros_like(tensors[position]) if grad is None else grad.detach()
    return Outcome(parts=parts)


def _by_autograd(
    case: Case, tensors: list[Tensor], leave: Callable[[], None] | None, backward: str
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    for i in case.differentiable:
        tensors[i] = torch.nn.Parameter(tensors[i])  # whose casts are kept in a region
    leaves = [tensors[i] for i in case.differentiable]
    outs = _tensors_of(case.call(tensors))
    if leave is not None:
        leave()
    heads = [o for o in outs if o.requires_grad and o.is_floating_point()]
    if not heads:
        return outs, ()
    return outs, torch.autograd.grad(heads, leaves, list(map(_cotangent, heads)), allow_unused=True)


def _by_functions(
    case: Case, tensors: list[Tensor], leave: Callable[[], None] | None, backward: str
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    # After the region only the first input is differentiated: the others are closed over, as weights often are.
    positions = case.differentiable[:1] if leave is not None else case.differentiable

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        given = list(tensors)
        for position, value in zip(positions, values, strict=True):
            given[position] = value
        return tuple(_tensors_of(case.call(given)))

    if not positions:
        return call(), ()
    outs, pull = torch.func.vjp(call, *(tensors[i] for i in positions))
    if leave is not None:
        leave()
    cotangents = tuple(_cotangent(o) if o.is_floating_point() else torch.zeros_like(o) for o in outs)
    if backward.startswith("vmap"):
        return outs, [g.squeeze(0) for g in torch.func.vmap(pull)(tuple(c.unsqueeze(0) for c in cotangents))]
    return outs, pull(cotangents)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Return the largest deviation relative to the largest magnitude; infinite if only `exact` is finite."""
    if out.shape != exact.shape:
        return float("inf")
    out, exact = (t if t.layout is torch.strided else t.to_dense() for t in (out, exact))
    out, exact = (
        torch.view_as_real(t.to(torch.complex128).resolve_conj()) if t.is_complex() else t.double()
        for t in (out, exact)
    )
    finite = exact.isfinite()
    if not finite.all():
        if not torch.equal(out[~finite].nan_to_num(nan=0.5), exact[~finite].nan_to_num(nan=0.5)):
            return float("inf")
        out, exact = out[finite], exact[finite]
    if not out.isfinite().all():
        return float("inf")
    if not exact.numel():
        return 0.0
    return float((out - exact).abs().max() / (exact.abs().max() or 1.0))


def _errors(outcome: Outcome, exact: Outcome) -> dict[str, float]:
    if outcome.raised:
        return dict.fromkeys(exact.parts, float("inf"))
    return {
        part: relative_error(value, exact.parts[part]) for part, value in outcome.parts.items() if part in exact.parts
    }


def _stock(device: str, half: torch.dtype) -> Callable[[], Any]:
    return lambda: torch.autocast(torch.device(device).type, half)


def _exact(case: Case) -> Outcome:
    """Return the float64 outcome; where an operator has no float64 kernel, the float32 one."""
    outcome = _run(case, case.exact, _float64)
    return _plain(case) if outcome.raised else outcome


def _plain(case: Case) -> Outcome:
    """Return the outcome in float32, without autocast."""
    return _run(case, [t.float() if t.dtype in _FLOATS else t for t in case.ours], contextlib.nullcontext)


def _on(device: str) -> Any:
    return contextlib.nullcontext() if device == "cpu" else torch.device(device)


def judge(
    cases: Sequence[Case],
    levels: Sequence[str],
    dtype: str,
    device: str = "cpu",
    backwards: Sequence[str] = ("after",),
    **options: Any,
) -> list[Finding]:
    """Return what is wrong with `auto_cast(level=..., dtype=..., **options)` on some cases.

    Stock results are computed first, with no kernel of mezzo installed.
    """
    findings: list[Finding] = []
    with warnings.catch_warnings(), _on(device):
        warnings.simplefilter("ignore")
        exact = [_exact(case) for case in cases]
        stock = {backward: _stock_outcomes(cases, dtype, device, backward) for backward in backwards}
        for level, backward in itertools.product(levels, backwards):
            for case, right, theirs in zip(cases, exact, stock[backward], strict=True):
                if not right.raised and not theirs.raised:
                    ours = _run(case, case.ours, lambda: auto_cast(level=level, dtype=dtype, **options), backward)  # noqa: B023
                    findings += _compare(case, level, dtype, backward, right, theirs, ours)
    return findings


def _stock_outcomes(cases: Sequence[Case], dtype: str, device: str, backward: str) -> list[Outcome]:
    uninstall_kernels()
    return [_run(case, case.stock, _stock(device, HALVES[dtype]), backward) for case in cases]


def disturbed(cases: Sequence[Case], dtype: str, device: str = "cpu", **options: Any) -> list[str]:
    """Return the cases in which `torch.autocast` itself gives another result once mezzo's kernels are installed."""
    with warnings.catch_warnings(), _on(device):
        warnings.simplefilter("ignore")
        before = _stock_outcomes(cases, dtype, device, "after")
        for level in ("OD", "O1", "O2"):
            with auto_cast(level=level, dtype=dtype, **options):
                pass
        after = [_run(case, case.stock, _stock(device, HALVES[dtype])) for case in cases]
    return [f"{c.name}, {c.form}" for c, a, b in zip(cases, before, after, strict=True) if not _are_same(a, b)]


def _are_same(one: Outcome, other: Outcome) -> bool:
    if one.raised or other.raised:
        return bool(one.raised) == bool(other.raised)
    return one.parts.keys() == other.parts.keys() and all(
        value.dtype is other.parts[part].dtype and relative_error(other.parts[part], value) < 1e-6
        for part, value in one.parts.items()
    )


def _compare(
    case: Case, level: str, dtype: str, backward: str, exact: Outcome, stock: Outcome, ours: Outcome
) -> Iterator[Finding]:
    form = case.form if backward == "after" else f"{case.form}, backward {backward}"
    about = {"name": case.name, "level": level, "dtype": dtype, "form": form}
    error_ours, error_stock = _errors(ours, exact), _errors(stock, exact)
    if ours.raised:
        worst = max(error_stock.values(), default=0.0)
        yield Finding(**about, part="call", ours=float("inf"), stock=worst, note=ours.raised)
        return
    eps, plain = torch.finfo(HALVES[dtype]).eps, None
    for part, other in error_stock.items():
        mine = error_ours.get(part, float("inf"))
        if mine > FACTOR * max(other, eps):
            plain = _errors(_plain(case), exact) if plain is None else plain
        if plain is not None and mine > FACTOR * max(other, eps, plain.get(part, 0.0)):
            yield Finding(**about, part=part, ours=mine, stock=other)


# --- cases of idioms ---


def idiom_cases(names: Iterable[str], level: str, dtype: str, device: str = "cpu") -> list[Case]:
    """Return the cases of idioms: inputs in float32, weights in half at O2, and activations in half."""
    return [case for name in names for case in _cases_of(IDIOMS[name], level, HALVES[dtype], device)]


def _cases_of(idiom: Idiom, level: str, half: torch.dtype, device: str) -> Iterator[Case]:
    _seed(1)
    tensors = {n: t.to(device) for n, t in idiom.make().items()}
    weights = idiom.weights if level == "O2" else frozenset()
    forms = {"float32": (frozenset(), frozenset())}
    if weights:
        forms["half weights"] = (frozenset(), weights)
    if idiom.activations:
        forms["half activations"] = (idiom.activations, weights)
    for form, (activations, weights) in forms.items():
        rounded = {n: t.to(half).float() if n in activations | weights else t for n, t in tensors.items()}
        if not all(t.isfinite().all() for t in rounded.values() if t.is_floating_point()):
            continue
        yield Case(
            name=idiom.name,
            form=form,
            call=lambda values: idiom.function(**dict(zip(tensors, values, strict=True))),
            ours=[t.to(half) if n in activations | weights else t for n, t in rounded.items()],
            stock=[t.to(half) if n in activations else t for n, t in rounded.items()],
            differentiable=tuple(
                i for i, n in enumerate(tensors) if idiom.has_gradients and n in idiom.activations | idiom.weights
            ),
        )


# --- cases of operators ---

#: Power of two by which the inputs of operators grow for the second form: large, and far below float16's limit.
LARGE = 256.0
#: Operators whose CUDA kernels assert that inputs are probabilities; a failed assertion ends the process.
_ASSERTS = ("binary_cross_entropy", "nn.functional.binary_cross_entropy", "bernoulli", "multinomial")


def _forms(
    name: str, call: Callable[[Sequence[Tensor]], Any], tensors: list[Tensor], half: torch.dtype, gradients: bool
) -> Iterator[Case]:
    """Yield a call with its inputs in float32, in half, and with large float32 inputs."""
    floats = [i for i, t in enumerate(tensors) if t.dtype is torch.float32]
    differentiable = tuple(floats) if gradients else ()

    def case(form: str, change: Callable[[Tensor], Tensor]) -> Case:
        changed = [change(t) if t.dtype is torch.float32 else t for t in tensors]
        return Case(name=name, form=form, call=call, ours=changed, stock=changed, differentiable=differentiable)

    yield case("float32", lambda t: t)
    yield case("half", lambda t: t.to(half))
    if not (name in _ASSERTS and any(t.is_cuda for t in tensors)):
        yield case("large", lambda t: t * LARGE)


def sample_cases(dtype: str, device: str = "cpu", gradients: bool = True) -> list[Case]:
    """Return the cases of every operator variant that mezzo knows."""
    cases: list[Case] = []
    for variant, sample in SAMPLES.items():
        _seed(1)
        made: list[Tensor] = []

        def record(*shape: int, made: list[Tensor] = made) -> Tensor:
            made.append(torch.rand(*shape) * 0.8 + 0.1)
            return made[-1]

        with warnings.catch_warnings(), _on(device):
            warnings.simplefilter("ignore")
            sample(record)

        def call(values: Sequence[Tensor], sample: Callable[..., Any] = sample) -> Any:
            given = iter(values)
            return sample(lambda *shape: next(given))

        cases += _forms(variant, call, made, HALVES[dtype], gradients)
    return [case for case in cases if not _is_random(case)]


#: Operators of torch's database that return memory as it was, or whose result is a sparse tensor or a random one.
_NO_NUMBERS = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_".split()
)


def torch_operators() -> list[Any]:
    """Return torch's own database of operators with samples of their inputs (`OpInfo`)."""
    name = "torch.testing._internal.common_methods_invocations"
    with contextlib.ExitStack() as stack:
        if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
            # torch's test helpers import this package for a base class that the database has no use for.
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
            stack.callback(sys.modules.pop, "expecttest")
        stack.enter_context(unittest.mock.patch("torch.backends.disable_global_flags"))  # or tests cannot set them
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return list(importlib.import_module(name).op_db)


def database_cases(
    operators: Iterable[Any], dtype: str, device: str = "cpu", samples: int = 2, gradients: bool = True
) -> list[Case]:
    """Return cases of operators of torch's database that take float32 tensors."""
    cases: list[Case] = []
    for op in operators:
        if op.name in _NO_NUMBERS or torch.float32 not in op.supported_dtypes(device):
            continue
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        _seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # `op.sample_inputs` walks the stack at every sample in search of a test case of torch's.
            made = op.sample_inputs_func(op, device, torch.float32, False)
            found = list(itertools.islice(made, 4 * samples))
        for sample in found[:: max(1, len(found) // samples)][:samples]:
            call, tensors = _call_of(op, sample)
            if any(t.numel() > 20000 for t in tensors) or not any(t.dtype is torch.float32 for t in tensors):
                continue
            cases += _forms(name, call, tensors, HALVES[dtype], gradients and op.supports_autograd)
    return [case for case in cases if not _is_random(case)]


def _call_of(op: Any, sample: Any) -> tuple[Callable[[Sequence[Tensor]], Any], list[Tensor]]:
    leaves, spec = tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(values: Sequence[Tensor]) -> Any:
        given = list(leaves)
        for position, value in zip(positions, values, strict=True):
            given[position] = value
        data, args, kwargs = tree_unflatten(given, spec)
        return op.op(data, *args, **kwargs)

    return call, [leaves[i].detach() for i in positions]


def _is_random(case: Case) -> bool:
    """Whether two seeds give two results."""
    results = []
    for seed in (0, 1):
        _seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results.append(_tensors_of(case.call([t.clone() for t in case.exact])))
            except Exception:  # noqa: BLE001 - the judge sees what a call raises
                return False
    return any(relative_error(a, b) > 1e-6 for a, b in zip(*results, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["idioms", "samples", "database"])
    parser.add_argument("--level", nargs="*", default=["O1", "O2"])
    parser.add_argument("--dtype", nargs="*", default=list(HALVES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backward", nargs="*", default=["after"], choices=BACKWARDS)
    parser.add_argument("--no-promote", action="store_true")
    parser.add_argument("--cpu-compute", default="auto")
    parser.add_argument("--samples", type=int, default=2, help="samples per operator of torch's database")
    parser.add_argument("--only", nargs="*", default=None)
    given = parser.parse_args()
    count = 0
    for level, dtype in itertools.product(given.level, given.dtype):
        if given.what == "idioms":
            cases = idiom_cases(given.only or IDIOMS, level, dtype, given.device)
        elif given.what == "samples":
            cases = sample_cases(dtype, given.device)
        else:
            cases = database_cases(torch_operators(), dtype, given.device, given.samples)
        cases = [c for c in cases if given.only is None or c.name in given.only]
        promote = level != "O2" or not given.no_promote
        findings = judge(
            cases, [level], dtype, given.device, given.backward, use_promote=promote, cpu_compute=given.cpu_compute
        )
        count += len(findings)
        for finding in findings:
            print(finding)
        print(
            f"# {level} {dtype}: {len(cases)} cases, {len(findings)} findings in {len({f.name for f in findings})} names"
        )


if __name__ == "__main__":
    main()
