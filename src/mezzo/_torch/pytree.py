"""Nested containers as torch sees them: lists, tuples, dictionaries and registered classes.

Why: arguments and results of modules are nested, and mezzo must find the same tensors in them as
torch does. `torch.utils.pytree`, the public name, is not in every release.
Releases: 2.11 to 2.15.
Without it: tensors inside containers are neither cast nor counted nor copied.
"""

from torch.utils._pytree import tree_any, tree_leaves, tree_map, tree_structure, tree_unflatten

__all__ = ["tree_any", "tree_leaves", "tree_map", "tree_structure", "tree_unflatten"]
