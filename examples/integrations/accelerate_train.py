"""Train with Accelerate's loop and mezzo's precision: accumulation, clipping, a schedule, a saved state.

python examples/integrations/accelerate_train.py
ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/integrations/accelerate_train.py
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo


def read_options() -> argparse.Namespace:
    """Return level, dtype and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="O2", choices=["O0", "O1", "O2"])
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save", help="folder for the state; it is loaded again")
    return parser.parse_args()


def make_data() -> TensorDataset:
    """Return points on four noisy rings, with the number of the ring."""
    generator = torch.Generator().manual_seed(0)
    ring = torch.randint(4, (1024,), generator=generator)
    angle = 6.2832 * torch.rand(1024, generator=generator)
    radius = ring + 1 + 0.1 * torch.randn(1024, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), ring)


def main() -> None:
    """Train, and show the numbers of the precision."""
    options = read_options()
    try:
        from mezzo.integrations.accelerate import MezzoAccelerator
    except mezzo.MezzoError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    precision = mezzo.Precision(options.level, options.dtype)
    accelerator = MezzoAccelerator(precision=precision, gradient_accumulation_steps=2)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(), batch_size=32, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader) // 2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for epoch in range(options.epochs):
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        mean = accelerator.gather(torch.stack(losses)).mean().item()
        accelerator.print(f"epoch {epoch}  loss {mean:.4f}  {precision.numbers()}")

    if options.save:
        accelerator.save_state(options.save)
        accelerator.wait_for_everyone()
        accelerator.load_state(options.save)
    accelerator.print(
        f"{accelerator.num_processes} process(es), weights are {accelerator.unwrap_model(model)[0].weight.dtype}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
