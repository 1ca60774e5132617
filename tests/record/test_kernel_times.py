"""Kernels with their times: names from the libraries, a CPU as its own profiler, and profiles made by hand."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

from mezzo.amp import auto_cast
from mezzo.amp.debugging import CastRow, KernelRow, ModuleRow, OperatorStats, collect_operator_stats
from mezzo.record import KernelRun, counts_operators, uses_tensor_cores
from mezzo.record._kernel_runs import describe_op
from mezzo.record._kernel_times import RANGE, KernelTimes, _launched

ON_TENSOR_CORES = [
    # cuBLAS and cuDNN on Hopper
    "nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_NTT",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
    "sm80_xmma_fprop_implicit_gemm_indexed_wo_smem_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x32x16_stage1_"
    "warpsize4x1x1_g1_tensor16x8x16_aligna2_alignc4_execute_kernel__5x_cudnn",
    "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x64_warpgroupsize1x1x1_g1_"
    "execute_segment_k_off_kernel__5x_cudnn",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x256x32_warpgroupsize2x1x1_execute_segment_k_off_kernel__5x_cublas",
    # CUTLASS
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(cutlass::Params)",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_16x16_128x2_tn_align8>(cutlass::Params)",
    "cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_16x4_nhwc_align4>",
    # Volta, Turing, Ampere: the instruction's shape
    "volta_h884gemm_128x64_ldg8_nn",
    "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
    "turing_h1688cudnn_256x128_ldg8_relu_exp_medium_nhwc_tn_v1",
    "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    "sm70_xmma_wgrad_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_stage1_warpsize2x2x1_g1_"
    "tensor8x8x4_kernel_cudnn",
    # attention
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)",
    "fmha_cutlassB_f16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::Params)",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::half_t> >()",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64> >()",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
    pytest.param("void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2> > >()"),
]
ON_ORDINARY_UNITS = [
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_"
    "execute_kernel__5x_cublas",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(cutlass::Params)",
    "void implicit_convolve_sgemm<__half, __half, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, int, int)",
    "sm90_xmma_depthwise_convolution_wgrad_tiling_f16f16_f32f32_f32_nhwckrsc_nhwc_tilesize1x8x8_1x5x5_1x1x1_1x1x1_"
    "stage2_warpsize4x1x1_g32_betaTrue_execute",
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)0>()",
    "dgrad2d_c1_k1_nhwc_specialized",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half> >(int)",
    "ampere_sgemm_128x64_tn",
    "ampere_dgemm_64x64_nn",
    "ampere_scudnn_128x64_relu_medium_nn_v1",
    "volta_fp16_sgemm_fp16_128x64_nn",
    "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false, true>()",
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>()",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, int, 512, true, 1, true>()",
    "void wgrad_alg0_engine<__half, 128, 5, 5, 3, 3, 3, false, 512>(int, int, int)",
    "Memcpy HtoD (Pageable -> Device)",
    "Memset (Device)",
    "",
    pytest.param("fmha_cutlassF_f32_aligned_64x64_rf_sm75(PyTorchMemEffAttention::Params)"),
]


@pytest.mark.parametrize("kernel", ON_TENSOR_CORES)
def test_a_kernel_on_tensor_cores_is_known_by_its_name(kernel: str) -> None:
    assert uses_tensor_cores(kernel)


@pytest.mark.parametrize("kernel", ON_ORDINARY_UNITS)
def test_a_kernel_on_ordinary_units_is_not_taken_for_one_on_tensor_cores(kernel: str) -> None:
    assert not uses_tensor_cores(kernel)


# -- on a CPU an operator is its own kernel


def train_once(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with auto_cast(dtype="bfloat16", cpu_compute="native"):
        loss = model(x).float().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("on_cpu")
def test_on_a_cpu_every_counted_call_is_timed_once() -> None:
    with collect_operator_stats(False, kernels=True) as stats:
        train_once(two_linears(), torch.ones(2, 4))
    calls: dict[str, int] = {}
    for row in stats.kernels:
        calls[row.op] = calls.get(row.op, 0) + row.calls
    assert calls == {op: sum(counts) for op, counts in stats.totals().items()}
    assert all(row.time_us > 0 for row in stats.kernels)
    assert all(row.kernel == row.op and row.on_tensor_cores is None for row in stats.kernels)
    assert stats.tensor_core_share is None
    assert stats.kernel_time_us == pytest.approx(sum(row.time_us for row in stats.kernels))
    assert [row.time_us for row in stats.kernels] == sorted((row.time_us for row in stats.kernels), reverse=True)


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_row_tells_operator_phase_module_call_dtype_and_cast() -> None:
    model, x = two_linears(), torch.ones(2, 4)
    with collect_operator_stats(False, kernels=True) as stats:
        train_once(model, x)
    rows = {(r.op, r.phase, r.module, r.api_op, r.dtype, r.is_cast): r.calls for r in stats.kernels}
    assert rows == {
        # forward: the data and both parameters are cast for the first layer, the parameters for the second
        ("_to_copy", "forward", "0", "linear", "float32", True): 3,
        ("addmm", "forward", "0", "linear", "bfloat16", False): 1,
        ("relu", "forward", "1", "relu", "bfloat16", False): 1,
        ("_to_copy", "forward", "2", "linear", "float32", True): 2,
        ("addmm", "forward", "2", "linear", "bfloat16", False): 1,
        ("_to_copy", "forward", "", "float", "bfloat16", True): 1,
        ("sum", "forward", "", "sum", "float32", False): 1,
        # backward: the chain rule from the end; data needs no gradient
        ("ones_like", "backward", "", "ones_like", "float32", False): 1,
        ("_to_copy", "backward", "", "", "float32", True): 1,
        ("mm", "backward", "2", "", "bfloat16", False): 2,
        ("sum", "backward", "2", "", "bfloat16", False): 1,
        ("_to_copy", "backward", "2", "", "bfloat16", True): 2,
        ("threshold_backward", "backward", "1", "", "bfloat16", False): 1,
        ("mm", "backward", "0", "", "bfloat16", False): 1,
        ("sum", "backward", "0", "", "bfloat16", False): 1,
        ("_to_copy", "backward", "0", "", "bfloat16", True): 2,
        ("add_", "optimizer", "", "add_", "float32", False): 4,
    }


@pytest.mark.usefixtures("on_cpu")
def test_a_copy_within_one_dtype_is_no_cast_and_integers_have_no_dtype() -> None:
    x, index = torch.ones(3), torch.tensor([2, 0, 1])
    with collect_operator_stats(False, kernels=True) as stats:
        torch.zeros(3).copy_(x)
        torch.zeros(3, dtype=torch.float16).copy_(x)
        index + index
    rows = {(row.op, row.dtype, row.is_cast) for row in stats.kernels if row.op in ("copy_", "add")}
    # the first floating input of copy_ is what it writes into
    assert rows == {("copy_", "float32", False), ("copy_", "float16", True), ("add", "", False)}


@pytest.mark.usefixtures("on_cpu")
def test_views_and_allocations_are_not_timed() -> None:
    with collect_operator_stats(False, kernels=True, include_views=True) as stats:
        torch.empty(2, 3).t().view(3, 2)
    assert stats.kernels == []
    assert set(stats.totals()) >= {"empty", "t", "view"}


@pytest.mark.usefixtures("on_cpu")
def test_statistics_are_the_same_with_and_without_times() -> None:
    model, x = two_linears(), torch.ones(2, 4)
    with collect_operator_stats(False) as plain:
        train_once(model, x)
    with collect_operator_stats(False, kernels=True, leaks=True) as timed:
        train_once(model, x)
    assert timed.rows == plain.rows
    assert timed.casts == plain.casts


@pytest.mark.usefixtures("on_cpu")
def test_a_nested_recording_times_only_what_runs_inside() -> None:
    x = torch.ones(2)
    with collect_operator_stats(False, kernels=True) as outer:
        x + x
        with collect_operator_stats(False, kernels=True) as inner:
            x * x
    assert {(row.op, row.calls) for row in outer.kernels} == {("add", 1), ("mul", 1)}
    assert {(row.op, row.calls) for row in inner.kernels} == {("mul", 1)}


@pytest.mark.usefixtures("on_cpu")
def test_an_exception_leaves_no_rows_and_nothing_installed() -> None:
    def fail() -> None:
        torch.ones(2) + 1
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), collect_operator_stats(False, kernels=True) as stats:
        fail()
    assert stats.kernels == []
    assert stats.raw()["add"] == "0,0,1,0"
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert not counts_operators()
    with collect_operator_stats(False, kernels=True) as again:
        torch.ones(2) + 1
    assert {row.op for row in again.kernels} == {"add", "ones"}


def test_threads_do_not_lose_kernels() -> None:
    times = KernelTimes()
    op = torch.ops.aten.relu.default
    seen = [_kernel_run(op, number) for number in range(4000)]

    def listen(part: int) -> None:
        for each in seen[part::4]:
            times.receive(each)

    threads = [threading.Thread(target=listen, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times._fill(times._on_host())
    (row,) = times.rows
    assert row.calls == 4000
    assert row.time_us == pytest.approx(4000.0)


def _kernel_run(func: object, number: int) -> KernelRun:
    x = torch.ones(1)
    op = describe_op(func)
    return KernelRun(op, func, (x,), {}, x, "forward", "", "relu", "", number=number, seconds=1e-6)


# -- profiles made by hand


@dataclass
class Kernel:
    name: str
    duration: float


@dataclass
class Event:
    """What of the profiler's event is read."""

    name: str
    device_type: DeviceType = DeviceType.CPU
    device_time_total: float = 0.0
    is_user_annotation: bool = False
    kernels: list[Kernel] = field(default_factory=list)
    cpu_parent: "Event | None" = None


def on_device(name: str, time_us: float, *, is_user_annotation: bool = False) -> Event:
    return Event(name, DeviceType.CUDA, time_us, is_user_annotation)


def launched(events: Sequence[Event]) -> list[tuple[str, int, float, bool | None]]:
    return sorted(_launched(events))


def test_a_kernel_belongs_to_the_innermost_range_around_its_launch() -> None:
    outer = Event(f"{RANGE}3")
    inner = Event(f"{RANGE}7", cpu_parent=outer)
    op = Event("aten::mm", cpu_parent=inner)
    launch = Event("cudaLaunchKernel", kernels=[Kernel("ampere_sgemm_128x64_tn", 12.5)], cpu_parent=op)
    other = Event("aten::add", kernels=[Kernel("nvjet_a", 2.0), Kernel("nvjet_b", 3.0)], cpu_parent=outer)
    gpu = [on_device("ampere_sgemm_128x64_tn", 12.5), on_device("nvjet_a", 2.0), on_device("nvjet_b", 3.0)]
    assert launched([outer, inner, op, launch, other, *gpu]) == [
        ("ampere_sgemm_128x64_tn", 7, 12.5, False),
        ("nvjet_a", 3, 2.0, True),
        ("nvjet_b", 3, 3.0, True),
    ]


def test_a_kernel_launched_without_the_dispatcher_belongs_to_no_range() -> None:
    free = Event("cuLaunchKernel", kernels=[Kernel("triton_step", 5.0)])
    inside = Event("cudaLaunchKernel", kernels=[Kernel("relu", 1.0)], cpu_parent=Event(f"{RANGE}0"))
    gpu = [on_device("triton_step", 5.0), on_device("triton_step", 6.0), on_device("relu", 1.0)]
    # two of Triton's, one of which the profiler joined with a launch outside of every range
    assert launched([free, inside, *gpu]) == [
        ("relu", 0, 1.0, False),
        ("triton_step", -1, 5.0, False),
        ("triton_step", -1, 6.0, False),
    ]


def test_annotations_on_the_device_are_no_kernels() -> None:
    gpu = [
        on_device("my epoch", 1e6, is_user_annotation=True),
        on_device(f"{RANGE}4", 1e6),
        on_device("relu", 2.0),
    ]
    assert launched(gpu) == [("relu", -1, 2.0, False)]


def test_a_kernel_without_a_range_keeps_its_own_time_beside_one_of_the_same_name_with_a_range() -> None:
    launch = Event("cudaLaunchKernel", kernels=[Kernel("copy", 10.0)], cpu_parent=Event(f"{RANGE}0"))
    events = [launch, on_device("copy", 10.0), on_device("copy", 1000.0)]
    assert launched(events) == [("copy", -1, 1000.0, False), ("copy", 0, 10.0, False)]


def test_a_profile_without_kernels_gives_none() -> None:
    assert launched([]) == []
    assert launched([Event("aten::mm", cpu_parent=Event(f"{RANGE}1"))]) == []


def test_rows_are_summed_by_kernel_and_place_the_longest_first() -> None:
    times = KernelTimes()
    times.receive(_kernel_run(torch.ops.aten.relu.default, 0))
    times.receive(_kernel_run(torch.ops.aten.relu.default, 1))
    times._fill([("fast", 0, 2.0, False), ("fast", 1, 3.0, False), ("slow", 1, 9.0, True), ("free", -1, 4.0, False)])
    assert times.rows == [
        KernelRow("slow", "relu", "forward", "", "relu", "float32", False, True, 1, 9.0),
        KernelRow("fast", "relu", "forward", "", "relu", "float32", False, False, 2, 5.0),
        KernelRow("free", "", None, "", "", "", False, False, 1, 4.0),
    ]


# -- what is read from rows


def timed(module: str, time_us: float, *, on_tensor_cores: bool | None) -> KernelRow:
    return KernelRow("k", "mm", "forward", module, "linear", "float16", False, on_tensor_cores, 1, time_us)


def counted(stats: OperatorStats, module: str, dtype: torch.dtype, calls: int) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    for _ in range(calls):
        stats.count(torch.ops.aten.mm.default, (x, x), {}, x, phase="forward", module=module, api_op="linear")


@pytest.fixture
def stats() -> OperatorStats:
    made = OperatorStats()
    counted(made, "body.0", torch.float16, 3)
    counted(made, "body.1.attn", torch.bfloat16, 1)
    counted(made, "body.1.attn", torch.float64, 1)
    counted(made, "head", torch.float32, 2)
    half, full = torch.ones(5, dtype=torch.float16), torch.ones(5)
    to_copy = torch.ops.aten._to_copy.default
    made.count(to_copy, (full,), {"dtype": torch.float16}, half, phase="forward", module="head", api_op="linear")
    made.kernels = [
        timed("body.0", 600.0, on_tensor_cores=True),
        timed("body.1.attn", 100.0, on_tensor_cores=True),
        timed("body.1.attn", 50.0, on_tensor_cores=False),
        timed("head", 200.0, on_tensor_cores=False),
        KernelRow("triton", "", None, "", "", "", False, False, 1, 50.0),
    ]
    return made


def test_a_modules_row_holds_all_below_it(stats: OperatorStats) -> None:
    assert stats.by_module() == [
        ModuleRow("", 3, 1, 3, 1, 1, 1000.0, 700.0),
        ModuleRow("body", 3, 1, 0, 1, 0, 750.0, 700.0),
        ModuleRow("body.0", 3, 0, 0, 0, 0, 600.0, 600.0),
        ModuleRow("body.1", 0, 1, 0, 1, 0, 150.0, 100.0),
        ModuleRow("body.1.attn", 0, 1, 0, 1, 0, 150.0, 100.0),
        ModuleRow("head", 0, 0, 3, 0, 1, 200.0, 0.0),
    ]


@pytest.mark.parametrize(("depth", "paths"), [(0, [""]), (1, ["", "body", "head"])])
def test_depth_limits_the_paths_and_keeps_the_sums(stats: OperatorStats, depth: int, paths: list[str]) -> None:
    rows = stats.by_module(depth)
    assert [row.module for row in rows] == paths
    assert (rows[0].time_us, rows[0].tensor_core_us, rows[0].fp16) == (1000.0, 700.0, 3)


def test_the_share_on_tensor_cores_is_of_the_time(stats: OperatorStats) -> None:
    assert stats.tensor_core_share == pytest.approx(0.7)
    assert stats.kernel_time_us == pytest.approx(1000.0)
    stats.kernels = [timed("a", 3.0, on_tensor_cores=None), timed("a", 1.0, on_tensor_cores=True)]
    assert stats.tensor_core_share == 1.0
    stats.kernels = [timed("a", 0.0, on_tensor_cores=True)]
    assert stats.tensor_core_share is None


def test_the_table_by_module_shows_milliseconds_and_shares(stats: OperatorStats) -> None:
    lines = [line.split() for line in stats.module_table(depth=1).splitlines()]
    assert lines == [
        ["module", "fp16", "bf16", "fp32", "other", "casts", "time", "ms", "Tensor", "Cores"],
        ["(the", "whole)", "3", "1", "3", "1", "1", "1.000", "70%"],
        ["body", "3", "1", "0", "1", "0", "0.750", "93%"],
        ["head", "0", "0", "3", "0", "1", "0.200", "0%"],
    ]
    assert len({len(line) for line in stats.module_table().splitlines()}) == 1


def test_without_times_the_table_by_module_has_no_times(stats: OperatorStats) -> None:
    stats.kernels = []
    assert stats.module_table(depth=0).splitlines()[0].split()[-1] == "casts"
    assert stats.module_table(depth=0).splitlines()[1].split() == ["(the", "whole)", "3", "1", "3", "1", "1"]


def test_on_a_cpu_the_table_shows_times_without_shares(stats: OperatorStats) -> None:
    stats.kernels = [timed("head", 1500.0, on_tensor_cores=None)]
    assert stats.module_table(depth=0).splitlines()[1].split() == "(the whole) 3 1 3 1 1 1.500".split()


def test_an_empty_recording_has_an_empty_table() -> None:
    with collect_operator_stats(False, kernels=True, leaks=True) as empty:
        pass
    assert empty.by_module() == []
    assert len(empty.module_table().splitlines()) == 1
    assert empty.tensor_core_share is None


def test_casts_are_counted_by_place_and_direction_with_their_elements() -> None:
    with collect_operator_stats(False) as stats:
        train_once(two_linears(), torch.ones(2, 4))
    half, full = "bfloat16", "float32"
    # weights have 32 elements each, biases 8 and 4, the data and the result 8
    assert stats.casts == [
        CastRow("0", "forward", "linear", full, half, calls=3, elements=8 + 32 + 8),
        CastRow("0", "backward", "", half, full, calls=2, elements=32 + 8),
        CastRow("2", "backward", "", half, full, calls=2, elements=32 + 4),
        CastRow("2", "forward", "linear", full, half, calls=2, elements=32 + 4),
        CastRow("", "backward", "", full, half, calls=1, elements=8),
        CastRow("", "forward", "float", half, full, calls=1, elements=8),
    ]


def test_a_copy_into_another_dtype_counts_as_a_cast_and_into_the_same_does_not() -> None:
    full, half = torch.ones(3), torch.zeros(3, dtype=torch.float16)
    with collect_operator_stats(False) as stats:
        half.copy_(full)
        half.copy_(half.clone())
        full[:2].copy_(half[:2])
        torch.zeros(3).copy_(torch.tensor([1, 2, 3]))
    assert [(row.source, row.target, row.calls, row.elements) for row in stats.casts] == [
        ("float32", "float16", 1, 3),
        ("float16", "float32", 1, 2),
    ]


def test_casts_are_counted_in_inference_mode() -> None:
    x = torch.ones(3)
    with torch.inference_mode(), collect_operator_stats(False) as stats:
        x.half()
    assert [(row.source, row.target, row.calls) for row in stats.casts] == [("float32", "float16", 1)]
