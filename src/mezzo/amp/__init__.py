"""Mixed precision: which precision each operator runs in, half weights with fp32 masters, and the loss scaler."""

import importlib
from typing import TYPE_CHECKING, Any

from mezzo.amp._auto_cast import auto_cast
from mezzo.amp._averages import master_parameters
from mezzo.amp._checkpoint import float32_copy
from mezzo.amp._checkpoint_blocks import checkpoint_blocks
from mezzo.amp._compile import source_digest as source_digest
from mezzo.amp._compiled import build_kernels
from mezzo.amp._compiled import library_path as library_path
from mezzo.amp._cpu import has_half_units as has_half_units
from mezzo.amp._decorate import decorate
from mezzo.amp._decorate import keep_optimizer_state as keep_optimizer_state
from mezzo.amp._decorate import set_optimizer_state as set_optimizer_state
from mezzo.amp._decorate_checks import check_optimizer_state as check_optimizer_state
from mezzo.amp._decorate_checks import parse_master_weight as parse_master_weight
from mezzo.amp._decorate_checks import parse_optimizer_state as parse_optimizer_state
from mezzo.amp._environment import Environment as Environment
from mezzo.amp._environment import Gpu as Gpu
from mezzo.amp._environment import check_environment
from mezzo.amp._exclude import Excluded as Excluded
from mezzo.amp._exclude import exclude_layers
from mezzo.amp._exclude import find_excluded as find_excluded
from mezzo.amp._exclude import is_excluded as is_excluded
from mezzo.amp._explain import Explanation, explain
from mezzo.amp._fp8 import first_and_last as first_and_last
from mezzo.amp._fp8 import fp8_weights as fp8_weights
from mezzo.amp._fp8 import keep_in_half
from mezzo.amp._fp8 import refuse_other_fp8 as refuse_other_fp8
from mezzo.amp._fp8_scales import fp8_scales, load_fp8_scales
from mezzo.amp._fuse import FusedPart as FusedPart
from mezzo.amp._fuse import causal_lm_loss as causal_lm_loss
from mezzo.amp._fuse import fuse_parts as fuse_parts
from mezzo.amp._half_weights import half_parameters as half_parameters
from mezzo.amp._lists import black_list, read_lists, white_list
from mezzo.amp._lists import load_lists as load_lists
from mezzo.amp._names import OPERATOR_GROUPS as OPERATOR_GROUPS
from mezzo.amp._names import is_operator_name as is_operator_name
from mezzo.amp._names import operator_names
from mezzo.amp._names import resolve_list as resolve_list
from mezzo.amp._names import resolve_name as resolve_name
from mezzo.amp._operator_log import OperatorLog as OperatorLog
from mezzo.amp._operator_log import glog_asks_for_operators as glog_asks_for_operators
from mezzo.amp._operator_log import operator_log as operator_log
from mezzo.amp._ops import OPS as OPS
from mezzo.amp._ops import VARIANTS as VARIANTS
from mezzo.amp._ops import Classifier as Classifier
from mezzo.amp._policy import Decision, Policy
from mezzo.amp._recompute import bind_policy, custom_bwd, custom_fwd
from mezzo.amp._scaler import GradScaler, LossScaleFloorError
from mezzo.amp._sharding import is_sharded as is_sharded
from mezzo.amp._sharding import shard_model as shard_model
from mezzo.amp._sharding_checks import note_optimizer as note_optimizer
from mezzo.amp._sharding_checks import refuse_gathering_in_fp8 as refuse_gathering_in_fp8
from mezzo.amp._sharding_checks import refuse_old_parameters as refuse_old_parameters
from mezzo.amp._sharding_checks import refuse_other_fp8_gathering as refuse_other_fp8_gathering
from mezzo.amp._sharding_checks import refuse_other_gathering as refuse_other_gathering
from mezzo.amp._sharding_checks import refuse_unshardable as refuse_unshardable
from mezzo.amp._sharding_checks import refuse_unsharded_options as refuse_unsharded_options
from mezzo.amp._state import current_policy, get_autocast_dtype, is_autocast_enabled
from mezzo.amp._state import thread_state as thread_state
from mezzo.amp.hardware import is_bfloat16_supported, is_float16_supported
from mezzo.fp8 import Fp8Recipe

if TYPE_CHECKING:
    from mezzo.amp import debugging

autocast = auto_cast
"""Another name of `auto_cast`, as in newer releases of Paddle."""
amp_guard = auto_cast
"""Another name of `auto_cast`, as in Paddle."""
amp_decorate = decorate
"""Another name of `decorate`, as in Paddle."""
AmpScaler = GradScaler
"""Another name of `GradScaler`, as in Paddle. It has the defaults of `GradScaler`."""

# What users call. The names imported `as` themselves above are for other packages of mezzo.
__all__ = [
    "auto_cast",
    "decorate",
    "GradScaler",
    "LossScaleFloorError",
    "Policy",
    "Decision",
    "current_policy",
    "white_list",
    "black_list",
    "read_lists",
    "operator_names",
    "explain",
    "Explanation",
    "exclude_layers",
    "keep_in_half",
    "checkpoint_blocks",
    "Fp8Recipe",
    "fp8_scales",
    "load_fp8_scales",
    "float32_copy",
    "master_parameters",
    "bind_policy",
    "custom_fwd",
    "custom_bwd",
    "check_environment",
    "is_float16_supported",
    "is_bfloat16_supported",
    "is_autocast_enabled",
    "get_autocast_dtype",
    "debugging",
    "build_kernels",
    # Paddle's other names of the first three
    "autocast",
    "amp_guard",
    "amp_decorate",
    "AmpScaler",
]


def __getattr__(name: str) -> Any:
    """Load `debugging` when it is asked for: it stands above the recorder, which stands above `amp`."""
    if name == "debugging":
        return importlib.import_module("mezzo.amp.debugging")
    raise AttributeError(f"module 'mezzo.amp' has no attribute {name!r}")
