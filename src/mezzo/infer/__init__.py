"""Predictions of exported models: engines, images in, results out, the benchmark report."""

from mezzo.infer._choose import AUTO, ENGINES, Choice, brief_engines, difference, load_engine
from mezzo.infer._deployed import OUTPUT_OPS, PRECISIONS, Deployed, OutputOp, Task, read_deployed, sha256
from mezzo.infer._engine import Engine, EngineOptions
from mezzo.infer._errors import DeployError, EngineError
from mezzo.infer._openvino import LABELS_LAST
from mezzo.infer._report import BenchmarkReport, Environment
from mezzo.infer._report_parser import parse_reports
from mezzo.infer._run import InferOptions, InferResult, infer
from mezzo.infer._sources import InputBatch, Refused, find_images, read_inputs
from mezzo.infer._stages import StageTimer, StageTimes, percentiles
from mezzo.infer._usage import Usage, UsageSampler

__all__ = [
    "infer",
    "InferOptions",
    "InferResult",
    "read_deployed",
    "Deployed",
    "Task",
    "OutputOp",
    "OUTPUT_OPS",
    "PRECISIONS",
    "sha256",
    "DeployError",
    "load_engine",
    "Engine",
    "EngineOptions",
    "EngineError",
    "ENGINES",
    "brief_engines",
    "AUTO",
    "LABELS_LAST",
    "Choice",
    "difference",
    "find_images",
    "read_inputs",
    "InputBatch",
    "Refused",
    "BenchmarkReport",
    "Environment",
    "parse_reports",
    "StageTimer",
    "StageTimes",
    "percentiles",
    "UsageSampler",
    "Usage",
]
