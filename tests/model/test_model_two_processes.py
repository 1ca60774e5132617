"""`mezzo.Model` in two processes, as torchrun starts them, against one process that sees all of the data."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mezzo
from mezzo.model.metric import Accuracy, Auc
from model_loops import make_data, make_model, make_network

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
LEVELS = {"O0": None, "O1": "O1", "O2": "O2", "bf16": {"level": "O2", "dtype": "bfloat16"}}
TOLERANCE = 1e-6  # float32 weights of about 1: the mean of two halves is not quite the mean of the whole

BEGIN = """
import os, sys
from pathlib import Path
import torch
from torch import nn
import mezzo
from mezzo.model.callbacks import *
from test_model_two_processes import *
rank, out = int(os.environ["RANK"]), Path(sys.argv[1])
"""

MANY = """
def main():
    found = {}
    for name, level in LEVELS.items():
        torch.manual_seed(1000 * rank)  # each process draws other weights
        network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        model = make_model(level, network=network)
        model.fit(make_data(16), batch_size=4, epochs=2, verbose=0)
        found[f"differently seeded {name}"] = weights(model)
    for name, options in RUNS.items():
        model = run(2, **options)
        found[name] = weights(model)
    found["histories"] = histories(2)

    model, data = exact()
    found["evaluation"] = model.evaluate(data, batch_size=2, verbose=0)
    found["one sample"] = model.evaluate(torch.utils.data.Subset(data, [0]), verbose=0)

    model = make_model("O2")
    model.fit(make_data(16), batch_size=2, shuffle=False, verbose=0)
    model.save(out / "shared")
    model.fit(make_data(16), batch_size=2, shuffle=False, verbose=0)
    found["unbroken"] = weights(model)
    torch.manual_seed(5 + rank)
    model = make_model("O2", network=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    model.load(out / "shared")
    model.fit(make_data(16), batch_size=2, shuffle=False, verbose=0)
    found["resumed"] = weights(model)

    model = make_model(metrics=Accuracy())
    model.fit(
        make_data(16), make_data(7), batch_size=4, epochs=2, save_dir=out / f"run{rank}",
        callbacks=[TensorBoard(out / f"tb{rank}", log_freq=1), EarlyStopping("acc", baseline=2.0)],
    )
    found["epochs"] = model.stop_training
    found["predictions"] = model.predict(make_data(5), batch_size=2, stack_outputs=True)[0]
    found["exported"] = str(model.save(out / f"net{rank}", training=False))
    model.summary((2, 6))

    model = make_model("O2")
    for _ in range(3):
        model.train_batch(*make_data(16)[:])
    before = weights(model)
    model.prepare(model.optimizer, nn.CrossEntropyLoss(), amp_configs="O2")
    found["prepared again"] = [bool(torch.equal(a, b)) for a, b in zip(before, weights(model))]

    model = make_model(network=make_network(norm=True))
    model.fit(make_data(16), batch_size=4, verbose=0)
    found["norms"] = model.predict(make_data(5), batch_size=5, stack_outputs=True, verbose=0)[0]

    model = make_model()
    model.fit(make_data(16), batch_size=4, verbose=0)
    torch.manual_seed(100 + rank)
    model.network[2] = nn.Linear(8, 3)  # a new head, drawn in each process
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    model.fit(make_data(16), batch_size=4, verbose=0)
    found["new head"] = weights(model)

    found["stream"] = make_model().evaluate(Stream(), batch_size=2, verbose=0)["samples"]
    torch.save(found, out / f"found{rank}.pt")

main()
"""


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Seven samples without a length."""

    def __iter__(self) -> Any:
        return iter([make_data(7)[i] for i in range(7)])


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"window": 3},
    "clipped": {"max_norm": 0.05},
    "accumulated and clipped": {"window": 2, "max_norm": 0.05},
}


def weights(model: mezzo.Model) -> list[Tensor]:
    """Return the weights in float32, without statistics, which each process has of its own batches."""
    state = model.network.state_dict()
    return [state[name].clone() for name, _ in model.network.named_parameters()]


def run(processes: int, *, window: int = 1, max_norm: float | None = None) -> mezzo.Model:
    """Train so that the batches of all processes together are those of one."""
    model = make_model(max_norm=max_norm)
    model.fit(
        make_data(16), batch_size=4 // processes, epochs=2, shuffle=False, verbose=0, accumulate_grad_batches=window
    )
    return model


def histories(processes: int) -> list[dict[str, float]]:
    """Return the numbers of all epochs of a run with evaluations of 7 samples."""
    model = make_model(metrics=[Accuracy(), Accuracy((1, 2), name="best")])
    return model.fit(make_data(16), make_data(7), batch_size=4 // processes, epochs=2, shuffle=False, verbose=0)


def exact() -> tuple[mezzo.Model, TensorDataset]:
    """Return a model and data whose losses are whole numbers: sums are exact in any order."""
    network = nn.Linear(2, 1, bias=False)
    nn.init.constant_(network.weight, 0.25)
    model = mezzo.Model(network, device="cpu")

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs[:, 0] - labels).square().mean()

    class Half(Auc):
        def update(self, preds: Any, labels: Any) -> None:
            super().update(preds / 8, labels > 3)

    model.prepare(loss=loss, metrics=Half())
    inputs = torch.tensor([[4, 4], [0, 8], [8, 12], [16, 4], [4, 0], [0, 0], [8, 8]], dtype=torch.float32)
    return model, TensorDataset(inputs, torch.tensor([1.0, 5, 2, 4, 4, 0, 3]))


def launch(tmp_path: Path, text: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a script in two processes."""
    script = tmp_path / "script.py"
    script.write_text(BEGIN + text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, tmp_path]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{HERE}{os.pathsep}{HERE.parent}",
    }
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout, env=environment)


class Found:
    """What one launch of many scenarios left."""

    def __init__(self, folder: Path, printed: str) -> None:
        self.folder, self.printed = folder, printed
        self.of = [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in (0, 1)]

    def __getitem__(self, name: str) -> tuple[Any, Any]:
        return self.of[0][name], self.of[1][name]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("two")
    done = launch(folder, MANY)
    assert done.returncode == 0, done.stderr
    return Found(folder, done.stdout)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether weights are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_processes_that_drew_other_weights_train_the_same_ones(level: str, found: Found) -> None:
    first, second = found[f"differently seeded {level}"]
    assert all(value.dtype is torch.float32 for value in first)
    assert same(first, second)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_one_with_twice_the_batch(name: str, found: Found) -> None:
    first, second = found[name]
    alone = weights(run(1, **RUNS[name]))
    assert same(first, second)
    start = [param.detach() for param in make_network().parameters()]
    moved = max((a - b).abs().max().item() for a, b in zip(alone, start, strict=True))
    assert moved > 100 * TOLERANCE
    for mine, theirs in zip(first, alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)


def test_loss_and_metrics_of_an_epoch_are_those_of_all_processes(found: Found) -> None:
    first, second = found["histories"]
    assert first == second
    for mine, theirs in zip(first, histories(1), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)  # of a thousand steps in float32
        for name in ("acc", "best_top1", "best_top2", "eval_acc", "eval_best_top2"):
            assert mine[name] == theirs[name]


def test_an_evaluation_over_both_is_exactly_that_of_one_process(found: Found) -> None:
    model, data = exact()
    alone = model.evaluate(data, batch_size=2, verbose=0)
    inputs, labels = data[:]
    each = (inputs.sum(1) / 4 - labels).double().square()
    assert alone["loss"] == each.mean().item()
    assert found["evaluation"] == (alone, alone)
    assert found["one sample"] == ({"loss": each[0].item(), "auc": 0.0, "samples": 1},) * 2


def test_a_resumed_run_repeats_the_unbroken_one(found: Found) -> None:
    (first, second), (again, too) = found["unbroken"], found["resumed"]
    assert same(first, second)
    assert same(first, again)
    assert same(first, too)


def test_only_the_first_process_prints(found: Found) -> None:
    text = re.sub(r"[\d.]+ ms/step", "T ms/step", found.printed)
    for pattern in (
        r"^Epoch 1/2$", r"^2 steps - loss: [\d.]+ - acc: [\d.]+ - T ms/step$", r"^Eval samples: 7 - loss: ",
        r"^Epoch 1: stopped early, best acc 2\.0000$", r"^Predicted samples: 5$", r"^total 83, trained 83$",
    ):  # fmt: skip
        assert len(re.findall(pattern, text, re.MULTILINE)) == 1, pattern
    assert "Epoch 2/2" not in text


def test_only_the_first_process_writes(found: Found) -> None:
    there = sorted(path.name for path in found.folder.iterdir())
    assert there == ["found0.pt", "found1.pt", "net0.pt2", "run0", "script.py", "shared", "tb0"]
    assert sorted(path.name for path in (found.folder / "run0").iterdir()) == ["0", "final"]
    assert len(list((found.folder / "tb0").iterdir())) == 1
    assert found["epochs"] == (True, True)


def test_every_process_predicts_everything(found: Found) -> None:
    first, second = found["predictions"]
    assert first.shape == (5, 3)
    assert (first == second).all()


def test_every_process_knows_what_was_written(found: Found) -> None:
    assert all(name.endswith(".pt2") for name in found["exported"])


def test_preparing_again_keeps_the_float32_weights(found: Found) -> None:
    assert all(all(is_same) for is_same in found["prepared again"])


def test_predictions_with_batch_norms_are_the_same_in_every_process(found: Found) -> None:
    first, second = found["norms"]
    assert (first == second).all()


def test_samples_of_a_stream_count_once(found: Found) -> None:
    assert found["stream"] == (7, 7)


def test_a_layer_that_was_replaced_is_shared_by_the_next_prepare(found: Found) -> None:
    assert same(*found["new head"])


# One launch each: what fails would take others with it

SCENARIO = """
def main():
    {body}
    torch.save(found, out / f"found{{rank}}.pt")
main()
"""


def scenario(tmp_path: Path, body: str) -> Found:
    done = launch(tmp_path, SCENARIO.format(body=body), timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return Found(tmp_path, done.stdout)


def test_an_odd_number_of_samples_is_shared_out_evenly_in_training(tmp_path: Path) -> None:
    found = scenario(
        tmp_path,
        "model = make_model(); h = model.fit(make_data(5), batch_size=1, epochs=2, shuffle=False, verbose=0); "
        "found = {'steps': [logs['step'] for logs in h], 'weights': weights(model)}",
    )
    assert found["steps"] == ([3, 3], [3, 3])
    assert same(*found["weights"])


def test_a_layer_that_is_never_used_does_not_stop_training(tmp_path: Path) -> None:
    found = scenario(
        tmp_path,
        "network = make_network(); network[0].spare = nn.Linear(2, 2); model = make_model(network=network); "
        "model.fit(make_data(16), batch_size=2, verbose=0); found = {'weights': weights(model)}",
    )
    assert same(*found["weights"])


def test_a_stream_trains_in_all_processes_for_as_many_batches(tmp_path: Path) -> None:
    found = scenario(
        tmp_path,
        "model = make_model(); h = model.fit(Stream(), batch_size=1, verbose=0); "
        "found = {'steps': h[0]['step'], 'weights': weights(model)}",
    )
    assert len(set(found["steps"])) == 1
    assert same(*found["weights"])


def test_one_process_alone_may_predict(tmp_path: Path) -> None:
    found = scenario(
        tmp_path,
        "model = make_model(network=make_network(norm=True)); model.fit(make_data(16), batch_size=4, verbose=0); "
        "found = {'shape': model.predict(make_data(5), batch_size=5, verbose=0)[0][0].shape if rank == 0 else None}",
    )
    assert found["shape"] == ((5, 3), None)


def test_the_failure_of_one_process_ends_all_and_is_told(tmp_path: Path) -> None:
    done = launch(
        tmp_path,
        "class Fails(Callback):\n"
        "    def on_train_batch_begin(self, step, logs):\n"
        "        if rank == 1 and step == 2:\n"
        "            raise ArithmeticError('worker one is out of order')\n"
        "make_model().fit(make_data(16), batch_size=1, epochs=99, verbose=0, save_dir=out / 'run', callbacks=Fails())\n",
        timeout=100,
    )
    assert done.returncode != 0
    assert "ArithmeticError: worker one is out of order" in done.stderr
    assert not (tmp_path / "run").exists()


def test_processes_end_in_peace_with_a_model_at_the_top_of_a_script(tmp_path: Path) -> None:
    """As scripts are written: nobody deletes the model, so the wrapper lives until the interpreter goes down."""
    for _ in range(6):
        done = launch(tmp_path, "model = make_model()\nmodel.evaluate(make_data(16), verbose=0)\n")
        assert done.returncode == 0, done.stderr[-2000:]
