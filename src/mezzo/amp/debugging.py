"""What ran in which precision: operator statistics of the forward, the backward and the optimizer step."""

from mezzo.amp._foreign import replaced_kernels
from mezzo.amp._kernel_times import KernelRow, uses_tensor_cores
from mezzo.amp._leaks import Leak
from mezzo.amp._operator_stats import CastRow, ModuleRow, OperatorRow, OperatorStats
from mezzo.amp._recorder import (
    collect_operator_stats,
    disable_operator_stats_collection,
    enable_operator_stats_collection,
)
from mezzo.amp._seen import Phase

__all__ = [
    "collect_operator_stats",
    "enable_operator_stats_collection",
    "disable_operator_stats_collection",
    "OperatorStats",
    "OperatorRow",
    "ModuleRow",
    "CastRow",
    "KernelRow",
    "Leak",
    "uses_tensor_cores",
    "Phase",
    "replaced_kernels",
]
