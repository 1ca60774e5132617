"""Learning rates against torch's own schedulers and against formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_files import changed, faults, load
from torch.optim import lr_scheduler as torch_schedules

from mezzo.vision.recipes import CURVES, Curve, Schedule

STEPS = 60
RATE = 0.1


def curve(name: str, **arguments: Any) -> Curve:
    return CURVES[name](**arguments)


def rates_of_torch(make: Callable[[torch.optim.Optimizer], Any]) -> list[float]:
    """Return the rates of one of torch's schedulers, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("name", "arguments", "torchs"),
    [
        (
            "PolynomialDecay",
            {"decay_steps": 40, "power": 0.9},
            lambda o: torch_schedules.PolynomialLR(o, 40, power=0.9),
        ),
        ("PolynomialDecay", {"decay_steps": 50, "power": 2}, lambda o: torch_schedules.PolynomialLR(o, 50, power=2.0)),
        ("LinearDecay", {"decay_steps": 40}, lambda o: torch_schedules.PolynomialLR(o, 40, power=1.0)),
        ("LinearLR", {"total_steps": 30}, lambda o: torch_schedules.LinearLR(o, total_iters=30)),
        ("StepDecay", {"step_size": 7, "gamma": 0.5}, lambda o: torch_schedules.StepLR(o, 7, gamma=0.5)),
        ("MultiStepDecay", {"milestones": [5, 6, 30]}, lambda o: torch_schedules.MultiStepLR(o, [5, 6, 30])),
        (
            "CosineAnnealingDecay",
            {"T_max": 59, "eta_min": 0.01},
            lambda o: torch_schedules.CosineAnnealingLR(o, 59, 0.01),
        ),
        ("CosineAnnealingDecay", {"T_max": 25}, lambda o: torch_schedules.CosineAnnealingLR(o, 25)),
        ("CosineAnnealingWarmRestarts", {"T_0": 7}, lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 7)),
        (
            "CosineAnnealingWarmRestarts",
            {"T_0": 4, "T_mult": 3, "eta_min": 0.02},
            lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 4, 3, 0.02),
        ),
        ("ExponentialDecay", {"gamma": 0.9}, lambda o: torch_schedules.ExponentialLR(o, 0.9)),
        ("NaturalExpDecay", {"gamma": 0.2}, lambda o: torch_schedules.LambdaLR(o, lambda i: math.exp(-0.2 * i))),
        ("InverseTimeDecay", {"gamma": 0.2}, lambda o: torch_schedules.LambdaLR(o, lambda i: 1 / (1 + 0.2 * i))),
    ],
)
def test_rates_are_those_of_torch(name: str, arguments: dict, torchs: Callable) -> None:
    own = Schedule(curve=curve(name, learning_rate=RATE, **arguments))
    assert [own.lr(step) for step in range(STEPS)] == pytest.approx(rates_of_torch(torchs), rel=1e-9, abs=1e-12)


def test_polynomial_decay_ends_at_its_last_rate_and_stays_there() -> None:
    own = curve("PolynomialDecay", learning_rate=0.1, decay_steps=10, end_lr=0.02, power=1)
    assert [own.at(i) for i in (0, 5, 10, 11, 10**6)] == pytest.approx([0.1, 0.06, 0.02, 0.02, 0.02])


def test_polynomial_decay_of_power_0_is_constant() -> None:
    own = curve("PolynomialDecay", learning_rate=0.1, decay_steps=10, end_lr=0.02, power=0)
    assert [own.at(i) for i in (0, 5, 10, 11)] == pytest.approx([0.1] * 4)


def test_warm_up_of_no_steps_needs_no_first_rate(tmp_path: Path) -> None:
    block = {"type": "ExponentialDecay", "learning_rate": 0.5, "gamma": 1, "warmup_iters": 0}
    schedule = load(tmp_path, changed(lr_scheduler=block)).schedule
    assert [schedule.lr(step) for step in (0, 1)] == [0.5, 0.5]


def test_polynomial_decay_in_cycles_begins_each_round_on_a_longer_line() -> None:
    own = curve("PolynomialDecay", learning_rate=1, decay_steps=10, power=1, cycle=True)
    assert [own.at(i) for i in (0, 5, 10, 11, 15, 20, 21)] == pytest.approx([1, 0.5, 0, 9 / 20, 5 / 20, 0, 9 / 30])


def test_piecewise_rates_change_at_their_boundaries() -> None:
    own = curve("PiecewiseDecay", boundaries=[2, 5], values=[1, 0.5, 0.1])
    assert [own.at(i) for i in range(7)] == [1, 1, 0.5, 0.5, 0.5, 0.1, 0.1]


def test_linear_warm_up_as_a_type_grows_and_then_stays() -> None:
    own = curve("LinearWarmup", learning_rate=0.5, warmup_steps=4, start_lr=0.0, end_lr=0.4)
    assert [own.at(i) for i in range(6)] == pytest.approx([0, 0.1, 0.2, 0.3, 0.5, 0.5])


@given(st.integers(1, 50), st.floats(0, 0.2), st.integers(0, 200))
def test_warm_up_is_a_line_to_the_curve_which_begins_behind_it(warmup: int, start: float, step: int) -> None:
    inner = curve("PolynomialDecay", learning_rate=0.1, decay_steps=100)
    own = Schedule(curve=inner, warmup_steps=warmup, warmup_start=start)
    line = start + (0.1 - start) * step / warmup
    assert own.lr(step) == pytest.approx(line if step < warmup else inner.at(step - warmup))


@given(st.sampled_from(["PolynomialDecay", "StepDecay", "ExponentialDecay"]), st.integers(0, 2**31 - 1))
def test_rates_are_finite_and_never_negative(name: str, step: int) -> None:
    more = {"PolynomialDecay": {"decay_steps": 77}, "StepDecay": {"step_size": 3}, "ExponentialDecay": {"gamma": 0.3}}
    rate = Schedule(curve=curve(name, learning_rate=RATE, **more[name])).lr(step)
    assert 0 <= rate <= RATE


def test_a_schedule_of_epochs_stands_still_within_one() -> None:
    own = Schedule(curve=curve("StepDecay", learning_rate=1.0, step_size=2), unit="epoch")
    rates = [own.lr(step, 3) for step in range(12)]
    assert rates == pytest.approx([1.0] * 6 + [0.1] * 6)
    with pytest.raises(ValueError, match="steps_per_epoch=None"):
        own.lr(0)
    with pytest.raises(ValueError, match="step=-1"):
        own.lr(-1, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("PolynomialDecay", {"learning_rate": 0, "decay_steps": 1}, "learning_rate=0"),
        ("PolynomialDecay", {"learning_rate": True, "decay_steps": 1}, "learning_rate=True"),
        ("PolynomialDecay", {"learning_rate": 1, "decay_steps": 0}, "decay_steps=0"),
        (
            "PolynomialDecay",
            {"learning_rate": 1, "decay_steps": 9, "power": -1},
            "power=-1",
        ),
        ("PolynomialDecay", {"learning_rate": 1, "decay_steps": 9, "cycle": 2}, "cycle=2"),
        ("StepDecay", {"learning_rate": 1, "step_size": 1.5}, "step_size=1.5"),
        (
            "StepDecay",
            {"learning_rate": 1, "step_size": 1, "gamma": 2},
            "gamma=2",
        ),
        (
            "MultiStepDecay",
            {"learning_rate": 1, "milestones": [3, 3]},
            r"milestones=\[3, 3\]: each must be larger than",
        ),
        ("MultiStepDecay", {"learning_rate": 1, "milestones": 3}, "milestones=3"),
        ("PiecewiseDecay", {"boundaries": [1], "values": [1]}, "values: 1 rates for 1 boundaries; must be one more"),
        ("PiecewiseDecay", {"boundaries": [1], "values": [1, "x"]}, r"values\[1\]='x'"),
        ("PiecewiseDecay", {"boundaries": [1], "values": "x"}, "values='x'"),
        ("CosineAnnealingDecay", {"learning_rate": 1, "T_max": 0}, "T_max=0"),
        ("ExponentialDecay", {"learning_rate": 10**400, "gamma": 1}, "learning_rate=1000.*"),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        curve(name, **arguments)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "Poly"}, "unknown schedule 'Poly'; allowed: PolynomialDecay, "),
        ({"type": "PolynomialDecai"}, "unknown schedule 'PolynomialDecai'; did you mean 'PolynomialDecay'"),
        ({"learning_rate": 1}, "schedule: type is missing; allowed: PolynomialDecay, "),
        ([1], "schedule: [1]"),
        ({"type": "StepDecay", "learning_rate": 1}, "StepDecay: step_size is missing"),
        (
            {"type": "StepDecay", "learning_rate": 1, "step_size": 2, "gama": 1},
            "unknown key of StepDecay 'gama'; did you mean 'gamma'",
        ),
        (
            {"type": "ExponentialDecay", "learning_rate": 1, "gamma": 1, "warmup_iters": 5},
            "warmup_iters needs warmup_start_lr beside it",
        ),
        (
            {"type": "ExponentialDecay", "learning_rate": 1, "gamma": 1, "warmup_iters": False},
            "warmup_iters needs warmup_start_lr beside it",
        ),
        (
            {"type": "ExponentialDecay", "learning_rate": 1, "gamma": 1, "warmup_start_lr": 5},
            "warmup_start_lr needs warmup_iters beside it",
        ),
        (
            {"type": "ExponentialDecay", "learning_rate": 1, "gamma": 1, "warmup_iters": -1, "warmup_start_lr": 0},
            "warmup_iters=-1",
        ),
    ],
)
def test_blocks_that_describe_no_schedule_are_refused(block: Any, message: str, tmp_path: Path) -> None:
    assert any(message in line for line in faults(tmp_path, changed(lr_scheduler=block)))
