"""What the policy decides is what really happens: every operator, level, dtype and device, custom lists too.

With mezzo's kernels uninstalled these tests fail (see `test_without_our_kernels_...`): they do not test torch.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from op_samples import NOT_CALLABLE_HERE, SAMPLES, Maker
from torch._subclasses.fake_tensor import FakeTensorMode

from installed_kernels import count_kernels, install_no_kernels, uninstall_kernels
from mezzo.amp import VARIANTS, Policy, auto_cast, black_list, debugging, white_list
from mezzo.amp._carried import FLOAT32_INSIDE

pytestmark = pytest.mark.filterwarnings("ignore:.*not part of single contiguous chunk.*")  # cuDNN, on the samples' RNNs

HALVES = ("float16", "bfloat16")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LEVELS = ("OD", "O1", "O2")


#: On a build without CUDA, tensors without data stand in for CUDA ones: they take the same way through the dispatcher.
NO_FAKE_CUDA = {"fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine", "gru", "gru_cell", "ctc_loss",
                "batch_norm", "grid_sampler", "linalg_lstsq", "geqrf"}  # fmt: skip  # torch's stand-ins fail for these


needs_fake_cuda = pytest.mark.skipif(
    torch.version.cuda is not None, reason="stand-ins for CUDA tensors need a build without CUDA, or a driver"
)


def fake_cuda() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_tensors(dtypes: list[torch.dtype], dtype: torch.dtype) -> Maker:
    def t(*shape: int) -> torch.Tensor:
        dtypes.append(dtype)
        return (torch.rand(*shape) * 0.8 + 0.1).to(dtype)

    return t


def observe(
    variant: str, policy: Policy, input_dtype: torch.dtype, device: str
) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype that came out of a call, and the one the policy decides for its inputs."""
    dtypes: list[torch.dtype] = []
    with torch.device(device), auto_cast(policy=policy):
        out = SAMPLES[variant](make_tensors(dtypes, input_dtype))
    return (out[0] if isinstance(out, tuple) else out).dtype, policy.decide(variant, dtypes).dtype


def disagreements(policy: Policy, device: str, variants: Iterable[str] | None = None) -> list[str]:
    wrong = []
    for variant in variants or SAMPLES:
        for input_dtype in (torch.float32, policy.dtype):
            seen, decided = observe(variant, policy, input_dtype, device)
            if seen is not decided:
                wrong.append(f"{variant} on {input_dtype}: decided {decided}, saw {seen}")
    return wrong


def test_every_known_variant_has_a_sample_or_a_reason() -> None:
    assert set(SAMPLES) | set(NOT_CALLABLE_HERE) == set(VARIANTS)
    assert not set(SAMPLES) & set(NOT_CALLABLE_HERE)


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cpu_compute", ["native", "float32"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
def test_every_operator_returns_the_dtype_that_the_policy_decides(
    level: str, half: str, cpu_compute: str, device: str
) -> None:
    assert disagreements(Policy.create(level, half, cpu_compute=cpu_compute), device) == []


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", HALVES)
def test_o2_without_promotion_returns_the_dtype_that_the_policy_decides(half: str, device: str) -> None:
    assert disagreements(Policy.create("O2", half, use_promote=False), device) == []


NAMES = sorted(v for v in SAMPLES if not v.startswith(("linalg", "fft", "nuclear", "frobenius", "chain")))


@settings(max_examples=25, deadline=None)
@given(
    level=st.sampled_from(LEVELS),
    half=st.sampled_from(HALVES),
    edits=st.dictionaries(st.sampled_from(NAMES), st.booleans(), min_size=1, max_size=6),
)
def test_custom_lists_are_followed(level: str, half: str, edits: dict[str, bool]) -> None:
    white = [name for name, to_white in edits.items() if to_white]
    black = [name for name, to_white in edits.items() if not to_white]
    policy = Policy.create(level, half, custom_white_list=white, custom_black_list=black)
    assert disagreements(policy, "cpu", iter(edits)) == []


@pytest.mark.gpu
def test_custom_lists_are_followed_on_the_gpu() -> None:
    for level in LEVELS:
        white, black = NAMES[::2], NAMES[1::2]
        assert (
            disagreements(Policy.create(level, custom_white_list=white, custom_black_list=black), "cuda", iter(NAMES))
            == []
        )


def kernels_in_half(variant: str, policy: Policy, device: str) -> list[str]:
    """Return the kernels, casts apart, that computed in half during a call with half inputs."""
    with torch.device(device), auto_cast(policy=policy), torch.no_grad():
        t = make_tensors([], policy.dtype)
        with debugging.collect_operator_stats(print_table=False) as stats:
            SAMPLES[variant](t)
    casts = {"_to_copy", "to", "copy_", "rand", "mul", "add", "prim::device"}  # how the sample makes its tensors
    return [
        name
        for name, (fp16, bf16, _, _) in stats.totals().items()
        # mezzo's own are float32 in registers; tests/kernels compares their numbers
        if fp16 + bf16 and name not in casts and not name.startswith("mezzo::")
    ]


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_fp32_inside_operators_compute_in_float32_on_half_inputs(level: str, device: str) -> None:
    policy = Policy.create(level)
    inside = [variant for variant in sorted(policy.inside) if variant in SAMPLES]
    assert len(inside) >= 12
    if device == "cuda":  # these kernels of torch are float32 inside; tests/amp/test_carried.py compares their numbers
        inside = [variant for variant in inside if variant not in FLOAT32_INSIDE]
    assert {v: kernels_in_half(v, policy, device) for v in inside} == {v: [] for v in inside}


#: On a build without CUDA stand-ins do; on one with CUDA this is a test for a GPU.
CUDA_MARKS = [pytest.mark.gpu] if torch.version.cuda is not None else []

#: One operator a list and level whose precision needs a kernel of ours, by device.
NEEDS_OUR_KERNEL = {
    ("cpu", "white", "OD"): "linear",
    ("cpu", "white", "O1"): "max_pool2d_with_indices",
    ("cpu", "white", "O2"): "max_pool2d_with_indices",
    ("cpu", "black", "O1"): "exp",
    ("cpu", "black", "O2"): "sum.full",
    ("cpu", "inside", "O1"): "upsample_bilinear2d",
    ("cpu", "inside", "O2"): "softmax",
    ("cpu", "gray", "OD"): "relu",
    ("cpu", "gray", "O1"): "prelu",
    ("cpu", "gray", "O2"): "prelu",
    ("cuda", "white", "OD"): "linear",
    ("cuda", "white", "O1"): "max_pool2d_with_indices",
    ("cuda", "white", "O2"): "max_pool2d_with_indices",
    ("cuda", "black", "O1"): "mean.full",
    ("cuda", "black", "O2"): "mean.full",
    ("cuda", "inside", "O1"): "upsample_bilinear2d",
    ("cuda", "inside", "O2"): "log_softmax",
    ("cuda", "gray", "OD"): "relu",
    ("cuda", "gray", "O1"): "log1p",
    ("cuda", "gray", "O2"): "log1p",
}


@pytest.mark.parametrize(
    ("device", "kind", "level"),
    [pytest.param(*key, marks=CUDA_MARKS if key[0] == "cuda" else []) for key in NEEDS_OUR_KERNEL],
)
def test_without_our_kernels_the_policy_is_not_followed(
    device: str, kind: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, policy = NEEDS_OUR_KERNEL[device, kind, level], Policy.create(level)

    def not_followed() -> list[str]:
        wrong = disagreements(policy, device, iter([variant]))
        return wrong + (kernels_in_half(variant, policy, device) if kind == "inside" else [])

    with fake_cuda() if device == "cuda" and not torch.cuda.is_available() else contextlib.nullcontext():
        assert not_followed() == []
        install_no_kernels(monkeypatch)
        assert not_followed() != []


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
@needs_fake_cuda
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_for_cuda_are_checked_without_a_gpu(level: str, half: str) -> None:
    with fake_cuda():
        assert disagreements(Policy.create(level, half), "cuda", [v for v in SAMPLES if v not in NO_FAKE_CUDA]) == []


@contextlib.contextmanager
def torch_autocast(device: str) -> Iterator[None]:
    """torch.autocast refuses to be entered for CUDA on a build without it; its state can be set all the same."""
    dtype = torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, dtype)
        torch.clear_autocast_cache()


@pytest.mark.parametrize("device", [*DEVICES, pytest.param("fake cuda", marks=needs_fake_cuda)])
def test_plain_autocast_is_untouched_by_our_kernels(device: str) -> None:
    """Inputs of both dtypes through every kernel: torch.autocast gives the same dtypes before and after ours exist."""
    fake, device = device == "fake cuda", device.removeprefix("fake ")
    skipped = NO_FAKE_CUDA if fake else ()

    def dtypes_under_torch() -> dict[tuple[str, torch.dtype], object]:
        seen: dict[tuple[str, torch.dtype], object] = {}
        for variant in (name for name in NAMES if name not in skipped):
            for dtype in (torch.float32, torch.bfloat16):
                with fake_cuda() if fake else contextlib.nullcontext(), torch.device(device), torch_autocast(device):
                    try:
                        out = SAMPLES[variant](make_tensors([], dtype))
                    except RuntimeError as error:
                        seen[variant, dtype] = type(error)
                        continue
                seen[variant, dtype] = (out[0] if isinstance(out, tuple) else out).dtype
        return seen

    uninstall_kernels()
    before = dtypes_under_torch()
    for level in LEVELS:
        with auto_cast(level=level, custom_black_list=["linear"]):
            pass
    assert count_kernels() > 100
    after = dtypes_under_torch()
    assert {key: (value, after[key]) for key, value in before.items() if after[key] != value} == {}


def test_in_place_and_out_variants_and_float64_are_never_cast() -> None:
    x, y = torch.rand(3, 3), torch.rand(3, 3)
    with auto_cast(level="O2"):
        out = torch.empty(3, 3)
        torch.mm(x, y, out=out)
        assert out.dtype is torch.float32
        assert x.add_(y).dtype is torch.float32
        assert torch.mm(x.double(), y.double()).dtype is torch.float64
        assert torch.exp(x.double()).dtype is torch.float64


def test_a_scalar_loss_stays_float32_through_arithmetic_at_o2() -> None:
    logits = torch.randn(4, 3)
    with auto_cast(level="O2"):
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0]))
        assert (loss + 0.4 * loss / 2).dtype is torch.float32


def test_losses_that_are_stacked_stay_float32_at_o2() -> None:
    losses = [torch.tensor(1.2345678, requires_grad=True), torch.tensor(0.7654321, requires_grad=True)]
    with auto_cast(level="O2"):
        total = torch.stack(losses).sum()
    assert total.item() == pytest.approx(1.9999999, rel=1e-7)
    (total * 2.0**20).backward()
    assert losses[0].grad == 2.0**20
    with auto_cast(level="O2"):
        assert torch.stack([torch.ones(2), torch.ones(2)]).dtype == torch.float32
        assert torch.stack([torch.ones(2).half(), torch.ones(2).half()]).dtype == torch.float16


def test_a_dtype_the_caller_names_is_kept() -> None:
    x = torch.rand(3, 4)
    with auto_cast(level="O1"):
        assert torch.softmax(x.half(), 1, dtype=torch.float16).dtype is torch.float16
        assert torch.sum(x, dtype=torch.float64).dtype is torch.float64
        assert x.half().sum(1, dtype=torch.float16).dtype is torch.float16


def test_batch_norm_updates_its_statistics_and_keeps_them_float32_at_o2() -> None:
    norm = torch.nn.BatchNorm1d(4)
    x = torch.randn(64, 4) + 3
    with auto_cast(level="O2"):
        assert norm(x.half()).dtype is torch.float16  # the float32 weights do not promote
    assert norm.running_mean is not None
    assert norm.running_mean.dtype is torch.float32
    # momentum 0.1 of the batch mean; float16 input: 2e-3 covers 10 mantissa bits at values near 3
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0), rtol=2e-3, atol=0)


def test_lists_hold_what_the_documents_hold() -> None:
    assert {"conv2d", "matmul", "einsum", "linear", "bmm", "conv3d"} <= white_list()["float16"]["O1"]
    assert {"exp", "softmax", "layer_norm", "cross_entropy_loss", "embedding", "scatter"} <= black_list()["float16"][
        "O1"
    ]
    assert black_list()["float16"]["OD"] == set()
    assert "sum.full" in black_list()["bfloat16"]["O2"]
    assert "softmax" not in black_list()["bfloat16"]["O2"]
    assert "fake_quantize_per_tensor_affine" in white_list()["float16"]["O1"] - white_list()["bfloat16"]["O1"]


#: Random numbers, and a solver whose last bit depends on where its work space lies.
NOT_REPEATABLE = {"dropout", "rrelu", "linalg_lstsq"}


def make_outside_the_region(dtype: torch.dtype, to: torch.dtype) -> Maker:
    def t(*shape: int) -> torch.Tensor:
        with auto_cast(enable=False):
            return (torch.rand(*shape) * 0.8 + 0.1).to(dtype).to(to)

    return t


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
def test_values_are_those_of_the_plain_operator_on_cast_inputs(level: str, device: str) -> None:
    """The kernel casts and nothing else: same bits as the operator called by hand in the dtype it computes in."""
    policy = Policy.create(level, cpu_compute="native")
    different = []
    for variant in sorted(set(SAMPLES) - NOT_REPEATABLE):
        for input_dtype in (torch.float32, policy.dtype):
            decision = policy.decide(variant, (input_dtype,))
            if (
                VARIANTS[variant].weights == "stay"
                or decision.compute is None
                or (variant == "avg_pool3d" and device == "cpu")
            ):
                continue
            with torch.device(device):
                torch.manual_seed(7)
                with auto_cast(policy=policy):
                    seen = SAMPLES[variant](make_outside_the_region(input_dtype, input_dtype))
                torch.manual_seed(7)
                by_hand = SAMPLES[variant](make_outside_the_region(input_dtype, decision.compute))
            seen, by_hand = (out[0] if isinstance(out, tuple) else out for out in (seen, by_hand))
            if seen.shape != by_hand.shape or not torch.equal(seen, by_hand.to(seen.dtype)):
                different.append(f"{variant} on {input_dtype}")
    assert different == []


def test_statistics_that_norms_return_stay_float32_at_o2() -> None:
    x = torch.randn(3, 4).half()
    with auto_cast(level="O2"):
        out, mean, rstd = torch.native_layer_norm(x, (4,), torch.ones(4), None, 1e-5)
    assert (out.dtype, mean.dtype, rstd.dtype) == (torch.float16, torch.float32, torch.float32)


def test_each_overload_is_judged_by_its_own_native_kernel() -> None:
    """The CPU autocast of torch has a kernel for one overload of _convolution and none for the other."""
    policy = Policy.create("O1", "bfloat16", cpu_compute="native")
    with auto_cast(dtype="bfloat16", custom_black_list=["conv"]):
        pass  # kernels of ours stand before both overloads now
    x, weight, rest = torch.rand(1, 2, 8, 8), torch.rand(4, 2, 3, 3), (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    with auto_cast(policy=policy):
        seen = [
            torch.ops.aten._convolution.deprecated(x, weight, *rest, False, False, False).dtype,
            torch.ops.aten._convolution.default(x, weight, *rest, False, False, False, False).dtype,
        ]
    assert seen == [torch.bfloat16] * 2


_ROWS = torch.zeros(1, 4, dtype=torch.long)
_MIXED: dict[str, Any] = {
    "scatter_add": lambda wide, half: torch.scatter_add(wide(3, 4), 0, _ROWS, half(1, 4)),
    "scatter": lambda wide, half: torch.scatter(wide(3, 4), 0, _ROWS, half(1, 4)),
    "scatter_reduce": lambda wide, half: torch.scatter_reduce(wide(3, 4), 0, _ROWS, half(1, 4), "sum"),
    "index_add": lambda wide, half: torch.index_add(wide(3, 4), 0, _ROWS[0, :2], half(2, 4)),
    "index_copy": lambda wide, half: torch.index_copy(wide(3, 4), 0, _ROWS[0, :1], half(1, 4)),
    "masked_scatter": lambda wide, half: torch.masked_scatter(wide(3, 4), torch.ones(3, 4).bool(), half(3, 4)),
    "linalg_cross": lambda wide, half: torch.linalg.cross(wide(2, 3), half(2, 3)),
    "embedding_bag": lambda wide, half: F.embedding_bag(
        _ROWS, wide(3, 4), per_sample_weights=half(1, 4), mode="sum"
    ),
}  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", _MIXED)
@pytest.mark.parametrize("swapped", [False, True])
def test_operators_that_torch_refuses_with_mixed_dtypes_are_promoted(name: str, half: str, level: str, swapped: bool):
    """A half result of a layer is scattered into a float32 buffer, or the other way round."""

    def make(dtype: torch.dtype) -> Any:
        return lambda *shape: (
            torch.linspace(0.1, 1.0, math.prod(shape)).reshape(shape).to(getattr(torch, half)).to(dtype)
        )

    sides = (make(torch.float32), make(getattr(torch, half)))
    expected = _MIXED[name](sides[0], sides[0])
    with auto_cast(level=level, dtype=half):
        found = _MIXED[name](*(reversed(sides) if swapped else sides))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected)
