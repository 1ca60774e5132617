"""`amp_configs`: every form of the documents' table, and what each gives or raises."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from mezzo import Model
from mezzo.amp import Policy

SCALER_DEFAULTS = {
    "scale": 2.0**15, "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 2,
    "use_dynamic_loss_scaling": True,
}  # fmt: skip


def prepared(amp_configs: Any, optimizer: bool = True) -> Model:
    model = Model(nn.Linear(3, 2), device="cpu")
    chosen = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    model.prepare(chosen, nn.CrossEntropyLoss(), amp_configs=amp_configs)
    return model


@pytest.mark.parametrize(
    ("amp_configs", "name"),
    [
        (None, "fp32"),
        ("", "fp32"),
        ({}, "fp32"),
        ("O0", "fp32"),
        ("O1", "fp16 O1"),
        ("O2", "fp16 O2"),
        ({"level": "O0"}, "fp32"),
        ({"level": "O2"}, "fp16 O2"),
        ({"use_dynamic_loss_scaling": True}, "fp16 O1"),  # level is O1 where nothing is said
        ({"custom_white_list": {"conv2d"}}, "fp16 O1"),
        ({"level": "O2", "dtype": "bfloat16"}, "bf16 O2"),
        ({"dtype": "bfloat16"}, "bf16 O1"),
        ({"dtype": torch.bfloat16}, "bf16 O1"),
        ({"level": "O2", "dtype": torch.float16}, "fp16 O2"),
        ({"level": "O2", "use_promote": False}, "fp16 O2"),
        ({"level": "O2", "use_promote": True}, "fp16 O2"),
    ],
)
def test_a_form_gives_a_precision(amp_configs: Any, name: str) -> None:
    model = prepared(amp_configs)
    assert model.precision.name == name
    assert (model.scaler is not None) == name.startswith("fp16")
    expected = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name[:4]]
    assert model.network.weight.dtype is expected


@pytest.mark.parametrize(
    ("amp_configs", "error", "message"),
    [
        ("OD", ValueError, "amp_configs: unknown level 'OD'; allowed: O0, O1, O2, O3"),
        ("o1", ValueError, "amp_configs: unknown level 'o1'; allowed: O0, O1, O2, O3"),
        ({"level": "O4"}, ValueError, "amp_configs: unknown level 'O4'"),
        ({"level": None}, ValueError, "amp_configs: unknown level None"),
        (1, TypeError, "amp_configs is a int: it must be None, a level (O0, O1, O2, O3) or a dict"),
        (["O1"], TypeError, "amp_configs is a list: it must be None, a level (O0, O1, O2, O3) or a dict"),
        (True, TypeError, "amp_configs is a bool: it must be None"),
        ({"custom_white": {"conv2d"}}, ValueError, "unknown key 'custom_white'; did you mean 'custom_white_list'?"),
        ({"init_loss_scale": 2.0}, ValueError, "unknown key 'init_loss_scale'; did you mean 'init_loss_scaling'?"),
        ({1: 2}, ValueError, "amp_configs: unknown key 1;"),
        (
            {"enable": False},
            ValueError,
            "'enable' is not a key of amp_configs; leave amp_configs out, or use level 'O0'",
        ),
        ({"use_pure_fp16": True}, ValueError, "'use_pure_fp16' is not a key of amp_configs; use level 'O2'"),
        (
            {"use_fp16_guard": True},
            ValueError,
            "'use_fp16_guard' is not a key of amp_configs; it belongs to graph mode",
        ),
        (
            {"custom_black_varnames": ["x"]},
            ValueError,
            "'custom_black_varnames' is not a key of amp_configs; it belongs to graph mode",
        ),
        ({"level": "O0", "nonsense": 1}, ValueError, "amp_configs: unknown key 'nonsense'"),
        ({"dtype": "float32"}, ValueError, "amp_configs: unknown dtype 'float32'"),
        ({"dtype": torch.float32}, ValueError, "amp_configs: unknown dtype 'float32'; did you mean 'float16'?"),
        ({"dtype": torch.int8}, ValueError, "amp_configs: unknown dtype 'int8'"),
        ({"dtype": torch.bfloat16, "incr_ratio": 2.0}, ValueError, "incr_ratio with dtype 'bfloat16'"),
        ({"use_promote": "False"}, TypeError, "amp_configs: use_promote is 'False': must be True or False"),
        (
            {"dtype": "bfloat16", "incr_ratio": 2.0},
            ValueError,
            "incr_ratio with dtype 'bfloat16': bfloat16 has the range of float32",
        ),
        ({"custom_white_list": {"exp"}, "custom_black_list": {"exp"}}, ValueError, "amp_configs: "),
        ({"custom_white_list": {"conv2dd"}}, ValueError, "conv2d"),  # the nearest name
        ({"custom_black_list": "exp"}, TypeError, "custom_black_list is 'exp': must be a set, list or tuple"),
        ({"init_loss_scaling": -1.0}, ValueError, "amp_configs: init_loss_scaling=-1.0"),
        ({"incr_ratio": 1.0}, ValueError, "amp_configs: incr_ratio=1.0: must be finite and above 1"),
        ({"decr_ratio": 1.5}, ValueError, "amp_configs: decr_ratio=1.5: must be between 0 and 1"),
        ({"incr_every_n_steps": 1.5}, ValueError, "amp_configs: incr_every_n_steps=1.5: must be a whole number"),
        ({"decr_every_n_nan_or_inf": "2"}, ValueError, "amp_configs: decr_every_n_nan_or_inf='2': must be a number"),
    ],
)
def test_a_wrong_form_fails_in_prepare_and_changes_nothing(amp_configs: Any, error: type, message: str) -> None:
    model = Model(nn.Linear(3, 2), device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=re.escape(message)):
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=amp_configs)
    assert model.optimizer is None
    assert model.network.weight.dtype is torch.float32


def test_the_scaler_has_its_own_defaults_and_takes_what_is_said() -> None:
    state = prepared("O1").scaler.state_dict()
    assert {key: state[key] for key in SCALER_DEFAULTS} == SCALER_DEFAULTS
    said = {
        "init_loss_scaling": 8.0, "incr_ratio": 3.0, "decr_ratio": 0.25, "incr_every_n_steps": 5,
        "decr_every_n_nan_or_inf": 1, "use_dynamic_loss_scaling": False,
    }  # fmt: skip
    state = prepared(said).scaler.state_dict()
    assert state["scale"] == said.pop("init_loss_scaling")
    assert {key: state[key] for key in said} == said


def test_lists_reach_the_policy() -> None:
    policy = prepared({"custom_white_list": ["softmax"], "custom_black_list": ("linear",)}).precision.policy
    assert policy.decide("softmax", [torch.float32])[0] is torch.float16
    assert policy.decide("linear", [torch.float32])[0] is torch.float32


@pytest.mark.parametrize("use_promote", [True, False])
def test_use_promote_reaches_the_policy(use_promote: bool) -> None:
    policy = prepared({"level": "O2", "use_promote": use_promote}).precision.policy
    assert policy == Policy.create("O2", use_promote=use_promote)
    assert prepared("O2").precision.policy == Policy.create("O2")


def test_settings_at_o0_warn_that_they_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="at level 'O0' incr_ratio, custom_black_list has no effect"):
        model = prepared({"level": "O0", "incr_ratio": 9.0, "custom_black_list": ["exp"]})
    assert model.precision.name == "fp32"


def test_o2_without_an_optimizer_evaluates_in_half() -> None:
    model = prepared("O2", optimizer=False)
    assert model.network.weight.dtype is torch.float16
    (loss,) = model.eval_batch(torch.ones(2, 3), torch.tensor([0, 1]))
    assert 0 < loss < 10
    with pytest.raises(RuntimeError, match=re.escape("fit() needs an optimizer: call prepare(optimizer=...) first")):
        model.fit([(torch.ones(3), 0)])
