"""Graph mode: a whole training step captured once and replayed."""

from mezzo.static import amp
from mezzo.static._capture import CapturedStep, capture_step
from mezzo.static._choice import StepReport
from mezzo.static._compile import CompiledStep, compile_step
from mezzo.static._current import (
    data,
    default_main_program,
    default_startup_program,
    disable_static,
    enable_static,
    in_static_mode,
    minimize,
    program_guard,
)
from mezzo.static._executor import Executor
from mezzo.static._graph import CapturedGraph, CaptureError, CompilerError
from mezzo.static._program import Program
from mezzo.static._save import save_forward
from mezzo.static._to_static import StaticFunction, static_forward, to_static
from mezzo.static._variables import InputSpec, ProgramError, Variable

__all__ = [
    "capture_step",
    "CapturedStep",
    "compile_step",
    "CompiledStep",
    "StepReport",
    "CaptureError",
    "CompilerError",
    "CapturedGraph",
    "Program",
    "Variable",
    "InputSpec",
    "data",
    "Executor",
    "minimize",
    "program_guard",
    "default_main_program",
    "default_startup_program",
    "enable_static",
    "disable_static",
    "in_static_mode",
    "ProgramError",
    "to_static",
    "static_forward",
    "StaticFunction",
    "save_forward",
    "amp",
]
