"""A small LightningModule, its data, and the same training written by hand with `mezzo.Precision`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import mezzo

try:
    import lightning as L
    from lightning import Fabric
except ModuleNotFoundError:  # the other distribution
    import pytorch_lightning as L
    from lightning_fabric import Fabric

__all__ = ["Fabric", "L"]

FEATURES, CLASSES, BATCH = 8, 4, 4

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

#: Warnings of Lightning about small data and about torch's newest release.
IGNORED = (
    f"ignore::{Fabric.__module__.rpartition('.')[0]}.utilities.warnings.PossibleUserWarning",
    "ignore:.*LeafSpec:FutureWarning",
)


class Classifier(L.LightningModule):
    """Linear, BatchNorm, ReLU, Linear; always the same weights."""

    def __init__(self, optimizer: str = "AdamW", lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.kind, self.lr = optimizer, lr
        self.losses: list[float] = []
        self.output_dtype: torch.dtype | None = None

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        output = self.net(batch[0])
        self.output_dtype = output.dtype
        return nn.functional.cross_entropy(output, batch[1])

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = getattr(torch.optim, self.kind)(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def make_batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return inputs with labels, always the same."""
    source = torch.Generator().manual_seed(7)
    return [
        (torch.randn(BATCH, FEATURES, generator=source), torch.randint(CLASSES, (BATCH,), generator=source))
        for _ in range(count)
    ]


def make_loader(batches: Sequence[tuple[Tensor, Tensor]] | None = None) -> DataLoader[Any]:
    batches = make_batches() if batches is None else batches
    inputs, labels = (torch.cat(column) for column in zip(*batches, strict=True))
    return DataLoader(TensorDataset(inputs, labels), batch_size=BATCH)


def train_by_hand(
    model: Classifier,
    precision: mezzo.Precision,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    max_norm: float | None = None,
    accumulate: int = 1,
) -> Optimizer:
    """Train with `mezzo.Precision` in a plain loop, as `Classifier` trains under a Trainer."""
    (optimizer,), (config,) = model.configure_optimizers()
    precision.prepare(model, optimizer)
    model.train()
    for number, batch in enumerate(batches, 1):
        with precision.autocast():
            loss = model.training_step(batch, number)
        precision.backward(loss / accumulate)
        if number % accumulate == 0:
            precision.step(optimizer, max_norm=max_norm)
            optimizer.zero_grad()
            config["scheduler"].step()
    return optimizer


def same_state(a: nn.Module, b: nn.Module) -> bool:
    """Whether all weights (by their float32 masters) and buffers have the same bits."""
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
