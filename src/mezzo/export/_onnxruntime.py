"""ONNX Runtime: the default on the CPU."""

from __future__ import annotations

from typing import Any

from mezzo.export._deployed import Deployed
from mezzo.export._engine import EngineOutput, Images, need
from mezzo.export._engine_options import EngineOptions
from mezzo.export._errors import EngineError


class OnnxRuntimeEngine:
    """A session of ONNX Runtime.

    Args:
        model: The exported model.
        options: Device, threads, precision.

    Raises:
        EngineError: The package, or its part for the device, is not installed; or the session
            cannot be made.
    """

    def __init__(self, model: Deployed, options: EngineOptions) -> None:
        need("onnxruntime", "'mezzo[export]'")
        import onnxruntime

        path = model.file(options.precision, "onnx")
        try:
            self._session: Any = onnxruntime.InferenceSession(
                str(path), session_options(options.threads), providers=_providers(onnxruntime, options)
            )
        except Exception as error:  # its exceptions have no other common base
            reason = " ".join(str(error).split())[:300]
            raise EngineError(f"{path}: ONNX Runtime cannot load it: {reason}") from error
        self._input = self._session.get_inputs()[0].name

    def run(self, images: Images) -> EngineOutput:
        """Return the output for images."""
        output: EngineOutput = self._session.run(None, {self._input: images})[0]
        return output


def session_options(threads: int) -> Any:
    """Return the options of a session: all optimisations, `threads` threads (0: one per core), no warnings."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    return options


def _providers(onnxruntime: Any, options: EngineOptions) -> list[Any]:
    if not options.on_gpu:
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise EngineError(
            "this onnxruntime works on the CPU only: pip install onnxruntime-gpu, or use --engine torch-graph"
        )
    return [("CUDAExecutionProvider", {"device_id": options.gpu_index}), "CPUExecutionProvider"]
