import json
import subprocess
import warnings
from types import SimpleNamespace

import pytest
import torch

from mezzo.amp import check_environment, hardware, is_bfloat16_supported, is_float16_supported
from mezzo.amp.hardware import query_nvidia_smi, warn_if_unsupported
from mezzo.dtypes import dtype_name

K40M, V100, A100, L4, H200 = (3, 5), (7, 0), (8, 0), (8, 9), (9, 0)
NAMES = {K40M: "Tesla K40m", V100: "Tesla V100-SXM2-16GB", A100: "A100", L4: "NVIDIA L4", H200: "NVIDIA H200"}
GUIDE_WARNING = (
    "AMP only support NVIDIA GPU with Compute Capability 7.0 or higher, "
    "current GPU is: Tesla K40m, with Compute Capability: 3.5."
)


@pytest.fixture(autouse=True)
def _as_on_linux_without_gpus(monkeypatch):
    """Each test starts as in a fresh process on a machine without a GPU, whatever the real one has."""
    monkeypatch.setattr(hardware, "_amp_runs", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Return a function that makes torch.cuda report GPUs of these compute capabilities."""

    def pretend(*capabilities, name=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: capabilities[i])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: name or NAMES[capabilities[i]])
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda i=0: SimpleNamespace(total_memory=16 * 2**30, uuid="abc")
        )

    return pretend


def answer_nvidia_smi(monkeypatch, stdout):
    commands = []

    def run(command, **options):
        commands.append((command, options))
        return subprocess.CompletedProcess(command, 0, stdout=stdout, stderr="")

    monkeypatch.setattr(hardware.subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("capability", "float16", "bfloat16"),
    [(K40M, False, False), ((5, 2), False, False), ((5, 3), True, False), (V100, True, False), (A100, True, True)],
)
def test_gpu_computes_float16_from_5_3_and_bfloat16_from_8_0(pretend_gpus, capability, float16, bfloat16):
    pretend_gpus(capability, name="x")
    for device in (None, "gpu", "gpu:0", "cuda", "cuda:0", torch.device("cuda", 0)):
        assert is_float16_supported(device) is float16
        assert is_bfloat16_supported(device) is bfloat16


def test_index_selects_the_gpu_that_is_asked(pretend_gpus):
    pretend_gpus(K40M, H200)
    assert [is_bfloat16_supported(f"gpu:{index}") for index in (0, 1)] == [False, True]
    with pytest.raises(ValueError, match="unknown device 'gpu:2'; this machine has gpu:0 to gpu:1"):
        is_float16_supported("gpu:2")


def test_rocm_supports_both_dtypes_and_amp_whatever_its_capability(pretend_gpus, monkeypatch):
    pretend_gpus((3, 5), name="gfx")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert is_float16_supported("gpu")
    assert is_bfloat16_supported("gpu")
    assert warn_if_unsupported("bfloat16")
    environment = check_environment()
    assert environment.can_run_amp("bfloat16")
    assert environment.cuda_version == "ROCm 6.4"


def test_gpu_is_unsupported_where_there_is_none():
    assert not is_float16_supported("gpu")
    assert not is_bfloat16_supported("cuda:0")


@pytest.mark.parametrize("device", ["tpu", "cup", "gpu:x", "cpu:-1", ""])
def test_unknown_device_is_an_error_that_names_the_allowed_ones(device):
    with pytest.raises(ValueError, match=r"^device .* cpu, gpu, gpu:N, cuda, cuda:N, xpu, npu, mlu"):
        is_float16_supported(device)


def test_cpu_float16_counts_as_unsupported_and_bfloat16_needs_onednn_with_avx512(monkeypatch):
    assert not is_float16_supported("cpu")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for answer in (True, False):
        monkeypatch.setattr(
            torch.ops, "mkldnn", SimpleNamespace(_is_mkldnn_bf16_supported=lambda answer=answer: answer)
        )
        assert is_bfloat16_supported("cpu") is answer
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())  # a torch without that probe
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(_is_avx512_supported=lambda: True))
    assert is_bfloat16_supported("cpu")
    monkeypatch.setattr(torch, "cpu", SimpleNamespace())
    assert not is_bfloat16_supported("cpu")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not is_bfloat16_supported("cpu")


def test_other_backends_have_the_dtypes_of_the_guide_when_torch_has_them(monkeypatch):
    monkeypatch.setattr(torch, "npu", SimpleNamespace(is_available=lambda: True), raising=False)
    assert is_float16_supported("npu")
    assert not is_bfloat16_supported("npu")
    assert not is_float16_supported("mlu")
    backends = check_environment().backends
    assert (backends["npu"], backends["mlu"]) == ("float16", "unsupported")


def test_backend_that_says_it_has_bfloat16_is_believed(monkeypatch):
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_available=lambda: True, is_bf16_supported=lambda: True))
    assert is_bfloat16_supported("xpu")
    assert check_environment().backends["xpu"] == "float16, bfloat16"


def test_the_guides_warning_comes_once_on_a_k40m(pretend_gpus):
    pretend_gpus(K40M)
    with pytest.warns(UserWarning, match="AMP only support") as caught:
        results = [warn_if_unsupported("float16") for _ in range(3)]
    assert [str(warning.message) for warning in caught] == [GUIDE_WARNING]
    assert results == [False] * 3


def test_bfloat16_warns_below_8_0_by_itself_and_float16_does_not(pretend_gpus):
    pretend_gpus(V100, H200)
    with pytest.warns(UserWarning, match=r"^For bfloat16, AMP only support .* 8\.0 or higher.* Capability: 7\.0\.$"):
        assert not warn_if_unsupported(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert warn_if_unsupported(torch.float16)
        assert warn_if_unsupported(torch.bfloat16, device_index=1)


def test_each_device_warns_for_itself(pretend_gpus):
    pretend_gpus(K40M, K40M)
    with pytest.warns(UserWarning, match="AMP only support") as caught:
        _ = [warn_if_unsupported("float16", index) for index in (0, 1, 0, 1)]
    assert len(caught) == 2


def test_without_a_gpu_nothing_warns_and_a_bad_dtype_is_an_error():
    assert warn_if_unsupported("float16")
    with pytest.raises(ValueError, match="'bfloat61': must be 'float16' or 'bfloat16'"):
        warn_if_unsupported("bfloat61")
    with pytest.raises(ValueError, match="float32: must be 'float16'"):
        warn_if_unsupported(torch.float32)


@pytest.mark.parametrize(
    ("capability", "abilities", "usable", "advice"),
    [
        (K40M, (False,) * 5, (False, False), "stay at level O0 (float32): AMP needs compute capability 7.0, "),
        (V100, (True, False, False, False, True), (True, False), "use level O2 in float16 with a GradScaler"),
        (A100, (True, True, False, True, True), (True, True), "use level O2 in bfloat16"),
        (L4, (True,) * 5, (True, True), "use level O2 in bfloat16"),
        (H200, (True,) * 5, (True, True), "use level O2 in bfloat16"),
    ],
)
def test_environment_of_a_gpu(pretend_gpus, monkeypatch, capability, abilities, usable, advice):
    pretend_gpus(capability)
    answer_nvidia_smi(monkeypatch, "580.159.04\n")
    environment = check_environment()
    (gpu,) = environment.gpus
    assert (gpu.float16, gpu.bfloat16, gpu.fp8, gpu.tf32, gpu.tensor_cores) == abilities
    assert (environment.can_run_amp("float16"), environment.can_run_amp("bfloat16")) == usable
    assert environment.advice.startswith(advice)
    assert "\n" not in environment.advice
    assert environment.driver_version == "580.159.04"
    assert dict(environment.rows())["gpu:0 capability"] == str(capability)


def test_gtx_16_has_no_tensor_cores_though_its_capability_is_7_5(pretend_gpus):
    pretend_gpus((7, 5), name="NVIDIA GeForce GTX 1660")
    environment = check_environment()
    assert not environment.gpus[0].tensor_cores
    assert "without Tensor Cores" in environment.advice


def test_environment_of_a_cpu_prints_and_serialises():
    environment = check_environment()
    assert environment.device_count == 0
    assert environment.best_gpu is None
    assert environment.can_run_amp("float16")
    assert environment.driver_version == "unknown"
    data = json.loads(json.dumps(environment.to_dict()))
    assert data["torch_version"] == str(torch.__version__)
    assert data["cpu"]["float16"] is False
    text = str(environment)
    assert "cpu bfloat16" in text
    assert text.splitlines()[-1].startswith("advice")


@pytest.mark.parametrize(
    ("fast", "advice", "row"),
    [
        (("bfloat16",), "use level O1 in bfloat16", "yes, at full speed"),
        ((), "use level O0 (float32)", "slow: AMP computes inside in float32"),
    ],
)
def test_advice_on_a_cpu_follows_what_was_measured(monkeypatch, fast, advice, row):
    monkeypatch.setattr("mezzo.amp._environment.has_half_units", lambda dtype: dtype_name(dtype) in fast)
    monkeypatch.setattr(hardware, "onednn_computes_bfloat16", lambda: True)
    environment = check_environment()
    assert environment.cpu.fast_dtypes == fast
    assert environment.advice.startswith(advice)
    assert dict(environment.rows())["cpu bfloat16"] == row


@pytest.mark.parametrize(("number", "text"), [(91002, "9.10.2"), (8907, "8.9.7"), (None, "none")])
def test_cudnn_number_is_split_as_both_schemes_mean_it(monkeypatch, pretend_gpus, number, text):
    pretend_gpus(H200)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert check_environment().cudnn_version == text


def test_nvidia_smi_is_asked_by_uuid_and_with_a_time_limit(pretend_gpus, monkeypatch):
    pretend_gpus(H200)
    commands = answer_nvidia_smi(monkeypatch, "3201 MHz, 1980 MHz\n")
    assert query_nvidia_smi("clocks.max.mem,clocks.max.sm", 0) == ["3201 MHz", "1980 MHz"]
    ((command, options),) = commands
    assert command[-2:] == ["-i", "GPU-abc"]
    assert options["timeout"] == 10


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10)])
def test_driver_is_unknown_where_nvidia_smi_is_absent_or_hangs(pretend_gpus, monkeypatch, error):
    def fail(*_, **__):
        raise error

    pretend_gpus(H200)
    monkeypatch.setattr(hardware.subprocess, "run", fail)
    assert check_environment().driver_version == "unknown"


@pytest.mark.gpu
def test_real_gpu_reports_name_capability_and_driver(monkeypatch):
    monkeypatch.undo()
    environment = check_environment()
    assert environment.gpus[0].name == torch.cuda.get_device_name(0)
    assert environment.gpus[0].capability == torch.cuda.get_device_capability(0)
    assert environment.driver_version != "unknown"
