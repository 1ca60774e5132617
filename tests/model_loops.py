"""Training loops written by hand; `mezzo.Model` must give the same bits.

model/test_model_reference.py compares them with NumPy.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mezzo
from mezzo import amp

Batch = tuple[Tensor, Tensor]
Logs = Mapping[str, Any]
FEATURES, CLASSES, SAMPLES = 6, 3, 14  # batches of 4: three whole ones, and one of 2


def make_network(*, norm: bool = False) -> nn.Sequential:
    """Return a small classifier, always the same."""
    torch.manual_seed(11)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Tanh(), nn.Linear(8, CLASSES))


def make_data(samples: int = SAMPLES) -> TensorDataset:
    """Return inputs with labels, always the same."""
    source = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, FEATURES, generator=source)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=source))


def make_model(
    amp_configs: Any = None, *, network: nn.Module | None = None, loss: Any = None, metrics: Any = None, **options: Any
) -> mezzo.Model:
    """Return a model that is prepared with SGD with momentum."""
    model = mezzo.Model(make_network() if network is None else network, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.prepare(optimizer, loss or nn.CrossEntropyLoss(), metrics, amp_configs, **options)
    return model


def batches_of(data: TensorDataset, size: int) -> list[Batch]:
    """Return the data in its order, cut into batches; the last one may be smaller."""
    inputs, labels = (
        data.tensors
    )  # copies, as a loader makes them: sums of views at odd addresses are rounded otherwise
    return [(x.clone(), y.clone()) for x, y in zip(inputs.split(size), labels.split(size), strict=True)]


def updates(count: int, window: int) -> list[bool]:
    """Return after which batches of an epoch the weights change: every `window`-th one, and the last."""
    return [(i + 1) % window == 0 or i == count - 1 for i in range(count)]


def plain_loop(
    network: nn.Module,
    batches: list[Batch],
    *,
    epochs: int = 1,
    window: int = 1,
    max_norm: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """Train in float32 with torch alone; return the loss of every batch."""
    optimizer = optimizer or torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for (inputs, labels), updates_now in zip(batches, updates(len(batches), window), strict=True):
            loss = nn.functional.cross_entropy(network(inputs), labels)
            loss.backward()
            losses.append(loss.item())
            if updates_now:
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(network.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
    return losses


def amp_loop(
    network: nn.Module,
    batches: list[Batch],
    *,
    level: str,
    dtype: str = "float16",
    epochs: int = 1,
    window: int = 1,
    max_norm: float | None = None,
    scaler: amp.GradScaler | None = None,
) -> list[float]:
    """Train with `decorate`, `auto_cast` and a scaler, as the guide's pages do; return the loss of every batch."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    amp.decorate(network, optimizer, level=level, dtype=dtype)
    scaler = scaler or amp.GradScaler(enable=dtype == "float16")
    scaler.protect_batch_norm(network)
    losses = []
    for _ in range(epochs):
        for (inputs, labels), updates_now in zip(batches, updates(len(batches), window), strict=True):
            with amp.auto_cast(level=level, dtype=dtype):
                loss = nn.functional.cross_entropy(network(inputs), labels)
            scaler.scale(loss).backward()
            losses.append(loss.item())
            if updates_now:
                if max_norm is not None:
                    scaler.clip_grad_norm_(optimizer, max_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return losses


class Losses(mezzo.model.callbacks.Callback):
    """Keeps the loss of every batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        self.seen.append(logs["loss"])


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Every entry of the state, masters where there are some, is the same bit for bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name


def mean_over_samples(losses: Iterable[float], batches: list[Batch]) -> float:
    """Return the mean loss of a sample, from those of batches, in float64."""
    sizes = [len(labels) for _, labels in batches]
    return sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
