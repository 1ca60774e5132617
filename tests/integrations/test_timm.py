"""`mezzo.integrations.timm` beside timm's own utilities."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo import amp, optim
from mezzo.integrations.timm import CLIP_MODES, MezzoScaler, model_ema, setup_amp

timm = pytest.importorskip("timm")

pytestmark = pytest.mark.integrations

SIZE, CLASSES, BATCH = 32, 10, 4


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return timm.create_model("test_resnet", num_classes=CLASSES)


def make_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(9)
    return [
        (torch.randn(BATCH, 3, SIZE, SIZE, generator=source), torch.randint(CLASSES, (BATCH,), generator=source))
        for _ in range(count)
    ]


def make_optimizer(model: nn.Module) -> Any:
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)


def train(
    model: Any, optimizer: Any, autocast: Any, scaler: Any, batches: Any, ema: Any = None, **options: Any
) -> None:
    """The inner loop of timm's script."""
    for number, (images, labels) in enumerate(batches, 1):
        with autocast():
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler(loss, optimizer, parameters=model.parameters(), **options)
        optimizer.zero_grad()
        if ema is not None:
            ema.update(model, step=number)


def test_the_call_is_that_of_timms_scaler():
    from timm.utils import NativeScaler

    own, theirs = (inspect.signature(kind.__call__).parameters for kind in (MezzoScaler, NativeScaler))
    assert list(own) == list(theirs)
    assert {name: each.default for name, each in own.items()} == {name: each.default for name, each in theirs.items()}
    assert MezzoScaler.state_dict_key == NativeScaler.state_dict_key


def true_gradients(dtype: str) -> nn.Module:
    """Return the float64 model with the gradients that the half network computes, unscaled in float64."""
    model, reference = make_model(), make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    autocast, scaler = setup_amp(model, optimizer, "O2", dtype)
    ((images, labels),) = make_batches(1)
    with autocast():
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler(loss, optimizer, need_update=False)
    scale = scaler.state_dict().get("scale", 1.0)
    for param, wide in zip(model.parameters(), reference.parameters(), strict=True):
        wide.grad = param.grad.double() / scale
    return reference


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("clip_mode", CLIP_MODES)
@pytest.mark.parametrize("exclude_head", [False, True])
def test_a_step_clips_as_timm_does_in_float64(dtype, clip_mode, exclude_head):
    from timm.models import model_parameters
    from timm.utils import dispatch_clip_grad

    factor = {"norm": 0.1, "value": 0.001, "agc": 0.01}[clip_mode]
    reference = true_gradients(dtype)
    before = torch.cat([param.detach().flatten() for param in reference.parameters()])
    dispatch_clip_grad(model_parameters(reference, exclude_head=exclude_head), factor, mode=clip_mode)
    expected = torch.cat([param.grad.flatten() for param in reference.parameters()])

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # the update is the clipped gradient
    autocast, scaler = setup_amp(model, optimizer, "O2", dtype)
    ((images, labels),) = make_batches(1)
    with autocast():
        loss = nn.functional.cross_entropy(model(images), labels)
    scaler(loss, optimizer, factor, clip_mode, model_parameters(model, exclude_head=exclude_head))
    update = before - torch.cat([value.double().flatten() for value in amp.master_parameters(model)])
    # masters near 1 hold updates to 2^-24; clipped gradients are stored as float32, or as bfloat16 with 8 bits
    tolerance = 2**-8 if dtype == "bfloat16" else 1e-4
    torch.testing.assert_close(update, expected, rtol=tolerance, atol=3e-7)


def test_adaptive_clipping_compares_with_the_masters():
    from timm.utils import adaptive_clip_grad

    model = nn.Linear(4, 3)
    model.weight.data.mul_(1e-3)
    values = model.weight.detach().clone()
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    _, scaler = setup_amp(model, optimizer, "O2", "bfloat16")
    gradient = torch.arange(12.0).reshape(3, 4)  # exact in bfloat16
    loss = (model.weight.float() * gradient).sum()
    scaler(loss, optimizer, 0.01, "agc", [model.weight])
    reference = nn.Parameter(values.double())
    reference.grad = gradient.double()
    adaptive_clip_grad([reference], 0.01)
    update = values.double() - optim.master_of(model.weight).double()
    # the clipped gradient is stored as bfloat16: eight bits
    torch.testing.assert_close(update, reference.grad, rtol=2**-8, atol=1e-9)


def test_accumulated_gradients_step_once():
    batches, steps = make_batches(2), []
    model = make_model()
    optimizer = make_optimizer(model)
    autocast, scaler = setup_amp(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for number, (images, labels) in enumerate(batches):
        with autocast():
            loss = nn.functional.cross_entropy(model(images), labels) / 2
        scaler(loss, optimizer, need_update=number == 1)
    assert len(steps) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_timms_checkpoints_resume_bit_exactly(tmp_path, dtype):
    from timm.models import load_checkpoint, resume_checkpoint
    from timm.utils import CheckpointSaver

    def start() -> tuple[Any, Any, Any, Any]:
        model = make_model()
        optimizer = make_optimizer(model)
        grown = amp.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=2) if dtype == "float16" else None
        autocast, scaler = setup_amp(model, optimizer, "O2", dtype, scaler=grown)
        return model, optimizer, autocast, scaler

    batches = make_batches(6)
    model, optimizer, autocast, scaler = start()
    ema = model_ema(model, decay=0.9)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, amp_scaler=scaler, checkpoint_dir=str(tmp_path))
    train(model, optimizer, autocast, scaler, batches[:3], ema, clip_grad=1.0)
    saver.save_checkpoint(0)
    train(model, optimizer, autocast, scaler, batches[3:], ema, clip_grad=1.0)

    other, other_optimizer, autocast, other_scaler = start()
    path = str(tmp_path / "last.pth.tar")
    assert resume_checkpoint(other, path, other_optimizer, other_scaler, log_info=False) == 1
    other_ema = model_ema(other, decay=0.9)
    load_checkpoint(other_ema.module, path, use_ema=True)
    train(other, other_optimizer, autocast, other_scaler, batches[3:], other_ema, clip_grad=1.0)
    for a, b in ((model, other), (ema, other_ema)):
        first, second = a.state_dict(), b.state_dict()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert scaler.state_dict() == other_scaler.state_dict()


def test_the_scale_of_timms_own_scaler_is_resumed():
    native = torch.amp.GradScaler("cpu", init_scale=128.0)
    native.scale(torch.ones(()))
    _, scaler = setup_amp(*(lambda model: (model, make_optimizer(model)))(make_model()))
    scaler.load_state_dict(native.state_dict())
    assert scaler.precision.scaler.get_scale() == 128.0


@pytest.mark.parametrize("exclude_buffers", [False, True])
@pytest.mark.parametrize("master_weight", [None, "compact"])
def test_the_average_is_that_of_the_masters_and_is_what_evaluates(exclude_buffers, master_weight):
    model = make_model()
    optimizer = make_optimizer(model)
    autocast, scaler = setup_amp(model, optimizer, "O2", "bfloat16", master_weight=master_weight)
    ema = model_ema(model, decay=0.75, exclude_buffers=exclude_buffers)
    expected = [value.double().clone() for value in amp.master_parameters(model)]
    for batch in make_batches(4):
        train(model, optimizer, autocast, scaler, [batch])
        ema.update(model)
        for mean, value in zip(expected, amp.master_parameters(model), strict=True):
            mean.lerp_(value.double(), 0.25)
    params = list(ema.module.parameters())
    assert {param.dtype for param in params} == {torch.float32}
    for param, mean in zip(params, expected, strict=True):
        # float32 arithmetic against float64, four updates
        torch.testing.assert_close(param.double(), mean, rtol=1e-5, atol=1e-7)
    with autocast(), torch.no_grad():
        assert torch.isfinite(ema(make_batches(1)[0][0])).all()


def test_timms_own_average_in_float32_is_that_of_the_masters():
    from timm.utils import ModelEmaV3

    if "dtype" not in inspect.signature(ModelEmaV3).parameters:
        pytest.skip("this timm keeps averages in the dtype of the model only")
    model = make_model()
    optimizer = make_optimizer(model)
    autocast, scaler = setup_amp(model, optimizer, "O2", "bfloat16")
    own, theirs = model_ema(model, decay=0.75), ModelEmaV3(model, decay=0.75, dtype=torch.float32)
    for batch in make_batches(3):
        train(model, optimizer, autocast, scaler, [batch])
        own.update(model)
        theirs.update(model)
    for a, b in zip(own.module.parameters(), theirs.module.parameters(), strict=True):
        assert b.dtype is torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("master_weight", [None, "compact"])
@pytest.mark.parametrize("foreach", [False, True])
def test_timms_own_average_of_a_prepared_model_is_what_evaluates(master_weight, foreach):
    from timm.utils import ModelEmaV3

    model = make_model()
    optimizer = make_optimizer(model)
    autocast, scaler = setup_amp(model, optimizer, "O2", "bfloat16", master_weight=master_weight)
    own, theirs = model_ema(model, decay=0.75), ModelEmaV3(model, decay=0.75, foreach=foreach)
    for batch in make_batches(3):
        train(model, optimizer, autocast, scaler, [batch])
        own.update(model)
        theirs.update(model)
    saved = theirs.module.state_dict()
    for name, param in own.module.named_parameters():
        torch.testing.assert_close(saved[name], param.detach(), rtol=1e-6, atol=1e-7)  # float32, another order
        half = theirs.module.get_parameter(name)
        # compact masters round ties away from zero, torch to even
        torch.testing.assert_close(half.float(), saved[name], rtol=2**-8, atol=1e-7)


def test_an_unknown_clip_mode_is_refused_before_anything_runs():
    model = make_model()
    optimizer = make_optimizer(model)
    _, scaler = setup_amp(model, optimizer)
    with pytest.raises(ValueError, match=r"unknown clip_mode 'norms'; did you mean 'norm'\? allowed: norm, value, agc"):
        scaler(torch.zeros(()), optimizer, 1.0, "norms")


def test_an_overflow_skips_the_step():
    model, batch = make_model(), make_batches(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = make_optimizer(model)
    huge = amp.GradScaler(init_loss_scaling=2.0**60, decr_every_n_nan_or_inf=1)
    autocast, scaler = setup_amp(model, optimizer, scaler=huge)
    train(model, optimizer, autocast, scaler, batch, clip_grad=0.01, clip_mode="agc")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert huge.get_scale() == 2.0**59
