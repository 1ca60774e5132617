"""`MezzoPrecision` on a GPU: `pytest -m "integrations and gpu" tests/integrations`."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mezzo
from mezzo import optim

pytest.importorskip("lightning_utilities")

from lightning_nets import IGNORED, QUIET, Classifier, L, make_batches, make_loader, train_by_hand

from mezzo.integrations.lightning import MezzoPrecision

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.gpu,
    *(pytest.mark.filterwarnings(each) for each in IGNORED),
]
GPU = {**QUIET, "accelerator": "gpu", "max_epochs": 1}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fit_trains_as_a_loop_by_hand(level, dtype):
    trained, by_hand = Classifier(), Classifier()
    trainer = L.Trainer(**GPU, plugins=[MezzoPrecision(level, dtype)], gradient_clip_val=0.1)
    trainer.fit(trained, make_loader())
    batches = [(inputs.cuda(), labels.cuda()) for inputs, labels in make_batches()]
    train_by_hand(by_hand.cuda(), mezzo.Precision(level, dtype), batches, max_norm=0.1)
    # the same kernels on the same numbers; sums of a few atomics may differ in their last bits
    assert trained.losses == pytest.approx(by_hand.losses, rel=1e-3)
    assert trained.net[0].weight.dtype is getattr(torch, dtype)
    assert optim.master_of(trained.net[0].weight).dtype is torch.float32


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8"
)
def test_o3_is_prepared_on_the_device():
    class Wide(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

    samples = TensorDataset(torch.randn(128, 256), torch.zeros(128, dtype=torch.long))
    model = Wide()
    plugin = MezzoPrecision("O3", "bfloat16", fp8={"min_width": 0, "min_size": 0})
    with plugin.mezzo.record() as stats:
        L.Trainer(**GPU, plugins=[plugin]).fit(model, DataLoader(samples, batch_size=64))
    assert "fp8_linear" in stats.table()
