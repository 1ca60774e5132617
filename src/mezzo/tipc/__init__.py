"""Certification: a TIPC configuration becomes a plan of commands, the plan is run, the run is reported."""

from mezzo.tipc._compat import run_as_scripts
from mezzo.tipc._config import MODES, ConfigError, read_config
from mezzo.tipc._lint import Finding, lint
from mezzo.tipc._mend import Allowances, mend
from mezzo.tipc._plan import Plan, Step
from mezzo.tipc._planner import make_plan
from mezzo.tipc._profile import Profile
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._recognise import choose_profile, dialect_of
from mezzo.tipc._record import Record, RunInfo

__all__ = [
    "MODES",
    "PROFILES",
    "Allowances",
    "ConfigError",
    "Finding",
    "Plan",
    "Profile",
    "Record",
    "RunInfo",
    "Step",
    "choose_profile",
    "dialect_of",
    "lint",
    "make_plan",
    "mend",
    "read_config",
    "run_as_scripts",
]
