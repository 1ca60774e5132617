"""The engine says which backward pass and which node run, and calls back at its end."""

import torch
from torch.autograd import forward_ad

from mezzo._torch import autograd_engine as engine


def test_a_backward_pass_and_its_nodes_are_known_while_they_run() -> None:
    first = engine.next_node_number()
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert engine.number_of_node(y.grad_fn) == first, "nodes no longer get the number that _get_sequence_nr announces"
    assert engine.next_node_number() == first + 1
    assert engine.graph_task_id() == -1
    assert engine.current_node() is None
    seen = []
    y.register_hook(lambda grad: seen.append((engine.graph_task_id() >= 0, engine.current_node() is not None)))
    y.sum().backward()
    assert seen == [(True, True)], "torch._C._current_graph_task_id or _current_autograd_node is gone"


def test_callbacks_run_after_the_gradients_are_there() -> None:
    x = torch.ones(2, requires_grad=True)
    seen = []
    y = (x * 2).sum()
    engine.hook_only(y, lambda grad: engine.queue_callback(lambda: seen.append(x.grad.tolist())))
    y.backward()
    assert seen == [[2, 2]], "queue_callback no longer runs at the end of the backward pass"


def test_a_tensor_with_hooks_is_left_alone() -> None:
    x = torch.ones(1, requires_grad=True)
    y, seen = x * 2, []
    y.register_hook(lambda grad: seen.append("user's"))
    engine.hook_only(y, lambda grad: seen.append("ours"))
    engine.hook_only(x, lambda grad: seen.append("of a leaf"))
    y.backward()
    assert seen == ["user's"]


def test_a_hook_may_follow_ours() -> None:
    x = torch.ones(1, requires_grad=True)
    y, seen = x * 2, []
    engine.hook_only(y, lambda grad: seen.append("ours"))
    y.register_hook(lambda grad: seen.append("user's"))
    y.backward()
    assert seen == ["ours", "user's"]


def test_forward_mode_is_noticed() -> None:
    assert not engine.has_forward_mode()
    with forward_ad.dual_level():
        assert engine.has_forward_mode(), "torch.autograd.forward_ad._current_level no longer counts dual levels"
    assert not engine.has_forward_mode()
