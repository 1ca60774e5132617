"""Metrics of several processes add up to those of one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from two_ranks import run_two_ranks

from mezzo.model.metric import ConfusionMatrix, RunningMean, TopK


def one_rank(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    matrix, top, mean = ConfusionMatrix(2, "cpu"), TopK((1,), "cpu"), RunningMean("cpu")
    matrix.update(torch.tensor([rank, 1]), torch.tensor([1, 255]))
    top.update(torch.eye(2)[: rank + 1], torch.zeros(rank + 1).long())
    mean.update(torch.tensor(float(rank)), weight=rank + 1)
    for metric in (matrix, top, mean):
        metric.reduce()
        metric.reduce()
    results.put((matrix.counts.tolist(), top.scores()[1], mean.value()))
    dist.destroy_process_group()


def test_two_processes_read_the_sums_of_both(tmp_path: Path):
    found = run_two_ranks(one_rank, tmp_path)
    for values in found:
        assert values == ([[0, 0], [1, 1]], 2 / 3, 2 / 3)


def test_alone_reduce_changes_nothing_and_later_updates_are_refused():
    mean = RunningMean("cpu")
    mean.update(3.0)
    mean.reduce()
    assert mean.value() == 3
    assert mean.device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"update after reduce.*call reset\(\) first"):
        mean.update(1.0)
