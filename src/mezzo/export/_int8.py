"""int8 variants: static post-training quantisation by ONNX Runtime, calibrated with images."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mezzo.errors import RunError
from mezzo.export._engine import Images
from mezzo.export._files import INPUT
from mezzo.files import write_file


def write_int8(source: Path, target: Path, batches: Iterable[Images]) -> None:
    """Write the int8 form of an ONNX file: weights per channel, activations by their ranges on the images.

    Activations are unsigned; weights are signed with seven bits. On CPUs without VNNI, products of
    eight-bit weights silently overflow 16-bit sums.

    Args:
        source: A float32 ONNX file.
        target: The quantised file.
        batches: Batches of preprocessed images; each is run once.

    Raises:
        RunError: ONNX Runtime cannot quantise it.
    """
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        prepared, made = Path(folder, "prepared.onnx"), Path(folder, "int8.onnx")
        try:
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            quantization.quantize_static(
                str(prepared),
                str(made),
                _reader(batches),
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                per_channel=True,
                reduce_range=True,
                calibrate_method=quantization.CalibrationMethod.MinMax,
            )
        except Exception as error:  # it can raise anything
            raise RunError(
                f"{source}: ONNX Runtime cannot quantise it: {' '.join(str(error).split())[:300]}"
            ) from error
        write_file(target, made.read_bytes())


def _reader(batches: Iterable[Images]) -> Any:
    """Return the batches as a CalibrationDataReader of ONNX Runtime."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # its package has no types
        def __init__(self) -> None:
            self._rest: Iterator[Images] = iter(batches)

        def get_next(self) -> dict[str, Images] | None:
            images = next(self._rest, None)
            return None if images is None else {INPUT: images}

    return Reader()
