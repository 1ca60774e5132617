"""OpenVINO: an optional engine for Intel and AMD CPUs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from mezzo.export._deployed import Deployed
from mezzo.export._engine import EngineOutput, Images, PerShape, need
from mezzo.export._engine_options import EngineOptions
from mezzo.export._errors import EngineError

LABELS_LAST = "mezzo_last"
"""The name of the exported node that puts the classes of a pixel side by side."""


class OpenVinoEngine:
    """A compiled model of OpenVINO for each input shape: fixed shapes are faster than free ones.

    Args:
        model: The exported model.
        options: Threads and precision; float32 stays float32, even on CPUs with bfloat16.

    Raises:
        EngineError: The package is not installed, a GPU was asked for, or the model cannot be read.
    """

    def __init__(self, model: Deployed, options: EngineOptions) -> None:
        need("openvino", "'mezzo[openvino]'")
        if options.on_gpu:
            raise EngineError("OpenVINO works on the CPU here; for a GPU use --engine torch-graph")
        import openvino

        self._core: Any = openvino.Core()
        self._path = model.file(options.precision, "onnx")
        self._source = with_classes_first(self._path)
        self._settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        if options.threads:
            self._settings["INFERENCE_NUM_THREADS"] = options.threads
        self._compiled = PerShape(self._compile, most=4)

    def run(self, images: Images) -> EngineOutput:
        """Return the output for images."""
        output: EngineOutput = self._compiled.get(images.shape)([images])[0]
        return output

    def _compile(self, shape: tuple[int, ...]) -> Any:
        try:
            model = self._core.read_model(self._source)
            model.reshape(list(shape))
            return self._core.compile_model(model, "CPU", self._settings)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise EngineError(f"{self._path}: OpenVINO cannot compile it for {shape}: {reason}") from error


def with_classes_first(path: Path) -> str | bytes:
    """Return a model with the classes on axis 1 in the final resize, faster in OpenVINO.

    Exports have the classes on the last axis there, which is faster in ONNX Runtime and slower in
    OpenVINO. Without the package `onnx` the file is used unchanged.
    """
    if importlib.util.find_spec("onnx") is None:
        return str(path)
    import onnx

    try:
        model = onnx.load(str(path))
    except Exception:  # noqa: BLE001  # OpenVINO reports a clearer error
        return str(path)
    producer = {name: node for node in model.graph.node for name in node.output}
    for best in model.graph.node:
        resize = producer.get(best.input[0]) if best.op_type == "ArgMax" else None
        if resize is None or resize.op_type != "Resize":
            continue
        turned = producer.get(resize.input[0])
        if turned is None or not turned.name.startswith(LABELS_LAST):
            continue
        resize.input[0], resize.input[3] = turned.input[0], producer[resize.input[3]].input[0]
        for item in best.attribute:
            if item.name == "axis":
                item.i = 1
    data: bytes = model.SerializeToString()
    return data
