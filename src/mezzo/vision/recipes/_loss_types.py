"""Loss types with the names of PaddleSeg: arguments are checked now, the loss is created later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mezzo._arguments import check_flag, check_integer, check_number, check_numbers
from mezzo.files import short_repr
from mezzo.vision.models import losses

Maker = Callable[[], nn.Module]


# Data sets convert the ignored label to 255, so the losses need no argument for it.
def _cross_entropy(
    weight: Any = None,
    top_k_percent_pixels: Any = 1.0,
    avg_non_ignore: Any = True,
    data_format: Any = "NCHW",
) -> Maker:
    _fixed("top_k_percent_pixels", top_k_percent_pixels, 1.0, "OhemCrossEntropyLoss keeps the hard pixels only")
    _fixed("avg_non_ignore", avg_non_ignore, True, "the mean is over the pixels that count")
    _fixed("data_format", data_format, "NCHW", "the layout of tensors is not a matter of the loss here")
    checked = None if weight is None else check_numbers("weight", weight, at_least=0)
    return lambda: losses.CrossEntropyLoss(checked)


def _ohem(thresh: Any = 0.7, min_kept: Any = 10000) -> Maker:
    limit, kept = check_number("thresh", thresh, at_least=0, at_most=1), check_integer("min_kept", min_kept)
    return lambda: losses.OhemCrossEntropyLoss(limit, kept)


def _lovasz(classes: Any = "present") -> Maker:
    _fixed("classes", classes, "present", "the mean is over the classes that occur")
    return losses.LovaszSoftmaxLoss


def _lovasz_hinge() -> Maker:
    return losses.LovaszHingeLoss


def _rmi(
    num_classes: Any = None,  # compared with the data elsewhere
    rmi_radius: Any = 3,
    rmi_pool_way: Any = 0,
    rmi_pool_size: Any = 3,
    rmi_pool_stride: Any = 3,
    loss_weight_lambda: Any = 0.5,
) -> Maker:
    radius = check_integer("rmi_radius", rmi_radius, at_least=1, at_most=10)
    _fixed("rmi_pool_way", rmi_pool_way, 0, "maxima of squares are taken")
    pool = check_integer("rmi_pool_size", rmi_pool_size, at_least=1)
    _fixed("rmi_pool_stride", rmi_pool_stride, pool, "it is the rmi_pool_size")
    check_number("loss_weight_lambda", loss_weight_lambda)  # PaddleSeg accepts and ignores it
    return lambda: losses.RMILoss(radius, pool)


def _connectivity(max_pred_num_conn: Any = 10, use_argmax: Any = True) -> Maker:
    check_integer("max_pred_num_conn", max_pred_num_conn, at_least=1)
    _fixed("use_argmax", check_flag("use_argmax", use_argmax), True, "it is a loss of predicted classes")
    return without_gradient


def without_gradient() -> nn.Module:
    """Placeholder for a loss without gradient, which is left out and reported."""
    raise AssertionError("a loss without gradient is never made")


def _fixed(name: str, value: object, wanted: object, why: str) -> None:
    if value != wanted:
        raise ValueError(f"{name}={short_repr(value)}: only {wanted!r} is supported; {why}")


SINGLE: dict[str, Callable[..., Maker]] = {
    "CrossEntropyLoss": _cross_entropy,
    "OhemCrossEntropyLoss": _ohem,
    "LovaszSoftmaxLoss": _lovasz,
    "LovaszHingeLoss": _lovasz_hinge,
    "RMILoss": _rmi,
    "SemanticConnectivityLoss": _connectivity,
}
