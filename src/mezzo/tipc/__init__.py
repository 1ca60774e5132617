"""Certification by TIPC texts ("training and inference pipeline certification", from the Paddle repositories).

A text becomes a plan of commands (`make_plan`), the plan is adapted to this machine (`adapt_plan`) and run (`certify`),
and the run is reported. Names are loaded when they are used: planning does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mezzo.tipc._config import MODES, ConfigError, parse_config, read_config
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._plan_text import plan_script, plan_text
from mezzo.tipc._planner import make_plan
from mezzo.tipc._profile import Profile
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._recognise import choose_profile, dialect_of
from mezzo.tipc._record import RECORDS, RUN, Record, RunInfo

if TYPE_CHECKING:
    from mezzo.tipc._adapt import Allowances, adapt_plan
    from mezzo.tipc._batch import BatchRun, preview_batch, run_batch
    from mezzo.tipc._certificate import add_checks, write_certificate
    from mezzo.tipc._certify import CertifyRequest, certify, certify_like_scripts, run_folder
    from mezzo.tipc._inputs import find_data
    from mezzo.tipc._junit import junit_xml
    from mezzo.tipc._lint import LintFinding, lint
    from mezzo.tipc._machine import MachineInfo, this_machine
    from mezzo.tipc._missing import find_missing
    from mezzo.tipc._output_paths import check_folder_names, check_output_paths
    from mezzo.tipc._page import page_text
    from mezzo.tipc._prepare import PreparedFiles, prepare
    from mezzo.tipc._progress import JsonProgress, LineProgress, TableProgress, progress_for
    from mezzo.tipc._report import merge_reports, write_reports
    from mezzo.tipc._run_folder import RecordedRun, RunFolderError, find_runs, load_run
    from mezzo.tipc._runner import RunnerOptions, run_plan
    from mezzo.tipc._weights import uncached_weights

__all__ = [
    "MODES",
    "PROFILES",
    "RECORDS",
    "RUN",
    "Allowances",
    "BatchRun",
    "CertifyRequest",
    "ConfigError",
    "JsonProgress",
    "LineProgress",
    "LintFinding",
    "MachineInfo",
    "Plan",
    "PlanStep",
    "PreparedFiles",
    "Profile",
    "Record",
    "RecordedRun",
    "RunFolderError",
    "RunInfo",
    "RunnerOptions",
    "TableProgress",
    "adapt_plan",
    "add_checks",
    "certify",
    "certify_like_scripts",
    "check_folder_names",
    "check_output_paths",
    "choose_profile",
    "dialect_of",
    "find_data",
    "find_missing",
    "find_runs",
    "junit_xml",
    "lint",
    "load_run",
    "make_plan",
    "merge_reports",
    "page_text",
    "parse_config",
    "plan_script",
    "plan_text",
    "prepare",
    "preview_batch",
    "progress_for",
    "read_config",
    "run_batch",
    "run_folder",
    "run_plan",
    "this_machine",
    "uncached_weights",
    "write_certificate",
    "write_reports",
]

_LOADED_ON_USE = {
    "_adapt": ("Allowances", "adapt_plan"),
    "_batch": ("BatchRun", "preview_batch", "run_batch"),
    "_certificate": ("add_checks", "write_certificate"),
    "_certify": ("CertifyRequest", "certify", "certify_like_scripts", "run_folder"),
    "_inputs": ("find_data",),
    "_junit": ("junit_xml",),
    "_lint": ("LintFinding", "lint"),
    "_machine": ("MachineInfo", "this_machine"),
    "_missing": ("find_missing",),
    "_output_paths": ("check_folder_names", "check_output_paths"),
    "_page": ("page_text",),
    "_prepare": ("PreparedFiles", "prepare"),
    "_progress": ("JsonProgress", "LineProgress", "TableProgress", "progress_for"),
    "_report": ("merge_reports", "write_reports"),
    "_run_folder": ("RecordedRun", "RunFolderError", "find_runs", "load_run"),
    "_runner": ("RunnerOptions", "run_plan"),
    "_weights": ("uncached_weights",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LOADED_ON_USE.items():
        if name in names:
            return getattr(importlib.import_module(f"mezzo.tipc.{module}"), name)
    raise AttributeError(f"module 'mezzo.tipc' has no attribute {name!r}")
