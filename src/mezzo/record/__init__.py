"""What ran and with which numbers: operators, dtypes, times, leaks, ranges and non-finite values."""

from mezzo.amp import OperatorLog, glog_asks_for_operators, operator_log
from mezzo.record._checker_config import TensorCheckerConfig, set_checked_op_list, set_skipped_op_list
from mezzo.record._checking import disable_tensor_checker, enable_tensor_checker, tensor_checker
from mezzo.record._collection import (
    collect_operator_stats,
    disable_operator_stats_collection,
    enable_operator_stats_collection,
)
from mezzo.record._dumps import DumpedTensor, DumpRow, compare_dumps
from mezzo.record._findings import Finding, Kind
from mezzo.record._fp8_numbers import Fp8Numbers, Fp8Row, collect_fp8_numbers
from mezzo.record._kernel_runs import EXCLUDED, KernelListener, KernelOp, KernelRun, Phase, find_tensors
from mezzo.record._kernel_times import FP8, KernelRow, KernelTimes, uses_tensor_cores
from mezzo.record._layer_numerics import check_layer_numerics
from mezzo.record._leaks import Leak
from mezzo.record._listening import abandon, counts_operators, has_foreign_mode, listening
from mezzo.record._module_calls import ModuleListener, listening_to_modules
from mezzo.record._operator_stats import CastRow, ModuleRow, OperatorRow, OperatorStats
from mezzo.record._ranges import RangeRow, Ranges, ScaleSuggestion, collect_ranges
from mezzo.record._tensor_checker import CheckedTensor, TensorChecker
from mezzo.record._tensor_numbers import DebugMode, NonFiniteError, TensorNumbers, check_numerics
from mezzo.record._timer import (
    Timing,
    drift_note,
    release_memory,
    synchronize,
    time_calls,
    time_on_device,
    unsteady_note,
)

__all__ = [
    "collect_operator_stats",
    "enable_operator_stats_collection",
    "disable_operator_stats_collection",
    "operator_log",
    "OperatorLog",
    "glog_asks_for_operators",
    "OperatorStats",
    "OperatorRow",
    "ModuleRow",
    "CastRow",
    "KernelRow",
    "KernelTimes",
    "Leak",
    "uses_tensor_cores",
    "Phase",
    "check_numerics",
    "DebugMode",
    "TensorNumbers",
    "tensor_checker",
    "TensorCheckerConfig",
    "set_checked_op_list",
    "set_skipped_op_list",
    "enable_tensor_checker",
    "disable_tensor_checker",
    "TensorChecker",
    "CheckedTensor",
    "NonFiniteError",
    "Finding",
    "Kind",
    "check_layer_numerics",
    "compare_dumps",
    "DumpRow",
    "DumpedTensor",
    "collect_ranges",
    "Ranges",
    "RangeRow",
    "ScaleSuggestion",
    "collect_fp8_numbers",
    "Fp8Numbers",
    "Fp8Row",
    "listening",
    "listening_to_modules",
    "ModuleListener",
    "abandon",
    "counts_operators",
    "has_foreign_mode",
    "KernelListener",
    "FP8",
    "KernelRun",
    "KernelOp",
    "EXCLUDED",
    "find_tensors",
    "time_calls",
    "time_on_device",
    "Timing",
    "synchronize",
    "release_memory",
    "unsteady_note",
    "drift_note",
]
