"""What all metrics of the high-level API share: order, splits, devices, processes, and that nothing waits."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from two_ranks import run_two_ranks

from mezzo.amp import auto_cast
from mezzo.model.metric import Accuracy, Auc, MeanIoU, Metric, Precision, Recall
from no_waiting import no_waiting

CLASSES = 4
MAKERS = {
    "accuracy": lambda: Accuracy((1, 2)),
    "precision": Precision,
    "recall": Recall,
    "auc": Auc,
    "auc_pr": lambda: Auc("PR"),
    "miou": lambda: MeanIoU(CLASSES),
}
EVERY = pytest.mark.parametrize("kind", MAKERS)
# Whatever makes the host wait for the device ends in one of these.
WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "bincount", "unique", "masked_select")


def batch(kind: str, samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and labels of so many samples."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "accuracy":
        scores = torch.rand(samples, CLASSES, generator=generator)
        return scores, torch.randint(CLASSES, (samples,), generator=generator)
    if kind == "miou":
        logits = torch.rand(samples, CLASSES, 3, 2, generator=generator)
        labels = torch.randint(CLASSES + 1, (samples, 3, 2), generator=generator)
        return logits, torch.where(labels == CLASSES, 255, labels)
    return torch.rand(samples, generator=generator), torch.randint(2, (samples,), generator=generator)


def count(metric: Metric, pred: torch.Tensor, label: torch.Tensor) -> object:
    """Count a batch as the Model does."""
    computed = metric.compute(pred, label)
    return metric.update(*(computed if isinstance(computed, tuple) else (computed,)))


class NothingWaits(TorchDispatchMode):
    """Raises where an operator needs a value on the host, or a copy on another device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in WAITING, f"{name} waits for the device"
        out = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            assert out.device == args[-1 if name == "copy_" else 0].device, "a copy to another device waits"
        return out


@EVERY
@given(seed=st.integers(0, 2**31), samples=st.integers(1, 40), parts=st.integers(1, 5))
def test_order_and_split_of_the_batches_do_not_matter(kind, seed, samples, parts):
    pred, label = batch(kind, samples, seed)
    whole, pieces = MAKERS[kind](), MAKERS[kind]()
    count(whole, pred, label)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    for some in order.tensor_split(parts):
        count(pieces, pred[some], label[some])
    assert whole.accumulate() == pieces.accumulate()


@EVERY
def test_update_reads_no_value(kind, monkeypatch):
    def refuse(*_):
        raise AssertionError("the host waits for the device")

    metric = MAKERS[kind]()
    with monkeypatch.context() as patch:
        for reader in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(torch.Tensor, reader, refuse)
        with NothingWaits():
            for seed in range(2):
                count(metric, *batch(kind, 8, seed))
    with pytest.raises(AssertionError, match="_local_scalar_dense waits for the device"), NothingWaits():
        torch.ones(1).item()


@EVERY
def test_update_asks_the_device_for_nothing(kind):
    metric = MAKERS[kind]()
    count(metric, *(t.to("meta") for t in batch(kind, 8)))  # whatever reads a value raises there


@pytest.mark.gpu
@EVERY
def test_update_does_not_wait_for_cuda(kind):
    metric, on_cpu = MAKERS[kind](), MAKERS[kind]()
    pred, label = (t.cuda() for t in batch(kind, 8))
    with no_waiting():
        count(metric, pred, label)
    count(on_cpu, pred.cpu(), label.cpu())
    assert metric.accumulate() == on_cpu.accumulate()


@EVERY
def test_nothing_counted_is_zero_and_reset_starts_again(kind):
    metric, fresh = MAKERS[kind](), MAKERS[kind]()
    zero = [0.0, 0.0] if kind == "accuracy" else 0.0
    assert metric.accumulate() == zero
    count(metric, *batch(kind, 0))
    assert metric.accumulate() == zero
    count(metric, *batch(kind, 30, seed=1))
    metric.reduce()
    metric.reset()
    assert metric.accumulate() == zero
    for one in (metric, fresh):
        count(one, *batch(kind, 20, seed=2))
    assert metric.accumulate() == fresh.accumulate() != zero


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_predictions_count_as_their_float32_values(kind, dtype):
    pred, label = batch(kind, 50)
    # Permutations of 1 to 4, exact in half: equal scores have no order.
    pred = pred.argsort(1).argsort(1) + 1.0 if pred.dim() > 1 else pred.to(dtype).float()
    half, single = MAKERS[kind](), MAKERS[kind]()
    count(half, pred.to(dtype), label)
    count(single, pred, label)
    assert half.accumulate() == single.accumulate()


@EVERY
def test_a_region_of_mixed_precision_changes_nothing(kind):
    pred, label = batch(kind, 50)
    pred = 0.5 + pred * 1e-3  # float16 knows three numbers here
    outside, inside = MAKERS[kind](), MAKERS[kind]()
    count(outside, pred, label)
    with auto_cast(level="O2"):
        count(inside, pred, label)
    assert inside.accumulate() == outside.accumulate()


@EVERY
def test_batches_counted_in_and_out_of_inference_mode_add_up(kind):
    mixed, plain = MAKERS[kind](), MAKERS[kind]()
    with torch.inference_mode():
        count(mixed, *batch(kind, 9, 1))
    count(mixed, *batch(kind, 9, 2))
    for seed in (1, 2):
        count(plain, *batch(kind, 9, seed))
    assert mixed.accumulate() == plain.accumulate()


@EVERY
def test_outputs_with_a_gradient_and_arrays_are_taken(kind):
    pred, label = batch(kind, 9)
    tensors, arrays = MAKERS[kind](), MAKERS[kind]()
    count(tensors, pred.requires_grad_() * 1, label)
    frozen = [t.detach().numpy() for t in (pred, label)]
    for array in frozen:
        array.flags.writeable = False  # torch warns of such an array where it does not copy it
    count(arrays, *frozen)
    assert tensors.accumulate() == arrays.accumulate()


@EVERY
def test_update_after_reduce_and_another_device_are_refused(kind):
    metric = MAKERS[kind]()
    count(metric, *batch(kind, 3))
    with pytest.raises(ValueError, match=r"counts on cpu, this batch is on meta; move it there, or call reset\(\)"):
        count(metric, *(t.to("meta") for t in batch(kind, 3)))
    metric.reduce()
    with pytest.raises(ValueError, match=r"update after reduce.*call reset\(\) first"):
        count(metric, *batch(kind, 3))
    untouched = MAKERS[kind]()
    untouched.reduce()
    with pytest.raises(ValueError, match=r"update after reduce.*call reset\(\) first"):
        count(untouched, *batch(kind, 3))


class OwnMetric(Metric):
    """What a user writes: the four methods that Paddle asks for."""

    def __init__(self) -> None:
        self.seen = []

    def name(self) -> str:
        return "own"

    def reset(self) -> None:
        self.seen = []

    def update(self, *args) -> None:
        self.seen.append(args)

    def accumulate(self) -> float:
        return float(len(self.seen))


def test_a_metric_of_ones_own_gets_outputs_and_labels_as_they_came():
    metric, values = OwnMetric(), (torch.ones(2), torch.zeros(2), "more")
    assert metric.compute(*values) == values
    metric.update(*metric.compute(*values))
    metric.reduce()  # alone there is nothing to add, and nothing to warn of
    assert metric.accumulate() == 1.0


def test_a_metric_without_its_methods_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Metric()


def one_rank(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    values = {}
    for kind, make in MAKERS.items():
        metric, busy = make(), make()
        count(metric, *batch(kind, 30 + rank, seed=rank))
        if rank == 0:  # the other process has no batch at all
            count(busy, *batch(kind, 30, seed=2))
        metric.reduce()
        metric.reduce()
        busy.reduce()
        values[kind] = (metric.accumulate(), busy.accumulate())
    with pytest.warns(UserWarning, match=r"OwnMetric does not define reduce\(\): its value is that of this process"):
        OwnMetric().reduce()
    results.put(values)
    dist.destroy_process_group()


def test_two_processes_read_what_one_would_have_counted(tmp_path: Path):
    found = run_two_ranks(one_rank, tmp_path)
    expected = {}
    for kind, make in MAKERS.items():
        both, first = make(), make()
        for rank in range(2):
            count(both, *batch(kind, 30 + rank, seed=rank))
        count(first, *batch(kind, 30, seed=2))
        expected[kind] = (both.accumulate(), first.accumulate())
    assert found == [expected, expected]
    assert all(np.all(np.asarray(value) > 0) for pair in expected.values() for value in pair)  # they counted
