"""One parser for the names of devices."""

import pytest
import torch

from mezzo.devices import DeviceError, find_device, parse_device


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        (None, ("auto", None)),
        ("auto", ("auto", None)),
        ("cpu", ("cpu", None)),
        (torch.device("cpu", 0), ("cpu", 0)),
        ("gpu", ("cuda", None)),
        ("gpu:1", ("cuda", 1)),
        (torch.device("cuda", 3), ("cuda", 3)),
        ("npu", ("npu", None)),
    ],
)
def test_both_spellings_of_a_gpu_are_one_device(name, parsed):
    assert parse_device(name) == parsed


@pytest.mark.parametrize("name", ["tpu", "gpu:x", "gpu:", "gpu:-1", "cpu:1", "auto:0", "", "GPU"])
def test_an_unknown_name_is_refused_with_all_that_are_allowed(name):
    with pytest.raises(DeviceError, match=f"^--device {name}: .* auto, cpu, gpu, gpu:N, cuda, cuda:N$"):
        find_device(name)


@pytest.mark.parametrize(
    ("name", "advice"), [("gpu", "use --device cpu"), ("cuda:1", "no CUDA device"), ("npu", "gpu")]
)
def test_a_device_that_is_not_there_is_refused(name, advice, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert find_device("auto") == find_device() == torch.device("cpu")
    with pytest.raises(DeviceError, match=f"--device {name}.*{advice}"):
        find_device(name)


def test_each_process_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("auto") == torch.device("cuda", 0)
    assert find_device("gpu", local_rank=1) == torch.device("cuda", 1)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    assert find_device("cpu", local_rank=7) == torch.device("cpu")
    with pytest.raises(DeviceError, match=r"no GPU 2, this machine has 2 .* fewer processes"):
        find_device("gpu", local_rank=2)
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES"):
        find_device("gpu:1", local_rank=1)
