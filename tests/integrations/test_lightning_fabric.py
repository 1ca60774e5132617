"""`MezzoPrecision` under Fabric, and with the distribution `pytorch_lightning`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo import amp, optim

pytest.importorskip("lightning_utilities")  # of both distributions

from lightning_nets import IGNORED, Classifier, Fabric, make_batches, same_state

from mezzo.integrations.lightning import MezzoPrecision

pytestmark = [pytest.mark.integrations, *(pytest.mark.filterwarnings(each) for each in IGNORED)]


def make_fabric(*arguments: Any, **options: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1, plugins=[MezzoPrecision(*arguments, **options)])


def train(fabric: Any, net: Any, optimizer: Any, batches: Any, max_norm: float | None = None) -> list[Tensor]:
    norms = []
    for inputs, labels in batches:
        output = net(inputs)
        assert output.dtype is torch.float32
        fabric.backward(nn.functional.cross_entropy(output, labels))
        if max_norm is not None:
            norms.append(fabric.clip_gradients(net, optimizer, max_norm=max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def train_by_hand(net: nn.Module, precision: mezzo.Precision) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    precision.prepare(net, optimizer)
    for inputs, labels in make_batches():
        with precision.autocast():
            output = net(inputs)
        precision.backward(nn.functional.cross_entropy(output.float(), labels))
        precision.step(optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fabric_gives_the_bits_of_a_loop_by_hand(level, dtype):
    trained, by_hand = Classifier().net, Classifier().net
    fabric = make_fabric(level, dtype)
    net, optimizer = fabric.setup(trained, torch.optim.AdamW(trained.parameters(), lr=1e-2))
    train(fabric, net, optimizer, make_batches())
    train_by_hand(by_hand, mezzo.Precision(level, dtype))
    assert same_state(trained, by_hand)
    assert trained[0].weight.dtype is getattr(torch, dtype)


def test_clipping_sees_true_gradients():
    batch = make_batches(1)
    plain = Classifier().net.double()
    nn.functional.cross_entropy(plain(batch[0][0].double()), batch[0][1]).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    net = Classifier().net
    fabric = make_fabric("O2", "float16")
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    (norm,) = train(fabric, net, optimizer, batch, max_norm=0.1)
    assert norm.item() == pytest.approx(expected.item(), rel=5e-3)  # float16 forward and backward pass
    before = torch.cat([p.flatten() for p in Classifier().net.parameters()])
    after = torch.cat([p.flatten() for p in amp.master_parameters(net.module)])
    assert (after - before).norm().item() == pytest.approx(0.1, rel=2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_saved_run_resumes_bit_exactly(tmp_path, dtype):
    def start() -> tuple[Any, dict[str, Any]]:
        scaler = amp.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=3) if dtype == "float16" else None
        fabric = make_fabric("O2", dtype, scaler=scaler)
        module = Classifier().net
        net, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
        return fabric, {"model": net, "optimizer": optimizer, "precision": fabric.strategy.precision}

    batches = make_batches(10)
    fabric, whole = start()
    train(fabric, whole["model"], whole["optimizer"], batches[:5])
    fabric.save(tmp_path / "five.ckpt", whole)
    train(fabric, whole["model"], whole["optimizer"], batches[5:])
    fabric, resumed = start()
    fabric.load(tmp_path / "five.ckpt", resumed)
    train(fabric, resumed["model"], resumed["optimizer"], batches[5:])
    assert same_state(resumed["model"], whole["model"])
    assert resumed["precision"].state_dict() == whole["precision"].state_dict()
    weight = resumed["model"].module[0].weight
    assert not torch.equal(optim.master_of(weight), weight.float())


def test_two_optimizers_of_one_backward_pass_share_the_scale():
    def scaler() -> amp.GradScaler:
        return amp.GradScaler(init_loss_scaling=4.0, incr_every_n_steps=1)  # grows after every step

    def optimizers_of(net: nn.Sequential) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(half.parameters(), lr=1e-2) for half in (net[:2], net[2:])]

    trained, by_hand = Classifier().net, Classifier().net
    fabric = make_fabric("O2", scaler=scaler())
    net, *optimizers = fabric.setup(trained, *optimizers_of(trained))
    precision, others = mezzo.Precision("O2", scaler=scaler()), optimizers_of(by_hand)
    precision.prepare(by_hand, others)
    for inputs, labels in make_batches():
        fabric.backward(nn.functional.cross_entropy(net(inputs), labels))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with precision.autocast():
            output = by_hand(inputs)
        precision.backward(nn.functional.cross_entropy(output.float(), labels))
        precision.step(*others)
        for optimizer in others:
            optimizer.zero_grad()
    assert same_state(trained, by_hand)
    assert fabric.strategy.precision.state_dict()["scale"] == 4.0 * 2**8


def test_clipping_again_without_a_step_is_refused():
    net = Classifier().net
    fabric = make_fabric("O2")
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1e-2))

    def clip(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        fabric.backward(nn.functional.cross_entropy(net(batch[0]), batch[1]))
        fabric.clip_gradients(net, optimizer, max_norm=1.0, error_if_nonfinite=False)

    first, second = make_batches(2)
    clip(first)
    optimizer.zero_grad()  # and no step: the next gradients would be taken for unscaled ones
    with pytest.raises(RuntimeError, match="already called on this optimizer since the last update"):
        clip(second)


def test_an_overflow_skips_the_step():
    net = Classifier().net
    before = {name: value.clone() for name, value in net.state_dict().items()}
    scaler = amp.GradScaler(init_loss_scaling=2.0**60, decr_every_n_nan_or_inf=1)
    fabric = make_fabric("O2", scaler=scaler)
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    train(fabric, net, optimizer, make_batches(1))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert scaler.get_scale() == 2.0**59


def test_a_closure_is_run_before_the_step():
    trained, by_hand = Classifier().net, Classifier().net
    fabric = make_fabric("O2")
    net, optimizer = fabric.setup(trained, torch.optim.AdamW(trained.parameters(), lr=1e-2))
    for inputs, labels in make_batches():

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), labels)
            fabric.backward(loss)
            return loss

        assert optimizer.step(closure).requires_grad
    train_by_hand(by_hand, mezzo.Precision("O2"))
    assert same_state(trained, by_hand)


def test_a_lightning_module_trains_under_fabric():
    module = Classifier()
    fabric = make_fabric("O2", "bfloat16")
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    before = module.net[0].weight.detach().clone()
    for batch in make_batches(2):
        with fabric.autocast():  # without a wrapper, Fabric itself opens no region around the methods of a module
            loss = model.training_step(batch, 0)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(before, module.net[0].weight)


OTHER_DISTRIBUTION = """
import warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
import torch
from mezzo.integrations.lightning import MezzoPrecision

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

import sys
assert "lightning.pytorch" not in sys.modules
plugin = MezzoPrecision("O2")
assert isinstance(plugin, pl.plugins.MixedPrecision)
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, plugins=[plugin])
model = Net()
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
assert model.net.weight.dtype is torch.float16
import lightning_fabric
fabric = lightning_fabric.Fabric(accelerator="cpu", plugins=[MezzoPrecision("O2")])
net = torch.nn.Linear(4, 2)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
fabric.backward(net(torch.ones(2, 4)).square().mean())
optimizer.step()
print("trained", trainer.global_step)
"""


def test_the_plugin_follows_the_distribution_that_is_imported():
    pytest.importorskip("pytorch_lightning")
    done = subprocess.run([sys.executable, "-c", OTHER_DISTRIBUTION], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["trained 4"], done.stderr[-2000:]


TWO_PROCESSES = """
import sys, torch
from pathlib import Path
from lightning_nets import Classifier, Fabric, make_batches
from mezzo.integrations.lightning import MezzoPrecision

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[MezzoPrecision("O2")])
fabric.launch()
module = Classifier().net
net, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
for inputs, labels in make_batches()[fabric.global_rank :: 2]:
    fabric.backward(torch.nn.functional.cross_entropy(net(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
torch.save(module.state_dict(), Path(sys.argv[1]) / f"{fabric.global_rank}.pt")
"""


@pytest.mark.filterwarnings("ignore")
def test_two_processes_of_fabric_agree(tmp_path):
    (tmp_path / "run.py").write_text(TWO_PROCESSES)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name in ("0.weight", "3.weight", "3.bias"):  # running statistics differ: other batches
        assert torch.equal(first[name], second[name]), name
        assert first[name].dtype is torch.float32
        assert not torch.equal(first[name], Classifier().net.state_dict()[name])
