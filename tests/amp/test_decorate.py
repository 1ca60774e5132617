"""`decorate`: half weights in place, float32 masters, checkpoints, exclusions, and what it refuses."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mezzo.amp import GradScaler, auto_cast, decorate
from mezzo.optim import master_of, refresh_master

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    """One of everything that is treated differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.instance_norm = nn.InstanceNorm1d(8, affine=True)
        self.group_norm = nn.GroupNorm(2, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.lin = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        self.register_buffer("positions", torch.linspace(0, 1, 8) + 1e-5)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2))
        x = self.group_norm(self.instance_norm(self.batch_norm(x)))
        x = self.layer_norm(x.transpose(1, 2) + self.positions)
        return self.head(torch.relu(self.lin(x)))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, level: str, half: torch.dtype, steps: int = 3
) -> list[float]:
    torch.manual_seed(3)
    device = next(model.parameters()).device
    tokens = torch.randint(0, 10, (4, 6)).to(device)
    scaler = GradScaler(enable=half is torch.float16, init_loss_scaling=1024)
    losses = []
    for _ in range(steps):
        with auto_cast(level=level, dtype=half):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("half", HALVES)
def test_o2_casts_all_but_the_norms_that_the_documents_keep(half: torch.dtype) -> None:
    model = decorate(Net(), level="O2", dtype=half)
    seen = dtypes(model)
    kept = {"batch_norm": torch.float32, "instance_norm": torch.float32, "layer_norm": torch.float32}
    if half is torch.bfloat16:
        kept = {"batch_norm": torch.float32}
    for name, dtype in seen.items():
        module = name.split(".")[0]
        expected = torch.long if "num_batches" in name or name == "count" else kept.get(module, half)
        assert dtype is expected, name


@pytest.mark.parametrize("half", HALVES)
def test_o1_casts_linear_and_convolution_layers_alone(half: torch.dtype) -> None:
    seen = dtypes(decorate(Net(), level="O1", dtype=half))
    cast = {name for name, dtype in seen.items() if dtype is half}
    assert cast == {f"{m}.{p}" for m in ("conv", "lin", "head") for p in ("weight", "bias")}


def test_the_same_objects_come_back_in_the_form_they_were_given() -> None:
    model = nn.Linear(2, 2)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert decorate(model, level="O2") is model
    back, opt = decorate(model, optimizer, level="O2")
    assert back is model
    assert opt is optimizer
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert isinstance(optimizer, torch.optim.SGD)
    models, optimizers = [model], [optimizer]
    assert decorate(models, optimizers, level="O2") == (models, optimizers)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: torch.optim.RMSprop(p, lr=1e-3)])
def test_a_decorated_network_learns_like_the_float32_one(
    make: Callable, half: torch.dtype, level: str, device: str
) -> None:
    """R12: every norm, embedding and convolution forward and backward, in each dtype and level."""
    reference = Net().to(device)
    model = copy.deepcopy(reference)
    expected = train(reference, make(reference.parameters()), "O0", half, steps=8)
    model, optimizer = decorate(model, make(model.parameters()), level=level, dtype=half)
    seen = train(model, optimizer, level, half, steps=8)
    # each step rounds activations to 10 (7) bits; measured 4e-3 (3e-2) of a loss of 2.3 after eight steps
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 6e-2}[half]
    assert seen[-1] == pytest.approx(expected[-1], rel=tolerance)
    assert seen[-1] < seen[0]


@pytest.mark.parametrize("half", HALVES)
def test_bfloat16_and_float16_step_without_a_scaler_too(half: torch.dtype) -> None:
    model = nn.Linear(4, 1, bias=False)
    start = model.weight.detach().clone()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=2.0**-12), level="O2", dtype=half)
    with auto_cast(level="O2", dtype=half):
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    master = master_of(model.weight)
    assert master is not None
    torch.testing.assert_close(master, start - 2.0**-12, rtol=1e-6, atol=0)  # too small a step for half weights
    assert torch.equal(model.weight, master.to(half))


def test_checkpoints_are_float32_under_the_usual_names_and_exact() -> None:
    reference = Net()
    names = {name: value.clone() for name, value in reference.state_dict().items()}
    model = decorate(reference, level="O2")
    saved = model.state_dict()
    assert list(saved) == list(names)
    for name, value in names.items():
        assert saved[name].dtype is value.dtype
        assert torch.equal(saved[name], value), name  # also what float16 cannot hold
    Net().load_state_dict(saved)  # into an undecorated model


def test_checkpoints_come_back_into_a_decorated_model_with_all_their_bits() -> None:
    source, target = Net(), decorate(Net(), level="O2")
    with torch.no_grad():
        for param in source.parameters():
            param.add_(1e-5)
    missing = target.load_state_dict(source.state_dict())
    assert not missing.missing_keys
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    assert torch.equal(target.lin.weight, source.lin.weight.half())
    assert target.lin.state_dict()["weight"].dtype is torch.float32  # a submodule alone, too


def test_a_run_resumed_from_a_checkpoint_repeats_the_unbroken_one() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = Net()
        return decorate(model, torch.optim.AdamW(model.parameters(), lr=1e-2), level="O2")

    model, optimizer = start()
    train(model, optimizer, "O2", torch.float16)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    unbroken = train(model, optimizer, "O2", torch.float16)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed, optimizer = start()
    resumed.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert train(resumed, optimizer, "O2", torch.float16) == unbroken


@pytest.mark.parametrize("save_dtype", ["float16", torch.bfloat16, "float64"])
def test_save_dtype_is_the_dtype_of_every_floating_tensor(save_dtype: object) -> None:
    model = decorate(Net(), level="O2", save_dtype=save_dtype)
    expected = save_dtype if isinstance(save_dtype, torch.dtype) else getattr(torch, str(save_dtype))
    assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} == {expected}
    assert model.lin.weight.dtype is torch.float16


def test_loading_by_assignment_is_refused() -> None:
    model = decorate(nn.Linear(2, 2), level="O2")
    with pytest.raises(RuntimeError, match=r"load_state_dict\(assign=True\) would replace the half parameters"):
        model.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)


@pytest.mark.parametrize(
    "edit",
    [
        lambda p, v: p.copy_(v),
        lambda p, v: p.mul_(0).add_(v.to(p.dtype)),
        lambda p, v: setattr(p, "data", v.to(p.dtype)),
        lambda p, v: nn.init.constant_(p, float(v.flatten()[0])),
        lambda p, v: (p.data.copy_(v), refresh_master(p)),
        lambda p, v: torch._foreach_copy_([p], [v]),
    ],
    ids=["copy_", "in place", ".data =", "init", ".data.copy_ + refresh_master", "foreach"],
)
def test_masters_follow_edits_of_the_half_weights(edit: Callable) -> None:
    """R3: whatever route the edit took, the next step starts from the edited value."""
    model = nn.Linear(3, 3, bias=False)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.5), level="O2")
    value = torch.full((3, 3), 0.25)
    with torch.no_grad():
        edit(model.weight, value)
    assert torch.equal(model.state_dict()["weight"], value)
    model.weight.grad = torch.ones(3, 3, dtype=torch.float16)
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], value - 0.5)
    assert torch.equal(model.weight, (value - 0.5).half())


def test_swapping_averaged_weights_in_and_out_keeps_masters_right() -> None:
    model = nn.Linear(3, 3)
    decorate(model, torch.optim.SGD(model.parameters(), lr=0.5), level="O2")
    own, average = {k: v.clone() for k, v in model.state_dict().items()}, nn.Linear(3, 3).state_dict()
    model.load_state_dict(average)
    assert all(torch.equal(v, average[k]) for k, v in model.state_dict().items())
    model.load_state_dict(own)
    assert all(torch.equal(v, own[k]) for k, v in model.state_dict().items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))


def test_tied_weights_stay_one_parameter_with_one_master() -> None:
    """R13."""
    model = Tied()
    start = model.embed.weight.detach().clone()
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=1.0), level="O2")
    assert model.out.weight is model.embed.weight
    with auto_cast(level="O2"):
        model(torch.tensor([1, 2])).float().sum().backward()
    optimizer.step()
    reference = Tied()
    reference.embed.weight.data.copy_(start)
    reference(torch.tensor([1, 2])).sum().backward()
    assert reference.embed.weight.grad is not None
    # the gradient is rounded to half once or twice: 10 mantissa bits
    torch.testing.assert_close(
        model.state_dict()["out.weight"], start - reference.embed.weight.grad, rtol=2e-3, atol=2e-3
    )


def test_a_weight_tied_to_an_excluded_layer_stays_float32() -> None:
    model = decorate(Tied(), level="O2", excluded_layers="out")
    assert model.embed.weight.dtype is torch.float32
    with auto_cast(level="O2"):
        assert model(torch.tensor([1])).dtype is torch.float32


def test_frozen_weights_are_cast_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5), level="O2")
    before = model[0].weight.clone()
    with auto_cast(level="O2"):
        model(torch.ones(2, 3)).float().sum().backward()
    optimizer.step()
    assert model[0].weight.dtype is torch.float16
    assert torch.equal(model[0].weight, before)


def test_channels_last_layout_is_kept_by_weight_master_and_checkpoint() -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), level="O2")
    with auto_cast(level="O2"):
        model(torch.ones(1, 4, 8, 8)).float().sum().backward()
    optimizer.step()
    for tensor in (model.weight, master_of(model.weight), model.state_dict()["weight"]):
        assert tensor is not None
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=1.0), lambda p: torch.optim.SparseAdam(list(p), lr=1.0)]
)
def test_sparse_gradients_reach_the_master(make: Callable) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    start = model.weight.detach().clone()
    model, optimizer = decorate(model, make(model.parameters()), level="O2")
    scaler = GradScaler(init_loss_scaling=8.0)
    with auto_cast(level="O2"):
        loss = model(torch.tensor([1, 1, 3])).float().sum()
    scaler.scale(loss).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.is_sparse
    scaler.step(optimizer)
    moved = (model.state_dict()["weight"] - start).abs().sum(1) > 0
    assert moved.tolist() == [False, True, False, True, False]


def test_gradients_accumulate_in_float32_with_master_grad() -> None:
    """1 + 64 x 2^-11 loses every addend in half; the sum is exact in float32."""
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=1.0), level="O2", master_grad=True)
    start = model.state_dict()["weight"].clone()
    for value in (1.0, *[2.0**-11] * 64):
        with auto_cast(level="O2"):
            out = model(torch.full((1, 1), value)).float().sum()
        out.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float32
    assert float(model.weight.grad) == 1 + 64 * 2.0**-11
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], start - (1 + 64 * 2.0**-11))


def test_master_weight_false_updates_the_half_weights_themselves() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    model, optimizer = decorate(
        model, torch.optim.SGD(model.parameters(), lr=2.0**-12), level="O2", master_weight=False
    )
    assert master_of(model.weight) is None
    for _ in range(8):
        model.weight.grad = torch.ones(1, 1, dtype=torch.float16)
        optimizer.step()
    assert model.weight.item() == 1.0  # each step is below half an ulp
    assert model.state_dict()["weight"].dtype is torch.float32


def test_without_optimizers_masters_join_at_the_first_scaler_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    decorate(model, level="O2")
    scaler = GradScaler(init_loss_scaling=16.0)
    with auto_cast(level="O2"):
        loss = model(torch.ones(1, 1)).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert torch.equal(model.state_dict()["weight"], start - 2.0**-12)


def test_a_plain_step_past_the_masters_warns_once() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decorate(model, level="O2")
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.warns(UserWarning, match=r"without their float32 masters; pass the optimizer to mezzo\.amp\.decorate"):
        optimizer.step()
    optimizer.step()  # warnings are errors: a second one would fail here
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    other.step()


def test_decorating_again_changes_nothing_and_the_other_dtype_is_refused() -> None:
    model = decorate(nn.Linear(2, 2), level="O2")
    master = master_of(model.weight)
    assert decorate(model, level="O2") is model
    assert master_of(model.weight) is master
    with pytest.raises(RuntimeError, match="'weight' is float16 already; bfloat16 was asked"):
        decorate(model, level="O2", dtype="bfloat16")


def test_a_model_that_is_half_already_gets_masters_from_its_half_values() -> None:
    model = nn.Linear(2, 2).half()
    model, _ = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    master = master_of(model.weight)
    assert master is not None
    assert torch.equal(master, model.weight.float())


def test_a_decorated_model_can_be_copied_pickled_and_made_float32_again() -> None:
    model = decorate(Net(), level="O2", excluded_layers="head")
    twin = copy.deepcopy(model)
    assert twin.lin.weight.dtype is torch.float16
    with auto_cast(level="O2"):
        assert twin(torch.tensor([[1, 2]])).dtype is torch.float32
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301  # made two calls ago
    assert torch.equal(loaded.lin.weight, model.lin.weight)
    model.float()
    assert model.state_dict()["lin.weight"].dtype is torch.float32


def test_weight_normalised_layers_are_cast() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    with auto_cast(level="O2"):
        model(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
    assert torch.isfinite(model.state_dict()["1.weight"]).all()


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"deep": inner})


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda m: nn.DataParallel(m), "found DataParallel at the model itself"),
        (lambda m: Wrapper(nn.DataParallel(m)), "found DataParallel at inner.deep"),
        (lambda m: [nn.Linear(1, 1), nn.DataParallel(m)], r"found DataParallel at models\[1\]"),
    ],
)
def test_wrapped_models_are_refused_before_anything_changes(wrap: Callable, found: str) -> None:
    model = nn.Linear(2, 2)
    message = r"call mezzo.amp.decorate\(\) first, then wrap with DistributedDataParallel; "
    for level in ("O1", "O2"):
        with pytest.raises(RuntimeError, match=message + found):
            decorate(wrap(model), level=level)
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"level": "OD"}, ValueError, "level='OD': must be one of O1, O2"),
        ({"dtype": "float32"}, ValueError, "dtype='float32': must be"),
        ({"save_dtype": "int8"}, ValueError, "save_dtype='int8': must be None or one of float16, bfloat16"),
        ({"optimizers": "sgd"}, TypeError, "optimizers: str is no Optimizer; give one or a list of them"),
        ({"excluded_layers": "nothing.*"}, ValueError, "no module is named 'nothing"),
        ({"excluded_layers": 3}, TypeError, "excluded_layers: 3 is int; give modules, module types or name globs"),
        ({"excluded_layers": nn.Linear(1, 1)}, ValueError, "this Linear is not part of the model"),
        ({"models": [nn.ReLU(), 3]}, TypeError, "models: int is no Module"),
    ],
)
def test_a_bad_argument_leaves_the_model_untouched(arguments: dict, error: type, message: str) -> None:
    model = Net()
    with pytest.raises(error, match=message):
        decorate(**{"models": model, "level": "O2", **arguments})
    assert set(dtypes(model).values()) == {torch.float32, torch.long}


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"'weight' has no shape yet \(a lazy module\): run the model once"):
        decorate(nn.LazyLinear(3), level="O2")


@pytest.mark.parametrize("excluded", ["lin", nn.Linear, ["li?", "head"]])
def test_excluded_layers_keep_float32_weights_and_arithmetic(excluded: object) -> None:
    model = decorate(Net(), level="O2", excluded_layers=excluded)
    seen: list[torch.dtype] = []
    model.lin.register_forward_hook(lambda _m, args, out: seen.extend([args[0].dtype, out.dtype]))
    with auto_cast(level="O2"):
        model(torch.tensor([[1, 2]]))
    assert model.lin.weight.dtype is torch.float32
    assert seen[1] is torch.float32
    assert model.embed.weight.dtype is torch.float16


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.BatchNorm1d(8),
    "instance_norm": lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
    "group_norm": lambda: nn.GroupNorm(2, 8),
    "layer_norm": lambda: nn.LayerNorm(8),
    "rms_norm": lambda: nn.RMSNorm(8),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_takes_half_data_with_the_weights_it_has(
    norm: str, half: torch.dtype, level: str, device: str
) -> None:
    """R12: CUDA refuses half data with float32 weights in some norms; the policy must not run into that."""
    torch.manual_seed(6)
    reference = NORMS[norm]().to(device)
    module = copy.deepcopy(reference)
    if level != "OD":
        decorate(module, level=level, dtype=half)
    x = torch.randn(4, 8, 8, device=device).to(half)
    expected = reference(x.float())
    data = x.clone().requires_grad_()
    with auto_cast(level=level, dtype=half):
        seen = module(data)
    seen.float().square().sum().backward()
    assert data.grad is not None
    assert torch.isfinite(data.grad).all()
    # weights are 1 and 0; the result is rounded to half once at values up to 3: 2^-11 or 2^-8 of them
    torch.testing.assert_close(seen.float(), expected, rtol=0, atol={torch.float16: 4e-3, torch.bfloat16: 3e-2}[half])


@pytest.mark.filterwarnings("ignore")  # torch.distributed warns about a group of one process
@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FSDPLinear"])
def test_models_wrapped_for_real_distributed_training_are_refused(kind: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: nn.Module = nn.Linear(2, 2)
        if kind == "DistributedDataParallel":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(RuntimeError, match=f"then wrap with DistributedDataParallel; found {kind} at inner.deep"):
            decorate(Wrapper(model), level="O2")
        assert all(p.dtype is torch.float32 for p in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_decorated_model_trains_inside_distributed_data_parallel(level: str) -> None:
    """Decorate first, wrap afterwards: one gloo process, the same numbers as without the wrapper."""
    import torch.distributed as dist

    def losses(wrap: Callable[[nn.Module], nn.Module]) -> list[float]:
        torch.manual_seed(8)
        model = Net()
        model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level)
        return train(wrap(model), optimizer, level, torch.float16)

    alone = losses(lambda model: model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert losses(nn.parallel.DistributedDataParallel) == alone
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "kept"), [(1, True), (4, False)])
def test_writing_a_weight_onto_itself_keeps_the_masters_bits_in_one_process(
    ranks: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributed wrappers broadcast half weights in place; with several ranks all of them must end with one master."""
    model = decorate(nn.Linear(3, 3), level="O2")
    exact, rounded = model.state_dict()["weight"].clone(), model.weight.detach().float()
    assert not torch.equal(exact, rounded)
    monkeypatch.setattr("mezzo.optim._masters._has_several_ranks", lambda: ranks > 1)
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
    assert torch.equal(model.state_dict()["weight"], exact if kept else rounded)


def test_optimizer_state_loaded_before_the_first_scaler_step_stays_float32() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 2)).sum().mul(1e-6).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    decorate(model, level="O2")
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fresh.load_state_dict(saved)
    state = fresh.state[model.weight]
    assert state["exp_avg_sq"].dtype is torch.float32
    assert state["exp_avg_sq"].max() > 0  # about 1e-15: nothing of it is left in float16


def test_a_disabled_scaler_still_steps_through_the_masters() -> None:
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    decorate(model, level="O2", dtype="bfloat16")
    scaler = GradScaler(enable=False)
    for _ in range(4):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        scaler.step(optimizer)
    assert torch.equal(model.state_dict()["weight"], start - 4 * 2.0**-12)


def test_a_second_optimizer_that_decorate_never_saw_warns() -> None:
    model = nn.Linear(1, 1)
    decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    second = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.warns(UserWarning, match="updates half weights without their float32 masters"):
        second.step()


def test_an_optimizer_of_another_model_warns() -> None:
    with pytest.warns(UserWarning, match="this SGD has no parameter of the models given"):
        decorate(nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), level="O2")


def test_a_deep_copy_has_masters_of_its_own() -> None:
    model = decorate(Net(), level="O2")
    twin = copy.deepcopy(model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.lin.weight.zero_()
    for name, value in twin.state_dict().items():
        assert torch.equal(value, expected[name]) or name == "positions", name


def test_keep_vars_gives_the_parameters_themselves() -> None:
    model = decorate(nn.Linear(2, 2), level="O2")
    assert model.state_dict(keep_vars=True)["weight"] is model.weight


def test_float_gives_the_masters_values_back() -> None:
    model = nn.Linear(3, 3)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    decorate(model, level="O2").float()
    for name, value in model.state_dict().items():
        assert torch.equal(value, exact[name])
    assert torch.equal(model.weight, exact["weight"])


def test_a_buffer_shared_by_two_modules_stays_one() -> None:
    shared = torch.rand(3)
    model = nn.ModuleList([nn.Module(), nn.Module()])
    for module in model:
        module.register_buffer("table", shared)
    decorate(model, level="O2")
    assert model[0].table is model[1].table
    assert model[0].table.dtype is torch.float16


def test_inference_mode_is_refused_before_anything_changes() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"call it outside torch\.inference_mode\(\)"):
        decorate(model, level="O2")
    assert model.weight.dtype is torch.float32


def test_a_half_model_without_masters_cannot_change_its_dtype() -> None:
    model = decorate(nn.Linear(2, 2), level="O2", master_weight=False)
    with pytest.raises(RuntimeError, match="'weight' is float16 already; bfloat16 was asked"):
        decorate(model, level="O2", dtype="bfloat16")


@pytest.mark.filterwarnings("ignore")
def test_sharding_a_decorated_model_warns_that_its_masters_are_gone() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = decorate(nn.Linear(2, 2), level="O2", dtype="bfloat16")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(UserWarning, match=r"fully_shard\(\) replaced half parameters of a decorated model"):
            optimizer.step()
    finally:
        dist.destroy_process_group()
