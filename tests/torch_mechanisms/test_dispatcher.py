"""Keys can be switched off, kernels found and called, as the kernels of amp need it."""

import torch

from mezzo._torch import dispatcher
from mezzo._torch.dispatcher import DispatchKey, DispatchKeySet

AUTOCAST = DispatchKey.AutocastCPU


def test_an_excluded_key_is_off_inside_and_as_before_afterwards() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not dispatcher.is_key_excluded(AUTOCAST), "torch no longer keeps 'autocast is on' as 'key not excluded'"
        with dispatcher.ExcludeKeys(DispatchKeySet(AUTOCAST)):
            assert (x @ x).dtype is torch.float32
        dispatcher.exclude_key(AUTOCAST, True)
        assert (x @ x).dtype is torch.float32
        dispatcher.exclude_key(AUTOCAST, False)
        assert (x @ x).dtype is torch.bfloat16


def test_sets_of_keys_can_be_joined_and_taken_apart() -> None:
    both = DispatchKeySet(AUTOCAST) | DispatchKeySet(DispatchKey.AutocastCUDA)
    assert both.has(AUTOCAST)
    assert not (both - DispatchKeySet(AUTOCAST)).has(AUTOCAST)
    assert not dispatcher.keys_after(AUTOCAST).has(AUTOCAST)
    assert dispatcher.keys_of(torch.ones(1)).has(DispatchKey.CPU)


def test_kernels_are_found_by_operator_and_key() -> None:
    assert dispatcher.has_kernel("aten::mm", "AutocastCPU")
    assert dispatcher.has_kernel("aten::_fused_adamw_", "CPU")
    assert not dispatcher.has_kernel("aten::randperm", "AutocastCPU")  # makes numbers: there is nothing to cast
    assert "aten::sum.dim_IntList" in dispatcher.all_operator_names()


def test_transforms_of_torch_func_include_their_key() -> None:
    seen = []
    key = DispatchKey.FuncTorchDynamicLayerBackMode

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(dispatcher.is_key_included(key))
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    assert seen == [True], "torch.func no longer shows itself by FuncTorchDynamicLayerBackMode"
    assert not dispatcher.is_key_included(key)


def test_a_composite_is_called_by_its_key_and_its_parts_see_autocast() -> None:
    linear = dispatcher.call_at_key(torch.ops.aten.linear.default, DispatchKey.CompositeImplicitAutograd)
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, x).dtype is torch.bfloat16


def test_autograd_records_nothing_below_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    with dispatcher.below_autograd():
        assert not (x * 2).requires_grad


def test_an_operator_is_called_below_its_autograd_kernel() -> None:
    library = torch.library.Library("mezzo_test", "FRAGMENT")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        operator = torch.ops.mezzo_test.twice.default

        def call(keys: DispatchKeySet, x: torch.Tensor) -> torch.Tensor:
            result = dispatcher.call_below_autograd(operator, keys, (x,))
            assert not result.requires_grad
            return result

        library.impl("twice", call, "Autograd", with_keyset=True)
        assert torch.ops.mezzo_test.twice(torch.ones(1, requires_grad=True)).item() == 2
    finally:
        library._destroy()


def test_bindings_are_where_they_are_looked_for() -> None:
    functions, neural = dispatcher.BINDINGS
    assert functions.mm is torch.mm
    assert neural.linear is torch.nn.functional.linear


def test_the_binding_of_an_overload_computes_the_same() -> None:
    overload = torch.ops.aten.add.Tensor
    assert isinstance(overload, dispatcher.OpOverload)
    binding = dispatcher.overload_binding(overload)
    assert binding is not overload, "OpOverload._op is gone: recordings get slower"
    assert binding(torch.ones(1), torch.ones(1)).item() == 2
    assert dispatcher.overload_binding(len) is len
