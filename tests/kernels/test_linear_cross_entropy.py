"""The head of a language model with its loss, in chunks: against float64, and against all logits at once."""

import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graph_backends import skip_without_compiler
from mezzo import static
from mezzo.amp import auto_cast, decorate
from mezzo.kernels import _linear_cross_entropy, linear_cross_entropy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
ROWS, INPUTS, CLASSES = 13, 32, 47
HALVES = (torch.float16, torch.bfloat16)


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return input, weight and targets; two rows do not count. Logits are near 1."""
    hidden = torch.randn(ROWS, INPUTS).to(DEVICE, dtype).requires_grad_()
    weight = (torch.randn(CLASSES, INPUTS) / INPUTS**0.5).to(DEVICE, dtype).requires_grad_()
    target = torch.randint(CLASSES, (ROWS,), device=DEVICE)
    target[[0, 7]] = -100
    return hidden, weight, target


def in_float64(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and both gradients."""
    rows, matrix = (each.detach().cpu().double().requires_grad_() for each in (hidden, weight))
    loss = F.cross_entropy(rows @ matrix.t(), target.cpu(), reduction=reduction)
    return loss.detach(), *torch.autograd.grad(loss, (rows, matrix))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_rows", [1, 4, 13, 100, None])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_loss_and_gradients_are_those_of_float64(dtype: torch.dtype, chunk_rows: int | None, reduction: str) -> None:
    hidden, weight, target = case(dtype)
    loss = linear_cross_entropy(hidden, weight, target, reduction, chunk_rows=chunk_rows)
    found = torch.autograd.grad(loss, (hidden, weight))
    expected, *gradients = in_float64(hidden, weight, target, reduction)
    assert loss.dtype is torch.float32
    # Logits are rounded to `dtype`, which moves a loss of about 4 by a unit at 1 or 2 per row.
    error = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(loss.cpu().double(), expected, rtol=error, atol=0)
    for mine, right in zip(found, gradients, strict=True):
        assert mine.dtype is dtype
        # Of the largest gradient: each is a sum of probabilities, which are rounded too.
        torch.testing.assert_close(mine.cpu().double(), right, rtol=0, atol=2 * error * float(right.abs().max()))
    assert not found[0][[0, 7]].any(), "rows that do not count"


@pytest.mark.parametrize("chunk_rows", [4, None])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_padded_vocabulary_gives_the_same_numbers(
    dtype: torch.dtype, chunk_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """47 classes become 48 columns: the padding must not count, in the losses or in a gradient."""
    hidden, weight, target = case(dtype)
    results = []
    for least in (10**6, 1):
        monkeypatch.setattr(_linear_cross_entropy, "LEAST_ALIGNED", least)
        loss = linear_cross_entropy(hidden, weight, target, chunk_rows=chunk_rows)
        results.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    plain, padded = results
    assert padded[0] == plain[0]
    assert padded[2].shape == weight.shape
    for mine, right in zip(padded[1:], plain[1:], strict=True):
        # the same half logits and probabilities; a product over 48 instead of 47 classes may sum in another order
        torch.testing.assert_close(mine, right, rtol=2**-7, atol=2**-10 * float(right.abs().max()))


def test_chunks_change_the_sums_of_float32_only() -> None:
    hidden, weight, target = case(torch.bfloat16)
    results = []
    for rows in (13, 5, 1):
        loss = linear_cross_entropy(hidden, weight, target, chunk_rows=rows)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for other in results[1:]:
        torch.testing.assert_close(other[0], results[0][0], rtol=1e-6, atol=0)
        assert torch.equal(other[1], results[0][1])
        torch.testing.assert_close(other[2], results[0][2], rtol=2**-7, atol=1e-7)  # one unit of bfloat16


def test_float16_gradients_do_not_vanish_before_they_are_scaled() -> None:
    """A mean over many rows divides by their number: the gradient of a row would be zero in float16."""
    hidden, weight, target = case(torch.float16)
    scale = 2.0**15
    loss = linear_cross_entropy(hidden, weight, target) / 2**14 * scale
    (found,) = torch.autograd.grad(loss, hidden)
    _, expected, _ = in_float64(hidden, weight, target, "mean")
    torch.testing.assert_close(found.cpu().double(), 2 * expected, rtol=0, atol=2**-9 * float(2 * expected.abs().max()))


@pytest.mark.parametrize("chunk_rows", [5, None])
def test_smoothed_labels_give_torchs_loss_and_gradients(chunk_rows: int | None) -> None:
    hidden, weight, target = case(torch.float32)
    loss = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, chunk_rows=chunk_rows)
    expected = F.cross_entropy(hidden @ weight.t(), target, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, (hidden, weight))
    right = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)  # float32, other orders of sums


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("rows", [0, ROWS])
def test_without_a_counted_target_the_mean_is_nan_and_gradients_are_zero(rows: int, dtype: torch.dtype) -> None:
    hidden, weight, target = case(dtype)
    loss = linear_cross_entropy(hidden[:rows], weight, torch.full_like(target, -100)[:rows], chunk_rows=5)
    assert loss.isnan()
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_target_that_is_no_class_makes_the_loss_nan() -> None:
    if DEVICE == "cpu" and not INTERPRETED:
        pytest.skip("torch's own operator, which computes it here, raises an error")
    hidden, weight, target = case(torch.float32)
    target[3] = CLASSES
    assert linear_cross_entropy(hidden, weight, target).isnan()


def test_a_head_that_is_the_embedding_collects_both_gradients() -> None:
    weight = torch.randn(CLASSES, INPUTS, device=DEVICE).requires_grad_()
    tokens, target = (torch.randint(CLASSES, (ROWS,), device=DEVICE) for _ in range(2))
    hidden = F.embedding(tokens, weight)
    (found,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, chunk_rows=4), weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(F.embedding(tokens, weight) @ weight.t(), target), weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # float32, other orders of sums


def test_only_what_is_trained_gets_a_gradient() -> None:
    hidden, weight, target = case(torch.float32)
    for frozen, trained in ((hidden, weight), (weight, hidden)):
        frozen.requires_grad_(False)
        loss = linear_cross_entropy(hidden, weight, target)
        loss.backward()
        assert frozen.grad is None
        assert trained.grad is not None
        trained.grad = None
        frozen.requires_grad_()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target).requires_grad


def test_inputs_may_have_more_dimensions_and_no_rows() -> None:
    hidden, weight, target = case(torch.float32)
    deep = hidden[:12].reshape(3, 4, INPUTS)
    loss = linear_cross_entropy(deep, weight, target[:12].reshape(3, 4))
    torch.testing.assert_close(loss, F.cross_entropy(hidden[:12] @ weight.t(), target[:12]))
    none = linear_cross_entropy(hidden[:0], weight, target[:0], "sum")
    assert none.item() == 0
    (grad,) = torch.autograd.grad(none, weight)
    assert not grad.any()


@pytest.mark.parametrize("chunk_rows", [4, None])
def test_a_padded_vocabulary_without_rows_gives_zero_gradients(
    chunk_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_linear_cross_entropy, "LEAST_ALIGNED", 1)
    hidden, weight, target = case(torch.bfloat16)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        loss = linear_cross_entropy(hidden[:0], weight, target[:0], "sum", chunk_rows=chunk_rows)
        (grad,) = torch.autograd.grad(loss, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss.item() == 0
    assert not grad.any()


def test_second_derivatives_are_those_of_torch() -> None:
    hidden, weight, target = case(torch.float32)

    def penalty(loss: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return grad.square().sum()

    (found,) = torch.autograd.grad(penalty(linear_cross_entropy(hidden, weight, target)), weight)
    (expected,) = torch.autograd.grad(penalty(F.cross_entropy(hidden @ weight.t(), target)), weight)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_under_a_policy_logits_are_half_and_the_loss_is_float32(level: str) -> None:
    head = nn.Linear(INPUTS, CLASSES, bias=False).to(DEVICE)
    hidden, _, target = case(torch.float32)
    if level == "O2":
        decorate(head, torch.optim.SGD(head.parameters(), lr=0.1), level="O2", dtype="bfloat16")
    with auto_cast(level=level, dtype="bfloat16"):
        loss = linear_cross_entropy(hidden, head.weight, target)
        expected = F.cross_entropy(head(hidden).float(), target)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype is head.weight.dtype


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(self.body(x), self.head.weight, target, chunk_rows=5)


@pytest.mark.skipif(INTERPRETED, reason="compilers do not use the interpreter")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_captured_step_trains_as_an_eager_one(backend: str) -> None:
    if backend == "inductor":
        skip_without_compiler()
    hidden, _, target = case(torch.float32)
    batch = hidden.detach(), target
    losses = {}
    for form in ("eager", backend):
        model = Model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        decorate(model, optimizer, level="O2", dtype="bfloat16")
        step = static.compile_step(model, lambda loss: loss, optimizer, policy="O2", backend=form, num_inputs=2)
        losses[form] = [step(*batch).item() for _ in range(4)]
    torch._dynamo.reset()
    assert losses[backend] == pytest.approx(losses["eager"], rel=2**-7)
    assert losses["eager"][-1] < losses["eager"][0]


def test_the_operator_follows_torchs_rules_for_operators() -> None:
    hidden, weight, target = case(torch.float32)
    for wanted in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(
            torch.ops.mezzo.chunked_token_loss.default,
            (hidden, weight, target, -100, 0.1, 5, *wanted),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, "reduction 'none'; allowed: mean, sum"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: must be from 0 to 1"),
        ({"chunk_rows": 0}, "chunk_rows=0: must be at least 1"),
        ({"weight": torch.zeros(3, 5)}, r"hidden \[13, 32\], weight \[3, 5\]"),
        ({"target": torch.zeros(2, dtype=torch.int64)}, r"target \[2\] do not fit"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    hidden, weight, target = case(torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "target": target, **change})  # type: ignore[arg-type]


@pytest.mark.gpu
def test_all_logits_never_exist() -> None:
    hidden = torch.randn(8192, 1024, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(128256, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    target = torch.randint(128256, (8192,), device="cuda")
    expected = F.cross_entropy((hidden @ weight.t()).float(), target)
    gradients = torch.autograd.grad(expected, (hidden, weight))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, target, chunk_rows=1024)
    found = torch.autograd.grad(loss, (hidden, weight))
    grown = torch.cuda.max_memory_allocated() - before
    logits = 2 * 8192 * 128256
    assert grown < logits / 2, "1/8 of the half logits, the float32 gradient of the weight and its half copy"
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    for mine, right in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, right, rtol=2**-6, atol=2**-6 * float(right.abs().max()))
