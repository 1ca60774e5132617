"""Compiled steps of whole networks follow eager steps: loss curve, loss scale, number of skipped steps."""

from typing import NamedTuple

import pytest
import torch

import mezzo
from graph_backends import skip_without_compiler
from mezzo.vision.models import create_model, list_models, model_info
from mezzo.vision.models.losses import HeadLosses, OhemCrossEntropyLoss

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:(?s).*Online softmax is disabled:UserWarning"
    ),  # advice of Inductor in torch 2.11
]
CLASSES = 5


class Curve(NamedTuple):
    losses: list[float]
    scale: float
    skipped: int


def train(
    name: str,
    dtype: str,
    device: str,
    shape: tuple[int, int, int],
    steps: int,
    backend: str,
    first_scale: float = 2.0**15,
) -> Curve:
    """Train on two fixed batches of noise with labels that depend on the brightness, so that it can be learnt."""
    count, height, width = shape
    torch.manual_seed(0)
    net = create_model(name, num_classes=CLASSES).to(device).to(memory_format=torch.channels_last).train()
    images = torch.randn(2, count, 3, height, width, device=device)
    if model_info(name).task == "segmentation":
        heads = model_info(name).train_outputs
        loss_fn = HeadLosses(OhemCrossEntropyLoss(min_kept=count * height * width // 16), [1.0] * heads)
        labels = (images.mean(dim=2) * 2 + CLASSES / 2).clamp(0, CLASSES - 1).long()
    else:
        loss_fn = torch.nn.CrossEntropyLoss()
        labels = torch.arange(2 * count, device=device).view(2, count) % CLASSES
    scaler = mezzo.amp.GradScaler(init_loss_scaling=first_scale) if dtype == "float16" else None
    precision = mezzo.Precision("O2", dtype, scaler=scaler)
    net, optimizer = precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9))
    step = precision.compile(net, loss_fn, optimizer, backend=backend)
    losses = []
    for number in range(steps):
        x = images[number % 2].to(memory_format=torch.channels_last)
        losses.append(step(x, labels[number % 2]).item())
    if precision.scaler is None:
        return Curve(losses, 1.0, 0)
    precision.scaler.flush()
    return Curve(losses, precision.scaler.get_scale(), precision.scaler.skipped_steps)


def check(compiled: Curve, eager: Curve) -> None:
    steps = len(eager.losses)
    # The first loss has no update before it: units of 2^-8 of logits, averaged over all pixels.
    assert compiled.losses[0] == pytest.approx(eager.losses[0], rel=5e-3)
    # Later ones: other roundings grow with each update; a step that trains nothing would stay at the first loss.
    assert compiled.losses == pytest.approx(eager.losses, rel=0.1)
    assert sum(eager.losses[-4:]) < 0.97 * sum(eager.losses[:4]), "the eager steps learn nothing: no comparison"
    assert abs(compiled.skipped - eager.skipped) <= max(2, steps // 10)
    assert 0.25 <= compiled.scale / eager.scale <= 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pp_liteseg_on_a_cpu(dtype: str) -> None:
    skip_without_compiler()
    arguments = "pp_liteseg_stdc1", dtype, "cpu", (2, 128, 256), 10
    # With the usual first scale the first ten steps of both are skipped.
    check(*(train(*arguments, backend, first_scale=2.0**6) for backend in ("inductor", "eager")))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", list_models())
def test_networks_at_the_size_of_their_recipes(name: str, dtype: str) -> None:
    shape = (4, *model_info(name).input_size[-2:])
    curves = [train(name, dtype, "cuda", shape, 30, backend) for backend in ("inductor", "eager")]
    check(*curves)
