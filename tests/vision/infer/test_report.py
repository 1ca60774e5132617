"""The report's lines, as AutoLog prints them, and what is found for them here."""

import dataclasses
import json
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mezzo.vision.infer import BenchmarkEnvironment, BenchmarkReport, Percentiles, StageTimes, Usage

ENVIRONMENT = BenchmarkEnvironment(
    os_version="CentOS Linux 7",
    cuda_version="11.2",
    cudnn_version="8.1.1",
    driver_version="460.27.04",
    torch_version="2.11.0",
    torch_commit="b031c38",
    engine="onnxruntime",
    engine_version="1.20.1",
)
TIMES = StageTimes(
    cycles=50,
    warmup=5,
    total_s=4.23861,
    preprocess_ms=33.78874,
    inference_ms=50.0,
    postprocess_ms=0.00001,
    inference=Percentiles(p50_ms=49.0, p95_ms=60.12346, p99_ms=61.0),
    cycle=Percentiles(p50_ms=84.0, p95_ms=95.0, p99_ms=96.0),
    samples_per_s=94.37,
)
REPORT = BenchmarkReport(
    model_name="pphumanseg_lite",
    precision="fp32",
    batch_size=8,
    input_shape="[8, 3, 192, 192]",
    runtime_device="cpu",
    ir_optim=True,
    enable_memory_optim=True,
    enable_tensorrt=False,
    enable_mkldnn=None,
    cpu_threads=1,
    usage=Usage(mean_rss_mb=315.265625, peak_rss_mb=400.0, gpu_memory_mb=8842.1875, gpu_util=12.345),
    times=TIMES,
    env=ENVIRONMENT,
)
EXPECTED = """
---------------------- Env info ----------------------
 OS_version: CentOS Linux 7
 CUDA_version: 11.2
 CUDNN_version: 8.1.1
 drivier_version: 460.27.04
---------------------- Paddle info ----------------------
 paddle_version: 2.11.0
 paddle_commit: b031c38
 log_api_version: 1.0
----------------------- Conf info -----------------------
 runtime_device: cpu
 ir_optim: True
 enable_memory_optim: True
 enable_tensorrt: False
 enable_mkldnn: None
 cpu_math_library_num_threads: 1
----------------------- Model info ----------------------
 model_name: pphumanseg_lite
 precision: fp32
----------------------- Data info -----------------------
 batch_size: 8
 input_shape: [8, 3, 192, 192]
 data_num: 50
----------------------- Perf info -----------------------
 cpu_rss(MB): 315.2656, gpu_rss(MB): 8842.2, gpu_util: 12.3%
 total time spent(s): 4.2386
 preprocess_time(ms): 33.7887, inference_time(ms): 50.0, postprocess_time(ms): 0.0
---------------------- Torch info ----------------------
 torch_version: 2.11.0
 torch_commit: b031c38
 engine: onnxruntime
 engine_version: 1.20.1
 cpu_peak_rss(MB): 400.0
 warmup: 5
 throughput(samples/s): 94.37
 inference_p50(ms): 49.0, inference_p95(ms): 60.1235, inference_p99(ms): 61.0
 cycle_p50(ms): 84.0, cycle_p95(ms): 95.0, cycle_p99(ms): 96.0"""


def test_lines_are_those_of_autolog_with_a_section_of_ours_behind():
    assert REPORT.lines() == EXPECTED.split("\n")


def test_runs_before_the_timer_are_added_to_the_cycles_that_it_left_out():
    assert " warmup: 8" in dataclasses.replace(REPORT, warmup_runs=3).lines()


def test_identifier_stands_in_brackets_before_fields_but_not_before_titles():
    fields = [f"[b8]{line}" if line.startswith(" ") else line for line in EXPECTED.split("\n")]
    assert REPORT.lines("b8") == fields


def test_what_was_not_measured_prints_as_none():
    bare = dataclasses.replace(REPORT, usage=Usage(), model_name="", cpu_threads=None)
    lines = bare.lines()
    assert " cpu_rss(MB): None, gpu_rss(MB): None, gpu_util: None%" in lines
    assert " model_name: " in lines
    assert " cpu_math_library_num_threads: None" in lines


def test_dict_has_the_printed_labels_and_values_and_survives_json():
    fields = REPORT.as_dict()
    assert json.loads(json.dumps(fields)) == fields
    printed = [line.strip() for line in REPORT.lines() if line.startswith(" ")]
    written = [f"{label}: {value}{'%' * (label == 'gpu_util')}" for label, value in fields.items()]
    assert ", ".join(printed) == ", ".join(written)
    assert fields["gpu_rss(MB)"] == 8842.2


def test_numpy_numbers_become_plain_ones():
    np = pytest.importorskip("numpy")
    usage = Usage(mean_rss_mb=np.float64(1.25))
    assert type(dataclasses.replace(REPORT, usage=usage).as_dict()["cpu_rss(MB)"]) is float


def test_device_is_cpu_or_gpu():
    with pytest.raises(ValueError, match=r"^unknown runtime_device 'gpu:0'; did you mean 'gpu'\? allowed: cpu, gpu$"):
        dataclasses.replace(REPORT, runtime_device="gpu:0")


@pytest.mark.parametrize("text", ["two\nlines", "car\rriage", "\x1b[33mcolour"])
def test_texts_are_one_line(text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole text is compared
        dataclasses.replace(REPORT, model_name=text)
    assert str(caught.value) == f"model_name={text!r}: must be one line without control characters"
    with pytest.raises(ValueError, match=r"^CUDA_version=.*: must be one line"):
        dataclasses.replace(REPORT, env=dataclasses.replace(ENVIRONMENT, cuda_version=text))
    with pytest.raises(ValueError, match=r"^identifier=.*: must be one line"):
        REPORT.lines(text)


def test_identifier_has_no_brackets():
    with pytest.raises(ValueError, match=r"^identifier='\[a\]': must be without brackets; they are put around it$"):
        REPORT.lines("[a]")


@pytest.fixture
def no_driver(monkeypatch):
    """Neither pynvml nor nvidia-smi."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", _absent)


def _absent(*_, **__):
    raise FileNotFoundError


def test_environment_is_that_of_torch_and_of_the_system(monkeypatch, no_driver):
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"NAME": "Ubuntu", "VERSION_ID": "24.04"})
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert BenchmarkEnvironment.query(engine="eager") == BenchmarkEnvironment(
        os_version="Ubuntu 24.04",
        cuda_version="12.8",
        cudnn_version="9.10.2",
        driver_version=None,
        torch_version=str(torch.__version__),
        torch_commit=torch.version.git_version,
        engine="eager",
        engine_version=None,
    )


def test_build_without_cuda_has_neither_cuda_nor_cudnn(monkeypatch, no_driver):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    environment = BenchmarkEnvironment.query(engine="onnxruntime", engine_version="1.20.1")
    assert (environment.cuda_version, environment.cudnn_version) == (None, None)
    assert (environment.engine, environment.engine_version) == ("onnxruntime", "1.20.1")


@pytest.mark.parametrize(
    ("system", "text"), [("Darwin", "macOs 15.1"), ("Windows", "Windows 11"), ("Linux", "Linux 11")]
)
def test_system_without_a_release_file_names_itself(monkeypatch, no_driver, system, text):
    monkeypatch.setattr(platform, "freedesktop_os_release", _absent)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: "11")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), ""))
    assert BenchmarkEnvironment.query(engine="eager").os_version == text


def test_rolling_distribution_has_a_name_alone(monkeypatch, no_driver):
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"NAME": "Arch Linux"})
    assert BenchmarkEnvironment.query(engine="eager").os_version == "Arch Linux"


def fake_nvml(monkeypatch, ask):
    nvml = SimpleNamespace(NVMLError=KeyError, nvmlSystemGetDriverVersion=ask)
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_driver_is_asked_through_pynvml(monkeypatch):
    fake_nvml(monkeypatch, lambda: "570.86.15")
    monkeypatch.setattr(subprocess, "run", _absent)
    assert BenchmarkEnvironment.query(engine="eager").driver_version == "570.86.15"


@pytest.mark.parametrize("has_nvml", [True, False])
def test_driver_is_asked_through_nvidia_smi_where_pynvml_does_not_know(monkeypatch, has_nvml):
    if has_nvml:
        fake_nvml(monkeypatch, lambda: {}["no answer"])
    else:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="460.27.04\n460.27.04\n"))
    assert BenchmarkEnvironment.query(engine="eager").driver_version == "460.27.04"
