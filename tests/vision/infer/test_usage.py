"""Memory and GPU load beside a program: figures of a faked driver, and what happens where there is none."""

import resource
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from mezzo.vision.infer import _usage
from mezzo.vision.infer._usage import Usage, UsageSampler

MIB = 2**20
QUICK_S = 0.002


class NvmlError(Exception):
    pass


class FakeNvml:
    """A driver with some cards; each answers its memory in turn, and the last one from then on."""

    NVMLError = NvmlError

    def __init__(self, **used_mb):
        self.used_mb = {uuid: list(values) for uuid, values in used_mb.items()}
        self.utils = [10, 30]
        self.calls = []

    def nvmlInit(self):
        self.calls.append("init")

    def nvmlShutdown(self):
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.used_mb):
            raise NvmlError("no such card")
        return list(self.used_mb)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.used_mb:
            raise NvmlError("no such card")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, card):
        values = self.used_mb[card]
        return SimpleNamespace(used=(values.pop(0) if len(values) > 1 else values[0]) * MIB)

    def nvmlDeviceGetUtilizationRates(self, card):
        return SimpleNamespace(gpu=self.utils.pop(0) if len(self.utils) > 1 else self.utils[0])


@pytest.fixture
def driver(monkeypatch):
    nvml = FakeNvml(first=[100, 900, 200], second=[7])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


def fake_psutil(monkeypatch, read):
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=read() * MIB))
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=lambda: process))


def measure(gpu=None):
    """Return the usage of a block that does nothing: two samples, one at its start and one at its end."""
    with UsageSampler(gpu, interval_s=60) as sampler:
        pass
    return sampler.usage


def test_an_empty_block_has_a_sample_at_its_start_and_one_at_its_end(monkeypatch, driver):
    rss_mb = [300.0, 100.0]
    fake_psutil(monkeypatch, lambda: rss_mb.pop(0))
    assert measure(gpu=0) == Usage(mean_rss_mb=200.0, peak_rss_mb=300.0, gpu_memory_mb=900.0, gpu_util=20.0)
    assert rss_mb == []
    assert driver.calls == ["init", "shutdown"]


def test_a_long_block_is_sampled_all_the_time(monkeypatch):
    sampled = threading.Semaphore(0)
    fake_psutil(monkeypatch, lambda: sampled.release() or 5.0)
    with UsageSampler(interval_s=QUICK_S):
        for _ in range(10):
            assert sampled.acquire(timeout=5)


def test_usage_can_be_read_while_the_block_runs(monkeypatch):
    fake_psutil(monkeypatch, lambda: 5.0)
    with UsageSampler() as sampler:
        assert sampler.usage == Usage(mean_rss_mb=5.0, peak_rss_mb=5.0)


def test_nothing_is_measured_before_the_block():
    assert UsageSampler(0).usage == Usage()


def test_a_block_that_raises_stops_the_thread_too():
    sampler = UsageSampler()
    with pytest.raises(KeyError), sampler:
        raise KeyError
    assert not sampler._thread.is_alive()


@pytest.mark.parametrize("without", ["", "psutil"])
def test_resident_memory_is_what_the_kernel_says(monkeypatch, without):
    monkeypatch.setitem(sys.modules, without or "no_such_module", None)
    usage = measure()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # a higher bound, from another source
    assert 0.1 * peak_mb < usage.mean_rss_mb <= usage.peak_rss_mb < 1.1 * peak_mb


def test_memory_is_none_without_psutil_and_proc(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(_usage, "_STATM", tmp_path / "statm")
    assert measure() == Usage()


def test_a_gpu_that_nobody_asked_for_is_not_measured(driver):
    usage = measure()
    assert (usage.gpu_memory_mb, usage.gpu_util, driver.calls) == (None, None, [])


def test_gpu_is_none_without_pynvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    usage = measure(gpu=0)
    assert (usage.gpu_memory_mb, usage.gpu_util) == (None, None)
    assert usage.mean_rss_mb is not None


def test_gpu_is_none_without_a_driver(driver):
    def fail():
        raise NvmlError("library not found")

    driver.nvmlInit = fail
    usage = measure(gpu=0)
    assert (usage.gpu_memory_mb, usage.gpu_util) == (None, None)


@pytest.mark.parametrize(
    ("visible", "gpu", "memory_mb"),
    [
        (None, 1, 7.0),
        ("1", 0, 7.0),
        ("1,0", 0, 7.0),
        (" 1 , 0", 1, 900.0),
        ("second", 0, 7.0),
        ("second,first", 1, 900.0),
        ("", 0, 900.0),  # not a card: 0, as AutoLog is described
        ("GPU-of-another-machine", 0, 900.0),
        ("10,11", 0, None),  # AutoLog would measure card 1
        ("0", 1, None),
        (None, 2, None),
    ],
)
def test_card_is_the_one_that_cuda_shows_at_that_place(monkeypatch, driver, visible, gpu, memory_mb):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert measure(gpu).gpu_memory_mb == memory_mb


def test_one_failing_sample_makes_its_figure_none_and_no_other(monkeypatch, driver):
    def fail(card):
        raise NvmlError("not supported")

    fake_psutil(monkeypatch, lambda: 5.0)
    driver.nvmlDeviceGetUtilizationRates = fail
    assert measure(gpu=0) == Usage(mean_rss_mb=5.0, peak_rss_mb=5.0, gpu_memory_mb=900.0)


def test_a_failure_after_good_samples_makes_the_figure_none(monkeypatch):
    rss_mb = [300.0]
    fake_psutil(monkeypatch, lambda: rss_mb.pop(0))
    assert measure() == Usage()


def test_a_driver_that_hangs_neither_blocks_the_program_nor_gives_a_figure(monkeypatch, driver):
    monkeypatch.setattr(_usage, "START_TIMEOUT_S", 0.02)
    monkeypatch.setattr(_usage, "STOP_TIMEOUT_S", 0.02)
    fake_psutil(monkeypatch, lambda: 5.0)
    awake = threading.Event()
    driver.nvmlDeviceGetMemoryInfo = lambda card: awake.wait(20)
    start = time.perf_counter()
    usage = measure(gpu=0)
    assert time.perf_counter() - start < 5
    awake.set()
    assert usage == Usage(mean_rss_mb=5.0, peak_rss_mb=5.0)


def test_a_driver_that_fails_to_close_is_no_fault(driver):
    def fail():
        raise NvmlError("uninitialized")

    driver.nvmlShutdown = fail
    assert measure(gpu=0).gpu_memory_mb == 900.0


@pytest.mark.parametrize("interval_s", [0, -1.0, float("nan")])
def test_interval_must_be_positive(interval_s):
    with pytest.raises(ValueError, match=rf"^interval_s={interval_s}: must be more than 0$"):
        UsageSampler(interval_s=interval_s)


def test_gpu_must_not_be_negative():
    with pytest.raises(ValueError, match=r"^gpu=-1: must be 0 or more, or None to measure no GPU$"):
        UsageSampler(-1)


@pytest.mark.gpu
def test_real_gpu_shows_the_memory_of_a_tensor():
    import torch

    with UsageSampler(0) as sampler:
        block = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    assert sampler.usage.gpu_memory_mb >= block.nbytes / MIB
    assert 0 <= sampler.usage.gpu_util <= 100
