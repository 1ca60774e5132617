"""The doctor on real models with planted faults: each is found and named; the model stays as it was."""

import copy
import inspect
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from recordings import advice_page
from torch import Tensor, nn

from mezzo.proof import Changes, advise, apply_changes
from mezzo.record import Timing, time_on_device

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


class Upsampler(nn.Module):
    """Leaks: enlarges in float32, and goes on in it."""

    def forward(self, x: Tensor) -> Tensor:
        large = F.interpolate(x.float(), scale_factor=2.0, mode="bilinear")
        return F.relu(large) + 1


class Leaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 61, 3, padding=1)
        self.up = Upsampler()
        self.head = nn.Conv2d(61, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.stem(x)))


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(Upsampler)
    return first + next(number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_leak_after_upsampling_and_the_odd_convolution_are_named_exactly(device):
    report = advise(Leaky(), torch.rand(2, 3, 32, 32), device=device, steps=2, dtype="bfloat16")
    leak = next(advice for advice in report.of_kind("leak") if advice.where.startswith("up "))
    assert leak.where == f"up at {__file__}:{line_of('x.float()')}"
    assert leak.seen.startswith("float returns float32 (cast by the model's own code), and so do ")
    assert "until head: conv2d casts to half" in leak.seen
    if device == "cpu":
        wanted = {advice.where: (advice.seen, advice.todo) for advice in report.of_kind("shape")}
        assert wanted["stem"][0] == "conv2d with 3 -> 61 channels: not a multiple of 8"
        assert "4 -> 64 channels" in wanted["stem"][1]
        assert "64 -> 8 channels" in wanted["head"][1]
    else:  # named in one line if padding brings nothing, in one of its own if it does
        text = " ".join(f"{advice.where} {advice.seen}" for advice in report.of_kind("shape"))
        assert "stem" in text
        assert "3 -> 61" in text


@pytest.mark.gpu
def test_a_launch_bound_net_is_found_and_its_captured_step_measured():
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(200)))
    report = advise(net, torch.rand(8, 16), torch.rand(8, 16), F.mse_loss, measure_gains=True, steps=5)
    advice = report.of_kind("launch-bound")[0]
    assert report.amp.idle_share > 0.5
    assert advice.gain > 2
    assert advice.measured_gain > 2


def test_the_model_its_buffers_and_the_random_numbers_are_as_before():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    images = torch.rand(2, 3, 8, 8)
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    net.eval()
    advise(net, images, device="cpu", steps=1)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not net.training
    assert net[0].weight.is_contiguous()


def test_the_report_is_text_and_json_with_the_largest_gain_first():
    told = []
    report = advise(
        Leaky(),
        torch.rand(2, 3, 16, 16),
        device="cpu",
        steps=1,
        measure_gains=True,
        progress=lambda *what: told.append(what),
    )
    text, data = str(report), json.loads(json.dumps(report.to_dict()))
    assert text.startswith("float32 ")
    assert "kernels" in text
    gains = [
        advice["measured_gain"] or (not advice["is_bound"] and advice["gain"]) or 1.0 for advice in data["advices"]
    ]
    assert gains == sorted(gains, reverse=True)
    assert ("float32 step", 1, 1) in told
    assert data["changes"] == report.changes.to_dict()


def test_changes_together_are_measured_and_what_moves_the_loss_is_withdrawn(monkeypatch):
    wanted = Changes(channels_last=True, custom_white_list=("add",))
    monkeypatch.setattr("mezzo.proof._doctor._all_changes", lambda _: wanted)
    monkeypatch.setattr("mezzo.proof._doctor.RULES", ())
    monkeypatch.setattr("mezzo.proof._doctor.LEAST_GAIN", 1e4)  # times of tiny steps are noise
    arguments = (Leaky(), torch.rand(2, 3, 16, 16))
    report = advise(*arguments, device="cpu", steps=1, measure_gains=True)
    assert report.changes == wanted
    assert report.changed.setup.changes == wanted
    assert "with the changes: " in str(report)
    monkeypatch.setattr("mezzo.proof._doctor.LOSS_TOLERANCE", -1.0)
    report = advise(*arguments, device="cpu", steps=1, measure_gains=True)
    assert report.changes == Changes(channels_last=True)  # layout moves no loss but by the order of sums
    assert report.is_less_than_advised
    assert str(report).endswith("were left out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O0"}, "level='O0'"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"dtype": "float64"}, "must be 'float16' or 'bfloat16'"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(options, message):
    with pytest.raises(ValueError, match=message):
        advise(nn.Linear(2, 2), torch.ones(1, 2), device="cpu", **options)


def test_a_model_without_a_floating_output_needs_a_loss():
    class Counter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    with pytest.raises(ValueError, match="loss_fn"):
        advise(Counter(2, 2), torch.ones(1, 2), device="cpu", steps=1)


def test_a_model_without_parameters_has_no_step_to_measure():
    with pytest.raises(ValueError, match="the ReLU has no parameters to train"):
        advise(nn.ReLU(), torch.ones(1, 2), device="cpu")


def test_outputs_of_any_shape_have_a_loss():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.layer(x), "index": x.argmax(-1)}

    assert advise(Two(), torch.ones(1, 2), device="cpu", steps=1).amp.losses


def test_what_the_doctor_writes_makes_the_same_model(tmp_path):
    changes = Changes(channels_last=True, pad_channels=(("stem", 4, 64), ("head", 64, 8)), custom_white_list=("add",))
    changes.write(tmp_path / "changes.yml")
    net, x = Leaky().double(), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    plain = net.head(F.relu(F.interpolate(net.stem(x), scale_factor=2.0, mode="bilinear")) + 1)
    assert apply_changes(net, tmp_path / "changes.yml") == {"custom_white_list": ["add"]}
    padded = net.head(F.relu(F.interpolate(net.stem(x), scale_factor=2.0, mode="bilinear")) + 1)
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)  # float64: sums in another order


# -- what is given is left alone, and looked at before anything is measured


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5))


class Keeping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def kept() -> nn.Module:
    model = Keeping(4, 4)
    model(torch.ones(1, 4))
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.DataParallel(nn.Linear(4, 4)), "wrapped in DataParallel: .*model.module"),
        (lambda: nn.LazyLinear(4), "'weight' has no shape yet: run the model once"),
        (lambda: nn.Linear(4, 4).half(), "'weight' is float16"),
        (lambda: nn.Linear(4, 4).double(), "'weight' is float64"),
        (lambda: InPlace(4, 4), "the model changes its inputs"),
        (kept, r"the model cannot be copied .* self.last = out"),
    ],
)
def test_a_model_that_cannot_be_measured_is_refused_in_words(model, message):
    with pytest.raises(ValueError, match=message):
        advise(model(), torch.ones(2, 4), device="cpu", steps=1)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda out, _: (out.mean(), 1), "loss_fn returned tuple; must return a tensor with one number"),
        (lambda out, _: out, r"loss_fn returned a tensor of shape \(2, 4\); must return"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        advise(nn.Linear(4, 4), torch.ones(2, 4), None, loss_fn, device="cpu", steps=1)


def test_batch_and_loss_are_copied():
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, out: Tensor, _: object) -> Tensor:
            return (out * self.weight).square().mean()

    loss, x = Learned(), torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():  # the steps are taken all the same
        advise(nn.Linear(4, 4), x, None, loss, device="cpu", steps=1)
    assert loss.weight.grad is None
    assert x.grad is None


def test_what_is_frozen_in_a_model_in_training_mode_stays_frozen():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    advise(net, torch.ones(1, 4), device="cpu", steps=1)  # a batch norm in training would refuse one sample


def test_a_data_loader_leaves_the_random_numbers_as_they_were():
    data = torch.utils.data.DataLoader(torch.zeros(64, 4), shuffle=True)
    model, inputs = nn.Linear(4, 4), torch.ones(2, 4)
    before = torch.get_rng_state()
    advise(model, inputs, device="cpu", steps=1, loader=data)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_of_volumes_are_left_out_of_channels_last():
    net = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Unflatten(1, (4, 1)), nn.Conv3d(4, 2, 1))
    apply_changes(net, Changes(channels_last=True))
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert net[2].weight.is_contiguous()


def test_a_loss_that_is_not_finite_is_told_first_and_is_null_in_json():
    report = advise(nn.Linear(4, 4), torch.full((2, 4), float("inf")), device="cpu", steps=1)
    (advice,) = report.of_kind("loss-scale")
    assert "not finite from measured step 1" in advice.seen
    assert "in float32 it is not finite" in advice.seen
    assert report.to_dict()["amp"]["losses"][0] is None


def test_attention_is_not_told_to_pad_its_sequence():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    report = advise(layer, torch.randn(2, 7, 32), device="cpu", steps=1)
    assert not any("attention" in advice.seen or "matmul" in advice.seen for advice in report.of_kind("shape"))
    assert not any("test_doctor" in advice.where for advice in report.advices)  # the caller is not where it stands


def test_times_that_are_not_steady_are_told():
    report = advise(nn.Linear(8, 8), torch.rand(2, 8), device="cpu", steps=2, dtype="bfloat16")
    steady, busy = Timing((1.0, 1.0, 1.01, 1.0)), Timing((0.04, 0.4, 0.05, 0.7))

    def with_times(full, amp, again):
        full, amp = (replace(step, timing=timing) for step, timing in ((report.full, full), (report.amp, amp)))
        return replace(report, full=full, amp=amp, full_again=again)

    assert with_times(steady, steady, steady).note == ""
    told = with_times(steady, busy, steady)
    assert "The step times of AMP-O1 vary by more than 25%" in str(told)
    assert "The step times of AMP-O1 vary" in told.to_dict()["note"]
    assert "The step times of AMP-O1 vary" in advice_page(told)
    slower = with_times(steady, steady, Timing((5.0, 5.0)))
    assert "The step time of float32 was 5.0x apart at the start and at the end" in str(slower)


def test_the_float32_step_is_timed_again_at_the_end():
    report = advise(nn.Linear(8, 8), torch.rand(2, 8), device="cpu", steps=3, dtype="bfloat16")
    assert report.full_again is not None
    assert len(report.full_again.times_s) == 3


def test_the_float32_step_is_warmed_up_the_same_way_both_times(monkeypatch):
    warmups = []

    def time_and_note(*args, warmup_calls, **options):
        warmups.append(warmup_calls)
        return time_on_device(*args, warmup_calls=warmup_calls, **options)

    monkeypatch.setattr("mezzo.proof._measure.time_on_device", time_and_note)
    advise(nn.Linear(8, 8), torch.rand(2, 8), device="cpu", steps=1, dtype="bfloat16")
    assert warmups[-1] == warmups[0] > 0  # the one at the end
