"""Predictions with exported models: reading images, writing results, the benchmark report."""

from mezzo.vision.infer._report import BenchmarkEnvironment, BenchmarkReport
from mezzo.vision.infer._report_parser import parse_reports
from mezzo.vision.infer._run import InferResult, infer
from mezzo.vision.infer._sources import (
    InputBatch,
    Refused,
    compose_transforms,
    find_images,
    read_batches,
    read_inputs,
    to_planes,
)
from mezzo.vision.infer._stages import Percentiles, StageTimer, StageTimes, percentiles
from mezzo.vision.infer._usage import Usage, UsageSampler
from mezzo.vision.options import InferOptions

__all__ = [
    "infer",
    "InferOptions",
    "InferResult",
    "find_images",
    "read_inputs",
    "to_planes",
    "read_batches",
    "compose_transforms",
    "InputBatch",
    "Refused",
    "BenchmarkReport",
    "BenchmarkEnvironment",
    "parse_reports",
    "StageTimer",
    "StageTimes",
    "percentiles",
    "Percentiles",
    "UsageSampler",
    "Usage",
]
