"""The options of an export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from mezzo._options import Option, check_options, split_commas
from mezzo.errors import OptionError
from mezzo.export._engine_options import PRECISIONS

OUTPUT_OPS = ("argmax", "softmax", "none")


class ExportError(OptionError):
    """Options of an export that contradict each other, the network or its description."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What is written, and where."""

    save_dir: Annotated[Path, Option("Folder of the exported files.", "--save-dir", "--save-inference-dir")]
    input_shape: Annotated[
        tuple[int, int, int, int], Option("Batch, channels, height and width; -1 leaves a size free.")
    ] = (-1, 3, -1, -1)
    output_op: Annotated[
        Literal["argmax", "softmax", "none"] | None,
        Option(
            f"{', '.join(OUTPUT_OPS)}.",
            choices=OUTPUT_OPS,
            default_text="argmax for segmentation, softmax for classification",
        ),
    ] = None
    precisions: Annotated[
        tuple[str, ...],
        Option(
            "fp32, and with commas: fp16, bf16, int8. fp32 is always written.",
            "--precision",
            choices=PRECISIONS,
            parse=split_commas,
        ),
    ] = ("fp32",)
    calibration_images: Annotated[int, Option("Number of images that int8 is calibrated on.", at_least=1)] = 100
    min_agreement: Annotated[float | None, Option("Smallest share of equal classes.", default_text="by precision")] = (
        None
    )
    with_onnx: bool = True
    """False: only torch.export programs."""

    def __post_init__(self) -> None:
        check_options(self)
        if len(self.input_shape) != 4 or any(size != -1 and size < 1 for size in self.input_shape):
            raise ExportError(
                f"input_shape={list(self.input_shape)}: must be batch, channels, height, width; -1 where it is free"
            )
        if "int8" in self.precisions and not self.with_onnx:
            raise ExportError("int8 is made from ONNX: leave --no-onnx out")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            raise ExportError(f"min_agreement={self.min_agreement}: must be between 0 and 1")
