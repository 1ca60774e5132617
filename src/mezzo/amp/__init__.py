"""Mixed precision: which precision each operator runs in, half weights with fp32 masters, and the loss scaler."""

from mezzo.amp._auto_cast import auto_cast
from mezzo.amp._lists import black_list, read_lists, white_list
from mezzo.amp._policy import Decision, Policy
from mezzo.amp._recompute import bind_policy, custom_bwd, custom_fwd
from mezzo.amp._state import current_policy

__all__ = [
    "auto_cast",
    "Policy",
    "Decision",
    "current_policy",
    "white_list",
    "black_list",
    "read_lists",
    "bind_policy",
    "custom_fwd",
    "custom_bwd",
]
