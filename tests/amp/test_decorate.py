"""`decorate`: which weights become half, that the network still learns, and what is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from decorated import Net, dtypes, train
from torch import nn
from torch.nn.utils import parametrizations

from mezzo.amp import auto_cast, decorate, is_excluded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES = [torch.float16, torch.bfloat16]


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
        if name in dict(model.named_buffers()) and expected is half:
            expected = torch.float32
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


def test_weight_normalised_layers_are_cast() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    model, optimizer = decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    with auto_cast(level="O2"):
        model(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
    assert torch.isfinite(model.state_dict()["1.weight"]).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"level": "OD"}, ValueError, "level='OD': must be one of O1, O2"),
        ({"dtype": "float32"}, ValueError, "dtype='float32': must be"),
        ({"save_dtype": "int8"}, ValueError, "save_dtype='int8': must be None or one of float16, bfloat16"),
        ({"optimizers": "sgd"}, TypeError, "optimizers: .*Optimizer.* str"),
        ({"excluded_layers": "nothing.*"}, ValueError, "no module is named 'nothing"),
        ({"excluded_layers": 3}, TypeError, "excluded_layers: 3 is int; give modules, module types or name globs"),
        ({"excluded_layers": nn.Linear(1, 1)}, ValueError, "this Linear is not part of the model"),
        ({"models": [nn.ReLU(), 3]}, TypeError, "models: .*Module.* int"),
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


def test_buffers_stay_float32_and_shared() -> None:
    """Half rotary frequencies would turn position 4096 by more than a radian."""
    shared = torch.rand(3)
    model = nn.ModuleList([nn.Module(), nn.Module()])
    for module in model:
        module.register_buffer("table", shared)
    decorate(model, level="O2")
    assert model[0].table is model[1].table is shared
    assert shared.dtype is torch.float32


def test_inference_mode_is_refused_before_anything_changes() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"call it outside torch\.inference_mode\(\)"):
        decorate(model, level="O2")
    assert model.weight.dtype is torch.float32


def test_master_grad_without_grad_dtype_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.amp._decorate._HAS_GRAD_DTYPE", False)
    model = nn.Linear(2, 2)
    with pytest.raises(
        RuntimeError, match=r"master_grad=True needs Tensor\.grad_dtype, which this torch does not have"
    ):
        decorate(model, level="O2", master_grad=True)
    assert model.weight.dtype is torch.float32


def test_an_excluded_half_layer_is_refused_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(ValueError, match="excluded_layers: 'weight' is float16 and has no float32 value"):
        decorate(model, level="O2", excluded_layers="1")
    assert model[0].weight.dtype is torch.float32


def test_single_parameters_stay_float32() -> None:
    """The weights alone: what they are used in stays the policy's decision."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    decorate(model, level="O2", excluded_parameters=[model[0].weight])
    assert [p.dtype for p in model.parameters()] == [torch.float32, *[torch.float16] * 3]
    assert not is_excluded(model[0])
    with auto_cast(level="O2"):
        assert model(torch.ones(2, 4)).dtype is torch.float16


def test_excluded_parameters_are_parameters_of_the_models() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"excluded_parameters: str .*excluded_layers"):
        decorate(model, level="O2", excluded_parameters=["weight"])
    with pytest.raises(ValueError, match=r"excluded_parameters: .*\[2, 2\]"):
        decorate(model, level="O2", excluded_parameters=[nn.Parameter(torch.ones(2, 2))])
    assert model.weight.dtype is torch.float32
