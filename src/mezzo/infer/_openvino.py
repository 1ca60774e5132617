"""OpenVINO: an optional engine for Intel and AMD CPUs."""

from __future__ import annotations

from typing import Any

from mezzo.infer._deployed import Deployed
from mezzo.infer._engine import EngineOptions, Images, Output, PerShape, need
from mezzo.infer._errors import EngineError


class OpenVinoEngine:
    """A compiled model of OpenVINO for each input shape: fixed shapes are faster than free ones.

    Args:
        model: The exported model.
        options: Threads and precision; float32 is computed in float32, also where the CPU would offer bfloat16.

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
        self._settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
        if options.threads:
            self._settings["INFERENCE_NUM_THREADS"] = options.threads
        self._compiled = PerShape(self._compile, most=4)

    def run(self, images: Images) -> Output:
        """Return the output for images."""
        output: Output = self._compiled.get(images.shape)([images])[0]
        return output

    def _compile(self, shape: tuple[int, ...]) -> Any:
        try:
            model = self._core.read_model(str(self._path))
            model.reshape(list(shape))
            return self._core.compile_model(model, "CPU", self._settings)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise EngineError(f"{self._path}: OpenVINO cannot compile it for {shape}: {reason}") from error
