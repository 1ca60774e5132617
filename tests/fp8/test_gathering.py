"""FSDP2 gathers weights in FP8: the same training bit for bit as gathering in half, with half the bytes."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear

from mezzo.amp import fp8_weights
from mezzo.fp8 import E4M3, HEADROOM, GatheredWeight, make_operand
from mezzo.precision import Precision
from mezzo.record import collect_fp8_numbers
from sharded_nets import BATCH, FP8, STEPS, WIDTH, Net, batch_of, make, run, state_of, train

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore:.*(view tensor|c10d|process group|_all_gather_base).*"),
]

MATRICES = 3 * 2 * 4 * WIDTH * WIDTH
"""Numbers in the weights of the FP8 layers: three blocks of two."""


class CountedGather:
    """FSDP2's all-gather, which also counts the bytes that a process sends."""

    def __init__(self) -> None:
        self.sent = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.sent += input_tensor.numel() * input_tensor.itemsize
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


def count_bytes(net: nn.Module) -> CountedGather:
    counted = CountedGather()
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(counted)
    return counted


def make_uneven(gather_fp8: bool, **options: Any) -> tuple[Any, torch.optim.Optimizer, Precision]:
    """Return a net whose largest weights are on the first process: a scale of one shard would not fit the others."""
    made = make("O3", options.pop("dtype", "bfloat16"), is_sharded=True, gather_fp8=gather_fp8, **options)
    with torch.no_grad():
        for layer in made[0].layers:
            for weight in (layer.up.weight, layer.down.weight):
                weight._local_tensor.mul_(16.0 if dist.get_rank() == 0 else 1.0)
    return made


def trained(rank: int, size: int, gather_fp8: bool, **options: Any) -> dict[str, Any]:
    made = make_uneven(gather_fp8, **options)
    counted = count_bytes(made[0])
    # A third of a batch is not a multiple of 16 rows: three processes train on the whole batch.
    share = (rank, size) if BATCH % size == 0 else (0, 1)
    train(made, *share, range(1))
    sent = counted.sent
    losses = train(made, *share, range(1, STEPS))
    weights = [float(param.full_tensor().double().square().sum()) for param in made[0].parameters()]
    return {"losses": losses, "sent": sent, "weights": weights}


def compare(rank: int, size: int) -> list[list[Any]]:
    warnings.filterwarnings("error", message=".*gather_fp8.*")
    return [
        [trained(rank, size, gather_fp8, **options) for gather_fp8 in (False, True)]
        for options in ({}, {"dtype": "float16"}, {"is_checkpointed": True})
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])  # three: uneven shards, which are padded
def test_training_is_bit_for_bit_that_of_gathering_in_half(size: int, tmp_path: Path) -> None:
    for in_half, in_fp8 in run(size, tmp_path, compare):
        assert in_fp8["losses"] == in_half["losses"]
        assert in_fp8["weights"] == in_half["weights"]
        rows = -(-4 * WIDTH // size) * WIDTH + -(-WIDTH // size) * 4 * WIDTH
        assert in_half["sent"] - in_fp8["sent"] == 2 * 3 * rows, "a byte less per number, forward and backward"


def plain_losses(rank: int, size: int) -> list[float]:
    return train(make("O3", "bfloat16", is_sharded=True, gather_fp8=True), rank, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_training_is_that_of_one_process(size: int, tmp_path: Path) -> None:
    losses = run(size, tmp_path, plain_losses)
    whole = train(make("O3", "bfloat16", is_sharded=False))
    assert losses == pytest.approx(whole, abs=2e-2)  # as of gathering in half: tests/test_sharded_training.py
    assert losses[0] == pytest.approx(whole[0], abs=1e-6)


def save_after_four_steps(rank: int, size: int, path: str) -> list[float]:
    made = make("O3", "bfloat16", is_sharded=True, gather_fp8=True)
    losses = train(made, rank, size, range(4))
    dcp.save(state_of(*made), checkpoint_id=path)
    return losses


def resume(rank: int, size: int, path: str) -> list[list[float]]:
    losses = []
    for gather_fp8 in (False, True):
        made = net, optimizer, precision = make("O3", "bfloat16", is_sharded=True, gather_fp8=gather_fp8)
        train(made, rank, size, range(1))  # the scales of other weights
        state = state_of(*made)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(net, state["model"])
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
        precision.load_state_dict(state["precision"])
        losses.append(train(made, rank, size, range(4, STEPS)))
    return losses


@pytest.mark.slow
def test_a_checkpoint_of_four_processes_is_resumed_by_two(tmp_path: Path) -> None:
    first = run(4, tmp_path, save_after_four_steps, str(tmp_path / "saved"))
    in_half, in_fp8 = run(2, tmp_path, resume, str(tmp_path / "saved"))
    assert in_fp8 == in_half
    whole = train(make("O3", "bfloat16", is_sharded=False))
    assert [*first, *in_fp8] == pytest.approx(whole, abs=2e-2)


def outputs_of_a_broken_weight(rank: int, size: int) -> list[list[bool]]:
    found = []
    for gather_fp8 in (False, True):
        net = nn.Sequential(nn.Linear(16, 32))
        precision = Precision("O3", "bfloat16", fp8=FP8, half_layers=())
        precision.prepare(precision.shard(net, gather_fp8=gather_fp8))
        if rank == size - 1:
            net[0].weight._local_tensor[0, 0] = float("nan")
        with torch.no_grad(), precision.autocast():
            found.append(net(torch.ones(16, 16)).isnan().flatten().tolist())
    return found


@pytest.mark.slow
def test_nan_in_one_shard_reaches_every_output_as_with_half_weights(tmp_path: Path) -> None:
    in_half, in_fp8 = run(2, tmp_path, outputs_of_a_broken_weight)
    assert all(in_half)
    assert all(in_fp8)


# What one process shows.


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def group_of_two() -> Iterator[None]:
    """The first of two processes; the second does not exist, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def last_of_five() -> Iterator[None]:
    """The last of five processes, with none of 16 rows; the others do not exist, and collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=4, world_size=5)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.fp8._gathered._has_warned", False)


@pytest.mark.usefixtures("group_of_two")
def test_half_the_bytes_are_gathered() -> None:
    sent = []
    for gather_fp8 in (False, True):
        net, _, precision = make("O3", "bfloat16", is_sharded=True, gather_fp8=gather_fp8)
        counted = count_bytes(net)
        with precision.autocast():
            net(batch_of(0)[0])
        sent.append(counted.sent)
    numbers = sum(param.numel() for param in net.parameters()) // 2
    assert sent[0] == 2 * numbers
    assert sent[1] == 2 * numbers - MATRICES // 2


def weights_in_use(net: nn.Module, precision: Precision) -> dict[str, Tensor]:
    """Return the weight of each linear layer while the layer computes."""
    found: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.register_forward_pre_hook(lambda m, _, name=name: found.update({name: m.weight}))
    with precision.autocast():
        net(batch_of(0)[0])
    return found


@pytest.mark.usefixtures("group", "fresh_warning")
def test_only_weights_of_fp8_layers_are_gathered_in_fp8() -> None:
    net, _, precision = make("O3", "bfloat16", is_sharded=True, gather_fp8=True)
    found = weights_in_use(net, precision)
    for name, weight in found.items():
        assert isinstance(weight, GatheredWeight) == name.startswith("layers."), name
        assert weight.dtype is torch.bfloat16
        assert weight.requires_grad


@pytest.mark.usefixtures("group", "fresh_warning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gathered_numbers_are_those_of_the_whole_half_weight(dtype: str) -> None:
    net = make("O3", dtype, is_sharded=True, gather_fp8=True)[0]
    net.layers[0].unshard()
    weight = net.layers[0].up.weight
    torch.manual_seed(0)
    master = Net().layers[0].up.weight.detach()
    expected = make_operand(master.to(getattr(torch, dtype)), E4M3, headroom=HEADROOM)
    assert torch.equal(weight.numbers.view(torch.uint8), expected.values.view(torch.uint8))
    assert weight.inverse_scale == expected.inverse
    assert torch.equal(
        weight.operand(transposed=True).transposed.view(torch.uint8), expected.transposed.view(torch.uint8)
    )


@pytest.mark.usefixtures("group", "fresh_warning")
@pytest.mark.parametrize("options", [{}, {"is_checkpointed": True}])
def test_one_process_trains_bit_for_bit_as_with_half_weights(options: dict[str, Any]) -> None:
    losses = [train(make_uneven(gather_fp8, **options)) for gather_fp8 in (False, True)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


@pytest.mark.usefixtures("group", "fresh_warning")
def test_weights_are_measured_anew_however_they_change() -> None:
    """Twenty times larger weights would not fit the scale from before."""

    def outputs(gather_fp8: bool) -> list[Tensor]:
        made = net, _, precision = make("O3", "bfloat16", is_sharded=True, gather_fp8=gather_fp8)
        x, found = torch.linspace(-1, 1, 16 * WIDTH).reshape(16, WIDTH).bfloat16(), []
        train(made, steps=range(2))
        with torch.no_grad(), precision.autocast():
            found.append(net.layers[0](x))  # a block without the model
            for param in net.layers[1].parameters():
                param.mul_(20.0)
            net.layers[1].unshard()
            net.layers[1].reshard()
            found.append(net.layers[1](x))
            net.load_state_dict({name: value * 20.0 for name, value in net.state_dict().items()}, assign=True)
            found.append(net(batch_of(0)[0]))
        return found

    for in_half, in_fp8 in zip(outputs(False), outputs(True), strict=True):
        assert torch.equal(in_half, in_fp8)


@pytest.mark.usefixtures("group", "fresh_warning")
def test_weights_that_were_replaced_are_gathered_in_fp8_before_any_forward_pass() -> None:
    net = make("O3", "bfloat16", is_sharded=True, gather_fp8=True)[0]
    net.layers[0].unshard()
    net.layers[0].reshard()
    net.load_state_dict({name: value * 20.0 for name, value in net.state_dict().items()}, assign=True)
    largest = net.layers[0].up.weight.to_local().abs().max()
    net.layers[0].unshard()
    assert net.layers[0].up.weight.to_half().abs().max().item() == pytest.approx(
        largest.item(), rel=2**-4
    )  # 3-bit mantissa


@pytest.mark.usefixtures("group", "fresh_warning")
def test_a_model_on_the_meta_device_gets_its_weights_after_sharding() -> None:
    def losses(gather_fp8: bool) -> list[float]:
        with torch.device("meta"):
            net = Net()
        precision = Precision("O3", "bfloat16", fp8=FP8)
        precision.shard(net, blocks="layers.?", gather_fp8=gather_fp8)
        net.to_empty(device="cpu")
        torch.manual_seed(0)
        for param in net.parameters():
            nn.init.normal_(param.to_local(), std=0.1)
        optimizer = torch.optim.AdamW(net.parameters())
        precision.prepare(net, optimizer)
        return train((net, optimizer, precision), steps=range(2))

    assert losses(True) == losses(False)


@pytest.mark.usefixtures("group", "fresh_warning")
def test_counting_fp8_numbers_leaves_gathered_weights_out_without_a_warning() -> None:
    net, _, precision = make("O3", "bfloat16", is_sharded=True, gather_fp8=True)
    with collect_fp8_numbers() as numbers, precision.autocast():
        net(batch_of(0)[0])
    assert {row.role for row in numbers.rows} == {"input"}


@pytest.mark.usefixtures("group", "fresh_warning")
def test_parameters_and_optimizers_can_be_copied_but_not_pickled() -> None:
    made = net, optimizer, _ = make("O3", "bfloat16", is_sharded=True, gather_fp8=True)
    train(made, steps=range(1))
    copies = copy.deepcopy(optimizer).param_groups[0]["params"]
    for param, copied in zip(net.parameters(), copies, strict=True):
        assert torch.equal(param.to_local(), copied.to_local())
        assert param.to_local().data_ptr() != copied.to_local().data_ptr()
    with pytest.raises(TypeError, match=r"gathered in FP8.*state_dict"):
        pickle.dumps(optimizer)
    assert pickle.dumps((net.state_dict(), optimizer.state_dict()))


@pytest.mark.usefixtures("last_of_five", "fresh_warning")
def test_a_process_without_rows_measures_zero() -> None:
    """An error on this process only would let the others wait for it."""
    net = nn.Sequential(nn.Linear(16, 16))
    precision = Precision("O3", "bfloat16", fp8=FP8, half_layers=())
    precision.prepare(precision.shard(net, gather_fp8=True))
    assert net[0].weight.to_local().shape == (0, 16)
    with precision.autocast(), torch.no_grad():
        net(torch.ones(16, 16))
    net.unshard()
    assert net[0].weight.inverse_scale == 1


@pytest.mark.usefixtures("group", "fresh_warning")
@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf.*")  # Dynamo, of any FSDP2 model
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_blocks_train_bit_for_bit_as_with_half_weights(fullgraph: bool) -> None:
    def losses(gather_fp8: bool) -> list[float]:
        made = make("O3", "bfloat16", is_sharded=True, gather_fp8=gather_fp8)
        for layer in made[0].layers:
            layer.compile(backend="aot_eager", fullgraph=fullgraph)
        return train(made, steps=range(3))

    assert losses(True) == losses(False)


@pytest.mark.usefixtures("group", "fresh_warning")
def test_an_interrupted_forward_pass_leaves_no_old_scales() -> None:
    net, _, precision = make("O3", "bfloat16", is_sharded=True, gather_fp8=True)
    before = net.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), precision.autocast():
        net(batch_of(0)[0])
    before.remove()
    with torch.no_grad():
        net.layers[0].up.weight.mul_(20.0)
    largest = net.layers[0].up.weight.to_local().abs().max()
    with precision.autocast(), torch.no_grad():
        net(batch_of(0)[0])
        net.layers[0].unshard()
    assert net.layers[0].up.weight.numbers.float().abs().max() * net.layers[0].up.weight.inverse_scale > 0.9 * largest


@pytest.mark.usefixtures("group", "fresh_warning")
def test_a_call_in_half_uses_the_fp8_numbers_and_warns_once() -> None:
    net, _, precision = make("O3", "bfloat16", is_sharded=True, gather_fp8=True)
    x = torch.ones(5, WIDTH, dtype=torch.bfloat16)
    net.layers[0].unshard()
    layer = net.layers[0].up
    with precision.autocast():
        with pytest.warns(UserWarning, match=r"gather_fp8=True.*5 rows are not a multiple of 16.*half_layers"):
            found = layer(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(x)
    assert torch.equal(found, linear(x, layer.weight.to_half(), layer.bias))
    found.float().sum().backward()
    assert layer.weight.grad.dtype is torch.bfloat16
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight.grad, 5.0))


@pytest.mark.usefixtures("group", "fresh_warning")
def test_other_operators_get_the_fp8_numbers_in_half_and_warn() -> None:
    numbers = torch.tensor([[1.0, 448.0]]).to(E4M3)
    weight = GatheredWeight(numbers, torch.tensor(0.5), torch.bfloat16)
    assert "GatheredWeight" in repr(weight)
    assert isinstance(weight.detach(), GatheredWeight)
    assert torch.zeros_like(weight).tolist() == [[0, 0]]
    with pytest.warns(UserWarning, match=r"aten.mul.Tensor is not a product in FP8 .*outside of autocast"):
        doubled = weight * 2
    assert (doubled.tolist(), doubled.dtype) == ([[1.0, 448.0]], torch.bfloat16)


def test_a_gathered_weight_cannot_be_written() -> None:
    """The change would be lost when the weight is gathered again."""
    weight = GatheredWeight(torch.ones(1, 2).to(E4M3), torch.tensor(0.5), torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"mul_.*gathered in FP8.*reshard"):
        weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"copy_.*gathered in FP8.*reshard"):
        weight.copy_(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match=r"foreach_mul_.*gathered in FP8.*reshard"):
        torch._foreach_mul_([weight], 2)
    with pytest.raises(RuntimeError, match=r"mul.out.*gathered in FP8.*reshard"):
        torch.mul(torch.ones(1, 2), 2, out=weight)
    with pytest.raises(RuntimeError, match=r"weight\[\.\.\.\].*gathered in FP8.*reshard"):
        weight[0, 1] = 2.0


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O0"}, "belongs to level O3"),
        ({"level": "O2"}, "belongs to level O3"),
        ({"level": "O3", "fp8": {**FP8, "granularity": "row"}}, "granularity='row'"),
        ({"level": "O3", "fp8": {**FP8, "scaling": "delayed"}}, "scaling='delayed'"),
    ],
)
def test_options_that_cannot_be_gathered_in_fp8_are_refused_before_anything_is_sharded(
    options: dict[str, Any], message: str
) -> None:
    net = Net()
    with pytest.raises(ValueError, match=message):
        Precision(dtype="bfloat16", **options).shard(net, gather_fp8=True)
    assert not isinstance(net, FSDPModule)


def test_a_word_is_not_a_switch() -> None:
    with pytest.raises(TypeError, match="'no'"):
        Precision("O3", "bfloat16", fp8=FP8).shard(Net(), gather_fp8="no")  # type: ignore[arg-type]


@pytest.mark.usefixtures("group")
def test_resharding_over_some_processes_is_refused() -> None:
    """FSDP2 fails in the first forward pass, with an error about gradients of integers."""
    with pytest.raises(ValueError, match=r"reshard_after_forward=2.*True or False"):
        Precision("O3", "bfloat16", fp8=FP8).shard(Net(), gather_fp8=True, reshard_after_forward=2)


@pytest.mark.usefixtures("group")
def test_a_model_without_fp8_layers_warns() -> None:
    with pytest.warns(UserWarning, match=r"no FP8 layer.*explain"):
        Precision("O3", "bfloat16", fp8={"emulate": True}).shard(Net(), gather_fp8=True)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("options", [{"level": "O2"}, {"level": "O3", "fp8": FP8, "half_layers": "layers.1"}])
def test_another_precision_that_computes_in_half_is_refused(options: dict[str, Any]) -> None:
    net = Precision("O3", "bfloat16", fp8=FP8).shard(Net(), gather_fp8=True)
    with pytest.raises(RuntimeError, match=r"gathers 'layers.\d.up.weight' in FP8.*same Precision"):
        Precision(dtype="bfloat16", **options).prepare(net)


class Special(nn.Linear):
    """A layer that does something else with its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.abs(), self.bias)


def test_weights_with_other_uses_are_not_chosen() -> None:
    net = nn.ModuleDict(
        {
            "plain": nn.Linear(16, 32),
            "odd": nn.Linear(16, 20),
            "special": Special(16, 16),
            "attention": nn.MultiheadAttention(16, 2),
            "embedding": nn.Embedding(16, 16),
            "tied": nn.Linear(16, 16),
            "left": nn.Linear(16, 16),
            "right": nn.Linear(16, 16),
            "spared": nn.Linear(16, 16),
            "patched": nn.Linear(16, 16),
        }
    )
    net["patched"].forward = lambda x: linear(x, net["patched"].weight.abs())
    net["tied"].weight = net["embedding"].weight
    net["right"].weight = net["left"].weight
    policy = Precision("O3", "bfloat16", fp8=FP8).policy
    assert policy is not None
    found = {id(param) for param in fp8_weights(net, policy, [net["spared"]])}
    assert {name for name, param in net.named_parameters() if id(param) in found} == {"plain.weight", "left.weight"}
    no_linear = Precision("O3", "bfloat16", fp8=FP8, custom_black_list=["linear"]).policy
    assert no_linear is not None
    assert fp8_weights(net, no_linear, []) == []
