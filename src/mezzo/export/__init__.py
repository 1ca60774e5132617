"""Export networks to files that run without their source: torch.export, ONNX and deploy.yaml.

Every export is verified. This package also has the engines that run the files.
"""

from typing import TYPE_CHECKING

from mezzo._lazy import load_on_demand

if TYPE_CHECKING:
    from mezzo.export._choose import ENGINES, Choice, brief_engines, difference, load_engine
    from mezzo.export._deployed import OUTPUT_OPS, Deployed, OutputOp, TaskName, read_deployed, sha256
    from mezzo.export._engine import Engine
    from mezzo.export._engine import EngineOutput as EngineOutput
    from mezzo.export._engine_options import AUTO, ENGINE_NAMES, PRECISIONS, EngineOptions
    from mezzo.export._errors import DeployError, EngineError
    from mezzo.export._openvino import LABELS_LAST
    from mezzo.export._options import ExportError, ExportOptions
    from mezzo.export._programs import forget_places as forget_places
    from mezzo.export._programs import load_program as load_program
    from mezzo.export._programs import own_program as own_program
    from mezzo.export._programs import quietly as quietly
    from mezzo.export._programs import write_program as write_program
    from mezzo.export._run import Description, ExportReport, PrintLine, ReadImages, export_model
    from mezzo.export._verify import Check, verify

# The public API. The names imported `as` themselves above are for other packages of mezzo.
__all__ = [
    "export_model",
    "Description",
    "ExportOptions",
    "ExportReport",
    "ExportError",
    "ReadImages",
    "PrintLine",
    "Check",
    "verify",
    "read_deployed",
    "Deployed",
    "TaskName",
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
    "ENGINE_NAMES",
    "LABELS_LAST",
    "Choice",
    "difference",
]

__getattr__ = load_on_demand(__name__)
