"""`auto_cast` as context manager and decorator: nesting, exceptions, threads, and its errors."""

import gc
import importlib
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from mezzo.amp import GradScaler, Policy, _marker, auto_cast, bind_policy, current_policy, debugging, decorate
from mezzo.amp._recompute import run_in_state, with_policy_in_replicas
from mezzo.amp._state import set_policy, state_of, thread_state

X = torch.rand(4, 4)


def product_dtype() -> torch.dtype:
    return torch.mm(X, X).dtype


def test_region_and_decorator_cast_and_leave_nothing_behind() -> None:
    with auto_cast(dtype="bfloat16"):
        assert product_dtype() is torch.bfloat16
    assert product_dtype() is torch.float32

    @auto_cast(level="O1", dtype=torch.float16)
    def product() -> torch.dtype:
        """Multiply."""
        return product_dtype()

    assert [product(), product()] == [torch.float16] * 2
    assert product.__doc__ == "Multiply."
    assert product_dtype() is torch.float32
    assert current_policy() is None


@pytest.mark.parametrize(("level", "enable"), [("O0", True), ("O1", False), ("O2", False)])
def test_level_o0_and_enable_false_are_off(level: str, enable: bool) -> None:
    with auto_cast(enable=enable, level=level):
        assert product_dtype() is torch.float32
        assert current_policy() is None


def test_an_inner_disabled_region_is_off_and_the_outer_one_comes_back() -> None:
    with auto_cast(custom_black_list=["mm"]):
        assert product_dtype() is torch.float32
        with auto_cast(dtype="bfloat16"):
            assert product_dtype() is torch.bfloat16
            with auto_cast(enable=False):
                assert product_dtype() is torch.float32
            assert product_dtype() is torch.bfloat16
        assert product_dtype() is torch.float32


def test_torch_autocast_inside_a_region_switches_it_off_or_brings_torchs_rules_for_another_dtype() -> None:
    with auto_cast(custom_black_list=["mm"], cpu_compute="native"):
        assert product_dtype() is torch.float32
        with torch.autocast("cpu", enabled=False):
            assert torch.nn.functional.linear(X, X).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert product_dtype() is torch.bfloat16
            assert torch.exp(X.bfloat16()).dtype is torch.bfloat16  # black in our lists, not in torch's for the CPU
        with torch.autocast("cpu", dtype=torch.float16):
            assert product_dtype() is torch.float32
        assert product_dtype() is torch.float32


def test_one_object_may_be_entered_inside_itself() -> None:
    region = auto_cast()
    with region, region:
        assert product_dtype() is torch.float16
    assert product_dtype() is torch.float32


REGIONS = st.recursive(
    st.just(()),
    lambda inner: st.tuples(
        st.sampled_from(["O0", "OD", "O1", "O2"]),
        st.sampled_from(["float16", "bfloat16"]),
        st.sampled_from([None, "mm", "exp"]),
        st.booleans(),
        st.lists(inner, max_size=3),
    ),
    max_leaves=8,
)


def expected_dtypes(level: str, half: str, black: str | None) -> tuple[torch.dtype, torch.dtype]:
    """An independent model: mm is white, exp of float32 stays float32; OD returns float32 throughout."""
    low = getattr(torch, half)
    if level in ("O0", "OD"):
        return torch.float32, torch.float32
    mm = torch.float32 if black == "mm" else low
    return mm, torch.float32


def run_region(region: tuple, around: tuple[torch.dtype, torch.dtype]) -> None:
    if not region:
        return
    level, half, black, raises, inner = region
    try:
        with auto_cast(level=level, dtype=half, custom_black_list=[black] if black else None):
            here = expected_dtypes(level, half, black)
            for child in inner:
                run_region(child, here)
            assert (product_dtype(), torch.exp(X).dtype) == here
            if raises:
                raise KeyError("from inside")
    except KeyError:
        assert raises
    assert (product_dtype(), torch.exp(X).dtype) == around


@settings(max_examples=60, deadline=None)
@given(REGIONS)
def test_any_nesting_with_exceptions_restores_what_was_around_it(region: tuple) -> None:
    run_region(region, (torch.float32, torch.float32))
    assert current_policy() is None


def test_another_thread_sees_no_policy_unless_it_is_bound() -> None:
    seen: dict[str, object] = {}

    def work(name: str) -> None:
        seen[name] = (current_policy(), product_dtype())

    with auto_cast(custom_black_list=["exp"]) as region:
        threads = [
            threading.Thread(target=work, args=("plain",)),
            threading.Thread(target=bind_policy(work), args=("bound",)),
        ]
        for thread in threads:
            thread.start()
            thread.join()
    assert seen == {"plain": (None, torch.float32), "bound": (region.policy, torch.float16)}


def test_threads_with_policies_of_their_own_do_not_disturb_each_other() -> None:
    barrier, seen = threading.Barrier(2), {}

    def work(half: str) -> None:
        with auto_cast(dtype=half):
            barrier.wait(10)
            seen[half] = product_dtype()
            barrier.wait(10)

    threads = [threading.Thread(target=work, args=(half,)) for half in ("float16", "bfloat16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Remember(torch.autograd.Function):
    """Notes the policy that its backward sees."""

    seen: list[object] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        Remember.seen.append((current_policy(), threading.get_ident()))
        return grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_backward_inside_the_region_sees_the_policy_also_in_autograds_own_thread(device: str) -> None:
    Remember.seen.clear()
    x = torch.rand(3, 3, device=device, requires_grad=True)
    with auto_cast() as region:
        Remember.apply(x).sum().backward()
    Remember.apply(x).sum().backward()
    assert [policy for policy, _ in Remember.seen] == [region.policy, None]
    assert (Remember.seen[0][1] != threading.get_ident()) == (device == "cuda")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"level": "O4"}, ValueError, "level='O4': must be one of O0, OD, O1, O2"),
        ({"level": 1}, ValueError, "level=1: must be one of"),
        ({"dtype": "float32"}, ValueError, "dtype='float32': must be 'float16' or 'bfloat16'.*; level 'O0' is float32"),
        ({"dtype": torch.float8_e4m3fn}, ValueError, "must be 'float16' or 'bfloat16'.*; level 'O3' computes in FP8"),
        ({"dtype": "fp8"}, ValueError, "dtype='fp8': must be 'float16' or 'bfloat16'.*; level 'O3' computes in FP8"),
        ({"dtype": torch.float64}, ValueError, "dtype=torch.float64: must be"),
        ({"cpu_compute": "fast"}, ValueError, "cpu_compute='fast': must be one of auto, native, float32"),
        ({"custom_white_list": ["softmaxx"]}, ValueError, "unknown operator 'softmaxx'; did you mean 'softmax'"),
        ({"custom_black_list": "exp"}, TypeError, r"custom_black_list='exp': .* not one string; use \['exp'\]"),
        ({"custom_black_list": 3}, TypeError, "custom_black_list=3: must be a list or set of operator names, not int"),
        ({"custom_white_list": [torch.exp]}, TypeError, "operator names are strings"),
        ({"custom_white_list": ["exp"], "custom_black_list": {"exp"}}, ValueError, "both hold 'exp'; keep it in one"),
        (
            {"custom_white_list": ("matmul",), "custom_black_list": ["matmul_v2"]},
            ValueError,
            r"both hold 'matmul' and 'matmul_v2' \(the same operator\)",
        ),
    ],
)
def test_bad_arguments_are_refused_and_leave_no_trace(arguments: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        auto_cast(**arguments)
    assert current_policy() is None
    assert product_dtype() is torch.float32


def test_a_decorated_thing_must_be_callable() -> None:
    with pytest.raises(TypeError, match="auto_cast\\(\\) decorates a function; got int"):
        auto_cast()(3)


def test_names_without_a_torch_operator_warn_and_do_nothing() -> None:
    with pytest.warns(UserWarning, match="custom_black_list: 'tanh_shrink' has no effect"):
        region = auto_cast(custom_black_list=["tanh_shrink"])
    assert region.policy == Policy.create()


def test_dtype_and_level_are_understood_in_any_case() -> None:
    assert auto_cast(level="o2", dtype="BFloat16").policy == Policy.create("O2", torch.bfloat16)


def test_a_policy_lives_as_long_as_its_regions_and_no_longer() -> None:
    """Some torch releases drop a reference too many in their thread-local store: the policy would die in use."""
    policy = Policy.create(custom_black_list=["tan"])
    before = sys.getrefcount(policy)
    for _ in range(50):
        with auto_cast(policy=policy):
            assert sys.getrefcount(policy) > before
    gc.collect()
    assert sys.getrefcount(policy) - before <= 3  # the kernel table and the compile marker remember it once each


def test_a_pickled_policy_brings_its_lists_into_another_process() -> None:
    policy = Policy.create("O2", custom_black_list=["linear"])
    with auto_cast(policy=policy):
        pass
    script = (
        "import pickle, sys, torch\n"
        "from mezzo.amp import auto_cast\n"
        "policy, x = pickle.loads(sys.stdin.buffer.read()), torch.rand(2, 2)\n"
        "with auto_cast(policy=policy):\n"
        "    print(torch.nn.functional.linear(x, x).dtype, torch.mm(x, x).dtype)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(policy), capture_output=True, check=True)
    assert done.stdout.split() == [b"torch.float32", b"torch.float16"]


def test_gradients_inside_a_region_are_those_outside() -> None:
    """A backward inside an O2 region must not round float32 arithmetic to half: 2^15 times 1000 overflows."""
    weight = torch.tensor([0.7, 0.3, 0.5, 0.9], requires_grad=True)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def loss() -> torch.Tensor:
        with auto_cast(level="O2"), auto_cast(enable=False):
            return (x * weight * 1000 * weight / 1000).sum() * 2.0**15

    outside = torch.autograd.grad(loss(), weight)[0]
    with auto_cast(level="O2"):
        inside = torch.autograd.grad(loss(), weight)[0]
    assert torch.equal(inside, outside)


def test_the_threads_of_data_parallel_follow_the_policy() -> None:
    """With a stand-in for torch's function, which needs GPUs: one thread a replica, as there."""

    def parallel_apply(modules: list, inputs: list) -> None:
        threads = [threading.Thread(target=m, args=(x,)) for m, x in zip(modules, inputs, strict=True)]
        for thread in threads:
            thread.start()
            thread.join()

    seen = []

    def replica(x: torch.Tensor) -> None:
        seen.append((current_policy(), (x @ x).dtype))

    with auto_cast(level="O2", dtype="bfloat16") as region:
        parallel_apply([replica], [X])
        with_policy_in_replicas(parallel_apply)([replica, replica], [X, X])
    assert seen == [(None, torch.float32), *[(region.policy, torch.bfloat16)] * 2]
    patched = importlib.import_module("torch.nn.parallel.data_parallel").parallel_apply
    assert patched.__code__ is with_policy_in_replicas(parallel_apply).__code__


def test_nested_regions_of_two_dtypes_share_weights() -> None:
    """The cache of cast weights does not know their dtype."""
    layer = torch.nn.Linear(4, 4)
    with auto_cast(dtype="float16", cpu_compute="native"):
        assert layer(X).dtype is torch.float16
        with auto_cast(dtype="bfloat16", cpu_compute="native"):
            assert layer(X).dtype is torch.bfloat16
        assert layer(X).dtype is torch.float16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "O1"}, "policy='O1': must be a mezzo.amp.Policy"),
        ({"policy": Policy.create(), "level": "O2"}, "give a policy, or level, dtype and lists, not both"),
        ({"enable": product_dtype}, "write @auto_cast\\(\\), not @auto_cast"),
    ],
)
def test_mixed_up_arguments_are_type_errors(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        auto_cast(**arguments)


def test_a_dtype_that_cannot_be_hashed_is_refused_like_any_other() -> None:
    with pytest.raises(ValueError, match="must be 'float16' or 'bfloat16'"):
        auto_cast(dtype=["float16"])


def test_a_region_in_a_thread_of_autograds_leaves_no_policy_behind() -> None:
    """There torch's store brings the policy of the caller; it must not be taken for one of the thread's own."""
    seen = []

    def as_in_autograds_thread() -> None:
        set_policy(policy)
        thread_state.policy = None  # the store was filled by torch, not by us
        with auto_cast(enable=False):
            seen.append(current_policy())
        run_in_state(state_of(policy), lambda: None)
        seen.append((current_policy(), thread_state.policy))

    policy = Policy.create()
    thread = threading.Thread(target=as_in_autograds_thread)
    thread.start()
    thread.join()
    assert seen == [None, (policy, None)]


def test_too_many_policies_for_the_marker_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_marker, "_dtypes", lambda: (torch.float32,))
    monkeypatch.setattr(_marker, "_numbers", {})
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys.modules.get("torch._dynamo"))
    _marker.set_marker("first")
    with pytest.raises(RuntimeError, match=r"more than 1 different policies in one process that uses torch.compile"):
        _marker.set_marker("second")
    _marker.set_marker(None)


def test_a_weight_is_cast_once_per_region_and_again_when_it_changed() -> None:
    """OD runs through kernels of ours, so torch's own cache of casts does not apply."""
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)

    def casts(calls: int) -> int:
        with debugging.collect_operator_stats(print_table=False) as stats, auto_cast(level="OD", dtype="bfloat16"):
            for _ in range(calls):
                layer(x)
        return sum(row.calls for row in stats.casts if row.target == "bfloat16")

    assert (casts(1), casts(5)) == (3, 7)  # weight and bias once, the input at each call
    with auto_cast(level="OD", dtype="bfloat16"):
        with torch.no_grad():
            before = layer(x)
            layer.weight.mul_(2)
            layer.bias.mul_(2)
        assert torch.equal(layer(x), 2 * before)
        assert layer(x).requires_grad  # the copy made without gradients is not used
    with auto_cast(level="OD", dtype="bfloat16"), torch.no_grad():
        assert torch.equal(layer(x), 2 * before)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("O2", "level='O2'"),
        (torch.bfloat16, "dtype=torch.bfloat16"),
        ("bf16", "dtype='bf16'"),
        (Policy.create(), "policy="),
    ],
)
def test_an_argument_in_the_place_of_enable_is_refused_and_the_right_name_given(given: object, meant: str) -> None:
    with pytest.raises(TypeError, match="the first argument is `enable`") as caught:
        auto_cast(given)  # type: ignore[arg-type]
    assert meant in str(caught.value)


@pytest.mark.parametrize("given", [None, 1, 0, 1024.0, "yes", "mps"])
def test_enable_is_true_or_false(given: object) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=r"must be True or False|mezzo casts tensors on cuda and cpu only"
    ):
        auto_cast(given)  # type: ignore[arg-type]


def test_a_device_type_in_the_place_of_enable_is_understood_as_torch_does() -> None:
    with auto_cast("cpu"):
        assert product_dtype() is torch.float16
    with auto_cast("cuda"):
        assert product_dtype() is torch.float32  # tensors on the CPU are not cast
    with auto_cast(torch.device("cpu"), dtype="bfloat16"):
        assert product_dtype() is torch.bfloat16


def test_a_region_that_is_off_takes_any_dtype_that_torch_takes() -> None:
    with auto_cast(enable=False, dtype=torch.float32):
        assert product_dtype() is torch.float32
    with pytest.raises(ValueError, match="must be 'float16' or 'bfloat16'"):
        auto_cast(dtype=torch.float32)


def test_a_kept_cast_is_no_constant_of_a_trace_and_no_fake_tensor() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with auto_cast(level="OD", dtype="bfloat16"), torch.no_grad():
        layer(x)
        traced = torch.jit.trace(layer, x)
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer(x)
        assert type(layer(x)) is torch.Tensor
        layer.weight.zero_()
        layer.bias.zero_()
        assert torch.equal(traced(x), torch.zeros(2, 4))


def test_weights_made_in_inference_mode_are_cast() -> None:
    with torch.inference_mode():
        layer = torch.nn.Linear(4, 4)
        with auto_cast(level="OD"):
            assert layer(torch.randn(2, 4)).dtype is torch.float32


def test_kept_casts_are_dropped_with_the_last_region_even_inside_torch_autocast() -> None:
    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cpu"):
        with auto_cast(level="OD"):
            layer(torch.randn(2, 4))
            assert thread_state.casts
        assert not thread_state.casts


def test_a_region_for_one_device_leaves_the_other_as_it_is() -> None:
    with auto_cast("cpu", dtype="bfloat16"), auto_cast("cuda", dtype="bfloat16"):
        assert product_dtype() is torch.bfloat16


def test_the_second_argument_is_no_dtype_unless_the_first_is_a_device() -> None:
    with pytest.raises(TypeError, match="the second argument is `custom_white_list`; write dtype="):
        auto_cast(True, torch.bfloat16)  # type: ignore[arg-type]


def test_an_async_generator_is_not_decorated() -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="open the region inside it"):
        auto_cast()(numbers)


@pytest.mark.parametrize("cpu_compute", ["native", "float32"])
def test_a_plain_optimizer_may_step_inside_the_region(cpu_compute: str) -> None:
    """Stock autocast keeps the half copies of the weights until the region ends."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    with auto_cast(dtype="bfloat16", cpu_compute=cpu_compute):
        for _ in range(4):
            loss = layer(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_are_half_at_o2_whatever_comes_in(kind: type[torch.nn.Module]) -> None:
    layer = decorate(kind(4, 4), level="O2", dtype="bfloat16")
    with auto_cast(level="O2", dtype="bfloat16"):
        assert layer(torch.randn(3, 2, 4))[0].dtype is torch.bfloat16
        assert layer(torch.randn(3, 2, 4).bfloat16())[0].dtype is torch.bfloat16


def test_a_string_as_use_promote_is_refused_and_numpy_bools_are_taken() -> None:
    with pytest.raises(TypeError, match="use_promote='False'"):
        auto_cast(level="O2", use_promote="False")
    with auto_cast(enable=False, dtype="float32"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert GradScaler(np.True_).is_enable()
    assert not GradScaler(np.False_).is_enable()
