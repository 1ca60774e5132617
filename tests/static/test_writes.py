"""What a call of a captured graph may change in place."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mezzo.static._writes import written_by

_aten = torch.ops.aten


def of_the_user(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@pytest.mark.parametrize(
    ("target", "places", "options", "written"),
    [
        ("add", "xy", {}, ""),
        ("add_", "xy", {}, "x"),
        ("__and__", "xy", {}, ""),
        ("__iand__", "xy", {}, "x"),
        ("__setitem__", "xy", {}, "x"),
        (operator.and_, "xy", {}, ""),
        (operator.iand, "xy", {}, "x"),
        (operator.setitem, "xyx", {}, "x"),
        (torch.add, "xy", {}, ""),
        (torch.relu_, "x", {}, "x"),
        (torch.neg, "x", {"out": "y"}, "xy"),
        (torch.where, ["x", True, False], {}, ""),
        (F.relu, "x", {}, ""),
        (F.relu, ["x", True], {}, "x"),
        (F.relu, "x", {"inplace": True}, "x"),
        (F.relu, ["x", False], {}, ""),
        (F.dropout, ["x", 0.5, True], {}, ""),
        (F.dropout, ["x", 0.5, True, True], {}, "x"),
        (F.batch_norm, ["x", "y", "y", None, None, True], {}, ""),
        (_aten.mul.Tensor, "xy", {}, ""),
        (_aten.mul, "xy", {}, ""),
        (_aten.mul, "xy", {"out": "y"}, "xy"),
        (_aten.mul_.Tensor, "xy", {}, "xy"),
        (torch._foreach_mul_, [["x", "y"], 2.0], {}, "xy"),
        (checkpoint, "xy", {}, "xy"),
        (of_the_user, "xy", {}, "xy"),
    ],
)
def test_a_call_writes_to_what_its_name_or_an_argument_says(
    target: Callable[..., Any] | str, places: Any, options: dict[str, Any], written: str
) -> None:
    graph = Graph()
    nodes = {name: graph.placeholder(name) for name in "xy"}

    def with_nodes(value: Any) -> Any:
        return [nodes.get(each, each) if isinstance(each, str) else each for each in value]

    args = [with_nodes(each) if isinstance(each, list) else each for each in with_nodes(places)]
    kwargs = dict(zip(options, with_nodes(options.values()), strict=True))
    create = graph.call_method if isinstance(target, str) else graph.call_function
    assert {node.name for node in written_by(create(target, tuple(args), kwargs))} == set(written)
