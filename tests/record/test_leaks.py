"""float32 that leaks: expected bytes are counted by hand, two for each element that float32 wrote."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from installed_kernels import uninstall_kernels
from mezzo import amp
from mezzo.amp import auto_cast
from mezzo.amp.debugging import Leak, collect_operator_stats

N, C = 2, 4
EXTRA = 2  # bytes that an element takes more in float32
OWN_CAST = "cast by the model's own code"
PROMOTED = "promoted: another input is float32"

Between = Callable[[Tensor], Tensor]


class TwoLayers(nn.Module):
    """Two linear layers, and whatever a test puts between them."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(C, C), nn.Linear(C, C)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x)))
        return out


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.head = nn.Conv2d(5, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        large = F.interpolate(features.float(), scale_factor=2, mode="bilinear")  # LEAK
        out: Tensor = self.head(large)
        return out


def line_of(mark: str) -> str:
    """Return `file:line` of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return f"{__file__}:{number}"


def leaks_of(
    model: nn.Module, x: Tensor, *, level: str = "O1", dtype: str = "bfloat16", cpu_compute: str = "auto"
) -> list[Leak]:
    region = auto_cast(level=level, dtype=dtype, cpu_compute=cpu_compute)
    with collect_operator_stats(False, leaks=True) as stats, region:
        model(x)
    return stats.leaks


def leaks_between(between: Between, *, level: str = "O1", dtype: str = "bfloat16") -> list[Leak]:
    return leaks_of(TwoLayers(between), torch.randn(N, C), level=level, dtype=dtype)


def leak_between(between: Between, *, level: str = "O1") -> Leak:
    (leak,) = leaks_between(between, level=level)
    return leak


@pytest.fixture(autouse=True)
def fresh_process() -> None:
    """Policies of earlier tests have left no kernels behind."""
    uninstall_kernels()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_upsampled_float_is_told_with_its_place_its_followers_and_its_bytes(dtype: str) -> None:
    # the cast writes (1, 5, 4, 6), the upsampling four times as much
    (leak,) = leaks_of(Upsampler(), torch.randn(1, 3, 4, 6), dtype=dtype)
    assert leak == Leak(
        op="float",
        module="",
        line=line_of("LEAK"),
        reason=OWN_CAST,
        followers=("upsample_bilinear2d",),
        fed=("head: conv2d",),
        calls=1,
        extra_bytes=EXTRA * (5 * 4 * 6) * (1 + 4),
    )


def test_the_module_is_the_one_that_makes_float32_and_the_fed_one_that_takes_it() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    net = nn.Sequential(nn.Linear(C, C), nn.Sequential(Inner(), nn.ReLU()), nn.Linear(C, C))
    (leak,) = leaks_of(net, torch.randn(N, C))
    assert (leak.module, leak.op, leak.followers, leak.fed) == ("1.0", "float", ("relu",), ("2: linear",))


@pytest.mark.parametrize(
    "cast",
    [
        lambda h: h.float(),
        lambda h: h.to(torch.float32),
        lambda h: h.to(dtype=torch.float32),
        lambda h: h.type(torch.float32),
        lambda h: h.type_as(torch.ones(1)),
        lambda h: h.to(torch.ones(1)),
    ],
    ids=["float", "to", "to dtype=", "type", "type_as", "to other"],
)
def test_every_spelling_of_a_cast_is_the_models_own(cast: Between) -> None:
    leak = leak_between(cast)
    assert leak.reason == OWN_CAST
    assert (leak.fed, leak.calls, leak.extra_bytes) == (("second: linear",), 1, EXTRA * N * C)


def test_a_float32_constant_promotes() -> None:
    constant = torch.ones(C)
    leak = leak_between(lambda h: h * constant)
    assert (leak.op, leak.reason, leak.fed) == ("mul", PROMOTED, ("second: linear",))
    assert leak.extra_bytes == EXTRA * N * C


def test_an_o1_leak_is_the_same_after_an_o2_region_in_the_same_process() -> None:
    constant = torch.ones(C)

    def found() -> list[tuple[str, int]]:
        return [(leak.reason, leak.extra_bytes) for leak in leaks_between(lambda h: h * constant)]

    before = found()
    with auto_cast(level="O2", dtype="bfloat16"):
        nn.Linear(C, C)(torch.ones(N, C))
    assert found() == before


def test_a_float32_buffer_promotes_and_what_follows_is_counted_too() -> None:
    class Shift(nn.Module):
        shift: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(C))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid((x + self.shift).relu())

    (leak,) = leaks_of(nn.Sequential(nn.Linear(C, C), Shift(), nn.Linear(C, C)), torch.randn(N, C))
    assert (leak.module, leak.op, leak.reason) == ("1", "add", PROMOTED)
    assert leak.followers == ("relu", "sigmoid")
    assert leak.extra_bytes == EXTRA * N * C * 3


def test_a_scalar_tensor_promotes_nothing() -> None:
    assert leaks_between(lambda h: h * torch.tensor(2.0) + 1.0) == []


def test_a_float32_residual_stream_leaks_in_every_layer_after_the_first() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(C, C) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    # the first sum meets the float32 input: all three are one stream, and the second and third layer take it in half
    (leak,) = leaks_of(Residual(), torch.randn(N, C))
    assert (leak.op, leak.reason, leak.fed) == ("add", PROMOTED, ("layers.1: linear", "layers.2: linear"))
    assert leak.followers == ("add",)
    assert leak.extra_bytes == EXTRA * N * C * 3


def test_a_black_listed_operator_that_feeds_a_linear_layer_is_a_leak() -> None:
    leak = leak_between(lambda h: h.softmax(-1))
    assert (leak.op, leak.reason, leak.followers, leak.fed) == ("softmax", "black list", (), ("second: linear",))
    assert leak.extra_bytes == EXTRA * N * C * 2  # its input in float32, and its result


def test_at_o2_a_black_listed_operator_gives_half_and_leaks_nothing() -> None:
    assert leaks_between(lambda h: h.softmax(-1), level="O2") == []


def test_at_o2_an_explicit_float32_is_followed_to_the_next_product() -> None:
    leak = leak_between(lambda h: h.float().relu(), level="O2")
    assert (leak.op, leak.followers, leak.fed) == ("float", ("relu",), ("second: linear",))
    assert leak.extra_bytes == EXTRA * N * C * 2


def test_a_decorated_o2_model_leaks_what_its_code_casts() -> None:
    model = amp.decorate(models=TwoLayers(lambda h: h.float()), level="O2", dtype="bfloat16")
    (leak,) = leaks_of(model, torch.randn(N, C), level="O2")
    assert (leak.op, leak.fed, leak.extra_bytes) == ("float", ("second: linear",), EXTRA * N * C)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_goes_only_into_the_loss_is_no_leak(level: str, dtype: str) -> None:
    model = TwoLayers(lambda h: h.relu())
    with collect_operator_stats(False, leaks=True) as stats:
        with auto_cast(level=level, dtype=dtype):
            logits = model(torch.randn(N, C))
            loss = F.cross_entropy(logits, torch.tensor([0, 1])) + F.mse_loss(logits.float(), torch.zeros(N, C))
        loss.backward()
    assert stats.leaks == []


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cpu_compute", ["native", "float32"])
def test_layers_that_compute_inside_in_float32_on_a_cpu_are_no_leak(level: str, dtype: str, cpu_compute: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.Linear(8, 2),
    )
    assert leaks_of(net, torch.randn(2, 3, 6, 6), level=level, dtype=dtype, cpu_compute=cpu_compute) == []


def test_without_auto_cast_and_in_float32_nothing_leaks() -> None:
    model = TwoLayers(lambda h: h.float().relu())
    with collect_operator_stats(False, leaks=True) as stats:
        model(torch.randn(N, C)).sum().backward()
    assert stats.leaks == []


def test_leaks_are_not_looked_for_unless_asked() -> None:
    with collect_operator_stats(False) as stats, auto_cast(dtype="bfloat16"):
        TwoLayers(lambda h: h.float())(torch.randn(N, C))
    assert stats.leaks == []


def test_several_calls_from_one_place_are_one_leak() -> None:
    model = TwoLayers(lambda h: h.float())
    with collect_operator_stats(False, leaks=True) as stats, auto_cast(dtype="bfloat16"):
        for _ in range(3):
            model(torch.randn(N, C))
    (leak,) = stats.leaks
    assert (leak.calls, leak.extra_bytes, leak.fed) == (3, 3 * EXTRA * N * C, ("second: linear",))


def test_one_result_that_two_layers_take_is_written_once() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.left, self.right = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            full = self.stem(x).float()
            return self.left(full), self.right(full)

    (leak,) = leaks_of(Fork(), torch.randn(N, C))
    assert (leak.calls, leak.extra_bytes) == (1, EXTRA * N * C)
    assert leak.fed == ("left: linear", "right: linear")


def test_the_same_operator_twice_follows_once_and_its_bytes_count_twice() -> None:
    leak = leak_between(lambda h: h.float().relu().relu())
    assert (leak.followers, leak.extra_bytes) == (("relu",), EXTRA * N * C * 3)


def test_a_call_that_feeds_no_half_operator_adds_nothing() -> None:
    layer = nn.Linear(C, C)

    def run(*, feeds: bool) -> None:
        full = layer(torch.ones(N, C)).float()
        if feeds:
            layer(full)

    with collect_operator_stats(False, leaks=True) as stats, auto_cast(dtype="bfloat16"):
        run(feeds=False)
        run(feeds=True)
    (leak,) = stats.leaks
    assert (leak.calls, leak.extra_bytes) == (1, EXTRA * N * C)


def test_the_largest_leak_stands_first() -> None:
    small, large = nn.Linear(C, C), nn.Linear(8 * C, C)
    with collect_operator_stats(False, leaks=True) as stats, auto_cast(dtype="bfloat16"):
        h = small(torch.ones(N, C))
        small(h.float())
        large(torch.cat([h] * 8, 1).float())
    assert [leak.extra_bytes for leak in stats.leaks] == [EXTRA * N * 8 * C, EXTRA * N * C]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t().t(),
        lambda t: t.view(C, N).reshape(N, C),
        lambda t: t[None].squeeze(0),
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.unflatten(1, (2, 2)).flatten(1),
    ],
    ids=["t", "view", "index", "detach", "data", "unflatten"],
)
def test_views_in_between_are_followed_and_write_nothing(view: Between) -> None:
    leak = leak_between(lambda h: view(h.float()))
    assert (leak.op, leak.followers, leak.fed) == ("float", (), ("second: linear",))
    assert leak.extra_bytes == EXTRA * N * C


def test_parts_of_a_split_are_followed() -> None:
    leak = leak_between(lambda h: torch.cat(h.float().chunk(2, 1), 1))
    assert (leak.op, leak.followers, leak.extra_bytes) == ("float", ("cat",), EXTRA * N * C * 2)


def test_in_place_operators_follow() -> None:
    leak = leak_between(lambda h: h.float().mul_(2).relu_())
    assert (leak.op, leak.followers, leak.fed) == ("float", ("mul_", "relu_"), ("second: linear",))
    assert leak.extra_bytes == EXTRA * N * C * 3


def test_a_sum_in_place_into_a_float32_tensor_is_promoted() -> None:
    leak = leak_between(lambda h: torch.zeros(N, C).add_(h))
    assert (leak.op, leak.reason, leak.extra_bytes) == ("add_", PROMOTED, EXTRA * N * C)


def test_a_half_tensor_that_float32_is_written_into_ends_the_leak() -> None:
    leak = leak_between(lambda h: torch.empty_like(h).copy_(h.float()))
    assert (leak.op, leak.followers, leak.fed) == ("float", (), ("copy_",))


def test_a_custom_function_in_between_is_followed() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    def between(h: Tensor) -> Tensor:
        out: Tensor = Double.apply(h.float())  # type: ignore[no-untyped-call]
        return out

    leak = leak_between(between)
    assert (leak.op, leak.followers, leak.fed) == ("float", ("mul",), ("second: linear",))


def test_cat_of_float32_and_half_follows_the_float32() -> None:
    leak = leak_between(lambda h: torch.cat([h.float()[:, :2], h[:, 2:]], 1))
    assert (leak.op, leak.reason, leak.followers) == ("float", OWN_CAST, ("cat",))
    assert leak.fed == ("second: linear",)


def test_the_order_of_inputs_of_cat_does_not_change_where_float32_begins() -> None:
    found = leaks_between(lambda h: torch.cat([h[:, :2], h.float()[:, 2:]], 1))
    assert "float" in {leak.op for leak in found}


def test_two_float32_results_that_meet_are_two_leaks() -> None:
    def between(h: Tensor) -> Tensor:
        one = h.float()
        two = h.to(torch.float32)
        return one + two

    assert sorted(leak.op for leak in leaks_between(between)) == ["float", "to"]


def test_half_values_written_into_a_part_of_a_float32_tensor_leak() -> None:
    def between(h: Tensor) -> Tensor:
        out = torch.zeros(N, C)
        out[:, :2] = h[:, :2]
        return out

    assert len(leaks_between(between)) == 1


def test_a_fourier_transform_in_between_is_followed() -> None:
    leak = leak_between(lambda h: torch.fft.irfft(torch.fft.rfft(h.float()), n=C))
    assert leak.fed == ("second: linear",)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_module_leaks_once_though_it_runs_twice(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = TwoLayers(lambda h: h.float().relu())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.body, x, use_reentrant=use_reentrant)
            return out

    model = Checkpointed()
    with collect_operator_stats(False, leaks=True) as stats:
        with auto_cast(dtype="bfloat16"):
            out = model(torch.randn(N, C, requires_grad=True))
        out.float().sum().backward()
    (leak,) = stats.leaks
    assert (leak.module, leak.followers, leak.fed) == ("body", ("relu",), ("body.second: linear",))
    assert (leak.calls, leak.extra_bytes) == (1, EXTRA * N * C * 2)


@pytest.mark.parametrize(
    "mode",
    [
        nullcontext,
        torch.no_grad,
        pytest.param(torch.inference_mode),
    ],
)
def test_leaks_do_not_depend_on_gradients(mode: Callable[[], AbstractContextManager[None]]) -> None:
    with mode():
        leak = leak_between(lambda h: h.float().relu())
    assert (leak.op, leak.followers, leak.fed) == ("float", ("relu",), ("second: linear",))
    assert (leak.calls, leak.extra_bytes) == (1, EXTRA * N * C * 2)


def test_nested_recordings_tell_what_each_has_seen() -> None:
    model = TwoLayers(lambda h: h.float())
    x = torch.randn(N, C)
    with auto_cast(dtype="bfloat16"), collect_operator_stats(False, leaks=True) as outer:
        model(x)
        with collect_operator_stats(False, leaks=True) as inner, collect_operator_stats(False) as plain:
            model(x)
    assert [leak.calls for leak in outer.leaks] == [2]
    assert [leak.calls for leak in inner.leaks] == [1]
    assert inner.leaks[0].extra_bytes == EXTRA * N * C
    assert plain.leaks == []


def test_a_recording_that_starts_after_float32_began_does_not_know_of_it() -> None:
    layer = nn.Linear(C, C)
    with auto_cast(dtype="bfloat16"):
        full = layer(torch.randn(N, C)).float()
        with collect_operator_stats(False, leaks=True) as stats:
            layer(full)
    assert stats.leaks == []


def excluded_leak() -> Leak:
    model = nn.Sequential(nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C))
    amp.exclude_layers(model, "1")
    (leak,) = leaks_of(model, torch.randn(N, C))
    return leak


def test_an_excluded_layer_that_feeds_half_is_told() -> None:
    leak = excluded_leak()
    assert (leak.module, leak.followers, leak.fed) == ("1", ("linear",), ("2: linear",))
    assert leak.extra_bytes == EXTRA * N * C * 2  # its input, and its result


def test_the_reason_of_an_excluded_layers_leak_is_the_exclusion() -> None:
    assert excluded_leak().reason == "excluded layer"


def test_an_exception_leaves_no_leaks_and_later_recordings_work() -> None:
    def fail(h: Tensor) -> Tensor:
        raise RuntimeError("planted")

    with (
        pytest.raises(RuntimeError, match="planted"),
        collect_operator_stats(False, leaks=True) as stats,
        auto_cast(dtype="bfloat16"),
    ):
        TwoLayers(fail)(torch.randn(N, C))
    assert stats.leaks == []
    assert len(leaks_between(lambda h: h.float())) == 1


def test_the_tracker_keeps_no_tensor_alive() -> None:
    model = TwoLayers(lambda h: h.float())
    with collect_operator_stats(False, leaks=True), torch.no_grad(), auto_cast(dtype="bfloat16"):
        full = model.first(torch.randn(N, C)).float()
        view = full.view(-1)
        refs = [weakref.ref(full), weakref.ref(view)]
        storage = weakref.ref(full.untyped_storage())
        model.second(full)
        del full, view
        gc.collect()
        assert [ref() for ref in refs] == [None, None]
        assert storage() is None


def test_a_leak_is_in_the_dictionary_for_json() -> None:
    with collect_operator_stats(False, leaks=True) as stats, auto_cast(dtype="bfloat16"):
        TwoLayers(lambda h: h.float())(torch.randn(N, C))
    (leak,) = stats.to_dict()["leaks"]
    assert (leak["op"], leak["fed"], leak["extra_bytes"]) == ("float", ("second: linear",), EXTRA * N * C)
