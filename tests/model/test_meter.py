"""What is summed up between two log lines."""

import math

import pytest
import torch

from mezzo.model.meter import StepMeter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_window_has_the_means_of_its_steps() -> None:
    clock = Clock()
    meter = StepMeter(torch.device("cpu"), clock)
    for step, loss in enumerate((1.0, 2.0, 6.0)):
        clock.now += 0.5
        meter.add(step, torch.tensor(loss), {"top1": torch.tensor(step / 4)}, samples=8, reading_s=0.1)
    window = meter.read()
    assert window.values == {"loss": 3.0, "top1": 0.25}
    assert (window.reader_cost_s, window.batch_cost_s, window.samples) == pytest.approx((0.1, 0.5, 8))
    assert window.images_per_s == pytest.approx(16)
    assert window.first_bad_step is None
    assert meter.is_empty


def test_the_time_of_an_evaluation_is_left_out() -> None:
    clock = Clock()
    meter = StepMeter(torch.device("cpu"), clock)
    meter.pause()
    clock.now = 100
    meter.go_on()
    clock.now += 2
    meter.add(0, torch.tensor(1.0), {}, 4, 0.0)
    assert meter.read().batch_cost_s == 2


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_first_bad_step_is_kept_over_windows(bad: float) -> None:
    meter = StepMeter(torch.device("cpu"))
    for step, loss in enumerate((1.0, bad, 2.0, bad)):
        meter.add(step, torch.tensor(loss), {}, 1, 0.0)
    assert meter.read().first_bad_step == 1
    meter.add(4, torch.tensor(1.0), {}, 1, 0.0)
    assert meter.read().first_bad_step == 1


def test_half_losses_are_summed_in_float32() -> None:
    meter = StepMeter(torch.device("cpu"))
    for step in range(100):
        meter.add(step, torch.tensor(1000.0, dtype=torch.float16), {}, 1, 0.0)
    assert meter.read().values["loss"] == 1000
