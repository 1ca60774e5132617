"""Batch norm, residual and activation of a captured graph become one call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.amp import Policy, auto_cast
from mezzo.static import _batch_norms

#: The fused call rounds once to bfloat16; the calls that it replaces round after each of up to three steps.
RTOL, ATOL = 2**-6, 2**-6


class Block(nn.Module):
    """A half convolution in channels-last, and float32 batch norms behind it, as `decorate` makes them."""

    def __init__(self, tail: Callable[["Block", Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=False).bfloat16()
        self.norm, self.other = (nn.BatchNorm2d(16, eps=1e-3, **options) for _ in range(2))
        self.tail = tail

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.tail(self, self.conv(x), residual)


def add_in_place(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    y = block.norm(x)
    y += residual
    return F.relu(y, inplace=True)


def add_to_residual(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    residual = residual * 1
    residual += block.norm(x)
    return residual


def used_twice(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    y = block.norm(x)
    return F.relu(y) + y


TAILS: dict[str, tuple[Callable[[Block, Tensor, Tensor], Tensor], list[tuple[str, bool]]]] = {
    "alone": (lambda block, x, _: block.norm(x).sigmoid(), [("none", False)]),
    "relu": (lambda block, x, _: F.relu(block.norm(x)), [("relu", False)]),
    "relu in place": (lambda block, x, _: F.relu(block.norm(x), inplace=True), [("relu", False)]),
    "relu as method": (lambda block, x, _: block.norm(x).relu(), [("relu", False)]),
    "relu6": (lambda block, x, _: F.relu6(block.norm(x)), [("relu6", False)]),
    "hardswish": (lambda block, x, _: F.hardswish(block.norm(x), True), [("hardswish", False)]),
    "silu": (lambda block, x, _: F.silu(block.norm(x)), [("silu", False)]),
    "gelu": (lambda block, x, _: F.gelu(block.norm(x)), [("none", False)]),
    "residual": (lambda block, x, r: block.norm(x) + r, [("none", True)]),
    "residual first, relu": (lambda block, x, r: torch.relu(r + block.norm(x)), [("relu", True)]),
    "residual in place, relu": (add_in_place, [("relu", True)]),
    "residual, silu": (lambda block, x, r: F.silu(block.norm(x) + r), [("none", True)]),
    "into the residual": (add_to_residual, [("none", False)]),
    "both sides normed": (
        lambda block, x, _: F.relu(block.norm(x) + block.other(x)),
        [("relu", True), ("none", False)],
    ),
    "one number added": (lambda block, x, _: F.relu(block.norm(x) + 1), [("none", False)]),
    "used twice": (used_twice, [("none", False)]),
    "two norms": (lambda block, x, _: F.relu(block.other(F.silu(block.norm(x)))), [("silu", False), ("relu", False)]),
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return a list of the calls of mezzo's operator: activation, and whether there is a residual."""
    calls: list[tuple[str, bool]] = []
    fused = _batch_norms.batch_norm_activation

    def noted(x: Tensor, residual: Tensor | None, *arguments: Any) -> Any:
        calls.append((arguments[-1], residual is not None))
        return fused(x, residual, *arguments)

    monkeypatch.setattr(_batch_norms, "has_triton", lambda device: True)  # the operator itself computes by torch
    monkeypatch.setattr(_batch_norms, "batch_norm_activation", noted)
    return calls


def run(block: Block, captured: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    """Return the result, gradients with buffers, and the number of batch norms that were found."""
    torch.manual_seed(1)
    x, residual = (
        torch.randn(2, size, 6, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last) for size in (8, 16)
    )
    found = 0

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal found
        found += _batch_norms.fuse_batch_norms(module.graph)
        module.graph.lint()
        module.recompile()
        return module

    x.requires_grad_()
    residual.requires_grad_()
    torch.compiler.reset()
    result = (torch.compile(block, backend=backend, fullgraph=True) if captured else block)(x, residual)
    result.float().square().sum().backward()
    numbers = {name: param.grad for name, param in block.named_parameters()} | dict(block.named_buffers())
    numbers |= {"x": x.grad, "residual": residual.grad}
    return result, {name: value.detach().clone() for name, value in numbers.items() if value is not None}, found


def twins(tail: Callable[[Block, Tensor, Tensor], Tensor], **options: Any) -> tuple[Block, Block]:
    blocks = []
    for _ in range(2):
        torch.manual_seed(0)
        block = Block(tail, **options).to(memory_format=torch.channels_last)
        nn.init.normal_(block.norm.bias)
        blocks.append(block)
    return blocks[0], blocks[1]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            # As a whole: a slope may jump where one of the two was rounded across a corner.
            assert (found[name].float() - value.float()).norm() <= RTOL * value.float().norm() + 1e-6, name
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", TAILS)
def test_the_joined_call_gives_the_same_numbers(name: str, seen: list[tuple[str, bool]]) -> None:
    tail, expected_calls = TAILS[name]
    plain, joined = twins(tail)
    expected = run(plain, captured=False)
    found = run(joined, captured=True)
    assert sorted(seen) == sorted(expected_calls)
    assert found[2] == len(expected_calls)
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=RTOL, atol=2 * ATOL)
    assert_same(found[1], expected[1])


def not_trained(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, block.norm.running_mean, block.norm.running_var, training=False))


def called_twice(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    return F.relu(block.norm(F.relu(block.norm(x))))


def of_rows(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    return F.relu(block.norm(x.contiguous()))


@pytest.mark.parametrize(
    ("tail", "options", "calls"),
    [
        (not_trained, {}, 0),
        (called_twice, {}, 0),  # the second call updates the averages after the first
        (of_rows, {}, 0),  # not in channels-last
        (lambda block, x, _: F.relu(block.norm(x)), {"track_running_stats": False}, 0),
    ],
)
def test_what_the_operator_cannot_do_stays_torchs(
    tail: Callable[[Block, Tensor, Tensor], Tensor], options: dict[str, Any], calls: int, seen: list[tuple[str, bool]]
) -> None:
    plain, joined = twins(tail, **options)
    expected = run(plain, captured=False)
    found = run(joined, captured=True)
    assert len(seen) == calls
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("listed", ["batch_norm", "silu"])
def test_an_operator_on_the_black_list_is_not_joined(listed: str, seen: list[tuple[str, bool]]) -> None:
    _, joined = twins(lambda block, x, _: F.silu(block.norm(x)))
    with auto_cast(policy=Policy.create("O2", torch.bfloat16, custom_black_list={listed})):
        result, _, _ = run(joined, captured=True)
    assert not seen
    assert result.dtype is torch.float32


def test_float32_images_are_not_joined(seen: list[tuple[str, bool]]) -> None:
    _, joined = twins(lambda block, x, _: F.silu(block.norm(x.float())))
    result, _, _ = run(joined, captured=True)
    assert not seen
    assert result.dtype is torch.float32


def test_the_counters_of_all_batch_norms_advance_by_one_call() -> None:
    graph_of: list[torch.fx.Graph] = []
    net = nn.Sequential(*(nn.BatchNorm2d(4) for _ in range(3))).to(memory_format=torch.channels_last)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        _batch_norms.fuse_batch_norms(module.graph)
        module.recompile()
        graph_of.append(module.graph)
        return module

    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    for _ in range(2):
        torch.compile(net, backend=backend, fullgraph=True)(x)
    assert [int(layer.num_batches_tracked) for layer in net] == [2, 2, 2]
    assert sum(node.target is _batch_norms.count_batches for node in graph_of[0].nodes) == 1
