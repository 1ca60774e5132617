"""The loop of timm's training script with mezzo: scaler, autocast, clipping, average, checkpoint and resume.

python examples/integrations/timm_train.py --model test_resnet --amp-dtype bfloat16 --clip-mode agc --clip-grad 0.01
"""

import argparse
from pathlib import Path

import timm
import torch
from timm.models import load_checkpoint, model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver
from torch import Tensor, nn

from mezzo.integrations.timm import model_ema, setup_amp


def read_options() -> argparse.Namespace:
    """Return options with the names of timm's script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--amp-level", default="O2", choices=["O1", "O2", "O3"])
    parser.add_argument("--amp-dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--clip-grad", type=float)
    parser.add_argument("--clip-mode", default="norm", choices=["norm", "value", "agc"])
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", default="")
    parser.add_argument("--output", type=Path, help="folder for checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def make_batches(device: str) -> list[tuple[Tensor, Tensor]]:
    """Return images whose brightness in one corner tells the class."""
    source = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(16):
        labels = torch.randint(4, (16,), generator=source)
        images = torch.randn(16, 3, 32, 32, generator=source)
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = divmod(label, 2)
            image[:, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += 1.0
        batches.append((images.to(device), labels.to(device)))
    return batches


def main() -> None:
    """Train as timm's script does; lines with mezzo are marked."""
    args = read_options()
    torch.manual_seed(0)
    model = timm.create_model(args.model, num_classes=4).to(args.device)
    optimizer = create_optimizer_v2(model, args.opt, lr=2e-3, weight_decay=0.05)
    amp_autocast, loss_scaler = setup_amp(model, optimizer, args.amp_level, args.amp_dtype)  # mezzo
    start = 0
    if args.resume:
        start = resume_checkpoint(model, args.resume, optimizer, loss_scaler) or 0
    ema = model_ema(model, decay=0.95)  # mezzo
    if args.resume:
        load_checkpoint(ema.module, args.resume, use_ema=True)
    saver = None
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        saver = CheckpointSaver(
            model, optimizer, model_ema=ema, amp_scaler=loss_scaler, checkpoint_dir=str(args.output)
        )
    batches, clip = make_batches(args.device), {"clip_grad": args.clip_grad, "clip_mode": args.clip_mode}
    for epoch in range(start, args.epochs):
        model.train()
        for number, (images, labels) in enumerate(batches, 1):
            need_update = number % args.grad_accum_steps == 0
            with amp_autocast():
                loss = nn.functional.cross_entropy(model(images), labels)
            parameters = model_parameters(model, exclude_head="agc" in args.clip_mode)
            part = loss / args.grad_accum_steps
            loss_scaler(part, optimizer, **clip, parameters=parameters, need_update=need_update)  # mezzo
            if need_update:
                optimizer.zero_grad()
                ema.update(model)
        accuracy = evaluate(ema.module, batches, amp_autocast)
        print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy of the average {accuracy:.3f}")
        if saver is not None:
            saver.save_checkpoint(epoch)


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[tuple[Tensor, Tensor]], amp_autocast: object) -> float:
    """Return the share of images that are classified well."""
    model.eval()
    with amp_autocast():  # type: ignore[operator]
        right = [(model(images).argmax(1) == labels).float().mean() for images, labels in batches]
    return torch.stack(right).mean().item()


if __name__ == "__main__":
    main()
