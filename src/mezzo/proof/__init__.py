"""What a number format does to a model: advice, bisection and the accuracy of two runs."""

from mezzo.proof._accuracy import AccuracyComparison, compare_accuracy
from mezzo.proof._accuracy_record import record_run, run_at
from mezzo.proof._accuracy_rows import AccuracyRow
from mezzo.proof._accuracy_run import AccuracyRun, load_run
from mezzo.proof._advice import Advice
from mezzo.proof._advice_page import write_advice_page
from mezzo.proof._bisect import Bisection, Evaluation, bisect, bisect_run
from mezzo.proof._doctor import Report, advise
from mezzo.proof._measure import Measured, copy_bandwidth
from mezzo.proof._memory import MemoryPrediction, MemoryPredictionError, MemoryReport, predict_fit, predict_memory
from mezzo.proof._operator_page import write_operator_page
from mezzo.proof._products import MATRIX_PRODUCTS, is_product
from mezzo.proof._search import SearchResult, minimal_set
from mezzo.trial import Changes, ChangesError, apply_changes, read_changes

__all__ = [
    "advise",
    "Report",
    "Measured",
    "Advice",
    "predict_memory",
    "predict_fit",
    "MemoryPrediction",
    "MemoryPredictionError",
    "MemoryReport",
    "Changes",
    "ChangesError",
    "apply_changes",
    "read_changes",
    "write_advice_page",
    "write_operator_page",
    "bisect",
    "bisect_run",
    "Bisection",
    "Evaluation",
    "minimal_set",
    "SearchResult",
    "compare_accuracy",
    "run_at",
    "record_run",
    "load_run",
    "AccuracyComparison",
    "AccuracyRow",
    "AccuracyRun",
    "MATRIX_PRODUCTS",
    "is_product",
    "copy_bandwidth",
]
