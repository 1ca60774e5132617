"""Train a small network with Lightning and mezzo: the only line that differs from stock Lightning is `plugins=`.

python examples/integrations/lightning_digits.py --level O2 --dtype bfloat16
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:
    import pytorch_lightning as pl

from mezzo.integrations.lightning import MezzoPrecision


class Classifier(pl.LightningModule):
    """Two hidden layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        output = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(output, batch[1]))
        self.log("val_accuracy", (output.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW: its state and its weights are float32 masters."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_data(samples: int, seed: int) -> TensorDataset:
    """Return images of 8 x 8 with a bright pattern for each of ten classes, and noise."""
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=source)
    return TensorDataset(patterns[labels] + torch.randn(samples, 64, generator=source), labels)


def main() -> None:
    """Train, evaluate, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O2", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--fuse", action="store_true", help="replace parts of the model by fused operators")
    options = parser.parse_args()
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        plugins=[MezzoPrecision(options.level, options.dtype, fuse=options.fuse)],
    )
    model = Classifier()
    trainer.fit(model, DataLoader(make_data(2048, 1), batch_size=32, shuffle=True))
    (result,) = trainer.validate(model, DataLoader(make_data(512, 2), batch_size=128), verbose=False)
    print(f"{options.level} {options.dtype}: loss {result['val_loss']:.4f}, accuracy {result['val_accuracy']:.3f}")
    print(f"weights {model.net[0].weight.dtype}, checkpoint {model.state_dict()['net.0.weight'].dtype}")


if __name__ == "__main__":
    main()
