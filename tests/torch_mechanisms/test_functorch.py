"""Transforms of torch.func are noticed, and tensors inside of their wrappers found."""

import torch

from mezzo._torch.functorch import innermost_transform, unwrapped


def test_a_transform_is_seen_inside_and_not_outside() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(innermost_transform() is not None)
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    assert seen == [True, True], "peek_interpreter_stack no longer shows a transform"
    assert innermost_transform() is None


def test_a_wrapped_tensor_leads_to_the_memory_of_the_users() -> None:
    x, found = torch.ones(2, 2), []

    def look(wrapped: torch.Tensor) -> torch.Tensor:
        found.append(unwrapped(wrapped).data_ptr())
        return wrapped.sum()

    torch.func.vmap(torch.func.grad(look))(x)
    assert found == [x.data_ptr()], "get_unwrapped no longer returns what a wrapper holds"
    assert unwrapped(x) is x
