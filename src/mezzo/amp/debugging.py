"""What ran in which precision: operator statistics of the forward, the backward and the optimizer step."""

from mezzo.amp._foreign import replaced_kernels
from mezzo.amp._recorder import (
    OperatorRow,
    OperatorStats,
    Phase,
    collect_operator_stats,
    disable_operator_stats_collection,
    enable_operator_stats_collection,
)

__all__ = [
    "collect_operator_stats",
    "enable_operator_stats_collection",
    "disable_operator_stats_collection",
    "OperatorStats",
    "OperatorRow",
    "Phase",
    "replaced_kernels",
]
