"""Code written for torch.amp or for later releases of Paddle, with mezzo's names only where the package is named."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.optim import SGD

from mezzo import amp
from mezzo.amp import GradScaler, auto_cast
from mezzo.devices import DeviceError
from no_waiting import no_waiting

TORCH_NUMBERS: dict[str, Any] = {
    "init_scale": 512.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7,
}  # fmt: skip


def product_dtype() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


# GradScaler


def numbers_of(scaler: Any) -> tuple[float, ...]:
    """Return what a scaler says by torch's accessors."""
    growth = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    return scaler.get_scale(), *growth, scaler.is_enabled()


def test_a_scaler_by_torchs_names_has_the_numbers_of_torchs() -> None:
    stock = torch.amp.GradScaler("cpu", **TORCH_NUMBERS)
    assert numbers_of(GradScaler("cpu", **TORCH_NUMBERS)) == numbers_of(stock)
    stock = torch.amp.GradScaler("cpu", **TORCH_NUMBERS, enabled=False)
    off = GradScaler("cpu", **TORCH_NUMBERS, enabled=False)
    assert (off.is_enabled(), off.get_scale()) == (stock.is_enabled(), stock.get_scale()) == (False, 1.0)


@pytest.mark.parametrize("device", ["cuda", "cpu", "cuda:1", "gpu", torch.device("cpu")])
def test_positional_arguments_after_a_device_are_in_torchs_order(device: Any) -> None:
    given = GradScaler(device, *TORCH_NUMBERS.values())
    assert numbers_of(given) == (*TORCH_NUMBERS.values(), True)
    assert not GradScaler(device, *TORCH_NUMBERS.values(), False).is_enabled()


def test_a_device_by_name_is_taken_and_another_kind_refused() -> None:
    assert GradScaler(device="cuda", init_scale=4.0).get_scale() == 4.0
    for device, kind in (("mps", ValueError), (3, TypeError)):
        with pytest.raises(kind, match=r"cuda.*cpu"):
            GradScaler(device=device)


def test_settings_that_are_left_out_are_mezzos() -> None:
    assert numbers_of(GradScaler("cuda")) == (2.0**15, 2.0, 0.5, 1000, True)
    assert GradScaler("cuda", init_scale=8.0).get_decr_every_n_nan_or_inf() == 2


@pytest.mark.parametrize(
    ("call", "ours", "theirs"),
    [
        (lambda: GradScaler(init_loss_scaling=8.0, init_scale=8.0), "init_loss_scaling", "init_scale"),
        (lambda: GradScaler(True, 8.0, init_scale=4.0), "init_loss_scaling", "init_scale"),
        (lambda: GradScaler(incr_ratio=2.0, growth_factor=3.0), "incr_ratio", "growth_factor"),
        (lambda: GradScaler(decr_ratio=0.5, backoff_factor=0.5), "decr_ratio", "backoff_factor"),
        (lambda: GradScaler(incr_every_n_steps=1, growth_interval=2), "incr_every_n_steps", "growth_interval"),
        (lambda: GradScaler(enable=True, enabled=False), "enable", "enabled"),
        (lambda: GradScaler(True, enabled=True), "enable", "enabled"),
        (lambda: GradScaler("cuda", 1.0, 2.0, 0.5, 9, True, enable=True), "enable", "enabled"),
        (lambda: auto_cast(enable=True, enabled=False), "enable", "enabled"),
        (lambda: auto_cast(False, enabled=True), "enable", "enabled"),
        (lambda: auto_cast("cuda", None, True, enable=False), "enable", "enabled"),
    ],
)
def test_both_names_of_one_argument_are_one_clear_line(call: Any, ours: str, theirs: str) -> None:
    with pytest.raises(TypeError, match=rf"give {ours} or {theirs}, not both") as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: GradScaler("cuda", device="cpu"),
        lambda: GradScaler("cuda", 4.0, init_scale=4.0),
        lambda: auto_cast("cuda", device_type="cuda"),
        lambda: auto_cast("cuda", torch.bfloat16, dtype="bfloat16"),
    ],
)
def test_an_argument_by_position_and_by_name_is_one_clear_line(call: Any) -> None:
    with pytest.raises(TypeError, match="came by position and by name: give it once"):
        call()


def test_more_positional_arguments_than_torch_has_are_refused_with_their_names() -> None:
    with pytest.raises(TypeError, match="at most 5 positional arguments: init_scale, growth_factor"):
        GradScaler("cuda", 1.0, 2.0, 0.5, 9, True, 2)
    with pytest.raises(TypeError, match="at most 3 positional arguments: dtype, enabled, cache_enabled"):
        auto_cast("cuda", torch.float16, True, True, "O1")


def public_methods(kind: type) -> dict[str, list[str]]:
    """Return the public methods of a class with the names of their arguments."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters)[1:] for name, method in found if name[0] != "_"}


def test_every_public_method_of_torchs_scaler_is_there_with_its_arguments() -> None:
    ours = public_methods(GradScaler)
    for name, arguments in public_methods(torch.amp.GradScaler).items():
        assert ours[name][: len(arguments)] == arguments, name


def test_setters_by_torchs_names_change_the_rule_that_the_other_names_read() -> None:
    scaler = GradScaler()
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.125)
    scaler.set_growth_interval(3)
    assert (scaler.get_incr_ratio(), scaler.get_decr_ratio(), scaler.get_incr_every_n_steps()) == (4.0, 0.125, 3)
    with pytest.raises(ValueError, match="must be finite and above 1"):
        scaler.set_growth_factor(1.0)


def train(
    scaler: Any, grads: list[float], new_scales: dict[int, Any], device: str = "cpu"
) -> tuple[list[float], list[float]]:
    """Take a step for each true gradient; return the weight and the scale after each."""
    weight = nn.Parameter(torch.tensor([1.0], device=device))
    optimizer = SGD([weight], lr=0.5)
    weights, scales = [], []
    for i, grad in enumerate(grads):
        scaler.scale((weight * grad).sum()).backward()
        scaler.step(optimizer)
        scaler.update(*([new_scales[i]] if i in new_scales else []))
        optimizer.zero_grad()
        weights.append(weight.item())
        scales.append(scaler.get_scale())
    return weights, scales


def test_a_loop_in_torchs_words_moves_weight_and_scale_as_torchs_scaler_does() -> None:
    # torch shrinks at each bad step and has no floor: mezzo's words for these two are given
    grads = [1.0, 2.0, float("inf"), 0.5, 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0]
    new_scales = {3: 64.0, 5: 32.0, 7: torch.tensor(16.0)}
    settings: dict[str, Any] = {"init_scale": 128.0, "growth_interval": 2}
    stock = train(torch.amp.GradScaler("cpu", **settings), grads, new_scales)
    ours = GradScaler("cpu", **settings, decr_every_n_nan_or_inf=1, min_loss_scaling=0.0)
    assert train(ours, grads, new_scales) == stock  # powers of two: exact
    assert ours.skipped_steps == 2


def test_update_with_a_scale_needs_no_step_and_forgets_unscaled_gradients() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = SGD([weight], lr=0.5)
    scaler = GradScaler(init_scale=8.0)
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update(2.0)
    scaler.unscale_(optimizer)  # a new step: 4 / 4 / 2
    assert weight.grad is not None
    assert weight.grad.item() == 0.5
    assert scaler.get_init_loss_scaling() == 8.0


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), torch.zeros(1), torch.ones(2), "8"])
def test_update_refuses_a_scale_out_of_range_and_changes_nothing(value: Any) -> None:
    scaler = GradScaler(init_scale=8.0)
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(value)
    assert scaler.get_scale() == 8.0


def test_an_outcome_hook_hears_of_a_step_that_ends_in_a_new_scale() -> None:
    scaler, outcomes = GradScaler(init_scale=8.0), []
    scaler.register_outcome_hook(outcomes.append)
    train(scaler, [1.0, float("inf")], {0: 4.0, 1: 4.0})
    assert outcomes == [True, False]


@pytest.mark.gpu
def test_on_cuda_a_loop_in_torchs_words_moves_weight_and_scale_as_torchs_scaler_does() -> None:
    grads = [1.0, 2.0, float("inf"), 0.5, 1.0, float("nan"), 1.0, 1.0]
    settings: dict[str, Any] = {"init_scale": 128.0, "growth_interval": 2}
    new_scales = {3: 64.0, 5: torch.tensor(32.0, device="cuda")}
    stock = train(torch.amp.GradScaler("cuda", **settings), grads, new_scales, "cuda")
    ours = GradScaler("cuda", **settings, decr_every_n_nan_or_inf=1, min_loss_scaling=0.0)
    assert train(ours, grads, new_scales, "cuda") == stock  # powers of two: exact


@pytest.mark.gpu
def test_on_cuda_a_new_scale_that_is_a_number_waits_for_nothing() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer, scaler = SGD([weight], lr=0.5), GradScaler("cuda", init_scale=8.0)
    for is_first in (True, False):  # the first step compiles and allocates
        scaler.scale(weight.sum()).backward()
        if is_first:
            scaler.step(optimizer)
            scaler.update(4.0)
        else:
            with no_waiting():
                scaler.step(optimizer)
                scaler.update(2.0)
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0
    assert (weight == 0).all()


# auto_cast


@pytest.mark.gpu
def test_on_cuda_device_type_and_dtype_by_position_are_those_of_torch_autocast() -> None:
    x = torch.ones(2, 2, device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            expected = (x @ x).dtype
        with auto_cast("cuda", dtype):
            assert (x @ x).dtype is expected
            assert product_dtype() is torch.float32  # on the CPU
        with auto_cast(device_type="cpu", dtype=dtype):
            assert (x @ x).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16"])
def test_device_type_and_dtype_by_position_are_those_of_torch_autocast(dtype: Any) -> None:
    stock = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.autocast("cpu", stock):
        expected = product_dtype()
    with auto_cast("cpu", dtype):
        assert product_dtype() is expected
    with auto_cast("cpu", dtype, False):
        assert product_dtype() is torch.float32


def test_torchs_keywords_choose_device_dtype_and_whether_it_is_on() -> None:
    with auto_cast(device_type="cpu", dtype=torch.bfloat16, enabled=True, cache_enabled=True):
        assert product_dtype() is torch.bfloat16
        with auto_cast(device_type="cpu", enabled=False):
            assert product_dtype() is torch.float32
    with auto_cast(device_type="cuda", dtype=torch.bfloat16):
        assert product_dtype() is torch.float32  # this tensor is on the CPU


def test_a_dtype_that_is_left_out_is_mezzos_default_on_every_device() -> None:
    with auto_cast("cpu", None):
        assert product_dtype() is torch.float16
    with auto_cast(device_type="cpu"):
        assert product_dtype() is torch.float16


def test_mezzos_arguments_go_with_a_device_too() -> None:
    with auto_cast("cpu", torch.bfloat16, level="O2", custom_black_list=["matmul"]) as region:
        assert region.policy.level == "O2"
        assert product_dtype() is torch.float32


@pytest.mark.parametrize(("cache_enabled", "expected"), [(None, 1), (True, 1), (False, 2)])
@pytest.mark.parametrize("level", ["O1", "OD"])  # casts by torch's own kernels, and by those of mezzo
def test_cache_enabled_says_whether_a_weight_is_cast_at_each_use(
    level: str, cache_enabled: bool | None, expected: int
) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4).bfloat16()
    region = auto_cast(level=level, dtype="bfloat16", cpu_compute="native", cache_enabled=cache_enabled)
    with amp.debugging.collect_operator_stats(print_table=False) as stats, region:
        layer(x)
        layer(x)
    casts = sum(row.calls for row in stats.casts if (row.source, row.target) == ("float32", "bfloat16"))
    assert casts == 2 * expected  # weight and bias


def test_cache_enabled_is_restored_with_the_region() -> None:
    assert torch.is_autocast_cache_enabled()
    with auto_cast(cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()
        with auto_cast():  # None leaves it as it is
            assert not torch.is_autocast_cache_enabled()
        with auto_cast(cache_enabled=True):
            assert torch.is_autocast_cache_enabled()
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()
    with pytest.raises(TypeError, match="cache_enabled=1"):
        auto_cast(cache_enabled=1)  # type: ignore[call-overload]


def test_a_region_that_is_off_on_one_device_leaves_the_rules_of_the_other() -> None:
    x = torch.ones(2, 4)
    with amp.auto_cast("cpu", torch.bfloat16), amp.auto_cast("cuda", enabled=False):
        assert x.matmul(x.t()).dtype is torch.bfloat16
        assert torch.softmax(x.bfloat16(), -1).dtype is torch.float32  # black: torch.autocast would leave it in half
        assert amp.is_autocast_enabled("cpu")
        assert not amp.is_autocast_enabled("cuda")
        assert amp.get_autocast_dtype("cpu") is torch.bfloat16
        with amp.auto_cast("cpu", enabled=False):
            assert x.matmul(x.t()).dtype is torch.float32


@pytest.mark.parametrize("other", [{"dtype": torch.float16}, {"dtype": torch.bfloat16, "level": "O2"}])
def test_other_rules_for_one_device_inside_a_region_for_the_other_are_refused(other: Any) -> None:
    x = torch.ones(2, 4)
    with amp.auto_cast("cpu", torch.bfloat16):
        with (
            pytest.raises(RuntimeError, match=r"auto_cast\('cuda'\) inside a region with other rules for cpu tensors"),
            amp.auto_cast("cuda", **other),
        ):
            pass
        assert torch.softmax(x.bfloat16(), -1).dtype is torch.float32  # nothing has changed
        with amp.auto_cast("cuda", torch.bfloat16):  # the same rules
            assert torch.softmax(x.bfloat16(), -1).dtype is torch.float32
            assert amp.is_autocast_enabled("cuda")
    assert not amp.is_autocast_enabled()


@pytest.mark.parametrize("device", ["mps", "meta", torch.device("xpu")])
def test_a_scaler_for_another_device_is_refused_by_position_and_by_name(device: Any) -> None:
    for make in (lambda: amp.GradScaler(device), lambda: amp.GradScaler(device=device)):
        with pytest.raises(DeviceError, match=rf"GradScaler\('{device}'\): mezzo casts tensors on cuda and cpu only"):
            make()


class ScalerWithTorchsSignature(amp.GradScaler):
    def __init__(self, device: str = "cuda", init_scale: float = 8.0, enabled: bool = True) -> None:
        super().__init__(device, init_scale, enabled=enabled)
        self.note = [device]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])  # noqa: S301
@pytest.mark.parametrize("enabled", [True, False])
def test_a_subclass_with_torchs_signature_is_copied_with_its_attributes(again: Any, enabled: bool) -> None:
    scaler = ScalerWithTorchsSignature("cpu", 16.0, enabled)
    second = again(scaler)
    assert type(second) is ScalerWithTorchsSignature
    assert (second.get_scale(), second.note) == (16.0 if enabled else 1.0, ["cpu"])


@pytest.mark.parametrize("decorator", [amp.custom_fwd, amp.custom_bwd])
def test_a_device_in_place_of_the_function_is_refused(decorator: Any) -> None:
    with pytest.raises(TypeError, match=r"custom_.wd\('cuda'\): decorates a function; write .*device_type="):
        decorator("cuda")


def test_a_name_in_place_of_the_dtype_of_inputs_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cast_inputs='float16'\): must be a torch dtype"):
        amp.custom_fwd(device_type="cuda", cast_inputs="float16")


@pytest.mark.parametrize("device_type", ["mps", "xpu"])
def test_a_device_type_that_mezzo_does_not_cast_is_refused_by_position_and_by_name(device_type: str) -> None:
    for call in (lambda: auto_cast(device_type), lambda: auto_cast(device_type=device_type)):
        with pytest.raises(ValueError, match=r"mezzo casts tensors on cuda and cpu only"):
            call()


# Functions of torch.amp


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_custom_fwd_and_bwd_take_a_device_type(device_type: str) -> None:
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @amp.custom_fwd(device_type=device_type, cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            seen.append((x.dtype, amp.is_autocast_enabled()))
            return x * x

        @staticmethod
        @once_differentiable
        @amp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append((grad.dtype, amp.is_autocast_enabled()))
            return 2 * ctx.saved_tensors[0] * grad

    x = torch.tensor([3.0], dtype=torch.bfloat16, requires_grad=True)
    with auto_cast(device_type="cpu", dtype=torch.bfloat16):
        Square.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [(torch.float32, False)] * 2
    assert x.grad is not None
    assert x.grad.item() == 6.0


def test_custom_fwd_and_bwd_refuse_other_devices() -> None:
    for decorator in (amp.custom_fwd, amp.custom_bwd):
        with pytest.raises(ValueError, match="mps"):
            decorator(device_type="mps")


def test_state_of_autocast_follows_the_regions_of_mezzo_only() -> None:
    assert (amp.is_autocast_enabled(), amp.get_autocast_dtype()) == (False, torch.float16)
    with auto_cast(device_type="cpu", dtype="bfloat16"):
        assert (amp.is_autocast_enabled(), amp.get_autocast_dtype("cpu")) == (True, torch.bfloat16)
        assert (amp.is_autocast_enabled("cpu"), amp.is_autocast_enabled("cuda")) == (True, False)
        with auto_cast(enabled=False):
            assert not amp.is_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert (amp.is_autocast_enabled(), amp.get_autocast_dtype()) == (False, torch.float16)
    for call in (amp.is_autocast_enabled, amp.get_autocast_dtype):
        with pytest.raises(ValueError, match="mps"):
            call("mps")


# Paddle's other names


def test_other_names_are_the_same_objects() -> None:
    assert amp.autocast is amp.amp_guard is amp.auto_cast
    assert amp.amp_decorate is amp.decorate
    assert amp.AmpScaler is amp.GradScaler
