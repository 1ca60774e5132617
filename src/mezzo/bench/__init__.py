"""Side-by-side measurements, made in one run on one machine."""

from mezzo.bench._commands import bisect_model, examine_model, predict_model
from mezzo.bench._compare import CompareSettings, Comparison, ModeResult, compare
from mezzo.bench._factories import ModelError
from mezzo.bench._frame import Bench
from mezzo.bench._machine import MachineClocks, read_machine
from mezzo.bench._networks import LLAMA_SIZES, NetworkSizes, find_network, network_names
from mezzo.bench._static import bench_static
from mezzo.bench._static_recipes import STATIC_RECIPES, StaticRecipe, recipe_choices
from mezzo.bench._static_result import NotRun, StaticBench, StaticResult, StaticSettings
from mezzo.bench._step import (
    OPTIMIZERS,
    StepBench,
    StepMeasurement,
    StepRecipe,
    StepSettings,
    bench_step,
    make_training,
)
from mezzo.bench._training import TrainingLoop
from mezzo.bench._workloads import find_workload, load_workload, simple_net_workload, small_net_workload
from mezzo.record import Timing, time_calls

__all__ = [
    "bisect_model",
    "examine_model",
    "predict_model",
    "compare",
    "Comparison",
    "CompareSettings",
    "ModeResult",
    "bench_step",
    "StepBench",
    "StepSettings",
    "StepRecipe",
    "StepMeasurement",
    "OPTIMIZERS",
    "make_training",
    "TrainingLoop",
    "Bench",
    "find_network",
    "LLAMA_SIZES",
    "NetworkSizes",
    "bench_static",
    "StaticBench",
    "StaticSettings",
    "StaticRecipe",
    "StaticResult",
    "STATIC_RECIPES",
    "NotRun",
    "recipe_choices",
    "network_names",
    "find_workload",
    "load_workload",
    "simple_net_workload",
    "small_net_workload",
    "ModelError",
    "read_machine",
    "MachineClocks",
    "time_calls",
    "Timing",
]
