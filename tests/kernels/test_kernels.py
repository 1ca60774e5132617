"""Operators of mezzo.kernels against float64: by torch on a CPU, by Triton on a GPU or in its interpreter."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo.kernels import add_layer_norm, add_rms_norm, fused_cross_entropy, fused_layer_norm, fused_rms_norm
from mezzo.kernels._norms import layer_norm_backward, rms_norm_backward
from mezzo.kernels._tiles import add_up

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
#: Half a unit of the result; Triton's interpreter cuts a bfloat16 off, which is up to a whole one.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float32: 2**-20}
HALVES = (torch.float16, torch.bfloat16)
SHAPES = [((7, 5), 1), ((3, 4, 24), 2), ((2, 3, 96), 1), ((37, 1030), 1), ((0, 8), 1), ((5, 1), 1)]


def make(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype).requires_grad_()


def in_double(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, cancelled: float = 4e-8) -> None:
    """One rounding to `dtype`, of which the float32 arithmetic before it errs by far less.

    `cancelled` is that error for a difference of larger terms; as it is, half the distance of the smallest float16
    numbers.
    """
    assert found.dtype is dtype
    error = (found.detach().cpu().double() - expected.detach()).abs()
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    assert (error <= ROUNDING[dtype] * expected.detach().abs() + 4e-6 * largest + cancelled).all(), error.max()


@pytest.mark.parametrize("param_dtype", [None, torch.float32, "same"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_norm_and_its_gradients_are_those_of_float64_rounded_once(
    name: str, shape: tuple, dims: int, dtype: torch.dtype, param_dtype: torch.dtype | str | None
) -> None:
    torch.manual_seed(0)
    x, normed = make(*shape, dtype=dtype), shape[-dims:]
    held = dtype if param_dtype == "same" else param_dtype
    count = 0 if held is None else 1 + (name == "layer_norm")
    params = [make(*normed, dtype=held) for _ in range(count)]
    fused, plain = (fused_layer_norm, F.layer_norm) if name == "layer_norm" else (fused_rms_norm, F.rms_norm)
    grad = torch.randn(shape).to(DEVICE, dtype)
    result = fused(x, normed, *params, eps=1e-5)
    grads = torch.autograd.grad(result, (x, *params), grad)
    reference = in_double(x, *params)
    expected = plain(reference[0], normed, *reference[1:], eps=1e-5)
    expected_grads = torch.autograd.grad(expected, reference, grad.cpu().double())
    assert_near(result, expected, dtype)
    for one, of_double, tensor in zip(grads, expected_grads, (x, *params), strict=True):
        assert_near(one, of_double, tensor.dtype, cancelled=4e-6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("used", ["both", "norm", "sum"])
@pytest.mark.parametrize("shape", [(2, 3, 96), (37, 1030), (500, 40), (0, 8)])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_norm_of_a_sum_and_its_gradients_are_those_of_float64_rounded_once(
    name: str, shape: tuple[int, ...], used: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, residual, weight = make(*shape, dtype=dtype), make(*shape, dtype=dtype), make(shape[-1], dtype=torch.float32)
    found = (
        add_layer_norm(x, residual, weight, None, 1e-5)
        if name == "layer_norm"
        else add_rms_norm(x, residual, weight, 1e-5)
    )
    weights = [torch.randn(shape).to(DEVICE, dtype) for _ in range(2)]
    chosen = {"both": slice(0, 2), "norm": slice(0, 1), "sum": slice(1, 2)}[used]
    inputs = (x, residual, weight) if used != "sum" else (x, residual)
    grads = torch.autograd.grad(found[chosen], inputs, weights[chosen])
    one, other, factor = in_double(x, residual, weight)
    total = one + other
    rounded = total + (found[1].detach().cpu().double() - total).detach()  # the norm is that of the rounded sum
    plain = F.layer_norm if name == "layer_norm" else F.rms_norm
    expected = plain(rounded, shape[-1:], factor, eps=1e-5), total
    doubles = (one, other, factor) if used != "sum" else (one, other)
    expected_grads = torch.autograd.grad(expected[chosen], doubles, [w.cpu().double() for w in weights[chosen]])
    for value, of_double in zip(found, expected, strict=True):
        assert_near(value, of_double, dtype)
    for grad, of_double, tensor in zip(grads, expected_grads, inputs, strict=True):
        assert_near(grad, of_double, tensor.dtype, cancelled=4e-6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "size"), [(7, 96), (700, 40), (9, 1030), (0, 8)])
def test_the_backward_of_a_norm_adds_up_the_rows_of_its_result(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad, other, total = (make(rows, size, dtype=dtype).detach() for _ in range(3))
    weight, means, scales = (torch.rand(count).to(DEVICE) for count in (size, rows, rows))
    layer = layer_norm_backward(grad, other, total, weight, None, means, scales, 1, True, True)
    rms = rms_norm_backward(grad, other, total, weight, scales, 1, True, True)
    for of_x, *_, sums in (layer, rms):
        exact = of_x.cpu().double()
        # Half a unit of the sum, and of each rounded term that this reference adds up.
        bound = ROUNDING[dtype] * (exact.sum(0).abs() + exact.abs().sum(0)) + 1e-5
        assert sums.dtype is dtype
        assert ((sums.cpu().double() - exact.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_parameter_of_a_norm_gets_no_gradient(frozen: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = make(9, 40, dtype=torch.float16), make(40, dtype=torch.float32), make(40, dtype=torch.float32)
    params = {"weight": weight, "bias": bias}
    params[frozen].requires_grad_(False)
    add_layer_norm(x, None, weight, bias, 1e-5)[0].float().square().sum().backward()
    ours = {name: param.grad for name, param in params.items()} | {"x": x.grad}
    doubles = in_double(x, weight, bias)
    F.layer_norm(doubles[0], (40,), *doubles[1:]).square().sum().backward()
    expected = {name: double.grad for name, double in zip(("x", "weight", "bias"), doubles, strict=True)}
    assert ours.pop(frozen) is None
    for name, grad in ours.items():
        # the loss reads the result rounded to half
        assert (grad.cpu().double() - expected[name]).norm() <= 2**-9 * expected[name].norm(), name


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="launches a kernel")
@pytest.mark.parametrize("count", [1, 256, 257, 700])
@pytest.mark.parametrize("results", [1, 2, 3])
def test_sums_of_programs_are_those_of_float64(count: int, results: int) -> None:
    torch.manual_seed(0)
    parts = torch.randn(results, count, 70, device=DEVICE)
    totals = [torch.empty(70, device=DEVICE, dtype=dtype) for dtype in (torch.float32, *HALVES)[:results]]
    add_up(parts, *totals)
    for total, part in zip(totals, parts, strict=True):
        exact = part.cpu().double().sum(0)
        # the rounding to the result's dtype, and one of float32 for each addition
        bound = ROUNDING[total.dtype] * exact.abs() + count * 2**-24 * part.cpu().double().abs().sum(0)
        assert ((total.cpu().double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("used", ["both", "norm", "sum"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_norm_of_a_sum_has_a_second_derivative(name: str, used: str) -> None:
    torch.manual_seed(0)
    leaves = [make(*shape, dtype=torch.float32) for shape in ((4, 6), (4, 6), (6,))]

    def penalty(tensors: list[Tensor], fused: bool) -> Tensor:
        x, residual, weight = tensors
        total = x + residual
        if not fused:
            norm = F.layer_norm(total, (6,), weight) if name == "layer_norm" else F.rms_norm(total, (6,), weight, 1e-5)
        elif name == "layer_norm":
            norm, total = add_layer_norm(x, residual, weight, None, 1e-5)
        else:
            norm, total = add_rms_norm(x, residual, weight, 1e-5)
        parts = {"both": (norm, total), "norm": (norm,), "sum": (total,)}[used]
        value = torch.stack([part.pow(3).sum() for part in parts]).sum()
        grads = torch.autograd.grad(value, tensors[:2], create_graph=True)
        return torch.stack([grad.square().sum() for grad in grads]).sum()

    found = torch.autograd.grad(penalty(leaves, True), leaves[:2])
    doubles = in_double(*leaves)
    for one, of_double in zip(found, torch.autograd.grad(penalty(doubles, False), doubles[:2]), strict=True):
        error = (one.cpu().double() - of_double).norm() / of_double.norm()
        assert error < 1e-4  # float32, three sums deep


def test_a_norm_takes_inputs_and_gradients_that_are_not_contiguous() -> None:
    x = make(24, 7, dtype=torch.float16)
    weight = make(24, dtype=torch.float32)
    result = fused_layer_norm(x.t(), (24,), weight)
    reference = in_double(x, weight)
    expected = F.layer_norm(reference[0].t(), (24,), reference[1])
    assert_near(result, expected, torch.float16)
    found = torch.autograd.grad(result.sum(), (x, weight))  # the gradient is one number, expanded
    for one, of_double in zip(found, torch.autograd.grad(expected.sum(), reference), strict=True):
        error = (one.cpu().double() - of_double).abs().max()
        assert error < 5e-3  # sums that cancel to 0: absolute, a few units of the half terms


def test_the_backward_of_a_norm_gives_the_same_bits_each_time() -> None:
    x, weight = make(300, 40, dtype=torch.float16), make(40, dtype=torch.float32)
    grad = torch.randn(300, 40).to(DEVICE, torch.float16)
    runs = [torch.autograd.grad(fused_rms_norm(x, (40,), weight), (x, weight), grad) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_the_norms_keep_their_half_input_and_no_float32_copy() -> None:
    x, weight = make(64, 128, dtype=torch.bfloat16), make(128, dtype=torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused_layer_norm(x, (128,), weight, None)
    assert max(tensor.numel() for tensor in kept if tensor.dtype is torch.float32) == 64
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in kept)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("classes", [1, 5, 8, 37, 9001])
def test_cross_entropy_is_that_of_float64(classes: int, dtype: torch.dtype, reduction: str, smoothing: float) -> None:
    torch.manual_seed(0)
    logits = make(6, classes, dtype=dtype)
    target = torch.randint(classes, (6,), device=DEVICE)
    target[2] = -100
    loss = fused_cross_entropy(logits, target, reduction, label_smoothing=smoothing)
    (found,) = torch.autograd.grad(loss.sum(), logits)
    (reference,) = in_double(logits)
    expected = F.cross_entropy(reference, target.cpu(), reduction=reduction, label_smoothing=smoothing)
    (expected_grad,) = torch.autograd.grad(expected.sum(), reference)
    assert_near(loss, expected, torch.float32)
    assert_near(found, expected_grad, dtype)
    assert not found[2].any()


def test_cross_entropy_reads_rows_that_lie_apart_or_are_transposed() -> None:
    target = torch.tensor([1, 0, 10], device=DEVICE)
    wide = make(3, 13, dtype=torch.float16)
    tall = make(11, 3, dtype=torch.float16)
    for logits, leaf in ((wide[:, 1:12], wide), (tall.t(), tall)):
        (reference,) = in_double(logits)
        expected = F.cross_entropy(reference, target.cpu())
        loss = fused_cross_entropy(logits, target)
        assert_near(loss, expected, torch.float32)
        (found,) = torch.autograd.grad(loss, logits)
        assert_near(found, torch.autograd.grad(expected, reference)[0], torch.float16)
        assert leaf.shape != found.shape or logits is not wide


def test_cross_entropy_of_logits_that_begin_with_minus_infinity() -> None:
    """A block of -inf only has no largest finite value: a naive running maximum gives NaN."""
    logits = torch.full((2, 9000), float("-inf"), device=DEVICE, dtype=torch.float16)
    logits[:, 8995:] = 1.0
    loss = fused_cross_entropy(logits, torch.tensor([8996, 8999], device=DEVICE))
    assert float(loss) == pytest.approx(1.6094379, abs=1e-5)  # log 5


def test_no_counted_target_gives_nan_as_in_torch() -> None:
    logits, target = make(2, 5, dtype=torch.float16), torch.full((2,), -100, device=DEVICE)
    assert fused_cross_entropy(logits, target).isnan()
    assert fused_cross_entropy(logits, target, "sum") == 0


@pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="torch raises IndexError on a CPU")
def test_a_target_that_is_not_a_class_gives_nan_in_its_row_only() -> None:
    logits, target = make(3, 5, dtype=torch.float16), torch.tensor([1, 7, -3], device=DEVICE)
    losses = fused_cross_entropy(logits, target, "none")
    assert losses.isnan().tolist() == [False, True, True]
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert grad.isnan().any(1).tolist() == [False, True, True]


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "cross_entropy"])
def test_second_derivatives_are_those_of_float64(name: str) -> None:
    x = make(4, 6, dtype=torch.float32)
    target = torch.tensor([0, 5, 2, 1])

    def penalty(x: Tensor, fused: bool) -> Tensor:
        if name == "cross_entropy":
            loss = fused_cross_entropy if fused else F.cross_entropy
            result = loss(x, target.to(x.device))
        elif name == "layer_norm":
            result = (fused_layer_norm if fused else F.layer_norm)(x, (6,)).pow(3).sum()
        else:
            result = (fused_rms_norm if fused else F.rms_norm)(x, (6,)).pow(3).sum()
        (grad,) = torch.autograd.grad(result, x, create_graph=True)
        return grad.square().sum()

    (found,) = torch.autograd.grad(penalty(x, True), x)
    (reference,) = in_double(x)
    (expected,) = torch.autograd.grad(penalty(reference, False), reference)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-3, atol=1e-4)  # float32, three sums deep


def test_every_operator_follows_torchs_rules_for_operators() -> None:
    mezzo = torch.ops.mezzo
    x, weight, bias = make(5, 12, dtype=torch.float16), make(12, dtype=torch.float32), make(12, dtype=torch.float16)
    target = torch.tensor([0, 3, -100, 11, 2], device=DEVICE)
    grad, rows, other = torch.randn_like(x), torch.rand(5, device=DEVICE), make(5, 12, dtype=torch.float16)
    calls = [
        (mezzo.layer_norm.default, (x, None, weight, bias, 1, 1e-5)),
        (mezzo.layer_norm.default, (x, None, None, None, 1, 1e-5)),
        (mezzo.layer_norm.default, (x, other, weight, bias, 1, 1e-5)),
        (
            mezzo.layer_norm_backward.default,
            (grad, None, x.detach(), weight.detach(), None, rows, rows, 1, False, True),
        ),
        (
            mezzo.layer_norm_backward.default,
            (grad, grad, x.detach(), weight.detach(), None, rows, rows, 1, True, False),
        ),
        (mezzo.rms_norm.default, (x, None, weight, 1, 1e-5)),
        (mezzo.rms_norm.default, (x, other, weight, 1, 1e-5)),
        (mezzo.rms_norm_backward.default, (grad, None, x.detach(), weight.detach(), rows, 1, False, True)),
        (mezzo.rms_norm_backward.default, (grad, grad, x.detach(), weight.detach(), rows, 1, True, False)),
        (mezzo.token_losses.default, (x, target, -100, 0.1)),
        (mezzo.token_losses_backward.default, (rows, x.detach(), target, rows, -100, 0.1)),
    ]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operator, args in calls:
        torch.library.opcheck(operator, args, test_utils=tests)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="reduction 'average'; allowed: none, mean, sum"):
        fused_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), "average")


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_weight_that_depends_on_the_data_counts_once_in_its_gradient(create_graph: bool) -> None:
    torch.manual_seed(0)
    x = make(4, 6, dtype=torch.float32)
    (wide,) = in_double(x)

    def gradient(data: Tensor, norm) -> Tensor:
        loss = norm(data, (6,), data.mean(0)).square().sum()
        return torch.autograd.grad(loss, data, create_graph=create_graph)[0]

    for fused, plain in ((fused_layer_norm, F.layer_norm), (fused_rms_norm, F.rms_norm)):
        assert_near(gradient(x, fused), gradient(wide, plain), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="sizes for a GPU")
def test_cross_entropy_of_gpt2s_head_needs_no_float32_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2048, 50257, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(50257, (2048,), device="cuda")
    target[::7] = -100
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = fused_cross_entropy(logits, target)
    loss.backward()
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < 1.1 * 2 * logits.numel()  # the half gradient, and vectors
    reference = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(reference, target)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(logits.grad.float(), reference.grad, rtol=2**-8, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="sizes for a GPU")
@pytest.mark.parametrize("size", [768, 1024, 4096, 16384])
def test_norms_at_sizes_of_language_models(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4096, size, device="cuda").bfloat16().requires_grad_()
    weight, bias = (torch.randn(size, device="cuda").requires_grad_() for _ in range(2))
    grad = torch.randn_like(x)
    for fused, plain, params in (
        (fused_layer_norm, F.layer_norm, (weight, bias)),
        (fused_rms_norm, F.rms_norm, (weight,)),
    ):
        result = fused(x, (size,), *params, eps=1e-5)
        found = torch.autograd.grad(result, (x, *params), grad)
        reference = [t.detach().double().requires_grad_() for t in (x, *params)]
        expected = plain(reference[0], (size,), *reference[1:], eps=1e-5)
        wanted = torch.autograd.grad(expected, reference, grad.double())
        torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(found[0].double(), wanted[0], rtol=2**-8, atol=1e-5)
        for one, of_double in zip(found[1:], wanted[1:], strict=True):  # float32 sums of 4096 terms
            torch.testing.assert_close(one.double(), of_double, rtol=1e-4, atol=1e-3)
