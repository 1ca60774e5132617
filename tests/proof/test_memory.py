"""Predicted memory beside that of real steps, which torch's profiler counts by the events of the allocator."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import SGD, AdamW, RMSprop
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from mezzo.amp import _cpu
from mezzo.cli import run
from mezzo.fp8 import copies_of
from mezzo.optim import stored_master
from mezzo.precision import Precision
from mezzo.proof import MemoryPredictionError, advise, predict_fit, predict_memory
from mezzo.trial import Workload

WORDS, WIDTH, ROWS, LENGTH = 256, 64, 8, 64

OPAQUE = 0.05
"""Share of the peak that operators allocate inside, where no mode sees it: 75 KiB of attention in bfloat16, of 1.9 MiB."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.into(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*split.unbind(0), is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("unused", torch.zeros(10))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), following.flatten())


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(WORDS, (ROWS, LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def peak_of_events(passes: Callable[[], None]) -> int:
    gc.collect()  # memory of older tests must not be freed in between
    with profile(profile_memory=True) as profiled:
        passes()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # once per process, in torch 2.11
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(
    ("level", "dtype"), [("O0", "bfloat16"), ("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")]
)
def test_the_predicted_peak_is_that_of_a_real_step(
    level: str, dtype: str, is_checkpointed: bool, batch: tuple[Tensor, Tensor]
) -> None:
    predicted = predict_memory(
        Net(is_checkpointed), batch[0], batch[1], loss_of, precision=Precision(level, dtype), device="cpu"
    )
    model, precision = Net(is_checkpointed), Precision(level, dtype)
    optimizer = AdamW(model.parameters())
    precision.prepare(model, optimizer)

    def passes() -> None:
        with precision.autocast():
            loss = loss_of(model(batch[0]), batch[1])
        loss.backward()

    passes()
    optimizer.step()
    optimizer.zero_grad()
    assert predicted.forward_backward == pytest.approx(peak_of_events(passes), rel=OPAQUE)
    grads = sum(param.grad.numel() * param.grad.itemsize for param in model.parameters())
    masters = [stored_master(param) for param in model.parameters()]
    kept = sum(t.numel() * t.itemsize for t in (*model.parameters(), *model.buffers()))
    assert predicted.gradients == grads
    assert predicted.weights == kept
    assert predicted.masters == sum(master.numel() * 4 for master in masters if master is not None)
    state = [value for each in optimizer.state.values() for key, value in each.items() if key != "step"]
    assert predicted.optimizer_state == sum(value.numel() * value.itemsize for value in state)


def test_fp8_copies_of_weights_are_counted(batch: tuple[Tensor, Tensor]) -> None:
    def precision() -> Precision:
        return Precision("O3", "bfloat16", fp8={"emulate": True, "min_width": 0, "min_size": 0})

    predicted = predict_memory(Net(), *batch, loss_of, precision=precision(), device="cpu")
    model, rule = Net(), precision()
    rule.prepare(model, SGD(model.parameters(), lr=0.1))
    with rule.autocast():
        loss_of(model(batch[0]), batch[1]).backward()
    copies = [found for param in model.parameters() if (found := copies_of(param)) is not None]
    assert len(copies) == 4 * 4
    assert predicted.fp8_copies == sum(each.values.nbytes + each.transposed.nbytes for each in copies)


def test_checkpointing_and_half_save_activations(batch: tuple[Tensor, Tensor]) -> None:
    def activations(is_checkpointed: bool, **options: Any) -> int:
        return predict_memory(Net(is_checkpointed), *batch, loss_of, device="cpu", **options).activations

    half = {"precision": Precision("O2", "bfloat16"), "on_gpu": True}
    assert activations(True) < activations(False) / 2
    assert 0.4 * activations(False) < activations(False, **half) < 0.75 * activations(False)


def test_masters_and_state_are_counted_by_options(batch: tuple[Tensor, Tensor]) -> None:
    def predict(optimizer: Any = "adamw", **options: Any) -> Any:
        precision = Precision("O2", "bfloat16", **options)
        return predict_memory(Net(), *batch, loss_of, precision=precision, optimizer=optimizer, device="cpu")

    elements = sum(param.numel() for param in Net().parameters())
    assert predict().masters == 4 * elements
    assert predict(master_weight="compact").masters == 2 * elements
    assert predict(master_weight=False).masters == 0
    assert predict().optimizer_state == 8 * elements
    assert predict(optimizer_state="bfloat16").optimizer_state == 4 * elements
    assert predict("sgd").optimizer_state == 0
    assert predict("momentum").optimizer_state == 4 * elements
    params = list(Net().parameters())
    assert predict(SGD(params, lr=0.1, momentum=0.9)).optimizer_state == 4 * elements
    assert predict(AdamW(params, amsgrad=True)).optimizer_state == 12 * elements
    with pytest.raises(ValueError, match="RMSprop"):
        predict(RMSprop(params))
    with pytest.raises(ValueError, match="lion"):
        predict("lion")


def test_the_model_is_unchanged_and_may_have_no_memory(batch: tuple[Tensor, Tensor]) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    predicted = predict_memory(model, *batch, loss_of, precision=Precision("O2"), device="cpu")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    with torch.device("meta"):
        empty = Net()
    assert predict_memory(empty, *batch, loss_of, precision=Precision("O2"), device="cpu") == predicted


def test_frozen_weights_have_no_gradients_and_no_state(batch: tuple[Tensor, Tensor]) -> None:
    model = Net()
    model.embed.requires_grad_(False)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    predicted = predict_memory(model, *batch, loss_of, device="cpu")
    assert (predicted.gradients, predicted.optimizer_state) == (4 * trained, 8 * trained)


class Reader(nn.Module):
    """Decides by a number, which a tensor without memory does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum().item() > 0 else x


def test_a_model_that_reads_numbers_gives_a_reason() -> None:
    with pytest.raises(MemoryPredictionError, match="without numbers"):
        predict_memory(Reader(), torch.ones(2, 4), device="cpu")
    report = predict_fit(Workload(Reader(), torch.ones(2, 4), None, lambda out, _: out.sum()), level="O2")
    assert "without numbers" in str(report)
    assert not report.level_fits


def test_fits_leaves_room_for_the_context_of_a_gpu(batch: tuple[Tensor, Tensor]) -> None:
    predicted = predict_memory(Net(), *batch, loss_of, device="cpu")
    assert predicted.fits(predicted.peak * 1.05, is_cuda=False)
    assert not predicted.fits(predicted.peak * 0.99, is_cuda=False)
    assert not predicted.fits(predicted.peak * 1.05, is_cuda=True)


def test_the_doctor_shows_the_prediction(batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    # Measured by default: a busy machine may seem to have no half units, and float32 products need more memory.
    monkeypatch.setattr(_cpu, "has_half_units", lambda dtype: True)
    report = advise(Net(), *batch, loss_of, level="O2", dtype="bfloat16", steps=1, device="cpu", optimizer="momentum")
    assert "predicted memory of a step with momentum" in str(report)
    data = report.to_dict()["memory"]
    assert [each["fits"] for each in data["predictions"]] == [True] * 4
    assert data["predictions"][0]["peak"] > data["predictions"][1]["peak"] > data["predictions"][3]["peak"]


def test_sizes_of_a_small_model_are_not_rounded_to_zero() -> None:
    inputs, targets = torch.randn(4, 16), torch.randn(4, 16)
    report = advise(nn.Linear(16, 16), inputs, targets, nn.functional.mse_loss, level="O2", steps=1, device="cpu")
    row = next(line for line in str(report.memory).splitlines() if line.startswith("| float32 "))
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["1.1 KiB", "0"]  # 272 weights of 4 bytes, no masters


CODE = """
import torch
from torch import nn

def build(batch_size=4):
    model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 8))
    return model, torch.randn(batch_size, 512), torch.randn(batch_size, 8), nn.functional.mse_loss
"""


def test_the_command_answers_for_another_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(CODE)
    name = f"{tmp_path / 'net.py'}:build"
    assert run(["doctor", name, "--level", "O2", "--memory", "1"]) == 0
    assert "fits" in capsys.readouterr().out
    assert run(["doctor", name, "--level", "O2", "--memory", "0.5", "--batch-size", "65536", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [each["fits"] for each in data["predictions"]] == [False] * 4
    assert data["memory_bytes"] == 2**29


@pytest.mark.parametrize(
    "options", [["--memory", "0"], ["--memory", "inf"], ["--memory", "4", "--measure"], ["--optimizer", "lion"]]
)
def test_bad_options_are_refused(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(CODE)
    assert run(["doctor", f"{tmp_path / 'net.py'}:build", *options]) == 2
    assert options[0] in capsys.readouterr().err


def test_a_batch_may_be_larger_than_this_machines_memory(capsys: pytest.CaptureFixture[str]) -> None:
    batch = 10**8
    assert run(["doctor", "mobilenet_v3_small", "--memory", "24", "--batch-size", str(batch), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["predictions"]
    assert all(each["batch"] > batch * 3 * 4 for each in found)


class Tables(nn.Module):
    """Tensors that are neither parameters nor buffers, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = torch.randn(8)
        self.levels = [self.table, torch.randn(4, 8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table + self.levels[1].sum(0)


def test_plain_tensors_of_a_model_need_no_numbers() -> None:
    net = Tables()
    before = net.table.clone()
    found = predict_memory(net, torch.randn(16, 8), device="cpu")
    assert found.weights == 4 * 72
    assert torch.equal(net.table, before)
    assert net.levels[0] is net.table


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"model": 3}, "int"),
        ({"precision": "O2"}, "Precision"),
        ({"optimizer": RMSprop([torch.zeros(1)])}, "optimizer=RMSprop:"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(given: dict[str, Any], word: str) -> None:
    with pytest.raises((TypeError, ValueError), match=word) as caught:
        predict_memory(**{"model": nn.Linear(2, 2), "inputs": torch.ones(1, 2), "device": "cpu", **given})
    assert "\n" not in str(caught.value)
