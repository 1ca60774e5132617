"""What the doctor says of given measurements; expected gains are worked out by hand from the times."""

import time
from dataclasses import replace

import pytest
import torch
from examined import examination, kernel, measured, observed
from torch.utils.data import DataLoader, Dataset

from mezzo.amp import GradScaler
from mezzo.amp.debugging import CastRow, Leak
from mezzo.proof import Changes
from mezzo.proof import _time_rules as rules
from mezzo.proof._number_rules import leaks, loss_scale
from mezzo.proof._products import Product
from mezzo.proof._shape_rules import layout, shapes
from mezzo.record import Timing
from mezzo.trial import TrialSetup


def test_the_longer_of_host_and_kernels_is_the_predicted_step():
    now = measured([kernel(ms=20)], step_ms=44, host_ms=40)
    assert now.predicted_s(0.010) == pytest.approx(0.044)  # the host's 40 ms and what the step takes more
    assert now.predicted_s(0.080) == pytest.approx(0.088)
    assert now.predicted_s(0.010, num_launches=2) == pytest.approx(0.088)  # twice the launches, twice the host
    assert measured([kernel(ms=20)], step_ms=44, host_ms=44, is_cuda=False).predicted_s(0.010) == pytest.approx(0.022)


def test_idle_share_is_the_part_of_a_step_without_a_kernel_and_nothing_on_a_cpu():
    assert measured([kernel(ms=10)], step_ms=40, host_ms=40).idle_share == pytest.approx(0.75)
    assert measured([kernel(ms=10)], step_ms=40, host_ms=40, is_cuda=False).idle_share == 0


def test_a_launch_bound_step_is_sent_to_graph_mode_with_the_gain_of_its_kernels():
    seen = examination(measured([kernel(ms=10, calls=1000)], step_ms=42, host_ms=40))
    (advice,) = rules.launches(seen)
    assert advice.kind == "launch-bound"
    assert "76% of a step: 1000 kernels take 10.0 ms, the host needs 40.0 ms" in advice.seen
    assert "capture_step" in advice.todo
    assert advice.gain == pytest.approx(42 / 10.5)  # half a microsecond a kernel between them
    assert advice.setup == replace(seen.setup, is_captured=True)


def test_a_step_that_cannot_be_captured_from_here_is_told_so_all_the_same():
    seen = examination(measured([kernel(ms=10)], step_ms=42, host_ms=40))
    seen.workload = replace(seen.workload, inputs=[torch.ones(1)])
    (advice,) = rules.launches(seen)
    assert advice.setup is None


@pytest.mark.parametrize(
    "amp",
    [
        measured([kernel(ms=39)], step_ms=40, host_ms=20),
        measured([kernel(ms=1)], step_ms=40, host_ms=40, is_cuda=False),
    ],
    ids=["busy", "cpu"],
)
def test_a_busy_gpu_and_a_cpu_are_not_called_launch_bound(amp):
    assert list(rules.launches(examination(amp))) == []


def test_amp_that_is_slower_than_float32_is_to_be_turned_off():
    seen = examination(
        measured([kernel("mm", 30)], step_ms=40, host_ms=10), measured([kernel("mm", 30)], step_ms=32, host_ms=10)
    )
    (advice,) = rules.amp_itself(seen)
    assert advice.kind == "amp-off"
    assert advice.seen == "a step takes 40.0 ms in AMP and 32.0 ms in float32"
    assert advice.todo.startswith("turn AMP off")
    assert advice.gain == pytest.approx(1.25)
    assert str(advice).startswith("amp-off [float32 is 1.25x as fast]\n")


def test_times_that_are_not_steady_are_measured_again_before_amp_is_turned_off():
    slow = replace(measured([kernel("mm", 30)], step_ms=40, host_ms=10), timing=Timing((0.02, 0.04, 0.2)))
    (advice,) = rules.amp_itself(examination(slow, measured([kernel("mm", 30)], step_ms=32, host_ms=10)))
    assert advice.todo.startswith(
        "measure again on an idle machine, because these times are not steady; then turn AMP off"
    )


def test_amp_that_pays_is_left_in_peace():
    seen = examination(measured([kernel("mm", 30)], step_ms=20, host_ms=1), measured([], step_ms=40, host_ms=1))
    assert list(rules.amp_itself(seen)) == []


def test_amp_in_which_no_product_is_half_is_named():
    seen = examination(
        measured([kernel("mm", 30, dtype="float32")], step_ms=40, host_ms=1), measured([], step_ms=40, host_ms=1)
    )
    (advice,) = rules.amp_itself(seen)
    assert advice.kind == "amp-idle"
    assert "inside auto_cast" in advice.todo


def test_the_bound_is_amdahls():
    full = measured([kernel("mm", 30, dtype="float32"), kernel("add", 10, dtype="float32")], step_ms=40, host_ms=1)
    (advice,) = rules.amdahl(examination(full, full))
    # three quarters ten times as fast: 1 / (0.25 + 0.075)
    assert "products take 75% of the kernels' time in float32" in advice.seen
    assert "at most 3.08x" in advice.seen
    assert "0% of the kernels' time is on Tensor Cores" in advice.seen


def test_on_a_cpu_the_share_of_products_alone_is_told():
    full = measured([kernel("mm", 30), kernel("add", 10)], step_ms=40, host_ms=40, is_cuda=False)
    (advice,) = rules.amdahl(examination(full, full, capability=None))
    assert advice.seen.startswith("products take 75% of the operators' time in float32")


@pytest.mark.parametrize(
    ("capability", "dtype", "seen_text"),
    [
        ((6, 1), "float16", "compute capability 6.1; AMP in float16 needs 7.0"),
        ((7, 5), "bfloat16", "compute capability 7.5; AMP in bfloat16 needs 8.0"),
    ],
)
def test_a_gpu_that_is_too_old_is_named(capability, dtype, seen_text):
    seen = examination(measured([], step_ms=1, host_ms=1), capability=capability, setup=TrialSetup(dtype=dtype))
    (advice,) = rules.hardware(seen)
    assert advice.seen == seen_text
    assert advice.todo.startswith("turn AMP off")


def test_a_gpu_that_is_new_enough_is_not_mentioned():
    assert list(rules.hardware(examination(measured([], step_ms=1, host_ms=1), capability=(7, 0)))) == []


def test_a_cpu_without_half_units_is_told_to_turn_amp_off(monkeypatch):
    monkeypatch.setattr(rules, "has_half_units", lambda _: False)
    seen = examination(measured([], step_ms=1, host_ms=1, is_cuda=False), capability=None)
    (advice,) = rules.hardware(seen)
    assert "no float16 units" in advice.seen
    monkeypatch.setattr(rules, "has_half_units", lambda _: True)
    assert list(rules.hardware(seen)) == []


def casting(setup: TrialSetup):
    amp = measured([kernel("_to_copy", 10, is_cast=True), kernel("mm", 30)], step_ms=40, host_ms=1)
    seen = examination(amp, setup=setup)
    amp.stats._casts[("encoder", "forward", "linear", "float32", "float16")] = 3
    amp.stats._cast_elements[("encoder", "forward", "linear", "float32", "float16")] = 300
    assert amp.stats.casts == [CastRow("encoder", "forward", "linear", "float32", "float16", 3, 300)]
    return seen


def test_casts_of_weights_are_cured_by_decorate():
    seen = casting(TrialSetup())
    seen.observe = lambda setup, _: observed([kernel("mm", 30)])
    (advice,) = rules.casts(seen)
    assert (
        advice.seen == "3 casts take 25% of the kernels' time; the largest is float32 to float16 in encoder (forward)"
    )
    assert advice.todo.startswith("amp.decorate(model, optimizer, level='O1')")
    assert advice.gain == pytest.approx(40 / 30)
    assert advice.setup == TrialSetup(is_decorated=True)


def test_casts_that_decorate_does_not_cure_have_an_upper_bound():
    (advice,) = rules.casts(casting(TrialSetup(level="O2")))
    assert advice.gain == pytest.approx(40 / 30)
    assert advice.benefit == "at most 1.33x"
    assert "O2" not in advice.todo
    assert advice.setup is None


def test_the_advice_on_casts_names_leaks_only_if_there_are_any(monkeypatch):
    seen = casting(TrialSetup(level="O2"))
    (without,) = rules.casts(seen)
    assert "leak" not in without.todo
    assert "compile the step" in without.todo
    seen.amp.stats.leaks = [LEAK]
    (advice,) = rules.casts(seen)
    assert "'leak'" in advice.todo
    monkeypatch.setattr(rules, "has_half_units", lambda _: False)
    amp = replace(seen.amp, is_cuda=False)
    (on_cpu,) = rules.casts(examination(amp, capability=None, setup=TrialSetup(level="O2")))
    assert "a GPU has no such casts" in on_cpu.todo


class Slow(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.01)
        return index


def test_a_loader_that_is_slower_than_the_step_is_found():
    seen = examination(measured([kernel(ms=1)], step_ms=1, host_ms=1), loader=DataLoader(Slow(), batch_size=2))
    (advice,) = rules.loader(seen)
    assert advice.kind == "loader"
    assert advice.where == "DataLoader"
    assert "the device waits" in advice.seen
    assert "with 0 workers" in advice.seen
    assert advice.gain > 15  # two items of 10 ms against a step of 1 ms, and no item is faster than its sleep


def test_a_loader_that_keeps_up_is_not_mentioned():
    seen = examination(measured([kernel(ms=1)], step_ms=1e6, host_ms=1), loader=DataLoader(Slow(), batch_size=2))
    assert list(rules.loader(seen)) == []
    (advice,) = rules.loader(replace_loader(seen, [1]))
    assert "too few batches" in advice.seen


def replace_loader(seen, loader):
    seen.loader = loader
    return seen


def conv(inputs: int, outputs: int, *, last: bool | None = False, groups: int = 1, module: str = "stem") -> Product:
    return Product("convolution", "conv2d", module, "net.py:3", (2, inputs, 8, 8), inputs, outputs, 128, groups, last)


def with_products(*products: Product, is_cuda: bool = False, capability=None):
    amp = replace(measured([kernel(ms=30)], step_ms=31, host_ms=1, is_cuda=is_cuda), products=products)
    return examination(amp, capability=capability)


def test_a_convolution_from_3_to_61_channels_is_told_what_to_pad_to():
    (advice,) = shapes(with_products(conv(3, 61)))
    assert advice.where == "stem"
    assert advice.seen == "conv2d with 3 -> 61 channels: not a multiple of 8"
    assert advice.todo == "pad with zeros to 4 -> 64 channels (4 are enough for an image)"


def test_grouped_and_well_shaped_products_are_left_alone():
    assert list(shapes(with_products(conv(61, 61, groups=61), conv(64, 64)))) == []


def test_from_the_a100_on_multiples_of_8_are_mentioned_only_where_16_is_faster(monkeypatch):
    gains = {"a": 1.0, "b": 1.3, "c": 1.0}
    monkeypatch.setattr("mezzo.proof._shape_rules._gain_of_padding", lambda seen, product, _: gains[product.module])
    seen = with_products(
        conv(24, 40, module="a"), conv(24, 40, module="b"), conv(3, 61, module="c"), is_cuda=True, capability=(8, 0)
    )
    found = {advice.where: advice for advice in shapes(seen)}
    assert "32 -> 48 channels" in found["b"].todo
    assert found["b"].setup.changes == Changes(pad_channels=(("b", 32, 48),))
    assert "not faster here: c (3 -> 61), a (24 -> 40)" in found[""].seen


def test_nchw_convolutions_are_advised_by_the_time_of_their_kernels():
    seen = with_products(conv(3, 64), is_cuda=True, capability=(9, 0))
    seen.observe = lambda setup, _: observed([kernel(ms=15)])
    (advice,) = layout(seen)
    assert advice.where == "stem"
    assert "take 30.0 ms, channels-last 15.0 ms" in advice.seen
    assert advice.gain == pytest.approx(2.0)
    assert advice.setup.changes == Changes(channels_last=True)


def test_channels_last_behind_a_slow_host_is_advised_together_with_a_graph():
    seen = with_products(conv(3, 64), is_cuda=True, capability=(9, 0))
    seen.__dict__["amp"] = replace(seen.amp, host_s=0.031)
    seen.observe = lambda setup, _: observed([kernel(ms=10)])
    alone, together = layout(seen)
    assert alone.gain == pytest.approx(1.0)
    assert "only with a captured step" in alone.todo
    assert together.kind == "launch-bound"
    assert together.gain == pytest.approx(31 / 10.0005)
    assert together.setup == TrialSetup(changes=Changes(channels_last=True), is_captured=True)


def test_channels_last_images_and_other_products_need_no_other_layout():
    assert list(layout(with_products(conv(3, 64, last=True), conv(3, 64, last=None)))) == []


LEAK = Leak(
    "interpolate", "decoder", "net.py:9", "cast by the model's own code", ("relu", "add"), ("head: conv2d",), 1, 10**9
)


def leaking(*found: Leak, is_cuda: bool = True):
    amp = measured([kernel(ms=30)], step_ms=30, host_ms=1, is_cuda=is_cuda)
    amp.stats.leaks = list(found)
    return examination(amp)


def test_a_leak_is_named_with_what_follows_and_what_it_feeds():
    (advice,) = leaks(leaking(LEAK))
    assert advice.where == "decoder at net.py:9"
    assert "and so do relu, add after it, until head: conv2d casts to half: 1,000,000,000 extra bytes" in advice.seen
    assert "remove the cast" in advice.todo
    assert advice.gain == pytest.approx(30 / 26)  # four passes over 1e9 bytes at 1e12 bytes a second


def test_a_promoted_sum_may_go_on_the_white_list():
    (advice,) = leaks(leaking(replace(LEAK, op="add", reason="promoted: another input is float32")))
    assert advice.todo.startswith("custom_white_list=['add']")
    assert advice.setup.changes == Changes(custom_white_list=("add",))


@pytest.mark.parametrize(
    ("reason", "todo"),
    [("black list", "interpolate is black-listed"), ("unlisted: torch's own rule", "cast the result to half")],
)
def test_other_leaks_have_their_own_remedy(reason, todo):
    (advice,) = leaks(leaking(replace(LEAK, reason=reason)))
    assert advice.todo.startswith(todo)
    assert advice.setup is None


def test_small_leaks_are_left_out_but_for_the_largest():
    small = [replace(LEAK, module=name, extra_bytes=10) for name in "ab"]
    assert [advice.where for advice in leaks(leaking(*small))] == ["a at net.py:9"]
    assert [advice.gain for advice in leaks(leaking(*small, is_cuda=False))] == [None, None]


def test_a_scale_that_goes_on_skipping_is_given_its_value():
    (advice,) = loss_scale(examination(measured([], step_ms=1, host_ms=1, skipped=6, scale=4096.0)))
    assert advice.seen == "the measured steps: 6 steps skipped, the scale is now 4096"
    assert "GradScaler(init_loss_scaling=4096)" in advice.todo


def test_a_scale_at_its_floor_points_to_the_tools_that_name_the_kernel():
    (advice,) = loss_scale(examination(measured([], step_ms=1, host_ms=1, skipped=2, scale=1.0)))
    assert "at its minimum" in advice.seen
    assert "tensor_checker" in advice.todo


def test_a_few_skips_at_the_start_and_bfloat16_are_no_matter():
    assert list(loss_scale(examination(measured([], step_ms=1, host_ms=1, skipped=3)))) == []
    seen = examination(measured([], step_ms=1, host_ms=1, skipped=9, scale=1.0), setup=TrialSetup(dtype="bfloat16"))
    assert list(loss_scale(seen)) == []


def test_the_history_of_the_users_scaler_counts_instead():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler(init_loss_scaling=2.0**10)
    scaler.scale(torch.ones(()))
    for _ in range(5):
        weight.grad = torch.full((1,), float("inf"))
        scaler.step(optimizer)
        scaler.update()
    scaler.flush()
    (advice,) = loss_scale(examination(measured([], step_ms=1, host_ms=1), scaler=scaler))
    assert advice.seen == "the given GradScaler: 5 steps skipped, the scale is now 256"


def test_a_scaler_that_has_come_back_to_its_first_scale_is_left_in_peace():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = GradScaler(init_loss_scaling=2.0**10, incr_every_n_steps=1, decr_every_n_nan_or_inf=1)
    scaler.scale(torch.ones(()))
    for value in [float("inf"), 0.0] * 5:
        weight.grad = torch.full((1,), value)
        scaler.step(optimizer)
        scaler.update()
    scaler.flush()
    assert scaler.skipped_steps == 5
    assert list(loss_scale(examination(measured([], step_ms=1, host_ms=1), scaler=scaler))) == []


def test_batches_that_workers_have_ready_are_not_timed():
    class Ahead:
        num_workers, prefetch_factor = 4, 2

        def __iter__(self):
            for number in range(40):
                if number > 8:  # the first, and two for each worker, are there at once
                    time.sleep(0.01)
                yield number

    seen = examination(measured([kernel(ms=1)], step_ms=1, host_ms=1), loader=Ahead())
    assert rules.time_batches(seen) >= 0.01
