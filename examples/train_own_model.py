"""Train a small model in mixed precision, save it, and show what ran in which dtype.

python examples/train_own_model.py --level O2 --dtype float16
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import mezzo


class Classifier(nn.Module):
    """Two convolutions and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(32, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.body(images).flatten(1))


def main() -> None:
    """Parse, train, save, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O2", choices=["O0", "OD", "O1", "O2"])
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", type=Path, help="where to write the checkpoint")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    labels = torch.randint(4, (64,), device=device)
    images = torch.randn(64, 3, 16, 16, device=device) + labels.view(-1, 1, 1, 1)
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    precision = mezzo.Precision(options.level, options.dtype)
    model, optimizer = precision.prepare(model, optimizer)

    for step in range(options.steps):
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(images), labels)
        precision.backward(loss)
        precision.step(optimizer, max_norm=1.0)
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == options.steps - 1:
            skipped = precision.scaler.skipped_steps if precision.scaler else 0
            print(f"step {step:3d}  loss {loss.item():.4f}  skipped {skipped}")

    if options.save is not None:  # state dicts are float32 under the usual names at every level
        parts = {"model": model, "optimizer": optimizer, "precision": precision}
        torch.save({name: part.state_dict() for name, part in parts.items()}, options.save)
    with precision.autocast(), precision.record() as stats:
        model(images)
    print(stats.table())


if __name__ == "__main__":
    main()
