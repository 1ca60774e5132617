"""Recordings with known numbers, as a GPU gives them, and a report made of them."""

import tempfile
from pathlib import Path

import torch

from mezzo.amp.debugging import KernelRow, Leak, OperatorStats
from mezzo.proof import Advice, Changes, Measured, Report, write_advice_page, write_operator_page
from mezzo.record import Timing
from mezzo.trial import TrialSetup

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}",
    '"onload="x',
    "\x1b[31ma\u202e",
]

GEMM = "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
COPY = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul>, 4>(int)"
)

_HALF = torch.zeros(4, 4, dtype=torch.float16)
_FULL = torch.zeros(4, 4)


def gpu_stats() -> OperatorStats:
    """Three half products, one in float32, two casts, one addition, one kernel of an optimizer; 1000 us in all."""
    stats = OperatorStats()
    aten = torch.ops.aten
    for module, x, reason in (
        ("body.layers.2", _HALF, "white list"),
        ("body.layers.2", _HALF, "white list"),
        ("body.layers.10", _HALF, "white list"),
        ("head", _FULL, "black list"),
    ):
        stats.count(aten.mm.default, (x, x), {}, x, phase="forward", module=module, api_op="linear", reason=reason)
    for _ in range(2):
        stats.count(
            aten._to_copy.default, (_FULL,), {"dtype": torch.float16}, _HALF, phase="forward", module="head", api_op="to",
            reason="gray",
        )  # fmt: skip
    stats.count(aten.add.Tensor, (_FULL, _FULL), {}, _FULL, phase="forward", module="body", api_op="add", reason="gray")
    stats.kernels = [
        KernelRow(GEMM, "mm", "forward", "body.layers.2", "linear", "float16", False, True, 2, 400),
        KernelRow(GEMM, "mm", "forward", "body.layers.10", "linear", "float16", False, True, 1, 200),
        KernelRow("ampere_sgemm_128x64_tn", "mm", "forward", "head", "linear", "float32", False, False, 1, 150),
        KernelRow(COPY, "_to_copy", "forward", "head", "to", "float32", True, False, 2, 100),
        KernelRow(ADD, "add", "forward", "body", "add", "float32", False, False, 1, 90),
        KernelRow("update_kernel", "", None, "", "", "", False, False, 1, 60),
    ]
    stats.leaks = [
        Leak("add", "body", "net.py:7", "promoted: another input is float32", ("relu",), ("head: linear",), 3, 4096)
    ]
    return stats


def measured(step_s: float, *, is_cuda: bool = True, stats: OperatorStats | None = None) -> Measured:
    return Measured(
        setup=TrialSetup(),
        timing=Timing((step_s,)),
        host_s=0.0015,
        stats=gpu_stats() if stats is None else stats,
        products=(),
        losses=(2.5, 2.25),
        num_skipped=0,
        last_scale=1.0,
        is_cuda=is_cuda,
    )


def gpu_report(where: str = "head") -> Report:
    """4 ms in float32, 2 ms in AMP with 1 ms of kernels, 1.6 ms with the changes."""
    advices = (
        Advice(kind="launch-bound", where="", seen="the host is slow", todo="capture the step", gain=2.0),
        Advice(kind="shape", where=where, seen="61 outputs", todo="64 outputs", gain=1.1, measured_gain=1.25),
        Advice(kind="amdahl", where="", seen="products take half", todo=""),
    )
    changes = Changes(channels_last=True, pad_channels=((where, 64, 64),), custom_white_list=("add",))
    return Report(TrialSetup(), measured(4e-3), measured(2e-3), advices, changes, measured(1.6e-3))


def advice_page(report: Report) -> str:
    with tempfile.TemporaryDirectory() as folder:
        write_advice_page(report, Path(folder) / "page.html")
        return (Path(folder) / "page.html").read_text("utf-8")


def operator_page(stats: OperatorStats, title: str = "") -> str:
    with tempfile.TemporaryDirectory() as folder:
        write_operator_page(stats, Path(folder) / "page.html", title=title)
        return (Path(folder) / "page.html").read_text("utf-8")
