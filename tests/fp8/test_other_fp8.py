"""O3 beside layers of torchao and Transformer Engine, which compute in FP8 by themselves."""

import pytest
import torch
from torch import nn

import mezzo
from mezzo import amp

EMULATED = {"emulate": True, "min_width": 0, "min_size": 0}
HOMES = {"torchao.float8.float8_linear": "Float8Linear", "transformer_engine.pytorch.module.linear": "Linear"}


def stand_in(module: str, base: type[nn.Module] = nn.Linear) -> type[nn.Module]:
    """Return a class that looks like one of another library."""
    return type(HOMES.get(module, "LayerNorm"), (base,), {"__module__": module})


def make_net(module: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), stand_in(module)(16, 16), nn.Linear(16, 16))


@pytest.mark.parametrize("module", HOMES)
@pytest.mark.parametrize("fuse", [False, True])
def test_prepare_refuses_to_quantise_twice_and_changes_nothing(module, fuse):
    net = make_net(module)
    kinds = [type(part) for part in net]
    precision = mezzo.Precision("O3", "bfloat16", fp8=EMULATED)
    message = (
        rf"^level O3: '2' is a {module}.{HOMES[module]}, which computes in FP8 by itself, and O3 would quantise twice"
    )
    with pytest.raises(ValueError, match=message):
        precision.prepare(net, fuse=fuse)
    with pytest.raises(ValueError, match=message):
        precision.prepare_for_evaluation(net)
    assert {param.dtype for param in net.parameters()} == {torch.float32}
    assert [type(part) for part in net] == kinds


def test_decorate_refuses_it_too():
    with pytest.raises(ValueError, match="would quantise twice"):
        amp.decorate(make_net("torchao.float8.float8_linear"), level="O3", dtype="bfloat16", fp8=EMULATED)


def test_a_subclass_of_such_a_layer_is_refused():
    class Own(stand_in("torchao.float8.float8_linear")):
        pass

    net = nn.Sequential(nn.Linear(16, 16), Own(16, 16), nn.Linear(16, 16))
    with pytest.raises(ValueError, match="'1' is a torchao"):
        mezzo.Precision("O3", "bfloat16", fp8=EMULATED).prepare(net)


@pytest.mark.parametrize("options", [{"half_layers": ["2"]}, {"excluded_layers": ["2"]}])
def test_layers_that_o3_leaves_alone_are_allowed(options):
    net = make_net("torchao.float8.float8_linear")
    mezzo.Precision("O3", "bfloat16", fp8=EMULATED, **options).prepare(net)
    assert net[0].weight.dtype is torch.bfloat16


def test_other_levels_and_norms_are_allowed():
    net = make_net("torchao.float8.float8_linear")
    mezzo.Precision("O2", "bfloat16").prepare(net)
    assert net[2].weight.dtype is torch.bfloat16
    norm = stand_in("transformer_engine.pytorch.module.layernorm", nn.LayerNorm)
    mezzo.Precision("O3", "bfloat16", fp8=EMULATED).prepare(
        nn.Sequential(nn.Linear(16, 16), norm(16), nn.Linear(16, 16))
    )
