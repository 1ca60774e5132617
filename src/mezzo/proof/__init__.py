"""What a number format does to a model, proved: what must stay in float32, and how far two runs are apart."""

from mezzo.proof._accuracy import Comparison, compare_accuracy
from mezzo.proof._accuracy_record import record_run, run_at
from mezzo.proof._accuracy_rows import Row
from mezzo.proof._accuracy_run import Run, load_run
from mezzo.proof._advice import Advice
from mezzo.proof._advice_page import write_advice_page
from mezzo.proof._bisect import Bisection, Evaluation, bisect, bisect_run
from mezzo.proof._changes import Changes, ChangesError, apply_changes, read_changes
from mezzo.proof._doctor import Report, advise
from mezzo.proof._measure import Measured
from mezzo.proof._operator_page import write_operator_page
from mezzo.proof._products import MATRIX_PRODUCTS as MATRIX_PRODUCTS
from mezzo.proof._random import random_states_kept as random_states_kept
from mezzo.proof._random import seed_all as seed_all
from mezzo.proof._random import torch_state as torch_state
from mezzo.proof._search import SearchResult, minimal_set
from mezzo.proof._trial import Setup as Setup
from mezzo.proof._trial import Task as Task
from mezzo.proof._trial import Trainer as Trainer

# What users call. The names imported `as` themselves above are for other packages of mezzo.
__all__ = [
    "advise",
    "Report",
    "Measured",
    "Advice",
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
    "Comparison",
    "Row",
    "Run",
]
