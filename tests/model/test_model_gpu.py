"""`mezzo.Model` on a GPU: near the CPU's numbers, without a wait, and back on disk for any machine."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import mezzo
from mezzo.export import load_program
from mezzo.model.callbacks import Callback
from mezzo.model.metric import Accuracy
from model_loops import FEATURES, Logs, Losses, assert_same_weights, make_data, make_network
from no_waiting import no_waiting

pytestmark = pytest.mark.gpu
LEVELS: list[Any] = [None, "O1", "O2", {"level": "O2", "dtype": "bfloat16"}]


def make(level: Any, device: str = "auto") -> mezzo.Model:
    """Return a model that is prepared with AdamW, whose step is fused on a GPU."""
    model = mezzo.Model(make_network(norm=True), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.prepare(optimizer, nn.CrossEntropyLoss(), Accuracy(), level, max_norm=1.0)
    return model


def losses_of(model: mezzo.Model, **options: Any) -> list[float]:
    """Return the losses of three epochs."""
    losses = Losses()
    model.fit(make_data(), batch_size=7, epochs=3, shuffle=False, verbose=0, callbacks=losses, **options)
    return losses.seen


@pytest.mark.parametrize("level", LEVELS)
def test_a_gpu_trains_as_a_cpu_does(level: Any) -> None:
    model = make(level)
    assert model.world.device.type == "cuda"
    assert all(param.is_cuda for param in model.parameters())
    # 8 bits of bfloat16, or 11 of float16, in values of about 1 through six steps; float32 sums in another order
    tolerance = 1e-4 if level is None else 3e-2
    assert losses_of(model) == pytest.approx(losses_of(make(None, "cpu")), abs=tolerance)
    result = model.evaluate(make_data(), batch_size=4, verbose=0)
    (outputs,) = model.predict(make_data(), batch_size=4, stack_outputs=True, verbose=0)
    right = (outputs.argmax(1) == make_data().tensors[1].numpy()).mean()
    assert result["acc"] == pytest.approx(right)
    assert outputs.dtype == np.float32


class NoWaits(Callback):
    """Lets torch raise where the host waits for the device, from the second batch to the ninth."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()

    def on_train_batch_begin(self, step: int, logs: Logs) -> None:
        if step == 1:
            self._stack.enter_context(no_waiting())

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        if step == 8:
            self._stack.close()

    def close(self) -> None:
        self._stack.close()


@pytest.mark.parametrize("level", LEVELS)
def test_no_batch_waits_for_the_gpu(level: Any, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = torch.randn(20 * 4, FEATURES)
    data = TensorDataset(inputs, torch.randint(3, (len(inputs),)))
    make(level).fit(data, batch_size=4, verbose=2, log_freq=100, callbacks=NoWaits())
    with pytest.raises(RuntimeError, match="synchronizing"):  # it would have been seen
        make(level).fit(data, batch_size=4, verbose=2, log_freq=1, callbacks=NoWaits())


@pytest.mark.parametrize("level", LEVELS)
def test_training_goes_on_from_the_disk_bit_for_bit(level: Any, tmp_path: Path) -> None:
    model, other = make(level), make(level)
    losses_of(model)
    model.save(tmp_path / "ck")
    expected = losses_of(model)
    other.load(tmp_path / "ck")
    assert losses_of(other) == expected
    assert_same_weights(other.network, model.network)
    plain = mezzo.Model(make_network(norm=True), device="cpu")  # without a GPU too
    plain.load(tmp_path / "ck")
    other.load(tmp_path / "ck")
    for name, value in plain.network.state_dict().items():
        assert torch.equal(value, other.network.state_dict()[name].cpu()), name


@pytest.mark.parametrize("level", LEVELS)
def test_the_forward_is_exported_for_any_machine(level: Any, tmp_path: Path) -> None:
    model = make(level)
    losses_of(model)
    path = model.save(tmp_path / "net", training=False)
    rows = make_data().tensors[0]
    plain = make_network(norm=True)
    plain.load_state_dict(model.network.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(load_program(path).module()(rows), plain.eval()(rows), rtol=1e-5, atol=1e-6)
    assert all(param.is_cuda for param in model.parameters())


def test_a_summary_runs_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert make("O2").summary((2, FEATURES)) == {"total_params": 99, "trainable_params": 99}
    assert "[2, 3]" in capsys.readouterr().out
