"""Options that several commands have, and settings that all benchmarks share."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from mezzo._options import FP8_HELP, Option, parse_settings
from mezzo.dtypes import HALF_SPELLINGS


def model_names() -> Iterable[str]:
    """Return the names of all networks."""
    from mezzo.vision.models import list_models

    return list_models()


_DEVICE_HELP = "cpu, gpu or gpu:N."
_DEVICES = ("auto", "cpu", "gpu")

Json = Annotated[bool, Option("Print only JSON.", "--json")]
Device = Annotated[
    str | None, Option(_DEVICE_HELP, "--device", suggest=lambda: _DEVICES, default_text="the GPU if there is one")
]
Dtype = Annotated[str, Option("float16 or bfloat16.", "--dtype", choices=tuple(HALF_SPELLINGS))]
Fp8 = Annotated[Mapping[str, Any] | None, Option(FP8_HELP, "--fp8", parse=parse_settings)]
LearningRate = Annotated[float, Option("Learning rate of the SGD optimizer.", "--learning-rate")]
Steps = Annotated[int, Option("Timed steps of each variant.", "--steps")]
SimpleNetSize = Annotated[int | None, Option("Width of SimpleNet.", "--size", default_text="8192; 256 on a CPU")]
SimpleNetBatch = Annotated[
    int | None, Option("Batch size of SimpleNet.", "--batch-size", default_text="2048; 64 on a CPU")
]
