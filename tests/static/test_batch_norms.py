"""Batch norm, residual and activation of a captured graph become one call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.amp import Policy, auto_cast
from mezzo.static import _batch_norms, _region
from mezzo.static._graph import _prepare_dynamo

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


def norm_without_gradient(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    with torch.no_grad():
        y = block.norm(x)
    return F.relu(y + residual)


def residual_changed_behind_the_sum(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    residual = residual * 1
    y = block.norm(x) + residual
    residual[:, 3:].mul_(3)
    return F.relu(y) + residual


def residual_partly_overwritten(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    residual = residual * 1
    y = block.norm(x) + residual
    residual[:, :3] = 7.0
    return F.relu(y) + residual


def input_changed_behind_the_norm(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    with torch.no_grad():
        x = x * 1
        y = block.norm(x)
        F.hardswish(x, True)
        y = F.relu(y)
    return y + residual


def other_tensor_changed(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    y = block.norm(x)
    other = F.relu(residual * 2, inplace=True)
    return F.relu(y + other)


def wide_residual_in_place(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    y = block.norm(x)
    y += residual.float()
    return F.relu(y)


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
    "by keyword": (lambda block, x, _: F.relu(input=block.norm(x)), [("none", False)]),
    "norm without gradient": (norm_without_gradient, [("none", False)]),
    "residual changed behind the sum": (residual_changed_behind_the_sum, [("none", True)]),
    "residual partly overwritten": (residual_partly_overwritten, [("none", True)]),
    "input changed behind the norm": (input_changed_behind_the_norm, [("none", False)]),
    "another tensor changed": (other_tensor_changed, [("relu", True)]),
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


def run(block: Block, captured: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, dict[str, Tensor], int]:
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

    x, residual = x.to(dtype), residual.to(dtype)
    x.requires_grad_()
    residual.requires_grad_()
    torch.compiler.reset()
    result = (torch.compile(block, backend=backend, fullgraph=True) if captured else block)(x, residual)
    result.to(torch.promote_types(dtype, torch.float32)).square().sum().backward()
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


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], exact: dict[str, Tensor] | None = None) -> None:
    """Check that numbers agree, or that those found are nearer to the exact ones."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not value.is_floating_point():
            assert torch.equal(found[name], value), name
            continue
        # As a whole: a slope may jump where one of the two was rounded across a corner.
        ours, theirs = found[name].double(), value.double()
        if (ours - theirs).norm() > RTOL * theirs.norm() + 1e-6:
            assert exact is not None, name
            assert (ours - exact[name]).norm() < (theirs - exact[name]).norm(), name


@pytest.mark.parametrize("name", TAILS)
def test_the_joined_call_gives_the_same_numbers(name: str, seen: list[tuple[str, bool]]) -> None:
    tail, expected_calls = TAILS[name]
    plain, joined = twins(tail)
    expected = run(plain, captured=False)
    found = run(joined, captured=True)
    assert sorted(seen) == sorted(expected_calls)
    assert found[2] == len(expected_calls)
    assert found[0].dtype is expected[0].dtype
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=RTOL, atol=2 * ATOL)
    exact = run(twins(tail)[0].double(), captured=False, dtype=torch.float64)
    assert_same(found[1], expected[1], exact[1])


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
        (wide_residual_in_place, {}, 0),
    ],
)
def test_what_the_operator_cannot_do_stays_torchs(
    tail: Callable[[Block, Tensor, Tensor], Tensor], options: dict[str, Any], calls: int, seen: list[tuple[str, bool]]
) -> None:
    plain, joined = twins(tail, **options)
    expected = run(plain, captured=False)
    found = run(joined, captured=True)
    assert len(seen) == calls
    assert found[0].dtype is expected[0].dtype
    assert_same(found[1], expected[1])


def test_inside_of_torch_func_the_norm_stays_torchs(seen: list[tuple[str, bool]]) -> None:
    """Operators of mezzo's have no rule for its transforms."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 6, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weights = torch.randn_like(x)

    def slope(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return (F.relu(F.batch_norm(x, mean, variance, training=True)) * weights).float().sum()

        return torch.func.grad(loss)(x)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        assert _batch_norms.fuse_batch_norms(module.graph) == 1
        module.recompile()
        return module

    torch.compiler.reset()
    captured = torch.compile(slope, backend=backend, fullgraph=True)
    averages = [(torch.zeros(16), torch.ones(16)) for _ in range(2)]
    found, expected = captured(x, *averages[0]), slope(x, *averages[1])
    assert not seen
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL)
    for one, other in zip(*averages, strict=True):
        torch.testing.assert_close(one, other)


class SharedAverages(Block):
    """Both averages are rows of one buffer, which the forward reads behind the norm."""

    def __init__(self) -> None:
        super().__init__(lambda block, x, _: block.norm(x))
        self.register_buffer("averages", torch.stack([torch.zeros(16), torch.ones(16)]))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        mean, variance = self.averages[0], self.averages[1]
        return F.relu(F.batch_norm(self.conv(x), mean, variance, training=True)) * self.averages.sum()


class AliasedAverages(Block):
    """A second buffer has the memory of an average; the forward reads it behind the norm."""

    def __init__(self) -> None:
        super().__init__(lambda block, x, _: F.relu(block.norm(x)) * block.whole.sum())
        self.register_buffer("whole", torch.zeros(20))
        self.norm.running_mean = self.whole[2:18]


@pytest.mark.parametrize("kind", [SharedAverages, AliasedAverages])
def test_averages_that_the_forward_reads_are_updated_at_once(
    kind: Callable[[], Block], seen: list[tuple[str, bool]]
) -> None:
    blocks = []
    for _ in range(2):
        torch.manual_seed(0)
        blocks.append(kind().to(memory_format=torch.channels_last))
    expected = run(blocks[0], captured=False)
    found = run(blocks[1], captured=True)
    assert not seen
    torch.testing.assert_close(found[0], expected[0])
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("place", ["around the norm", "around the activation"])
def test_a_float32_region_is_not_left(place: str, seen: list[tuple[str, bool]]) -> None:
    def tail(block: Block, x: Tensor, _: Tensor) -> Tensor:
        if place == "around the norm":
            _region.enter_float32()
        y = block.norm(x)
        if place == "around the norm":
            _region.leave_float32()
        else:
            _region.enter_float32()
        y = F.silu(y)
        if place == "around the activation":
            _region.leave_float32()
        return y

    _prepare_dynamo()
    plain, joined = twins(tail)
    with _region.casting_region(_region.CastRules(Policy.create("O2", torch.bfloat16))):
        expected = run(plain, captured=False)
        found = run(joined, captured=True)
    assert seen == ([] if place == "around the norm" else [("none", False)])
    assert found[0].dtype is expected[0].dtype is torch.float32
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


def with_bias(block: Block) -> Block:
    """Give the convolution a bias of about the size of its result."""
    block.conv.bias = nn.Parameter(torch.linspace(-1, 1, 16).bfloat16())
    return block


@pytest.mark.parametrize("listed", [set(), {"batch_norm"}])
def test_a_bias_in_front_of_a_batch_norm_moves_only_the_running_mean(
    listed: set[str], seen: list[tuple[str, bool]]
) -> None:
    plain, joined = map(with_bias, twins(lambda block, x, _: F.relu(block.norm(x))))
    with auto_cast(policy=Policy.create("O2", torch.bfloat16, custom_black_list=listed)):
        expected, found = run(plain, captured=False), run(joined, captured=True)
    assert found[2] == 1
    assert len(seen) == (0 if listed else 1)
    assert torch.count_nonzero(found[1].pop("conv.bias")) == 0
    expected[1].pop("conv.bias")  # rounding noise around the zero that it is in exact arithmetic
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=RTOL, atol=2 * ATOL)
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("options", [{"custom_white_list": {"add"}}, {"use_promote": False}])
def test_sums_with_the_bias_stay_float32_where_a_policy_makes_additions_half(
    options: dict[str, Any], seen: list[tuple[str, bool]]
) -> None:
    plain, joined = map(with_bias, twins(lambda block, x, _: F.relu(block.norm(x))))
    with auto_cast(policy=Policy.create("O2", torch.bfloat16, **options)):
        expected, found = run(plain, captured=False), run(joined, captured=True)
    assert found[2] == len(seen) == 1
    expected[1].pop("conv.bias"), found[1].pop("conv.bias")  # noise, and zero
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=RTOL, atol=2 * ATOL)
    assert_same(found[1], expected[1])


def test_an_infinite_gradient_shows_in_the_gradient_of_the_bias(seen: list[tuple[str, bool]]) -> None:
    joined = with_bias(twins(lambda block, x, _: block.norm(x) * float("inf"))[1])
    assert not run(joined, captured=True)[1]["conv.bias"].isfinite().all()


def read_twice(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    return F.relu(block.norm(x)) + x


def bias_changed_in_between(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    with torch.no_grad():
        block.conv.bias.add_(1)
    return F.relu(block.norm(x))


def bias_changed_behind_the_norm(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    y = block.norm(x)
    block.conv.bias.add_(1)
    return F.relu(y)


def norm_without_bias(block: Block, x: Tensor, residual: Tensor) -> Tensor:
    norm = block.norm
    return F.relu(F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, training=True))


@pytest.mark.parametrize("tail", [bias_changed_behind_the_norm, norm_without_bias])
def test_the_running_mean_has_the_bias_of_the_convolution(
    tail: Callable[[Block, Tensor, Tensor], Tensor], seen: list[tuple[str, bool]]
) -> None:
    plain, joined = map(with_bias, twins(tail))
    for block in (plain, joined):
        block.conv.bias.requires_grad_(False)
    expected, found = run(plain, captured=False), run(joined, captured=True)
    assert found[2] == 1
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("tail", [read_twice, bias_changed_in_between])
def test_a_bias_stays_where_more_depends_on_it(
    tail: Callable[[Block, Tensor, Tensor], Tensor], seen: list[tuple[str, bool]]
) -> None:
    plain, joined = map(with_bias, twins(tail))
    expected, found = run(plain, captured=False), run(joined, captured=True)
    assert found[1]["conv.bias"].count_nonzero() > 0
    if tail is bias_changed_in_between:  # its gradient is noise
        expected[1].pop("conv.bias"), found[1].pop("conv.bias")
    assert_same(found[1], expected[1])


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


def test_a_counter_with_a_step_of_its_own_keeps_it() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("ones", "twos"):
                self.register_buffer(name, torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.ones.add_(1)
            self.twos.add_(1, alpha=2)
            return x + 1

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        _batch_norms.fuse_batch_norms(module.graph)
        module.recompile()
        return module

    net = Counting()
    torch.compile(net, backend=backend, fullgraph=True)(torch.ones(2))
    assert (int(net.ones), int(net.twos)) == (1, 2)


def test_averages_and_counters_of_many_norms_are_updated_in_parts() -> None:
    """The time of Inductor grows with the square of the length of a list."""
    count = 2 * _batch_norms.MOST_AT_ONCE + 1
    generator = torch.Generator().manual_seed(0)
    means, variances = ([torch.rand(3, generator=generator) for _ in range(count)] for _ in range(2))
    statistics = [(torch.rand(3, generator=generator), torch.rand(3, generator=generator)) for _ in range(count)]
    expected = [
        average + 0.25 * (batch[place] - average)
        for place, averages in enumerate((means, variances))
        for average, batch in zip(averages, statistics, strict=True)
    ]
    counters = [torch.tensor(number) for number in range(count)]

    def update() -> None:
        _batch_norms.update_averages(means, variances, statistics, 0.25)
        _batch_norms.count_batches(counters)

    lists = lengths_of_lists(update)
    assert max(lists) == _batch_norms.MOST_AT_ONCE
    assert sum(lists) == 2 * count + count
    torch.testing.assert_close([*means, *variances], expected)
    assert [counter.item() for counter in counters] == [number + 1 for number in range(count)]


def lengths_of_lists(run: Callable[[], None]) -> list[int]:
    """Return how many tensors each call over a list got."""
    lengths = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_foreach" in str(func):
                lengths.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    with Watch():
        run()
    return lengths
