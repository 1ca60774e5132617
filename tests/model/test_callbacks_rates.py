"""Learning rates by torch's schedulers: the same as in a plain loop."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import mezzo
from mezzo.model.callbacks import Callback, LRScheduler
from model_loops import (
    Logs,
    assert_same_weights,
    batches_of,
    make_data,
    make_model,
    make_network,
    updates,
)

Scheduler = Any
KINDS: dict[str, Any] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=12),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
}


class Rates(Callback):
    """Keeps the rate that each batch was trained with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_begin(self, step: int, logs: Logs) -> None:
        assert self.model.optimizer is not None
        self.seen.append(self.model.optimizer.param_groups[0]["lr"])


def loop(kind: str, window: int, by_epoch: bool) -> tuple[nn.Module, list[float]]:
    """Train three epochs with torch alone; return the network and the rate of every batch."""
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    scheduler, seen = KINDS[kind](optimizer), []
    batches = batches_of(make_data(), 4)
    for _ in range(3):
        for (inputs, labels), updates_now in zip(batches, updates(len(batches), window), strict=True):
            seen.append(optimizer.param_groups[0]["lr"])
            nn.functional.cross_entropy(network(inputs), labels).backward()
            if updates_now:
                optimizer.step()
                optimizer.zero_grad()
                if not by_epoch:
                    scheduler.step()
        if by_epoch:
            scheduler.step()
    return network, seen


def fit(model: mezzo.Model, kind: str, window: int, by_epoch: bool) -> list[float]:
    """Train three epochs by the high-level API; return the rate of every batch."""
    rates, scheduler = Rates(), KINDS[kind](model.optimizer)
    options = {"by_step": False, "by_epoch": True} if by_epoch else {}
    model.fit(
        make_data(), batch_size=4, epochs=3, shuffle=False, verbose=0, accumulate_grad_batches=window,
        callbacks=[LRScheduler(scheduler, **options), rates],
    )  # fmt: skip
    return rates.seen


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rates_and_weights_are_those_of_a_plain_loop(kind: str, window: int, by_epoch: bool) -> None:
    network, expected = loop(kind, window, by_epoch)
    model = make_model()
    assert fit(model, kind, window, by_epoch) == expected
    assert len(set(expected)) > 1
    assert_same_weights(model.network, network)


@pytest.mark.parametrize("by_epoch", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", {"dtype": "bfloat16"}])
def test_rates_in_half_are_the_same_and_nobody_is_warned(level: Any, by_epoch: bool) -> None:
    _, expected = loop("StepLR", 2, by_epoch)  # a warning would be an error
    assert fit(make_model(level), "StepLR", 2, by_epoch) == expected


def test_a_skipped_update_counts_for_the_schedule() -> None:
    """As in torch's own loops: the host does not ask whether a step was skipped."""
    model = make_model({"init_loss_scaling": 2.0**40})
    assert fit(model, "StepLR", 1, False) == loop("StepLR", 1, False)[1]
    assert model.scaler is not None
    assert model.scaler.skipped_steps > 0


def test_the_scheduler_goes_on_in_the_next_training() -> None:
    model = make_model()
    scheduler = lr_scheduler.StepLR(model.optimizer, 1, 0.5)  # type: ignore[arg-type]
    callback = LRScheduler(scheduler, by_step=False, by_epoch=True)
    for _ in range(2):
        model.fit(make_data(), batch_size=7, epochs=2, verbose=0, callbacks=callback)
    assert scheduler.get_last_lr() == [0.1 * 0.5**4]


@pytest.mark.parametrize("value", [True, False])
def test_exactly_one_of_both_is_chosen(value: bool) -> None:
    scheduler = lr_scheduler.StepLR(torch.optim.SGD(make_network().parameters(), lr=0.1), 1)
    with pytest.raises(
        ValueError, match=rf"^by_step={value} and by_epoch={value}: exactly one of the two must be True$"
    ):
        LRScheduler(scheduler, by_step=value, by_epoch=value)


def test_a_scheduler_of_another_optimizer_is_refused_before_training() -> None:
    model = make_model()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"^LRScheduler: the scheduler belongs to another optimizer"):
        model.fit(make_data(), verbose=0, callbacks=LRScheduler(lr_scheduler.StepLR(other, 1)))
    assert_same_weights(model.network, make_network())


@pytest.mark.parametrize("kind", ["a word", "a scheduler that wants a number"])
def test_what_cannot_be_stepped_is_refused_on_construction(kind: str) -> None:
    optimizer = torch.optim.SGD(make_network().parameters(), lr=0.1)
    given: Any = "cosine" if kind == "a word" else lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match="scheduler"):
        LRScheduler(given)


class Warns(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("this network is old", UserWarning, stacklevel=1)
        return super().forward(x)


def test_a_networks_own_warning_is_shown_once() -> None:
    model = make_model(network=Warns(6, 3))
    scheduler = lr_scheduler.StepLR(model.optimizer, 1)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        model.fit(make_data(), verbose=0, callbacks=LRScheduler(scheduler))
    assert len(seen) == 1
