"""Transforms of torch.func are noticed."""

import torch

from mezzo._torch.functorch import innermost_transform


def test_a_transform_is_seen_inside_and_not_outside() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(innermost_transform() is not None)
        return x.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    assert seen == [True, True], "peek_interpreter_stack no longer shows a transform"
    assert innermost_transform() is None
