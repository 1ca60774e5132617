"""Containers are walked as mezzo expects."""

from collections import OrderedDict
from typing import NamedTuple

from mezzo._torch.pytree import tree_any, tree_leaves, tree_map, tree_structure, tree_unflatten


class Pair(NamedTuple):
    left: int
    right: int


NESTED = {"a": [1, (2, None)], "b": OrderedDict(c=Pair(3, 4))}


def test_leaves_are_found_in_order() -> None:
    assert [leaf for leaf in tree_leaves(NESTED) if leaf is not None] == [1, 2, 3, 4]
    assert tree_any(lambda leaf: leaf == 4, NESTED)
    assert not tree_any(lambda leaf: leaf == 5, NESTED)


def test_containers_keep_their_types() -> None:
    mapped = tree_map(lambda leaf: leaf if leaf is None else leaf + 1, NESTED)
    assert mapped == {"a": [2, (3, None)], "b": OrderedDict(c=Pair(4, 5))}
    assert type(mapped["b"]["c"]) is Pair
    assert tree_unflatten(tree_leaves(NESTED), tree_structure(NESTED)) == NESTED
