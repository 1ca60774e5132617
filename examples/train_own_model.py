"""Train a small model of your own in O1 or O2, resume it, and show what ran in which dtype.

python examples/train_own_model.py --level O2 --dtype float16
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from mezzo import amp


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
    if options.level in ("O1", "O2"):
        model, optimizer = amp.decorate(model, optimizer, level=options.level, dtype=options.dtype)
    scaler = amp.GradScaler(enable=options.dtype == "float16" and options.level != "O0")

    for step in range(options.steps):
        with amp.auto_cast(level=options.level, dtype=options.dtype):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}  skipped {scaler.skipped_steps}")

    if options.save is not None:  # float32 under the usual names, whatever the level
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save(state, options.save)
    with amp.auto_cast(level=options.level, dtype=options.dtype), amp.debugging.collect_operator_stats():
        model(images)


if __name__ == "__main__":
    main()
