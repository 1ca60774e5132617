"""Cross-entropy of pixels over few classes: on a CPU by torch, on a GPU or in Triton's interpreter by mezzo's kernels."""

import os
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mezzo.kernels import pixel_cross_entropy, pixel_loss
from mezzo.kernels._pixel_loss import _fits
from mezzo.static import to_static

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HALF = [torch.float16, torch.bfloat16]
#: The gradient is rounded once; the interpreter cuts bfloat16 off.
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}
IGNORED = 255


def data(device: str, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = (3 * torch.randn(2, classes, 5, 7, device=device)).to(dtype).to(memory_format=torch.channels_last)
    labels = torch.randint(0, classes, (2, 5, 7), device=device)
    labels[0, 1:3] = IGNORED
    return logits.requires_grad_(), labels


def check(device: str, classes: int, dtype: torch.dtype) -> None:
    logits, labels = data(device, classes, dtype)
    factor = torch.rand(labels.shape, device=device)
    losses = pixel_loss(logits, labels, IGNORED)[0]
    (losses * factor).sum().backward()
    wide = logits.detach().double().cpu().requires_grad_()
    expected = F.cross_entropy(wide, labels.cpu(), ignore_index=IGNORED, reduction="none")
    (expected * factor.double().cpu()).sum().backward()
    # float32 sums of up to 200 exponentials
    torch.testing.assert_close(losses.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    assert losses.dtype is torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype is dtype
    assert logits.grad.is_contiguous(memory_format=torch.channels_last)
    # subnormal gradients of float16 are rounded to 2^-25
    assert ((logits.grad.double().cpu() - wide.grad).abs() <= ROUNDING[dtype] * wide.grad.abs() + 2**-24).all()
    assert not logits.grad[0, :, 1:3].any()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("classes", [2, 19, 150])
def test_loss_and_gradient_are_those_of_float64(classes: int, dtype: torch.dtype) -> None:
    check("cpu", classes, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("classes", [2, 19, 150])
def test_on_cuda_loss_and_gradient_are_those_of_float64(classes: int, dtype: torch.dtype) -> None:
    check("cuda", classes, dtype)


@pytest.mark.skipif(not INTERPRETED, reason="a property of the kernels; torch raises IndexError on a CPU")
def test_a_label_that_is_no_class_makes_the_loss_and_its_gradient_nan() -> None:
    logits, labels = data("cpu", 4, torch.float16)
    labels[1, 0, 0] = 4
    losses = pixel_loss(logits, labels, IGNORED)[0]
    losses.sum().backward()
    assert logits.grad is not None
    assert losses[1, 0, 0].isnan()
    assert logits.grad[1, :, 0, 0].isnan().all()
    assert losses.isnan().sum() == 1


def test_logits_of_other_kinds_take_torchs_operator() -> None:
    labels = torch.randint(0, 3, (2, 4, 5))
    for logits in (torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, dtype=torch.float64)):
        assert torch.equal(pixel_cross_entropy(logits, labels), F.cross_entropy(logits, labels, reduction="none"))


def test_second_derivatives_are_those_of_float64() -> None:
    logits, labels = data("cpu", 4, torch.float16)
    wide = logits.detach().double().requires_grad_()
    first = torch.autograd.grad(pixel_loss(logits, labels, IGNORED)[0].sum(), logits, create_graph=True)[0]
    (found,) = torch.autograd.grad(first.float().square().sum(), logits)
    loss = F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
    first = torch.autograd.grad(loss, wide, create_graph=True)[0]
    (expected,) = torch.autograd.grad(first.square().sum(), wide)
    # the first derivative, up to 1, and the second one are rounded to half; the latter has factors of up to 2
    torch.testing.assert_close(found.double(), expected, rtol=2**-9, atol=2**-9)


def test_the_kernel_takes_only_labels_of_the_logits_size_and_nothing_inside_torch_func() -> None:
    logits, labels = data("cpu", 5, torch.float16)
    assert _fits(logits, labels)
    assert not _fits(logits, labels[:, :4])  # the kernel would pair pixels with labels of others
    assert not _fits(logits, labels[:1])
    assert not _fits(logits, labels.to("meta"))
    found = []
    torch.func.grad(lambda given: (found.append(_fits(given, labels)), given.float().sum())[1])(logits.detach())
    assert found == [False]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no fake tensors")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # opcheck's own reading, since torch 2.14
def test_fake_and_autograd_rules_are_right() -> None:
    logits, labels = data("cpu", 5, torch.float16)
    torch.library.opcheck(pixel_loss, (logits, labels, IGNORED))


@pytest.mark.skipif(not INTERPRETED, reason="no kernel is launched")
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    monkeypatch.setattr("mezzo.kernels._pixel_loss.on_device", lambda device: nullcontext(entered.append(device)))
    logits, labels = data("cpu", 4, torch.float16)
    pixel_loss(logits, labels, IGNORED)[0].sum().backward()
    assert entered == [torch.device("cpu")] * 2  # forward and backward; Triton itself takes the current device


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no fake tensors")
def test_a_captured_graph_holds_the_operator_and_its_gradient() -> None:
    logits, labels = data("cpu", 5, torch.float16)

    @to_static(backend="aot_eager")
    def mean_loss(logits: Tensor) -> Tensor:
        return pixel_loss(logits, labels, IGNORED)[0].mean()

    mean_loss(logits).backward()
    forward, backward = mean_loss.graphs[-1].parts
    assert "pixel_loss.default" in str(forward.graph)
    assert backward is not None
    assert "pixel_loss_gradient.default" in str(backward.graph)
