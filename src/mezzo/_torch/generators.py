"""A generator function that runs inside a context, but waits outside of it.

Why: `@auto_cast(...)` on a generator function must not leave the region open while the generator is
suspended. torch does this for `@torch.no_grad()`; the public `contextlib.ContextDecorator` does
not.
Releases: 2.11 to 2.15; the function that wraps only generators has another argument since 2.15.
Without it: the caller of a decorated generator computes under its policy.
"""

from torch.utils._contextlib import context_decorator as generator_in_context

__all__ = ["generator_in_context"]
