"""Multi-tensor and fused kernels compute what a step relies on."""

import pytest
import torch
from torch import Tensor

from mezzo._torch import foreach


def pair(*values: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.tensor([value, value], dtype=dtype) for value in values]


def test_copies_change_the_dtype() -> None:
    targets = pair(0, 0, dtype=torch.float16)
    foreach.foreach_copy_(targets, pair(1, 2))
    assert [t.tolist() for t in targets] == [[1, 1], [2, 2]], "torch._foreach_copy_ no longer copies between dtypes"


def test_copies_can_leave_the_host_free() -> None:
    targets = pair(0)
    foreach.foreach_copy_(targets, pair(3), non_blocking=True)
    assert targets[0].tolist() == [3, 3]


def test_products_and_sums_take_a_tensor_and_not_a_number() -> None:
    """As a tensor, the factor may lie on the device: nothing waits for it."""
    factor, tensors = torch.tensor(2.0), pair(1, 3)
    assert [t.tolist() for t in foreach.foreach_mul(tensors, factor)] == [[2, 2], [6, 6]]
    foreach.foreach_mul_(tensors, factor)
    foreach.foreach_add_(tensors, torch.tensor(1.0))
    assert [t.tolist() for t in tensors] == [[3, 3], [7, 7]]
    names = [str(op) for op in (foreach.foreach_mul, foreach.foreach_mul_, foreach.foreach_add_)]
    assert all(name.endswith(".Tensor") for name in names), names


def test_norms_are_those_of_each_tensor() -> None:
    largest = foreach.foreach_norm([torch.tensor([3.0, -4.0]), torch.tensor([float("nan")])], float("inf"))
    assert largest[0] == 4
    assert largest[1].isnan(), "torch._foreach_norm hides NaN: the check of gradients would not see it"
    assert foreach.foreach_norm([torch.tensor([3.0, -4.0])], 2)[0] == 5


def test_where_norms_take_a_dtype_it_widens_the_sum() -> None:
    if not foreach.norm_takes_dtype():
        pytest.skip("this torch sums norms in the dtype of the inputs")
    (norm,) = foreach.foreach_norm([torch.tensor([60000.0, 60000.0], dtype=torch.float16)], 2, dtype=torch.float64)
    assert norm.dtype is torch.float64
    assert norm.isfinite()


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_fused_updates_skip_by_found_inf(found: float) -> None:
    """Keyword by keyword as `mezzo.optim._fused` calls them."""
    common = {"weight_decay": 0.0, "maximize": False, "lr": 0.5, "found_inf": torch.tensor(found)}
    params, grads = pair(1), pair(1)
    foreach.fused_sgd_(params, grads, [], momentum=0.0, dampening=0.0, nesterov=False, is_first_step=False, **common)
    assert params[0].tolist() == ([1, 1] if found else [0.5, 0.5]), "torch._fused_sgd_ no longer skips by found_inf"
    for kernel in (foreach.fused_adam_, foreach.fused_adamw_):
        params, state = pair(1), (pair(0), pair(0))
        options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, **common}
        kernel(params, pair(1), *state, [], [torch.ones(())], **options)
        assert (params[0] == 1).all().item() == bool(found), f"{kernel.__name__} no longer skips by found_inf"
