"""Compiled steps in two processes: gradients are averaged, and all processes decide alike."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from free_port import free_port
from mezzo.amp import GradScaler, master_parameters
from mezzo.precision import Precision
from mezzo.static import compile_step

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
]

STEPS, SIZE = 10, 16


class Net(nn.Module):
    """Convolutions in channels-last, and statistics where the test asks for them."""

    def __init__(self, has_statistics: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if has_statistics else nn.GroupNorm(2, 8)
        self.head, self.unused = nn.Linear(8, 4), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def make(dtype: str, seed: int = 0, has_statistics: bool = False, device: str = "cpu") -> tuple[Any, Any, Precision]:
    torch.manual_seed(seed)
    net = Net(has_statistics).to(device, memory_format=torch.channels_last)
    optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    scaler = GradScaler(dtype == "float16", init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    precision = Precision(
        "O0" if dtype == "float32" else "O2", "float16" if dtype == "float32" else dtype, scaler=scaler
    )
    precision.prepare(net, optimizer)
    return net, optimizer, precision


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SIZE, 3, 6, 6, generator=generator), torch.randn(SIZE, 4, generator=generator)


def half_of(batch: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, ...]:
    return tuple(tensor[rank * SIZE // 2 : (rank + 1) * SIZE // 2] for tensor in batch)


def masters_of(net: nn.Module) -> list[Tensor]:
    return [*(value.detach().clone() for value in master_parameters(net)), *(b.clone() for b in net.buffers())]


def assert_equal_in_all(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(others, tensor.contiguous())
        assert all(torch.equal(others[0], other) for other in others)


def check_halves_make_a_whole(rank: int, backend: str) -> None:
    """Two halves of a batch, against one process with the whole batch: the mean of means is the mean."""
    # One unit of the gradients' dtype at ten steps of 0.05: float32 gradients differ by the order of a sum only.
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 4e-3)):
        expected_net, expected_optimizer, expected_precision = make(dtype)
        for number in range(STEPS):
            x, y = batch_of(number)
            expected_precision.train_step(
                lambda x=x, y=y, net=expected_net: (None, mse_loss(net(x), y)), expected_optimizer
            )
        net, optimizer, precision = make(dtype, seed=rank)  # the second process starts with other weights
        step = compile_step(
            net, mse_loss, optimizer, precision=precision, process_group=dist.group.WORLD, backend=backend
        )
        for number in range(STEPS):
            step(*half_of(batch_of(number), rank))
        assert_equal_in_all(masters_of(net))
        for one, other in zip(masters_of(net), masters_of(expected_net), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def check_a_wrapper_is_taken_off(rank: int, backend: str) -> None:
    """Against the loop with DDP itself, batch norm included: same averages, same buffers before each forward."""
    for accumulate in (1, 2):
        expected_net, expected_optimizer, expected_precision = make("float16", has_statistics=True)
        parallel = DistributedDataParallel(expected_net, static_graph=False, find_unused_parameters=True)
        net, optimizer, precision = make("float16", has_statistics=True)
        wrapped = DistributedDataParallel(net, find_unused_parameters=True)
        step = compile_step(
            wrapped, mse_loss, optimizer, precision=precision, accumulate=accumulate, max_norm=0.5, backend=backend
        )
        for number in range(STEPS):
            x, y = half_of(batch_of(number), rank)
            updates = number % accumulate == accumulate - 1
            parallel.require_backward_grad_sync = updates  # as no_sync() does
            with expected_precision.autocast():
                expected_loss = mse_loss(parallel(x), y)
            expected_precision.backward(expected_loss / accumulate)
            if updates:
                expected_precision.step(expected_optimizer, max_norm=0.5)
                expected_optimizer.zero_grad()
            loss = step(x, y)
            torch.testing.assert_close(loss, expected_loss.detach(), rtol=2e-3, atol=2e-3)  # float16 in other places
        for one, other in zip(master_parameters(net), master_parameters(expected_net), strict=True):
            torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3)
        assert_equal_in_all(masters_of(net))
        # DDP shares buffers before the next forward, the compiled step after the update; the first process has the same.
        if rank == 0:
            torch.testing.assert_close(net.norm.running_mean, expected_net.norm.running_mean, rtol=4e-3, atol=4e-3)


def check_an_overflow_in_one_skips_in_both(rank: int, backend: str) -> None:
    net, optimizer, precision = make("float16", has_statistics=True)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = compile_step(
        net, mse_loss, optimizer, precision=precision, process_group=dist.group.WORLD, ema=average, backend=backend
    )
    scales = []
    for number in range(STEPS):
        x, y = half_of(batch_of(number), rank)
        is_bad = number in (3, 6)
        if is_bad and rank == (number == 6):  # once in each process
            y[0, 0] = 1e30
        before = masters_of(net)[: len(list(net.parameters()))]
        step(x, y)
        after = masters_of(net)[: len(before)]
        moved = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert any(moved) is not is_bad
        assert precision.scaler is not None
        scales.append(precision.scaler.get_scale())
    assert scales == [1024.0] * 3 + [512.0] * 3 + [256.0] * 4
    assert precision.scaler.skipped_steps == 2
    assert_equal_in_all([*masters_of(net), *(value.detach() for value in average.module.parameters())])
    assert net.unused.weight.grad is None  # no gradient, no weight decay
    torch.manual_seed(0)
    assert torch.equal(master_parameters(Net(True))[-2], master_parameters(net)[-2].float())


def check_shapes_may_differ(rank: int, backend: str) -> None:
    """The last batch of an epoch may be smaller in one process: only this one captures again."""
    net, optimizer, precision = make("bfloat16")
    step = compile_step(net, mse_loss, optimizer, precision=precision, process_group=dist.group.WORLD, backend=backend)
    for number in range(4):
        x, y = half_of(batch_of(number), rank)
        size = 5 if number == 2 and rank == 1 else 8
        step(x[:size], y[:size])
    assert step.num_shapes == (2 if rank == 1 else 1)
    assert_equal_in_all(masters_of(net))


CHECKS: dict[str, Callable[[int, str], None]] = {
    "two halves make a whole": check_halves_make_a_whole,
    "a wrapper is taken off": check_a_wrapper_is_taken_off,
    "an overflow in one skips in both": check_an_overflow_in_one_skips_in_both,
    "shapes may differ": check_shapes_may_differ,
}


def rank_main(rank: int, port: int, name: str, backend: str) -> None:
    """What each process checks; an assertion that fails here fails the spawn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    CHECKS[name](rank, backend)
    dist.barrier()
    torch._dynamo.reset()
    gc.collect()  # frees DDP, which has reference cycles, before its process group goes
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "eager"])
@pytest.mark.parametrize("name", CHECKS)
def test_in_two_processes(name: str, backend: str) -> None:
    mp.spawn(rank_main, (free_port(), name, backend), nprocs=2)


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    """A group of this process only."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_one_changes_nothing(one_process: Any) -> None:
    seen = []
    for group in (None, one_process):
        net, optimizer, precision = make("float16", has_statistics=True)
        step = compile_step(net, mse_loss, optimizer, precision=precision, process_group=group, backend="aot_eager")
        seen.append(([step(*batch_of(number)).item() for number in range(4)], masters_of(net)))
    assert seen[0][0] == seen[1][0]
    assert all(torch.equal(one, other) for one, other in zip(seen[0][1], seen[1][1], strict=True))


def test_a_wrapper_and_a_group_are_one_too_many(one_process: Any) -> None:
    net, optimizer, precision = make("bfloat16")
    with pytest.raises(ValueError, match="process_group: DistributedDataParallel has its own"):
        compile_step(DistributedDataParallel(net), mse_loss, optimizer, precision=precision, process_group=one_process)


def test_sparse_gradients_are_refused(one_process: Any) -> None:
    net = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    step = compile_step(net, mse_loss, SGD(net.parameters(), lr=0.1), process_group=one_process, backend="eager")
    with pytest.raises(TypeError, match="process_group: a sparse gradient cannot be averaged"):
        step(torch.tensor([1, 2]), torch.ones(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_collectives_of_nccl_are_part_of_the_cuda_graph(backend: str, accumulate: int, one_process: Any) -> None:
    """With one process an average changes nothing; the collectives are captured and replayed all the same."""
    seen = []
    for group in (None, one_process):
        net, optimizer, precision = make("float16", has_statistics=True, device="cuda")
        step = compile_step(
            net,
            mse_loss,
            optimizer,
            precision=precision,
            process_group=group,
            accumulate=accumulate,
            max_norm=0.5,
            backend=backend,
        )
        losses = []
        for number in range(STEPS):
            x, y = (tensor.cuda() for tensor in batch_of(number))
            if number == 4:
                y[0, 0] = 1e30
            losses.append(step(x.to(memory_format=torch.channels_last), y).item())
        assert step.is_captured
        precision.scaler.flush()
        assert precision.scaler.skipped_steps == 1
        seen.append((losses, masters_of(net)))
    good = [number for number in range(STEPS) if number != 4]
    # Both are the same program on the same numbers; sums on a GPU may come in another order.
    assert [seen[0][0][n] for n in good] == pytest.approx([seen[1][0][n] for n in good], rel=1e-3)
    for one, other in zip(seen[0][1], seen[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_wrapper_on_a_gpu_is_refused(one_process: Any) -> None:
    net, optimizer, precision = make("bfloat16", device="cuda")
    with pytest.raises(ValueError, match=r"on a GPU compile_step takes the network itself.*give model\.module"):
        compile_step(DistributedDataParallel(net), mse_loss, optimizer, precision=precision)
