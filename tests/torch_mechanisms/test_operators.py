"""Operators without a public name are there and do what graphs rely on."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mezzo._torch.operators import ASSERT_TENSOR_METADATA, TO_COPY, unsafe_view


def test_a_traced_cast_is_to_copy() -> None:
    traced = make_fx(lambda x: x.to(torch.float16))(torch.ones(2))
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == [TO_COPY], "casts are traced as another operator: graph mode would keep those that do nothing"


def test_an_unsafe_view_is_no_view_for_autograd() -> None:
    x = torch.ones(4, requires_grad=True) * 1
    shaped = unsafe_view(x, (2, 2))
    assert shaped.shape == (2, 2)
    assert not shaped._is_view()


def test_an_export_asserts_dtypes_by_the_operator_that_is_dropped() -> None:
    assert str(ASSERT_TENSOR_METADATA) == "aten._assert_tensor_metadata.default"
