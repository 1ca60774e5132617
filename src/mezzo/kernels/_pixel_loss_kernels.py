"""Triton kernels of the cross-entropy of every pixel over few classes, in channels-last."""

import triton
import triton.language as tl


@triton.jit
def pixel_loss_kernel(
    logits, labels, losses, sums, pixels, ignored, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """Write loss and log-sum-exp of ROWS pixels; logits are (pixels, CLASSES), dense, and read once.

    A label that is neither a class nor ignored gives NaN.
    """
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = pixel < pixels
    index = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (index < CLASSES)[None, :]
    values = tl.load(logits + pixel[:, None] * CLASSES + index[None, :], mask=inside, other=-float("inf"))
    values = tl.where(exists[:, None], values.to(tl.float32), 0.0)
    largest = tl.max(values, axis=1)
    log_sum = largest + tl.log(tl.sum(tl.exp(values - largest[:, None]), axis=1))
    label = tl.load(labels + pixel, mask=exists, other=0).to(tl.int32)
    is_class = (label >= 0) & (label < CLASSES)
    # one load from the cache instead of a third sum over the classes
    chosen = tl.load(logits + pixel * CLASSES + label, mask=exists & is_class, other=0.0).to(tl.float32)
    loss = tl.where(is_class, log_sum - chosen, float("nan"))
    tl.store(losses + pixel, tl.where(label == ignored, 0.0, loss), mask=exists)
    tl.store(sums + pixel, log_sum, mask=exists)


@triton.jit
def pixel_loss_gradient_kernel(
    grad, logits, labels, sums, result, pixels, ignored,
    CLASSES: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the logits of ROWS pixels: (probability - label) * gradient of the loss."""
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = pixel < pixels
    index = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (index < CLASSES)[None, :]
    place = pixel[:, None] * CLASSES + index[None, :]
    values = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
    label = tl.load(labels + pixel, mask=exists, other=0).to(tl.int32)
    factor = tl.load(grad + pixel, mask=exists, other=0.0)
    factor = tl.where((label >= 0) & (label < CLASSES), factor, float("nan"))
    factor = tl.where(label == ignored, 0.0, factor)
    log_sum = tl.load(sums + pixel, mask=exists, other=0.0)
    share = tl.exp(values - log_sum[:, None]) - tl.where(index[None, :] == label[:, None], 1.0, 0.0)
    tl.store(result + place, tl.where(factor[:, None] == 0.0, 0.0, share * factor[:, None]), mask=inside)
