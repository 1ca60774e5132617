"""The state machine against two pure-Python models, for any parameters and any pattern of overflows."""

import copy
import dataclasses
import math
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from mezzo.amp import GradScaler

# Gradients are made by hand here, without a loss.
pytestmark = pytest.mark.filterwarnings("ignore:.*before any scale")


@dataclasses.dataclass
class Model:
    """Spec c.2 with NumPy float32: `floor=None` is the dynamic class, else the static kernel."""

    scale: np.float32
    incr_ratio: float
    decr_ratio: float
    incr_every_n_steps: int
    decr_every_n_nan_or_inf: int
    floor: float | None
    good: int = 0
    bad: int = 0

    def update(self, found: bool) -> None:
        if found:
            self.good, self.bad = 0, self.bad + 1
            if self.bad == self.decr_every_n_nan_or_inf:
                self.scale = self.scale * np.float32(self.decr_ratio)
                if self.floor is not None:
                    self.scale = max(self.scale, np.float32(self.floor))
                self.bad = 0
            return
        self.good, self.bad = self.good + 1, 0
        if self.good == self.incr_every_n_steps:
            with np.errstate(over="ignore"):
                grown = self.scale * np.float32(self.incr_ratio)
            if math.isfinite(grown):
                self.scale = grown
            self.good = 0


RULES = st.fixed_dictionaries(
    {
        "init_loss_scaling": st.floats(2.0**-20, 2.0**127, width=32),
        "incr_ratio": st.floats(1.0, 1000.0, exclude_min=True, width=32),
        "decr_ratio": st.floats(0.0, 1.0, exclude_min=True, exclude_max=True, width=32).filter(lambda x: x > 1e-6),
        "incr_every_n_steps": st.integers(0, 4),
        "decr_every_n_nan_or_inf": st.integers(0, 4),
    }
)


def run(scaler: GradScaler, model: Model, pattern: list[bool]) -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for found in pattern:
        weight.grad = torch.full((1,), math.inf if found else 0.0)
        with np.errstate(over="ignore", divide="ignore"):
            if not math.isfinite(np.float32(1) / model.scale):
                found = True  # nothing can be unscaled any more, at 0 and just above it: every step is bad
        scaler.step(optimizer)
        scaler.update()
        model.update(found)
        state = scaler.state_dict()
        assert state["scale"] == float(model.scale)
        assert (state["incr_count"], state["decr_count"]) == (model.good, model.bad)


@settings(max_examples=150, deadline=None)
@given(rule=RULES, floor=st.sampled_from([0.25, 1.0, 3.0, 1e4]), pattern=st.lists(st.booleans(), max_size=40))
def test_scaler_equals_the_static_kernel_for_any_parameters_and_pattern(rule, floor, pattern) -> None:
    scaler = GradScaler(**rule, min_loss_scaling=floor, max_skips_at_floor=None)
    run(scaler, Model(np.float32(rule.pop("init_loss_scaling")), **rule, floor=floor), pattern)


@example(
    rule={
        "init_loss_scaling": 0.25,
        "incr_ratio": 2.0,
        "decr_ratio": 2.0**-14,
        "incr_every_n_steps": 0,
        "decr_every_n_nan_or_inf": 1,
    },
    pattern=[True] * 9 + [False],  # ends at 2.9e-39, whose inverse does not fit into float32
)
@settings(max_examples=100, deadline=None)
@given(rule=RULES, pattern=st.lists(st.booleans(), max_size=40))
def test_scaler_without_floor_equals_the_dynamic_class(rule, pattern) -> None:
    scaler = GradScaler(**rule, min_loss_scaling=0, max_skips_at_floor=None)
    run(scaler, Model(np.float32(rule.pop("init_loss_scaling")), **rule, floor=None), pattern)


def test_scale_falls_to_zero_without_a_floor_and_every_step_is_bad_then() -> None:
    scaler = GradScaler(
        init_loss_scaling=2.0**-140, decr_every_n_nan_or_inf=1, min_loss_scaling=0, max_skips_at_floor=None
    )
    model = Model(np.float32(2.0**-140), 2.0, 0.5, 1000, 1, None)
    run(scaler, model, [True] * 12 + [False] * 3)
    assert scaler.get_scale() == 0
    assert scaler.skipped_steps == 15


def test_an_initial_scale_below_the_floor_is_lifted_at_the_first_decrease() -> None:
    scaler = GradScaler(init_loss_scaling=0.001, decr_every_n_nan_or_inf=2)
    run(scaler, Model(np.float32(0.001), 2.0, 0.5, 1000, 2, 1.0), [True, True])
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("incr_ratio", 1.0),
        ("incr_ratio", math.inf),
        ("decr_ratio", 1.0),
        ("decr_ratio", 0.0),
        ("decr_ratio", -0.5),
        ("init_loss_scaling", 0.0),
        ("init_loss_scaling", math.nan),
        ("init_loss_scaling", 1e39),
        ("incr_every_n_steps", -1),
        ("decr_every_n_nan_or_inf", 1.5),
        ("min_loss_scaling", -1.0),
        ("max_skips_at_floor", 0),
    ],
)
def test_values_out_of_range_are_refused(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{argument}={value!r}")):
        GradScaler(**{argument: value})


def test_defaults_are_those_of_the_guide() -> None:
    scaler = GradScaler()
    assert scaler.state_dict() == {
        "scale": 32768.0,
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_count": 0,
        "decr_count": 0,
        "use_dynamic_loss_scaling": True,
        "min_loss_scaling": 1.0,
        "max_skips_at_floor": 25,
        "skipped_steps": 0,
        "skips_at_floor": 0,
    }


def test_state_dict_resumes_a_run_exactly() -> None:
    pattern = [True, False, True, True, False, False, False, True, True, True, False, False]
    rule = {"init_loss_scaling": 8.0, "incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2}
    whole, first, second = GradScaler(**rule), GradScaler(**rule), GradScaler()
    model = Model(np.float32(8.0), 2.0, 0.5, 3, 2, 1.0)
    run(whole, dataclasses.replace(model), pattern)
    run(first, model, pattern[:7])
    saved = first.state_dict()
    assert all(isinstance(value, int | float) for value in saved.values())
    second.load_state_dict(saved)
    run(second, model, pattern[7:])
    assert second.state_dict() == whole.state_dict()
    assert second.skipped_steps == whole.skipped_steps == 6


def test_state_of_a_paddle_scaler_is_loaded() -> None:
    scaler = GradScaler(min_loss_scaling=2.0)
    scaler.load_state_dict(
        {
            "scale": np.array([512.0], dtype=np.float32),
            "incr_ratio": 4.0,
            "decr_ratio": 0.25,
            "incr_every_n_steps": 7,
            "decr_every_n_nan_or_inf": 3,
            "incr_count": np.array([5], dtype=np.int32),
            "decr_count": 0,
            "use_dynamic_loss_scaling": True,
        }
    )
    assert scaler.get_scale() == scaler.get_init_loss_scaling() == 512.0
    assert (scaler.get_incr_ratio(), scaler.get_decr_ratio()) == (4.0, 0.25)
    run(scaler, Model(np.float32(512.0), 4.0, 0.25, 7, 3, 2.0, good=5), [False, False, True])
    assert scaler.get_scale() == 2048.0


def test_loading_into_a_placed_scaler_replaces_the_live_state() -> None:
    scaler, other = GradScaler(), GradScaler(init_loss_scaling=4.0)
    assert scaler.scale(torch.ones(())).item() == 32768.0
    scaler.load_state_dict(other.state_dict())
    assert scaler.scale(torch.ones(())).item() == 4.0


def test_empty_and_incomplete_state_dicts_are_refused() -> None:
    with pytest.raises(RuntimeError, match="enable=False"):
        GradScaler().load_state_dict({})
    with pytest.raises(ValueError, match="incr_ratio, decr_ratio, incr_every_n_steps"):
        GradScaler().load_state_dict({"scale": 1.0})
    GradScaler(enable=False).load_state_dict({})


def test_getters_and_setters() -> None:
    scaler = GradScaler()
    assert scaler.is_enable()
    assert scaler.is_use_dynamic_loss_scaling()
    scaler.set_init_loss_scaling(16.0)
    scaler.set_incr_ratio(3.0)
    scaler.set_decr_ratio(0.1)
    scaler.set_incr_every_n_steps(5)
    scaler.set_decr_every_n_nan_or_inf(6)
    assert scaler.get_init_loss_scaling() == scaler.get_scale() == 16.0
    assert (scaler.get_incr_ratio(), scaler.get_decr_ratio()) == (3.0, 0.1)
    assert (scaler.get_incr_every_n_steps(), scaler.get_decr_every_n_nan_or_inf()) == (5, 6)
    assert scaler.scale(torch.ones(())).item() == 16.0
    scaler.set_init_loss_scaling(32.0)  # also when the state is on a device
    assert scaler.get_scale() == 32.0
    with pytest.raises(ValueError, match=r"incr_ratio=0\.5"):
        scaler.set_incr_ratio(0.5)
    assert scaler.get_incr_ratio() == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"incr_ratio": "2"}, "incr_ratio='2': must be a number, not str"),
        ({"incr_every_n_steps": float("inf")}, "incr_every_n_steps=inf: must be a whole number"),
        ({"decr_every_n_nan_or_inf": None}, "decr_every_n_nan_or_inf=None: must be a number, not NoneType"),
        ({"init_loss_scaling": None}, "init_loss_scaling=None: must be a number, not NoneType"),
        ({"max_skips_at_floor": float("nan")}, "max_skips_at_floor=nan: must be a whole number"),
    ],
)
def test_settings_of_the_wrong_kind_are_one_clear_line(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradScaler(**arguments)


def test_a_torch_scalers_state_is_understood() -> None:
    stock = torch.amp.GradScaler("cpu", init_scale=512.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    stock.scale(torch.ones(()))
    ours = GradScaler()
    ours.load_state_dict(stock.state_dict())
    state = ours.state_dict()
    assert (state["scale"], state["incr_ratio"], state["decr_ratio"]) == (512.0, 3.0, 0.25)
    assert (state["incr_every_n_steps"], state["decr_every_n_nan_or_inf"]) == (7, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": math.nan}, "scale=nan would skip every step; must be positive and finite"),
        ({"scale": math.inf}, "scale=inf would skip every step"),
        ({"scale": torch.tensor(1e39, dtype=torch.float64)}, r"scale=1e\+39 would skip every step"),
        ({"scale": -2.0}, "scale=-2.0 would skip every step"),
        ({"scale": 0.0}, "scale=0.0 would skip every step"),
        ({"scale": 1e-46}, "scale=1e-46"),
        ({"scale": "big"}, "scale='big'"),
        ({"scale": np.ones(2)}, "scale has 2 elements"),
        ({"scale": torch.ones(0)}, "scale has 0 elements"),
        ({"incr_count": 2**40}, "incr_count=1099511627776"),
        ({"decr_count": -1}, "decr_count=-1"),
        ({"skipped_steps": math.nan}, "skipped_steps=nan"),
        ({"skips_at_floor": 1.5}, "skips_at_floor=1.5"),
        ({"incr_count": None}, "incr_count=None"),
        ({"incr_ratio": 0.5}, "incr_ratio=0.5"),
    ],
)
def test_a_state_out_of_range_is_one_clear_line_and_changes_nothing(changes: dict, message: str) -> None:
    scaler = GradScaler(init_loss_scaling=64.0, incr_every_n_steps=3)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    other = GradScaler(init_loss_scaling=8.0, incr_ratio=3.0, use_dynamic_loss_scaling=False).state_dict()
    with pytest.raises(ValueError, match=message) as raised:
        scaler.load_state_dict({**other, **changes})
    assert "\n" not in str(raised.value)
    assert scaler.state_dict() == before
    assert scaler.get_init_loss_scaling() == 64.0


def test_a_torch_state_that_lacks_a_key_is_one_clear_line() -> None:
    state = {"scale": 2.0, "growth_factor": 2.0, "growth_interval": 7, "_growth_tracker": 0}
    with pytest.raises(ValueError, match="lacks decr_ratio"):
        GradScaler().load_state_dict(state)


# In mid-step


def unscaled_step(load: bool) -> tuple[GradScaler, torch.optim.Optimizer, nn.Parameter]:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    if load:
        scaler.load_state_dict(GradScaler(init_loss_scaling=4.0).state_dict())
    return scaler, optimizer, weight


def test_gradients_are_not_divided_again_when_a_state_is_loaded_in_mid_step() -> None:
    scaler, optimizer, weight = unscaled_step(load=True)
    with pytest.raises(RuntimeError, match="already called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == pytest.approx(0.9)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("value", ["no", "False", 2, None, math.nan])
def test_a_flag_that_is_none_is_refused_and_nothing_changes(value) -> None:
    scaler = GradScaler(init_loss_scaling=8.0)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="use_dynamic_loss_scaling="):
        scaler.load_state_dict({**before, "scale": 4.0, "use_dynamic_loss_scaling": value})
    assert scaler.state_dict() == before
    with pytest.raises(ValueError, match="must be True or False"):
        GradScaler(use_dynamic_loss_scaling=value)


@pytest.mark.parametrize("flag", [False, 0, 0.0, np.bool_(False), np.array([0]), torch.tensor([False])])
def test_flags_may_be_numbers_and_arrays_of_one(flag) -> None:
    scaler = GradScaler()
    scaler.load_state_dict({**scaler.state_dict(), "use_dynamic_loss_scaling": flag})
    assert not scaler.is_use_dynamic_loss_scaling()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_scaler_is_not_copied_in_mid_step(again) -> None:
    scaler, optimizer, weight = unscaled_step(load=False)
    message = r"do it after update\(\)"
    for call in (lambda: None, lambda: scaler.step(optimizer)):
        call()
        with pytest.raises(RuntimeError, match=message):
            again(scaler)
    scaler.update()
    again(scaler)
    weight.grad.fill_(1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    with pytest.raises(RuntimeError, match=message):
        again(scaler)


def test_fixed_scaling_without_update_can_be_copied() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    scaler = GradScaler(use_dynamic_loss_scaling=False)
    scaler.step(torch.optim.SGD([weight], lr=0.1))
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()


# repr


def test_repr_shows_settings_and_what_the_host_knows() -> None:
    scaler = GradScaler(init_loss_scaling=8.0, decr_every_n_nan_or_inf=1)
    settings = (
        "GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=True, incr_ratio=2.0, decr_ratio=0.5, "
        "incr_every_n_steps=1000, decr_every_n_nan_or_inf=1, min_loss_scaling=1.0, max_skips_at_floor=25; "
    )
    assert repr(scaler) == settings + "scale=8.0, skipped_steps=0)"
    run(scaler, Model(np.float32(8.0), 2.0, 0.5, 1000, 1, 1.0), [True])
    assert repr(scaler) == settings + "scale=4.0, skipped_steps=1)"
    assert repr(GradScaler(enable=False)) == "GradScaler(enable=False)"


def test_repr_never_reads_from_a_device(monkeypatch) -> None:
    scaler = GradScaler(init_loss_scaling=8.0, decr_every_n_nan_or_inf=1)
    monkeypatch.setattr(type(scaler._state), "known_scale", lambda _state: None)
    assert "scale=on the device" in repr(scaler)
    run(scaler, Model(np.float32(8.0), 2.0, 0.5, 1000, 1, 1.0), [True])
    assert "scale=4.0, skipped_steps=1" in repr(scaler)
    on_device = GradScaler()
    on_device.scale(torch.ones((), device="meta"))  # a device whose numbers cannot be read at all
    monkeypatch.undo()
    assert "scale=on the device" in repr(on_device)


def test_an_empty_state_is_refused() -> None:
    with pytest.raises(RuntimeError, match="enable=False"):
        GradScaler().load_state_dict({})


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])  # noqa: S301
def test_a_copied_or_pickled_scaler_goes_on_where_the_first_one_was(again, enable: bool) -> None:
    scaler = GradScaler(enable=enable, init_loss_scaling=64.0, incr_every_n_steps=3, min_loss_scaling=0.5)
    scaler.scale(torch.ones(()))
    assert again(scaler).state_dict() == scaler.state_dict()
    assert again(scaler).is_enable() is enable


def test_an_argument_in_the_place_of_enable_is_refused_unless_it_is_a_device_as_in_torch() -> None:
    with pytest.raises(TypeError, match=r"write GradScaler\(init_loss_scaling=1024\.0\)"):
        GradScaler(1024.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be True or False, not NoneType"):
        GradScaler(None)  # type: ignore[arg-type]
    assert GradScaler("cuda").is_enable()
    assert GradScaler(torch.device("cpu"), 4.0).get_scale() == 4.0
