"""What ran in which precision, where NaN and inf come from, and how near to float16's limits each layer is."""

from mezzo.amp._findings import Finding, Kind
from mezzo.amp._foreign import replaced_kernels
from mezzo.amp._fp8_numbers import Fp8Numbers, Fp8Row, collect_fp8_numbers
from mezzo.amp._kernel_times import KernelRow, uses_tensor_cores
from mezzo.amp._layer_numerics import check_layer_numerics
from mezzo.amp._leaks import Leak
from mezzo.amp._module_calls import ModuleListener, listening_to_modules
from mezzo.amp._operator_log import OperatorLog, glog_asks_for_operators, operator_log
from mezzo.amp._operator_stats import CastRow, ModuleRow, OperatorRow, OperatorStats
from mezzo.amp._ranges import RangeRow, Ranges, ScaleSuggestion, collect_ranges
from mezzo.amp._recorder import (
    collect_operator_stats,
    disable_operator_stats_collection,
    enable_operator_stats_collection,
)
from mezzo.amp._seen import Phase
from mezzo.amp._tensor_checker import (
    CheckedTensor,
    TensorChecker,
    TensorCheckerConfig,
    disable_tensor_checker,
    enable_tensor_checker,
    tensor_checker,
)
from mezzo.amp._tensor_numbers import DebugMode, NonFiniteError, TensorNumbers, check_numerics

__all__ = [
    "collect_operator_stats",
    "enable_operator_stats_collection",
    "disable_operator_stats_collection",
    "listening_to_modules",
    "ModuleListener",
    "operator_log",
    "OperatorLog",
    "glog_asks_for_operators",
    "OperatorStats",
    "OperatorRow",
    "ModuleRow",
    "CastRow",
    "KernelRow",
    "Leak",
    "uses_tensor_cores",
    "Phase",
    "check_numerics",
    "DebugMode",
    "TensorNumbers",
    "tensor_checker",
    "TensorCheckerConfig",
    "enable_tensor_checker",
    "disable_tensor_checker",
    "TensorChecker",
    "CheckedTensor",
    "NonFiniteError",
    "Finding",
    "Kind",
    "check_layer_numerics",
    "collect_ranges",
    "Ranges",
    "RangeRow",
    "ScaleSuggestion",
    "collect_fp8_numbers",
    "Fp8Numbers",
    "Fp8Row",
    "replaced_kernels",
]
