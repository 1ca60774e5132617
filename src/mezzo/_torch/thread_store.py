"""torch's thread-local store of Python objects, which backward threads inherit.

Why: the policy of a thread must be in force in the backward pass, which runs in threads of
autograd's own. A `threading.local` does not get there.
Releases: 2.11 to 2.15. In 2.11 the store takes a reference that it was not given; `STASH_STEALS`
says whether this one does, found by trying.
Without it: recomputation and autograd Functions run without the policy on CUDA.
"""

from __future__ import annotations

import sys

import torch

from mezzo._torch.references import add_reference

stash = torch._C._stash_obj_in_tls
is_stashed = torch._C._is_key_in_tls
stashed = torch._C._get_obj_in_tls


def _stash_steals_a_reference() -> bool:
    probe = object()
    add_reference(probe)  # one to lose; otherwise this one object is never freed
    before = sys.getrefcount(probe)
    stash("mezzo.probe", probe)
    stolen = sys.getrefcount(probe) == before
    stash("mezzo.probe", None)  # None never dies
    return stolen


STASH_STEALS = _stash_steals_a_reference()
"""Whether an object needs `add_reference` before it is stashed."""
