"""`checkpoint_blocks`: gradients of recomputed blocks are those of kept activations, at every level."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from mezzo.amp import auto_cast, checkpoint_blocks, fp8_scales
from mezzo.precision import Precision

WIDTH = 16
SMALL: dict[str, Any] = {"emulate": True, "min_width": 0, "min_size": 0}


class Block(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if not torch.compiler.is_compiling():
            Block.calls += 1
        return x + scale * self.drop(self.down(gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    Block.calls = 0
    yield
    torch._dynamo.reset()


def make(level: str, dtype: str, blocks: Any, **fp8: Any) -> tuple[nn.Module, torch.optim.Optimizer, Precision]:
    torch.manual_seed(0)
    net = Net()
    precision = Precision(level, dtype, fp8={**SMALL, **fp8} if level == "O3" else None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if blocks is not None:
        checkpoint_blocks(net, blocks)
    precision.prepare(net, optimizer)
    return net, optimizer, precision


def train(made: tuple[nn.Module, torch.optim.Optimizer, Precision], steps: int = 3) -> list[Tensor]:
    """Return the gradients of all steps, and the weights."""
    net, optimizer, precision = made
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(32, WIDTH) * (1 + step)  # growing: delayed scales change in every step
        with precision.autocast():
            loss = net(x).float().square().mean()
        precision.backward(loss)
        found += [param.grad.clone() for param in net.parameters()]
        precision.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    return [*found, *(value.clone() for value in net.state_dict().values())]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


LEVELS = [
    ("O0", "float16"),
    ("OD", "float16"),
    ("O1", "float16"),
    ("O1", "bfloat16"),
    ("O2", "float16"),
    ("O2", "bfloat16"),
]


@pytest.mark.parametrize(("level", "dtype"), [*LEVELS, ("O3", "bfloat16"), ("O3", "float16")])
def test_gradients_are_those_of_kept_activations_bit_for_bit(level: str, dtype: str) -> None:
    plain = train(make(level, dtype, None))
    assert Block.calls == 3 * 3
    Block.calls = 0
    assert_equal(train(make(level, dtype, "layers.*")), plain)
    assert Block.calls == 2 * 3 * 3, "each block runs again in the backward pass"


def test_delayed_scales_count_a_recomputed_block_once() -> None:
    kept, again = make("O3", "bfloat16", None, scaling="delayed"), make("O3", "bfloat16", "layers.*", scaling="delayed")
    assert_equal(train(kept), train(again))
    wanted, found = fp8_scales(kept[0]), fp8_scales(again[0])
    assert wanted
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)  # the same weights, roles and amaxes


def saved_bytes(net: nn.Module) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, besides the parameters."""
    kept: dict[int, int] = {}
    weights = {param.data_ptr() for param in net.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = net(torch.randn(64, WIDTH)).sum()
    assert loss.requires_grad
    return sum(kept.values())


def test_it_saves_activations_and_can_be_undone() -> None:
    net = Net()
    before = saved_bytes(net)
    handle = checkpoint_blocks(net, net.layers)  # a ModuleList stands for its children
    assert saved_bytes(net) < before / 4
    handle.remove()
    assert saved_bytes(net) == before


@pytest.mark.parametrize("blocks", [Block, "layers.?", ["layers.0", "layers.1", "layers.2"]])
def test_blocks_are_named_by_type_glob_or_list(blocks: Any) -> None:
    net = Net()
    checkpoint_blocks(net, blocks)
    checkpoint_blocks(net, blocks)  # twice is once
    net(torch.ones(2, WIDTH)).sum().backward()
    assert Block.calls == 6


def test_names_types_and_copies_stay() -> None:
    net, plain = Net(), Net()
    checkpoint_blocks(net, Block)
    assert list(net.state_dict()) == list(plain.state_dict())
    assert [type(part) for part in net.modules()] == [type(part) for part in plain.modules()]
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # noqa: S301  our own bytes
        Block.calls = 0
        other.layers[0].up.weight.data.zero_()
        other(torch.ones(2, WIDTH)).sum().backward()
        assert Block.calls == 6
        assert other.layers[1].up.weight.grad is not None
    assert net.layers[1].up.weight.grad is None
    assert net.layers[0].up.weight.any(), "the copy uses its own weights"


def test_evaluation_computes_once() -> None:
    net = Net().eval()
    checkpoint_blocks(net, Block)
    with torch.no_grad():
        net(torch.ones(2, WIDTH))
    assert Block.calls == 3


def test_an_excluded_layer_inside_of_a_block_stays_float32() -> None:
    results = []
    for blocks in (None, Block):
        torch.manual_seed(0)
        net = Net()
        precision = Precision("O2", "bfloat16", excluded_layers=["layers.1", "*.norm"])
        if blocks is not None:
            checkpoint_blocks(net, blocks)
        optimizer = torch.optim.AdamW(net.parameters())
        precision.prepare(net, optimizer)
        assert net.layers[1].up.weight.dtype is torch.float32
        results.append(train((net, optimizer, precision)))
    assert_equal(*results)


@pytest.mark.parametrize(
    ("blocks", "word"), [("layer.*", "layers"), ("*", "whole model"), ([], "no part"), (nn.Linear(2, 2), "Linear")]
)
def test_what_is_no_block_is_refused(blocks: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        checkpoint_blocks(Net(), blocks)


@pytest.mark.parametrize(
    ("level", "dtype"), [("O0", "float16"), ("O1", "bfloat16"), ("O2", "bfloat16"), ("O3", "bfloat16")]
)
def test_compiled_code_recomputes_too(level: str, dtype: str) -> None:
    net, _, precision = make(level, dtype, "layers.*")
    net.eval()  # compiled dropout draws other numbers
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.randn(32, WIDTH)
    found = []
    for run in (net, compiled):
        with precision.autocast():
            loss = run(x).float().square().mean()
        loss.backward()
        found.append([param.grad.clone() for param in net.parameters()])
        net.zero_grad()
    for one, other in zip(*found, strict=True):
        # A compiled product may sum in another order: units of the half format
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_compiled_step_trains_with_checkpointed_blocks(level: str) -> None:
    losses = []
    for is_compiled in (False, True):
        net, optimizer, precision = make(level, "bfloat16", Block)
        net.eval()
        loss_fn = nn.functional.mse_loss
        step = precision.compile(net, loss_fn, optimizer, backend="eager") if is_compiled else None
        x, y = torch.ones(32, WIDTH), torch.zeros(32, 4)
        found = []
        for _ in range(4):
            if step is None:
                _, loss = precision.train_step(lambda: (None, loss_fn(net(x), y)), optimizer)  # noqa: B023
            else:
                loss = step(x, y)
            found.append(loss.item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1][-1] < losses[1][0]


def test_a_region_of_torch_code_works_without_precision() -> None:
    torch.manual_seed(0)
    net = Net()
    checkpoint_blocks(net, Block)
    with auto_cast(level="O1", dtype="bfloat16"):
        loss = net(torch.randn(4, WIDTH)).float().sum()
    loss.backward()
    assert all(param.grad is not None for param in net.parameters())
