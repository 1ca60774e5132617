"""GELU in front of products of a captured graph is mezzo's operator, which also adds up the gradient of a bias."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from joint_graphs import Trained, assert_same, train_once
from mezzo.amp import Policy, auto_cast
from mezzo.static import _activations, _norms, _rows

#: A gradient that mezzo's operator rounds once, against one that torch rounds two or three times.
RTOL = 2**-6
HALVES = (torch.float16, torch.bfloat16)
GELU, BACKWARD = torch.ops.mezzo.gelu.default, torch.ops.mezzo.gelu_backward.default


class Mlp(nn.Module):
    """Two half layers with something between them, as in a transformer."""

    def __init__(self, between: Callable[[Tensor], Tensor], dtype: torch.dtype, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(*sizes, dtype=dtype) for sizes in ((16, width), (width, 8)))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.between(self.first(x)))
        return result


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "has_triton", lambda device: True)  # the operator itself computes by torch


def train(
    between: Callable[[Tensor], Tensor],
    captured: bool,
    dtype: torch.dtype = torch.bfloat16,
    rows: tuple[int, ...] = (4, 6),
    width: int = 64,
    dynamic: bool = False,
) -> Trained:
    torch.manual_seed(0)
    model = Mlp(between, dtype, width)
    x = torch.randn(*rows, 16, dtype=dtype).requires_grad_()
    return train_once(model, x, _activations.fuse_activations if captured else None, dynamic=dynamic)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("rows", [(24,), (4, 6), (2, 3, 4)])
def test_the_operator_gives_the_same_numbers_and_adds_up_the_bias(
    rows: tuple[int, ...], form: str, dtype: torch.dtype
) -> None:
    def between(y: Tensor) -> Tensor:
        return F.gelu(y, approximate=form)

    found = train(between, captured=True, dtype=dtype, rows=rows)
    assert_same(found, train(between, captured=False, dtype=dtype, rows=rows), RTOL)
    assert found.operators.count(GELU) == found.operators.count(BACKWARD) == 1
    sums = [target for target in found.operators if target is torch.ops.aten.sum.dim_IntList]
    assert len(sums) == 1  # of the second layer's bias


@pytest.mark.parametrize(
    "between",
    [
        nn.GELU(),
        nn.Sequential(nn.GELU(), nn.Dropout(0.0)),
        nn.Sequential(nn.GELU(), nn.Dropout(0.5).eval()),
        lambda y: F.gelu(y).reshape(-1, y.shape[-1]).view(y.shape),
        lambda y: F.gelu(input=y),
    ],
)
def test_views_and_dropout_that_drops_nothing_may_stand_between(between: Callable[[Tensor], Tensor]) -> None:
    found = train(between, captured=True)
    assert_same(found, train(between, captured=False), RTOL)
    assert GELU in found.operators


@pytest.mark.parametrize(
    "between",
    [
        lambda y: F.gelu(y) * 2,
        lambda y: F.gelu(y) + y,
        lambda y: F.gelu(y.float()).to(y.dtype),
        lambda y: F.gelu(y.mT.contiguous().mT),
        lambda y: F.conv1d(F.gelu(y), torch.ones(6, 6, 1, dtype=y.dtype)),  # its rows are not channels
        F.silu,
    ],
)
def test_elsewhere_gelu_stays_torchs(between: Callable[[Tensor], Tensor]) -> None:
    found = train(between, captured=True)
    assert_same(found, train(between, captured=False), RTOL)
    assert GELU not in found.operators


def test_short_rows_and_dynamic_sizes_stay_torchs() -> None:
    assert GELU not in train(F.gelu, captured=True, width=24).operators
    assert GELU not in train(F.gelu, captured=True, dynamic=True).operators


def test_gelu_behind_another_reader_keeps_the_sum_of_the_bias_right() -> None:
    """The bias of the first layer gets gradients from GELU and from the sum beside it."""

    def between(y: Tensor) -> Tensor:
        return F.gelu(y) @ torch.eye(64, dtype=y.dtype) + y

    found = train(between, captured=True)
    assert_same(found, train(between, captured=False), RTOL)
    assert GELU in found.operators


class TwoBiases(nn.Module):
    """A layer with a bias, and one more bias of another shape, before a GELU or a norm."""

    def __init__(self, is_norm: bool) -> None:
        super().__init__()
        self.mlp = Mlp(self.between, torch.bfloat16, 64)
        self.shift = nn.Parameter(torch.zeros(1, 1, 64, dtype=torch.bfloat16))
        self.is_norm = is_norm

    def between(self, y: Tensor) -> Tensor:
        y = y + self.shift
        return F.layer_norm(y, (64,)) if self.is_norm else F.gelu(y)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(x)
        return result


@pytest.mark.parametrize("is_norm", [False, True])
def test_the_gradients_of_two_biases_do_not_share_memory(is_norm: bool) -> None:
    """A second backward pass adds to both gradients: to one memory, it would add twice."""
    torch.manual_seed(0)
    model = TwoBiases(is_norm)
    x = torch.randn(4, 6, 16, dtype=torch.bfloat16).requires_grad_()
    train_once(model, x, _norms.fuse_norms if is_norm else _activations.fuse_activations)
    memory = [param.grad.untyped_storage().data_ptr() for param in model.parameters() if param.grad is not None]
    assert len(memory) == len(set(memory)) == 5


def test_a_sharded_tensor_keeps_torchs_operators() -> None:
    """DTensors refuse an operator for which no sharding is registered."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Mlp(F.gelu, torch.bfloat16, 64)
        plan = {"first": ColwiseParallel(use_local_output=False), "second": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
        x = torch.randn(4, 6, 16, dtype=torch.bfloat16).requires_grad_()
        assert GELU not in train_once(model, x, _activations.fuse_activations).operators
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rules", [{"custom_black_list": {"gelu"}}, {"level": "O3"}])
def test_lists_and_fp8_keep_it_torchs(rules: dict[str, Any]) -> None:
    policy = Policy.create(**{"level": "O2", "dtype": torch.bfloat16, **rules})
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert _rows.takes_rows(x, ("gelu",))
    with auto_cast(policy=policy):
        assert not _rows.takes_rows(x, ("gelu",))
