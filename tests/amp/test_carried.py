"""Decisions for float32 arithmetic on half inputs, carried out by mezzo's own kernels: on a GPU or interpreted."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from mezzo.amp import auto_cast
from mezzo.optim import step_tier
from mezzo.record import collect_operator_stats

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (12,), torch.ones(12, device=x.device), torch.zeros(12, device=x.device)),
    "rms_norm": lambda x: F.rms_norm(x, (12,), torch.ones(12, device=x.device), 1e-5),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([1, 2, -100, 11, 0], device=x.device)),
}
OPERATORS = {"layer_norm": "mezzo::layer_norm", "rms_norm": "mezzo::rms_norm", "cross_entropy": "mezzo::token_losses"}


def make_input(dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(5, 12).to(DEVICE, dtype).requires_grad_()


def kernels_of(call: Callable[[], object]) -> set[str]:
    with collect_operator_stats(print_table=False) as stats:
        call()
    return {row.op for row in stats.rows}


@pytest.mark.parametrize("name", CALLS)
def test_half_inputs_take_the_kernel_with_the_dtypes_and_values_of_the_casts(name: str) -> None:
    x = make_input()

    def run() -> tuple[Tensor, Tensor]:
        with auto_cast(level="O2", dtype="float16"):
            result = CALLS[name](x)
        (grad,) = torch.autograd.grad(result.float().square().sum(), x)
        return result, grad

    found = run()
    with step_tier("fused"):  # as without Triton: casts around torch's operator
        expected = run()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2**-9, atol=1e-4)  # two roundings of half numbers near 1


@pytest.mark.parametrize("name", CALLS)
def test_the_table_names_call_reason_and_module_of_a_carried_operator(name: str) -> None:
    x = make_input()

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return CALLS[name](x)

    model = nn.Sequential(Layer())
    with collect_operator_stats(print_table=False) as stats:
        with auto_cast(level="O2", dtype="float16"):
            result = model(x)
        result.float().sum().backward()
    (row,) = [row for row in stats.rows if row.op == OPERATORS[name]]
    reason = "black list" if name == "cross_entropy" else "fp32 inside, no input is float32"
    assert (row.api_op, row.reason, row.module, row.phase, row.fp16) == (name, reason, "0", "forward", 1)
    (gradient,) = [row for row in stats.rows if row.op == OPERATORS[name] + "_backward"]
    assert (gradient.api_op, gradient.module, gradient.phase) == ("", "0", "backward")
    assert gradient.fp16 + gradient.fp32 == 1  # by its first input: that of the loss is float32


@pytest.mark.parametrize("name", CALLS)
def test_float32_inputs_keep_torchs_operator(name: str) -> None:
    with auto_cast(level="O2", dtype="float16"):
        found = kernels_of(lambda: CALLS[name](make_input(torch.float32)))
    assert not any(op.startswith("mezzo::") for op in found)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_norm_on_the_users_black_list_returns_float32(name: str) -> None:
    with auto_cast(level="O2", dtype="float16", custom_black_list=[name]):
        assert CALLS[name](make_input()).dtype is torch.float32


@pytest.mark.parametrize("name", CALLS)
def test_transforms_forward_mode_and_second_derivatives_work(name: str) -> None:
    x = make_input()
    with auto_cast(level="O2", dtype="float16"):
        by_func = torch.func.grad(lambda x: CALLS[name](x).float().sum())(x.detach())
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
            assert torch.autograd.forward_ad.unpack_dual(CALLS[name](dual)).tangent is not None
        loss = CALLS[name](x).float().square().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    assert by_func.shape == x.shape
    (second,) = torch.autograd.grad(grad.float().square().sum(), x)
    assert second.isfinite().all()


def test_what_the_kernels_do_not_know_goes_the_way_of_the_casts() -> None:
    x = make_input()
    target = torch.randint(12, (5,), device=DEVICE)
    weight = torch.ones(12, device=DEVICE)
    with auto_cast(level="O2", dtype="float16"):
        calls = (
            lambda: F.cross_entropy(x, target, weight=weight),
            lambda: F.cross_entropy(x, x.detach().softmax(1)),
            lambda: F.cross_entropy(x[0], target[0]),
            lambda: F.cross_entropy(x.reshape(1, 12, 5), target.reshape(1, 5)),
        )
        for call in calls:
            assert not any(op.startswith("mezzo::") for op in kernels_of(call))
            assert call().dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="torch's CUDA kernels")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["softmax", "sum", "mean", "nansum"])
def test_torchs_own_kernels_that_are_float32_inside_are_called_without_casts(name: str, dtype: str) -> None:
    x = torch.randn(64, 5000, device="cuda").add(1).to(getattr(torch, dtype)).requires_grad_()
    call = getattr(torch, name)
    with auto_cast(level="O2", dtype=dtype):
        assert "_to_copy" not in kernels_of(lambda: call(x, -1))
        result = call(x, -1)
    reference = x.detach().double().requires_grad_()
    expected = call(reference, -1)
    unit = torch.finfo(x.dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=unit, atol=1e-6)
    weights = torch.rand_like(result)
    (grad,) = torch.autograd.grad(result, x, weights)
    (wanted,) = torch.autograd.grad(expected, reference, weights.double())
    torch.testing.assert_close(grad.double(), wanted, rtol=4 * unit, atol=4 * unit * float(wanted.abs().max()))


@pytest.mark.parametrize("classes", [8192, 12])
def test_a_captured_graph_leaves_losses_and_norms_to_inductor(classes: int) -> None:
    head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, classes)).to(DEVICE)
    x, target = torch.randn(3, 4, device=DEVICE), torch.tensor([1, 2, -100], device=DEVICE)
    traced: list[str] = []

    def read(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    @torch.compile(backend=aot_autograd(fw_compiler=read), fullgraph=True)
    def compute(x: Tensor) -> Tensor:
        return F.cross_entropy(head(x), target)

    with auto_cast(level="O2", dtype="bfloat16"):
        loss = compute(x.bfloat16())
    expected = F.cross_entropy(head(x), target)
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)  # bfloat16 logits
    assert traced
    assert not any("mezzo" in name for name in traced)
