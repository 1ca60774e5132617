"""The options of predictions."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mezzo._options import Option, check_options
from mezzo.export import AUTO, ENGINE_NAMES, EngineOptions

BENCHMARK_WARMUP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class InferOptions:
    """Which images are predicted, how, and what is written."""

    images: Annotated[
        Path | None,
        Option(
            "Image, folder of images, or list of images.",
            "--image-path",
            "--img-path",
            "--images",
            default_text="images/demo.jpg",
        ),
    ] = None
    """None: the first of the documents' demo images that exists."""
    engine: Annotated[
        str | None,
        Option(
            f"{', '.join((AUTO, *ENGINE_NAMES))}.",
            suggest=lambda: (AUTO, *ENGINE_NAMES),
            default_text="onnxruntime; torch-graph on a GPU",
        ),
    ] = None
    """`auto` takes the fastest; None the usual one of the device."""
    run: EngineOptions = field(default_factory=EngineOptions)
    batch_size: Annotated[int, Option("Images per run.", "--batch-size", "-b", at_least=1)] = 1
    save_dir: Annotated[Path | None, Option("Folder of the results.", default_text="segmentation: output")] = None
    """None writes nothing."""
    warmup: Annotated[
        int | None,
        Option("Untimed runs before the first.", at_least=0, default_text=f"0; {BENCHMARK_WARMUP} with --benchmark"),
    ] = None
    top_k: Annotated[int, Option("Classes to name per image.", at_least=1)] = 1
    benchmark: Annotated[bool, Option("Print the benchmark report.")] = False
    model_name: Annotated[str | None, Option("Name of the model in the report.")] = None
    resize_size: Annotated[
        int | None, Option("Short side before the crop (classification).", at_least=1, default_text="as exported")
    ] = None
    crop_size: Annotated[
        int | None, Option("Side of the crop (classification).", at_least=1, default_text="as exported")
    ] = None
    enable_mkldnn: Annotated[bool, Option("Shown in the report; engines use oneDNN by themselves.")] = False

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def warmup_runs(self) -> int:
        """Untimed runs before the first."""
        return self.warmup if self.warmup is not None else BENCHMARK_WARMUP if self.benchmark else 0
