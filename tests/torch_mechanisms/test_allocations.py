import torch

from mezzo._torch.allocations import AllocationCounter
from mezzo._torch.fake_tensors import FakeTensorMode


def test_results_count_until_they_are_freed_and_views_do_not_count() -> None:
    x = torch.ones(256)
    with AllocationCounter() as counter:
        y = x + 1
        z = y.view(16, 16).add_(1)
        assert counter.live_bytes == 1024
        w = z * 2
        assert counter.live_bytes == 2048
        del w
        x.mul_(2)  # existed before
        assert counter.live_bytes == 1024
        del y, z
    assert (counter.live_bytes, counter.peak_bytes) == (0, 2048)


def test_fake_tensors_count_as_real_ones() -> None:
    with FakeTensorMode():
        x = torch.empty(1000, 1000, device="cpu")
        with AllocationCounter([x]) as counter:
            y = x @ x
            del y
    assert counter.peak_bytes == 4_000_000
    assert counter.live_bytes == 0
