"""A decorated generator runs inside its context and waits outside of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from mezzo._torch.generators import generator_in_context


def test_the_context_is_left_at_each_yield() -> None:
    open_now = 0

    @contextmanager
    def context() -> Iterator[None]:
        nonlocal open_now
        open_now += 1
        try:
            yield
        finally:
            open_now -= 1

    def count() -> Iterator[int]:
        yield open_now
        yield open_now

    for inside in generator_in_context(context, count)():
        assert inside == 1
        assert open_now == 0, "torch's wrapper of generators leaves the context open while they wait"
