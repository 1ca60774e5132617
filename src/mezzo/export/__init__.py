"""Networks as files that run without their source: torch.export, ONNX, deploy.yaml, each verified as it is written."""

from mezzo.export._recipes import describe_classifier, describe_recipe, export_recipe
from mezzo.export._run import Description, ExportError, ExportOptions, ExportReport, export_model
from mezzo.export._verify import Check, verify

__all__ = [
    "export_model",
    "export_recipe",
    "describe_recipe",
    "describe_classifier",
    "Description",
    "ExportOptions",
    "ExportReport",
    "ExportError",
    "Check",
    "verify",
]
