"""FSDP2 through `Precision.shard` and `prepare`: float32 shards are the masters, layers are gathered in half."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from mezzo.amp import GradScaler, checkpoint_blocks, decorate
from mezzo.optim._rounding import store_rounded
from mezzo.precision import Precision
from sharded_nets import FP8, LENGTH, STEPS, WIDTH, Block, Net, batch_of, make, run, state_of, train

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.filterwarnings("ignore"),  # of torch.distributed, about groups of one process and views
]


def sharded_losses(rank: int, size: int, level: str, dtype: str, is_checkpointed: bool = False) -> list[float]:
    made = make(level, dtype, is_sharded=True, is_checkpointed=is_checkpointed)
    shards = sum(param.to_local().numel() for param in made[0].parameters())
    whole = sum(param.numel() for param in made[0].parameters())
    assert shards <= whole // size + 64 * len(list(made[0].parameters())), "a process holds only its part"
    return train(made, rank, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_float32_shards_train_as_one_process(size: int, tmp_path: Path) -> None:
    losses = run(size, tmp_path, sharded_losses, "O0", "float16")
    # Sums over the batch in another order, in float32.
    assert losses == pytest.approx(train(make("O0", "float16", is_sharded=False)), abs=1e-5)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "dtype", "tolerance"),
    # Units of 2^-11 and 2^-8 in gradients that are rounded before and after they are averaged, over eight steps.
    [("O1", "float16", 1e-3), ("O2", "float16", 1e-3), ("O2", "bfloat16", 5e-3), ("O3", "bfloat16", 2e-2)],
)
def test_shards_in_half_train_as_half_weights_with_masters(
    level: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    losses = run(2, tmp_path, sharded_losses, level, dtype)
    whole = train(make(level, dtype, is_sharded=False))
    assert losses == pytest.approx(whole, abs=tolerance)
    if level == "O3":  # its first forward pass has the same FP8 products, which are not those in half
        assert losses[0] == pytest.approx(whole[0], abs=1e-6)
        assert abs(losses[0] - train(make("O2", dtype, is_sharded=False), steps=range(1))[0]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_blocks_can_be_recomputed(level: str, tmp_path: Path) -> None:
    plain = run(2, tmp_path, sharded_losses, level, "bfloat16")
    assert run(2, tmp_path, sharded_losses, level, "bfloat16", True) == plain


def train_and_save(rank: int, size: int, level: str, path: str) -> list[float]:
    made = make(level, "float16", is_sharded=True)
    losses = train(made, rank, size, range(4))
    dcp.save(state_of(*made), checkpoint_id=path)
    return losses


def resume(rank: int, size: int, level: str, path: str) -> tuple[list[float], float]:
    made = net, optimizer, precision = make(level, "float16", is_sharded=True)
    assert precision.scaler is not None
    precision.scaler.set_init_loss_scaling(2.0)  # not that of the run
    state = state_of(*made)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    precision.load_state_dict(state["precision"])
    scale = precision.scaler.get_scale()
    return train(made, rank, size, range(4, STEPS)), scale


@pytest.mark.slow
@pytest.mark.parametrize(("level", "tolerance"), [("O0", 1e-5), ("O2", 1e-3)])
def test_a_checkpoint_of_four_processes_is_resumed_by_two(level: str, tolerance: float, tmp_path: Path) -> None:
    first = run(4, tmp_path, train_and_save, level, str(tmp_path / "saved"))
    rest, scale = run(2, tmp_path, resume, level, str(tmp_path / "saved"))
    assert [*first, *rest] == pytest.approx(train(make(level, "float16", is_sharded=False)), abs=tolerance)
    assert scale == 1024.0


def train_and_save_half_state(rank: int, size: int, path: str) -> list[float]:
    made = net, optimizer, _ = make("O2", "bfloat16", is_sharded=True, optimizer_state="bfloat16")
    losses = train(made, rank, size, range(4))
    state = get_optimizer_state_dict(net, optimizer)["state"]
    assert {value.dtype for each in state.values() for key, value in each.items() if key != "step"} == {torch.bfloat16}
    dcp.save(state_of(*made), checkpoint_id=path)
    return losses


def resume_half_state(rank: int, size: int, path: str) -> list[float]:
    made = net, optimizer, _ = make("O2", "bfloat16", is_sharded=True, optimizer_state="bfloat16")
    state = state_of(*made)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    kept = optimizer.state[net.head.weight]
    assert kept["exp_avg"].dtype is torch.bfloat16
    assert kept["step"].item() == 4
    return train(made, rank, size, range(4, STEPS))


@pytest.mark.slow
def test_bfloat16_state_of_four_processes_is_resumed_by_two(tmp_path: Path) -> None:
    first = run(4, tmp_path, train_and_save_half_state, str(tmp_path / "saved"))
    rest = run(2, tmp_path, resume_half_state, str(tmp_path / "saved"))
    whole = train(make("O2", "bfloat16", is_sharded=False, optimizer_state="bfloat16"))
    assert [*first, *rest] == pytest.approx(whole, abs=5e-3)  # as with float32 state: units of 2^-8 in gradients


def round_shards(rank: int, size: int) -> list[bool]:
    """Round the parts of a tensor on all processes; return whether the whole is that of one process."""
    torch.manual_seed(0)
    value, step = torch.randn(7, 6), torch.tensor(3.0)
    whole = torch.empty_like(value, dtype=torch.bfloat16)
    store_rounded([whole], [value], value, step, 5)
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        part = distribute_tensor(value, init_device_mesh("cpu", (size,)), [placement])
        stored = torch.empty_like(part.to_local(), dtype=torch.bfloat16)
        if stored.numel():
            store_rounded([stored], [part.to_local().contiguous()], part, step, 5)
        joined = DTensor.from_local(stored, part.device_mesh, [placement], shape=(7, 6), stride=(6, 1), run_check=False)
        found.append(torch.equal(joined.full_tensor(), whole))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_an_element_is_rounded_alike_whichever_process_has_it(size: int, tmp_path: Path) -> None:
    assert run(size, tmp_path, round_shards) == [True, True, True]


def checkpointed_losses(rank: int, size: int, level: str) -> list[float]:
    torch.manual_seed(0)
    net = Net()
    checkpoint_blocks(net, Block)
    precision = Precision(level, "bfloat16", fp8=FP8 if level == "O3" else None)
    precision.shard(net, blocks=Block)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    precision.prepare(net, optimizer)
    return train((net, optimizer, precision), rank, size)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_checkpointed_blocks_can_be_sharded(level: str, tmp_path: Path) -> None:
    assert run(2, tmp_path, checkpointed_losses, level) == run(2, tmp_path, sharded_losses, level, "bfloat16")


def overflow_in_one(rank: int, size: int) -> list[Any]:
    made = net, _, precision = make("O2", "float16", is_sharded=True)
    train(made, rank, size, range(2))
    before = [param.to_local().clone() for param in net.parameters()]
    train(made, rank, size, range(2, 3), lambda number, loss: loss * torch.inf if rank == 1 else loss)
    unchanged = [torch.equal(param.to_local(), old) for param, old in zip(net.parameters(), before, strict=True)]
    assert precision.scaler is not None
    return [all(unchanged), precision.scaler.get_scale()]


@pytest.mark.slow
def test_an_overflow_in_one_process_skips_the_step_in_all(tmp_path: Path) -> None:
    assert run(2, tmp_path, overflow_in_one) == [True, 512.0]


# Rules that one process shows.


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_model_of_fsdp1_is_refused_with_what_to_use(use_orig_params: bool) -> None:
    net = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    for level, fp8 in (("O2", None), ("O3", FP8)):
        precision = Precision(level, "bfloat16", fp8=fp8)
        with pytest.raises(RuntimeError, match=r"FSDP1.*Precision.shard"):
            precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(RuntimeError, match=r"FSDP1.*Precision.shard"):
            decorate(net, level=level, dtype="bfloat16", fp8=fp8)
        with pytest.raises(RuntimeError, match=r"'the model' is a FullyShardedDataParallel already"):
            precision.shard(net)


def gathered_dtypes(net: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """Return the dtype of each module's weight while the module computes."""
    seen: dict[str, torch.dtype] = {}
    for name, module in net.named_modules():
        if hasattr(module, "weight"):
            module.register_forward_pre_hook(lambda m, _, name=name: seen.update({name: m.weight.dtype}))
    with precision.autocast():
        net(batch_of(0)[0])
    return seen


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("level", "dtype", "in_half"),
    [
        ("O0", "float16", ""),
        ("O1", "float16", "up down head"),
        ("O2", "float16", "up down head embed"),
        ("O2", "bfloat16", "up down head embed norm"),
    ],
)
def test_each_weight_is_gathered_in_the_dtype_that_decorate_gives_it(level: str, dtype: str, in_half: str) -> None:
    half = getattr(torch, dtype)
    net, _, precision = make(level, dtype, is_sharded=True)
    plain = make(level, dtype, is_sharded=False)[0]
    found = gathered_dtypes(net, precision)
    for name, seen in found.items():
        assert seen is (half if name.split(".")[-1] in in_half.split() else torch.float32), name
        assert seen is plain.get_submodule(name).weight.dtype, name
    assert all(param.dtype is torch.float32 for param in net.parameters())


@pytest.mark.usefixtures("group")
def test_excluded_layers_are_gathered_in_float32() -> None:
    net, _, precision = make("O2", "bfloat16", is_sharded=True, excluded_layers="head")
    found = gathered_dtypes(net, precision)
    assert found["head"] is torch.float32
    assert found["layers.0.up"] is torch.bfloat16


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("param_dtype", [None, torch.float16])
def test_a_users_own_sharding_in_another_dtype_is_refused(param_dtype: torch.dtype | None) -> None:
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    found = "float16" if param_dtype else "float32"
    with pytest.raises(
        RuntimeError, match=rf"FSDP gathers '\S+' in {found}, and level O2 keeps it in bfloat16; .*shard"
    ):
        Precision("O2", "bfloat16").prepare(net)


@pytest.mark.usefixtures("group")
def test_a_users_own_sharding_in_the_same_dtype_trains() -> None:
    net = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    precision = Precision("O2", "bfloat16")
    made = *precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5)), precision
    losses = train(made)
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O2", "master_weight": "compact"}, "master_weight='compact': sharded weights are float32 masters"),
        ({"level": "O2", "master_weight": False}, "master_weight=False: sharded weights are float32 masters"),
        ({"level": "O3", "fp8": {"scaling": "delayed", "emulate": True}}, "scaling='delayed' with sharded weights"),
    ],
)
def test_options_that_sharded_weights_cannot_have_are_refused(options: dict[str, Any], message: str) -> None:
    precision = Precision(dtype="bfloat16", **options)
    net = precision.shard(Net())
    with pytest.raises(ValueError, match=message):
        precision.prepare(net)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("level", ["O0", "OD", "O2"])
def test_an_optimizer_from_before_the_sharding_is_refused(level: str) -> None:
    net, precision = Net(), Precision(level, "bfloat16")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    precision.shard(net)
    for given in (optimizer, [torch.optim.SGD(net.parameters(), lr=0.1), optimizer]):
        with pytest.raises(RuntimeError, match=r"this SGD has no parameter of the sharded model.*shard\(model\) first"):
            precision.prepare(net, given)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("level", ["O0", "OD"])  # the other levels find half weights
def test_a_model_that_was_prepared_with_its_optimizer_is_not_sharded(level: str) -> None:
    net, precision = Net(), Precision(level, "bfloat16")
    precision.prepare(net)
    precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match=r"shard\(\) after prepare\(\): the optimizer has the parameters"):
        precision.shard(net)
    assert not any(isinstance(param, DTensor) for param in net.parameters())


@pytest.mark.usefixtures("group")
def test_a_captured_step_of_a_sharded_model_is_refused_in_one_line() -> None:
    net, optimizer, precision = make("O2", "bfloat16", is_sharded=True)
    with pytest.raises(ValueError, match=r"weights are sharded \(FSDP2\), and a captured step cannot gather them"):
        precision.compile(net, cross_entropy, optimizer)


@pytest.mark.usefixtures("group")
def test_what_is_sharded_or_decorated_already_is_refused() -> None:
    precision = Precision("O2", "bfloat16")
    with pytest.raises(RuntimeError, match="has half weights already; give a float32 model"):
        precision.shard(precision.prepare(Net()))
    net = precision.shard(Net())
    with pytest.raises(RuntimeError, match="is sharded or has half weights already"):
        precision.shard(net)
    with pytest.raises(ValueError, match=r"use precision.shard\(model, fuse=True\)"):
        precision.prepare(net, fuse=True)
    with pytest.raises(TypeError, match=r"shard\(\): model must be an nn.Module, not list"):
        precision.shard([Net()])
    with pytest.raises(ValueError, match=r"blocks: no module is named 'layer\.\*'"):
        precision.shard(Net(), blocks="layer.*")


class Tied(Net):
    """Embedding and head share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class OwnParameters(Net):
    """Parameters of the whole network, which are not those of a layer, and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.number = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions + self.number - 3
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Attention(Net):
    """`nn.MultiheadAttention` uses the weight of its output layer without a call of that layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)])


class SharedLayer(Net):
    """Two blocks have one layer in common."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].up = self.layers[0].up


class ListOfNorms(Net):
    """Norms in a list that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm in self.norms:
            x = norm(x)
        return self.head(x)


def losses_of(kind: type[Net], level: str, dtype: str, **options: Any) -> list[float]:
    torch.manual_seed(0)
    net, precision = kind(), Precision(level, dtype, scaler=GradScaler(enable=False))
    if options:
        precision.shard(net, **options)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    precision.prepare(net, optimizer)
    return train((net, optimizer, precision), steps=range(4))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", [Tied, OwnParameters, Attention, SharedLayer, ListOfNorms])
@pytest.mark.parametrize(("level", "dtype"), [("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")])
@pytest.mark.parametrize("blocks", ["layers.?", "layers", ["embed", "layers.*"]])
def test_models_of_every_shape_train_as_unsharded_ones(kind: type[Net], level: str, dtype: str, blocks: Any) -> None:
    # One process averages nothing: only the order of the optimizer's arithmetic differs.
    sharded = losses_of(kind, level, dtype, blocks=blocks)
    assert sharded == pytest.approx(losses_of(kind, level, dtype), abs=2e-3 if dtype == "float16" else 1e-2)


def tied_after_steps(rank: int, size: int) -> tuple[bool, list[float]]:
    torch.manual_seed(0)
    net, precision = Tied(), Precision("O2", "bfloat16")
    precision.shard(net, blocks=["embed", "layers.*"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    precision.prepare(net, optimizer)
    losses = train((net, optimizer, precision), rank, size, range(4))
    return torch.equal(net.embed.weight.to_local(), net.head.weight.to_local()), losses


@pytest.mark.slow
def test_tied_weights_stay_tied_and_train_as_in_one_process(tmp_path: Path) -> None:
    is_tied, losses = run(2, tmp_path, tied_after_steps)
    assert is_tied
    # Units of 2^-8 in gradients, over four steps
    torch.manual_seed(0)
    net, precision = Tied(), Precision("O2", "bfloat16")
    made = *precision.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2)), precision
    assert losses == pytest.approx(train(made, steps=range(4)), abs=1e-2)


@pytest.mark.usefixtures("group")
def test_a_list_of_layers_beyond_the_size_of_a_group_is_sharded() -> None:
    layers = nn.ModuleList(nn.Linear(800, 800) for _ in range(2))  # 1.28 million together

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    precision = Precision("O2", "bfloat16")
    whole = precision.prepare(precision.shard(Whole()))
    with precision.autocast():
        assert whole(torch.ones(2, 800)).dtype is torch.bfloat16


@pytest.mark.usefixtures("group")
def test_a_weight_that_is_shared_by_half_and_float32_layers_is_refused_before_anything_is_sharded() -> None:
    net = Tied()
    with pytest.raises(ValueError, match=r"keeps 'embed.weight' in float32, .*: exclude all of these layers, or none"):
        Precision("O2", "bfloat16", excluded_layers="embed").shard(net)
    assert not any(isinstance(param, DTensor) for param in net.parameters())
    Precision("O2", "bfloat16", excluded_layers=["embed", "head"]).shard(net)
    assert net.embed.weight is net.head.weight


@pytest.mark.usefixtures("group")
def test_float64_weights_are_refused_with_their_name() -> None:
    net = Net()
    net.norm.double()
    with pytest.raises(ValueError, match=r"shard\(\): 'norm.weight' is float64; a sharded model is float32"):
        Precision("O2", "bfloat16").shard(net)


@pytest.mark.usefixtures("group")
def test_a_weight_without_dimension_is_refused_before_anything_is_sharded() -> None:
    net = Net()
    net.gain = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"'gain' has no dimension to shard: give it the shape \(1,\)"):
        Precision("O2", "bfloat16").shard(net, blocks="layers.*")
    assert not any(isinstance(param, DTensor) for param in net.parameters())
