"""What the call of a decorated model notices: no region around it, or one of another level or dtype."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decorated import Net
from torch import Tensor, nn

from mezzo.amp import Policy, auto_cast, decorate, float32_copy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return self.head(self.conv(x).mean((2, 3))) * times


IMAGE = torch.ones(1, 3, 8, 8)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("make", [Block, lambda: nn.Sequential(nn.Conv2d(3, 4, 3))])
def test_a_call_outside_of_a_region_names_auto_cast_and_the_parameter(make: Callable[[], nn.Module], half: str) -> None:
    model = decorate(make(), level="O2", dtype=half)
    with pytest.raises(RuntimeError) as caught:
        model(IMAGE)
    (note,) = caught.value.__notes__
    assert f"auto_cast(level='O2', dtype='{half}')" in note
    assert "weight' of this " in note
    assert "`with precision.autocast():`" in note
    assert "\n" not in note


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


@pytest.mark.parametrize("make", [lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU), Learned])
def test_recurrent_layers_and_prelu_get_the_note_too(make: Callable[[], nn.Module]) -> None:
    model = decorate(make(), level="O2")
    with pytest.raises((RuntimeError, ValueError)) as caught:
        model(torch.ones(2, 4))
    (note,) = caught.value.__notes__
    assert "auto_cast(level='O2', dtype='float16')" in note


def test_the_note_is_given_once_for_models_inside_each_other() -> None:
    inner = decorate(Block(), level="O2")
    outer = decorate(nn.Sequential(inner), level="O2")
    with pytest.raises(RuntimeError) as caught:
        outer(IMAGE)
    assert len(caught.value.__notes__) == 1


def test_other_errors_and_other_models_get_no_note() -> None:
    model, plain = decorate(Block(), level="O2"), Block()
    with auto_cast(level="O2"), pytest.raises(RuntimeError) as inside:
        model(torch.ones(1, 5, 8, 8))
    with pytest.raises(RuntimeError) as of_plain:
        plain(IMAGE.half())
    with pytest.raises(RuntimeError) as of_shape:
        model(torch.ones(1, 5, 8, 8).half())
    with pytest.raises(TypeError):
        model()
    assert not any(hasattr(caught.value, "__notes__") for caught in (inside, of_plain, of_shape))
    assert model(IMAGE.half()).dtype is torch.float16  # half inputs are fine without a region


@pytest.mark.parametrize("full", [True, False])
def test_decorated_models_compile_as_before(full: bool) -> None:
    model = decorate(Block(), level="O2", dtype="bfloat16")
    compiled = torch.compile(model, backend="eager", fullgraph=full)
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager", fullgraph=full)
    with auto_cast(level="O2", dtype="bfloat16"):
        expected = model(IMAGE, times=2)
        assert torch.equal(compiled(IMAGE, times=2), expected)
        assert torch.equal(in_place(IMAGE, times=2), expected)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_decorated_models_are_scripted_traced_copied_and_pickled_as_before() -> None:
    model = decorate(Block(), level="O2", dtype="bfloat16")
    with auto_cast(level="O2", dtype="bfloat16"):
        expected = model(IMAGE)
        assert torch.equal(torch.jit.script(model)(IMAGE), expected)
        assert torch.equal(torch.jit.trace(model, IMAGE, check_trace=False)(IMAGE), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(IMAGE), expected)  # noqa: S301
        shallow = copy.copy(model)
        shallow._modules = dict(copy.deepcopy(model)._modules)
        shallow.head.weight.data.zero_()
        shallow.head.bias.data.zero_()
        assert not shallow(IMAGE).any()  # its own parts run, not those of the model it was copied from
        assert torch.equal(model(IMAGE), expected)


def test_hooks_of_a_decorated_model_run_as_before() -> None:
    model, seen = decorate(Block(), level="O2"), []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    model.register_forward_hook(lambda *_: seen.append("after"))
    with auto_cast(level="O2"):
        model(IMAGE).sum().backward()
    assert seen == ["before", "after"]


@pytest.mark.parametrize(
    ("region", "words"),
    [
        ({"level": "O1", "dtype": "float16"}, r"auto_cast\(level='O1', dtype='float16'\)"),
        ({"level": "O2", "dtype": "bfloat16"}, r"auto_cast\(level='O2', dtype='bfloat16'\)"),
        ({"level": "OD", "dtype": "float16"}, r"auto_cast\(level='OD', dtype='float16'\)"),
        ({"policy": Policy.create("O1", "bfloat16", custom_black_list=["tan"])}, r"auto_cast\(level='O1', dtype='bfl"),
    ],
)
def test_a_region_of_another_level_or_dtype_warns_once(region: dict[str, Any], words: str) -> None:
    model = decorate(Block(), level="O2", dtype="float16")

    def run() -> None:
        for _ in range(3):
            with auto_cast(**region):
                model(IMAGE)

    with pytest.warns(UserWarning, match=r"decorate\(level='O2', dtype='float16'\) but " + words) as seen:
        run()
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_no_warning_without_a_mistake() -> None:
    """Evaluation in float32, an undecorated critic at another level, custom lists, O3's products in half."""
    model, critic, other = decorate(Block(), level="O2"), Block(), decorate(Block(), level="O1", dtype="bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with auto_cast(level="O2"):
                fake = model(IMAGE)
            with auto_cast(level="O1", dtype="bfloat16"):
                critic(IMAGE * fake.float().mean())
                other(IMAGE)
            with auto_cast(level="O2", custom_black_list=["tan"]):
                model(IMAGE)
            with auto_cast(level="O2"), auto_cast(policy=Policy.create("O2").in_float32()):
                model(IMAGE)
            with auto_cast(level="O1"):
                float32_copy(model)(IMAGE)
        emulated = decorate(Block(), level="O3", fp8={"emulate": True})
        with auto_cast(level="O2"):
            emulated(IMAGE)


def test_decorating_again_at_another_level_follows_the_last_call() -> None:
    model = decorate(decorate(Block(), level="O1"), level="O2")
    with auto_cast(level="O2"):
        model(IMAGE)


def test_the_layers_of_torch_are_not_touched() -> None:
    holder = nn.Module()  # as a static program has one
    holder.layer = nn.Linear(2, 2)
    decorate([nn.Linear(2, 2), nn.LSTM(2, 2), holder], level="O2")
    for kind in (nn.Module, nn.Linear, nn.LSTM, nn.Conv2d):
        assert kind._call_impl.__module__.startswith("torch.")


def test_master_weight_false_on_a_model_with_masters_is_refused() -> None:
    model = decorate(Net(), level="O2")
    exact = model.state_dict()["head.weight"].clone()
    with pytest.raises(RuntimeError, match=r"master_weight=False: 'embed.weight' has a full master already; leave"):
        decorate(model, level="O2", master_weight=False)
    assert torch.equal(model.state_dict()["head.weight"], exact)
    model.float()
    decorate(model, level="O2", master_weight=False)
    assert torch.equal(model.head.weight, exact.half())


def test_a_scripted_model_is_refused_before_anything_changes() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match="'the model' is a TorchScript module: decorate the model, then script it"):
        decorate(model, level="O2")
    assert {param.dtype for param in model.parameters()} == {torch.float32}
