"""A zoo of planted faults: each is found by the right tool and named exactly, on a CPU with and without half units.

The line of a fault is the one that ends in `# planted`.
"""

import gc
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo import amp
from mezzo.amp.debugging import (
    DebugMode,
    Finding,
    NonFiniteError,
    TensorCheckerConfig,
    collect_ranges,
    tensor_checker,
)

INF, NAN = math.inf, math.nan
FLOAT16_MAX = 65504

# Where a CPU has no half units, heavy operators compute in float32 between half borders: both ways everywhere.
PLACES = [
    pytest.param(("cpu", "native"), id="cpu-native"),
    pytest.param(("cpu", "float32"), id="cpu-float32"),
    pytest.param(("cuda", "auto"), id="cuda", marks=pytest.mark.gpu),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Place = tuple[str, str]


def planted(function: Callable[..., object]) -> str:
    """Return `file:line` of a planted fault."""
    code, lines = function.__code__, Path(__file__).read_text().splitlines()  # type: ignore[attr-defined]
    first = code.co_firstlineno
    (offset,) = [i for i, line in enumerate(lines[first - 1 : first + 40]) if line.endswith("# planted")][:1]
    return f"{__file__}:{first + offset}"


def find(run: Callable[[], object]) -> Finding:
    """Return what the checker stops at."""
    with pytest.raises(NonFiniteError) as caught, tensor_checker():
        run()
    assert caught.value.finding is not None
    assert str(caught.value) == str(caught.value.finding)
    return caught.value.finding


def find_nothing(run: Callable[[], object]) -> None:
    with tensor_checker() as checker:
        run()
    assert checker.num_findings == 0


class Attention(nn.Module):
    """One head; `gain` makes its scores too large for float16."""

    def __init__(self, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x) * self.gain
        key = self.key(x) * self.gain
        scores = query @ key.transpose(-1, -2)  # planted
        weights = scores.softmax(-1)
        return x + weights @ x


# -- forward


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_scores_too_large_in_one_layer_are_named_with_module_line_and_float32_value(place: Place, layer: int) -> None:
    device, compute = place
    model = nn.Sequential(*[Attention(16, 300.0 if i == layer else 1.0) for i in range(4)]).to(device)
    x = torch.randn(2, 8, 16, device=device)

    def run() -> None:
        with amp.auto_cast(level="O1", cpu_compute=compute):
            model(x)

    finding = find(run)
    assert (finding.api_op, finding.module, finding.phase, finding.dtype) == (
        "matmul",
        str(layer),
        "forward",
        "float16",
    )
    assert finding.op == ("_to_copy" if compute == "float32" else "bmm")
    assert finding.line == planted(Attention.forward)
    assert finding.kind == "range"
    # The true largest score, in float64 from the half inputs of the product, as far as layer 0 goes.
    if layer == 0:
        attention = model[0]
        half = [
            (F.linear(x.half().double(), m.weight.half().double(), m.bias.half().double()).half() * 300).double()
            for m in (attention.query, attention.key)
        ]
        largest = (half[0] @ half[1].transpose(-1, -2)).abs().max().item()
        said = float(finding.cause.split(" is ")[1].split(" (")[0])
        assert said > FLOAT16_MAX
        assert said == pytest.approx(largest, rel=2e-2)  # half inputs differ by an ulp or two, 2^-10 each
    assert finding.cause.endswith("(float16 ends at 65504)")
    assert f"`matmul` (kernel `{finding.op}`) in module `{layer}`, forward, float16 at {finding.line}" in str(finding)


@pytest.mark.parametrize("place", PLACES)
def test_a_linear_layer_that_overflows_is_named_and_not_only_its_cast(place: Place) -> None:
    device, compute = place
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(device)
    nn.init.constant_(model[2].weight, 6e4)
    nn.init.ones_(model[0].weight)
    x = torch.ones(2, 8, device=device)

    def run() -> None:
        with amp.auto_cast(level="O2", cpu_compute=compute):
            model(x)

    finding = find(run)
    assert (finding.api_op, finding.module, finding.kind) == ("linear", "2", "range")
    assert "`linear`" in str(finding)


class Exponential(nn.Module):
    """Several operators on several lines."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 0
        x = x + 12
        y = x.exp()  # planted
        z = y / y.sum()
        return z


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"level": "O2"}, {"level": "O1", "custom_white_list": ["exp"]}])
def test_exp_in_half_is_named_with_its_line(options: dict[str, object], device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Exponential()).to(device)
    x = torch.ones(2, 4, device=device)

    def run() -> None:
        with amp.auto_cast(**options):  # type: ignore[arg-type]
            model(x)

    finding = find(run)
    assert (finding.op, finding.api_op, finding.module, finding.kind) == ("exp", "exp", "1", "range")
    assert finding.line == planted(Exponential.forward)
    assert finding.inputs[0].max == 12
    assert (
        finding.cause == f"float16's range: in float32 the largest value is {math.exp(12):.4g} (float16 ends at 65504)"
    )


def test_a_cast_that_overflows_shows_the_value_before_it() -> None:
    x = torch.tensor([1.0, 1e5])
    finding = find(lambda: x.half())
    assert (finding.op, finding.api_op, finding.kind) == ("_to_copy", "half", "range")
    assert (finding.inputs[0].dtype, finding.inputs[0].max) == ("float32", 1e5)
    assert finding.cause == "float16's range: the float32 value it was cast from is 1e+05 (float16 ends at 65504)"


def test_an_integer_too_large_for_float16_is_a_matter_of_range() -> None:
    x = torch.tensor([70000])
    finding = find(lambda: x.to(torch.float16))
    assert (finding.op, finding.kind) == ("_to_copy", "range")
    assert "in float32 the largest value is 7e+04" in finding.cause


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_logarithm_of_zero_is_not_the_precision(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0], dtype=dtype)
    finding = find(lambda: x.log())
    assert (finding.op, finding.kind) == ("log", "formula")
    assert finding.cause.startswith("not the precision: ")
    assert finding.inputs[0].num_zero == 1


def test_a_kernel_that_loses_it_inside_is_rounding_not_range() -> None:
    with torch.library._scoped_library("planted", "FRAGMENT") as library:
        library.define("mean_of_squares(Tensor x) -> Tensor")
        # the sum of squares is kept in the dtype of the input, the result is small
        library.impl("mean_of_squares", lambda x: (x * x).sum(dtype=x.dtype) / x.numel(), "CompositeExplicitAutograd")
        x = torch.full((1000,), 10.0, dtype=torch.float16)
        finding = find(lambda: torch.ops.planted.mean_of_squares(x))
    assert (finding.op, finding.kind) == ("planted::mean_of_squares", "rounding")
    assert finding.cause == "rounding inside the kernel in float16: in float32 the largest value is 100"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [NAN, INF])
def test_bad_data_is_said_to_come_from_outside(value: float, device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(device)
    x = torch.ones(2, 4, device=device)
    x[0, 1] = value

    def run() -> None:
        with amp.auto_cast(level="O2"):
            model(x)

    finding = find(run)
    assert (finding.api_op, finding.module, finding.kind) == ("linear", "0", "outside")
    assert finding.cause == (
        "input `self` came from outside and was not finite when it first appeared: data, or the result of a kernel that "
        "was not checked"
    )


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_bad_weight_is_named(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 2)))
    with torch.no_grad():
        model[2][0].weight[1, 3] = NAN
    x = torch.ones(2, 4)

    def run() -> None:
        with amp.auto_cast(level=level):
            model(x)

    finding = find(run)
    assert (finding.api_op, finding.module, finding.kind) == ("linear", "2.0", "outside")
    assert finding.cause.endswith("was not finite when it first appeared: parameter `2.0.weight`")


def test_a_bad_running_statistic_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_var[2] = NAN
    finding = find(lambda: model(torch.ones(2, 4)))
    assert (finding.module, finding.kind) == ("1", "outside")
    assert finding.cause.endswith("buffer `1.running_var`")


def test_an_in_place_kernel_says_that_its_input_is_gone() -> None:
    x = torch.full((2,), 300.0, dtype=torch.float16)
    y = torch.full((2,), 400.0, dtype=torch.float16)
    finding = find(lambda: x.mul_(y))
    assert (finding.op, finding.kind) == ("mul_", "unknown")
    assert finding.cause == "the kernel wrote over its input, so it cannot be repeated in float32"
    assert [(numbers.name, numbers.max) for numbers in finding.inputs] == [("other", 400)]


def test_an_in_place_kernel_in_float32_says_that_its_input_is_not_known() -> None:
    finding = find(lambda: torch.zeros(2).log_())
    assert (finding.op, finding.kind) == ("log_", "unknown")
    assert finding.cause == "the kernel wrote over its input, so what it had is not known"


def test_a_list_of_tensors_that_a_kernel_writes_to_is_looked_at() -> None:
    tensors = [torch.ones(2), torch.zeros(2)]
    finding = find(lambda: torch._foreach_reciprocal_(tensors))
    assert finding.op == "_foreach_reciprocal_"
    assert [numbers.num_inf for numbers in finding.outputs] == [0, 2]


def test_a_random_kernel_is_not_repeated() -> None:
    x = torch.full((64,), 6e4, dtype=torch.float16)
    finding = find(lambda: torch.native_dropout(x, 0.5, True))
    assert finding.kind == "unknown"
    assert finding.cause.startswith("the kernel draws random numbers or knows no float32, so it was not repeated")


# -- infinities that are meant


def masked_fill(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -INF)


def added_mask(scores: Tensor) -> Tensor:
    return scores + torch.full_like(scores, -INF).triu(1)


def where(scores: Tensor) -> Tensor:
    return torch.where(torch.ones_like(scores).tril().bool(), scores, -INF)


def assigned(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[torch.ones_like(scores).triu(1).bool()] = -INF
    return scores


def in_place(scores: Tensor) -> Tensor:
    return scores.clone().masked_fill_(torch.ones_like(scores).triu(1).bool(), -INF).mul_(2).add_(1)


def smallest(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), torch.finfo(scores.dtype).min)


MASKS = [masked_fill, added_mask, where, assigned, in_place, smallest]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("mask", MASKS)
def test_an_attention_mask_is_not_reported(mask: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str) -> None:
    def run() -> None:
        x = torch.randn(5, 5, dtype=dtype, device=device, requires_grad=True)
        (mask(x) / 2).view(1, 5, 5).softmax(-1).sum().backward()

    find_nothing(run)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_mask_that_was_made_before_is_not_reported(dtype: torch.dtype) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=dtype)
    x = torch.randn(5, 5).to(dtype)
    constant = torch.tensor(-INF, dtype=dtype)
    find_nothing(lambda: (x + mask).softmax(-1))
    find_nothing(lambda: torch.maximum(x, constant))
    find_nothing(lambda: x.masked_fill(mask < 0, constant).softmax(-1))


def test_transformers_with_masks_pass() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)

    def run() -> None:
        with amp.auto_cast(level="O2"):
            out = model(torch.randn(2, 4, 8), src_mask=mask, is_causal=True)
            loss = out.square().mean()
        loss.backward()

    find_nothing(run)


@pytest.mark.parametrize("mask", [lambda x: x.masked_fill(x == x, -INF), lambda x: x + torch.full_like(x, -INF)])
def test_a_row_that_is_masked_as_a_whole_is_reported_where_it_becomes_nan(mask: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3)
    finding = find(lambda: mask(x).softmax(-1))
    assert (finding.api_op, finding.kind) == ("softmax", "formula")
    assert finding.cause.startswith(
        "not the precision: infinities among the inputs, put there on purpose, met each other"
    )


def test_nan_from_zero_times_a_written_infinity_is_reported_and_a_written_nan_is_not() -> None:
    x = torch.tensor([0.0, 1.0])
    find_nothing(lambda: x.masked_fill(x == 0, NAN))
    finding = find(lambda: x * INF)
    assert (finding.op, finding.kind, finding.outputs[0].num_nan) == ("mul", "formula", 1)


def test_after_a_mask_an_overflow_is_still_found() -> None:
    x = torch.full((2, 2), 300.0, dtype=torch.float16)

    def run() -> None:
        masked_fill(x).softmax(-1)
        x * x

    assert find(run).op == "mul"


def test_after_a_mask_an_inf_among_the_weights_is_still_found() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = INF

    def run() -> None:
        masked_fill(torch.ones(2, 2)).softmax(-1)
        model(torch.ones(2, 2))

    finding = find(run)
    assert (finding.api_op, finding.kind) == ("linear", "outside")
    assert "parameter `weight`" in finding.cause


# -- backward


class Root(nn.Module):
    """Square root whose gradient at 0 is inf; the forward is fine."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.relu()
        z = y.sqrt()  # planted
        return z + 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_fault_of_the_backward_alone_is_named_with_module_and_line_of_the_forward(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 1)).to(device)
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)

    def run() -> None:
        model(torch.ones(2, 4, device=device)).sum().backward()

    finding = find(run)
    assert (finding.api_op, finding.module, finding.phase, finding.kind) == ("sqrt", "1", "backward", "formula")
    assert finding.line == planted(Root.forward)
    assert "the gradient of `sqrt` (kernel `div`) in module `1`, backward, float32 at " in str(finding)


class FirstColumn(nn.Module):
    """A view, whose gradient is a kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]  # planted


def test_the_gradient_of_a_view_is_named_by_the_view() -> None:
    model = nn.Sequential(nn.Identity(), FirstColumn())
    x = torch.ones(2, 2, requires_grad=True)
    gradient = torch.tensor([1.0, NAN])
    finding = find(lambda: model(x).backward(gradient))
    assert (finding.op, finding.module, finding.kind) == ("select_backward", "1", "outside")
    assert finding.line == planted(FirstColumn.forward)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_that_overflow_by_the_loss_scale_say_how_much_smaller_it_must_be(place: Place) -> None:
    device, compute = place
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False)).to(device)
    nn.init.constant_(model[1].weight, 3.0)
    scaler = amp.GradScaler(init_loss_scaling=2.0**15)

    def run() -> None:
        with amp.auto_cast(level="O2", cpu_compute=compute):
            loss = model(torch.full((1, 4), 0.1, device=device)).sum()
        scaler.scale(loss).backward()

    finding = find(run)
    # d loss / d input of the second layer is its weight: 3 * 2^15 = 98304, and half of it fits
    assert (finding.api_op, finding.module, finding.phase, finding.kind) == ("linear", "1", "backward", "range")
    assert "9.83e+04" in finding.cause
    assert finding.cause.endswith(
        "gradients are multiplied by the loss scale, and with one 2 times smaller it would fit"
    )


def test_a_gradient_that_underflows_is_seen_by_ranges_and_cured_by_the_scale_they_suggest() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    factors = 1e-9 * torch.randn(32, 64).exp()

    def grads(dtype: torch.dtype, scale: float) -> Tensor:
        model.zero_grad()
        out = F.linear(x.to(dtype), model.weight.to(dtype), model.bias.to(dtype))
        ((out.float() * factors).sum() * scale).backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    with collect_ranges() as ranges:
        true = grads(torch.float32, 1.0)
    row = next(row for row in ranges.rows if row.phase == "backward" and row.op == "linear")
    assert row.to_zero_share > 0.5
    suggestion = ranges.suggest_scale()
    lost = (grads(torch.float16, 1.0) == 0).float().mean().item()
    assert lost > 0.9  # what comes in is zero in float16 already
    assert suggestion.to_zero_now > 0.5
    cured = grads(torch.float16, suggestion.loss_scale)
    assert cured.isfinite().all()
    assert (cured == 0).float().mean().item() == pytest.approx(suggestion.to_zero_then, abs=1e-3)
    assert suggestion.to_zero_then < 1e-3
    # half inputs and half gradients, sums of 32: 2^-11 each, and terms that cancel
    torch.testing.assert_close(cured / suggestion.loss_scale, true, rtol=0, atol=5e-3 * true.abs().max().item())


# -- recomputation, other ways to run


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_module_is_named_in_its_forward(use_reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Exponential()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    model = Outer()
    x = torch.ones(2, 4, dtype=torch.float16, requires_grad=True)
    finding = find(lambda: model(x).sum().backward())
    assert (finding.op, finding.module, finding.phase) == ("exp", "inner", "forward")
    assert finding.line == planted(Exponential.forward)
    gc.collect()  # torch 2.11 leaves the hooks of a checkpoint whose forward raised until its generator is collected


def test_a_checkpointed_module_is_named_in_its_backward() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Root()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Outer()
    finding = find(lambda: model(torch.zeros(2, 4, requires_grad=True)).sum().backward())
    assert (finding.api_op, finding.module, finding.phase) == ("sqrt", "inner", "backward")
    assert finding.line == planted(Root.forward)


def test_in_the_modes_that_go_on_the_first_finding_is_the_origin(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Exponential(), nn.Linear(4, 4))

    def run() -> None:
        with amp.auto_cast(level="O2"):
            model(torch.ones(2, 4)).sum().backward()

    with tensor_checker(TensorCheckerConfig(True, DebugMode.CHECK_NAN_INF)) as checker:
        run()
    first, *others = checker.findings
    assert (first.op, first.kind) == ("exp", "range")
    # 12 and 12 again: inf / inf is NaN, and all of it comes from `exp`
    assert {finding.kind for finding in others} == {"carried"}
    assert len(capsys.readouterr().out.splitlines()) >= checker.num_findings
