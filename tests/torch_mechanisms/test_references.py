"""A reference can be added from Python."""

import sys

from mezzo._torch.references import add_reference


def test_the_count_goes_up_by_one() -> None:
    something = object()
    before = sys.getrefcount(something)
    add_reference(something)
    assert sys.getrefcount(something) == before + 1
