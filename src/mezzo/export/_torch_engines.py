"""PyTorch as an engine: as exported, compiled, or replayed as a CUDA graph; the default on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mezzo._torch.cuda_graphs import capture_into
from mezzo.amp import auto_cast
from mezzo.devices import find_device
from mezzo.dtypes import PRECISION_DTYPES
from mezzo.export._deployed import Deployed
from mezzo.export._engine import EngineOutput, Images, PerShape
from mezzo.export._engine_options import EngineOptions
from mezzo.export._errors import EngineError
from mezzo.export._programs import load_program
from mezzo.record import operator_log

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ALL_THREADS = torch.get_num_threads()


class TorchEngine:
    """The program as it was exported.

    For half precision, a GPU runs the half variant. If it was not exported, the GPU runs the
    float32 variant under `auto_cast`.

    Args:
        model: The exported model.
        options: Device, threads, precision.

    Raises:
        DeviceError: The device does not exist.
    """

    def __init__(self, model: Deployed, options: EngineOptions) -> None:
        self._device = find_device(options.device)
        self._threads = options.threads or _ALL_THREADS
        lowered = (
            options.on_gpu and options.precision in ("fp16", "bf16") and not model.has(options.precision, "program")
        )
        self._casts = PRECISION_DTYPES[options.precision] if lowered else None
        self._program = load_program(model.file("fp32" if lowered else options.precision, "program"))
        self._network: Callable[[Tensor], Tensor] = _module(self._program, self._device)

    def run(self, images: Images) -> EngineOutput:
        """Return the output for images."""
        use_threads(self._threads)
        with torch.inference_mode(), self._region():
            output = self._network(self._put(images))
        result: EngineOutput = output.cpu().numpy()
        return result

    def _put(self, images: Images) -> Tensor:
        layout = torch.contiguous_format if self._device.type == "cpu" else torch.channels_last
        return torch.from_numpy(images).to(self._device).contiguous(memory_format=layout)

    @contextlib.contextmanager
    def _region(self) -> Iterator[None]:
        region = contextlib.nullcontext() if self._casts is None else auto_cast(level="O1", dtype=self._casts)
        with operator_log.paused(), region:
            yield


class CompiledEngine(TorchEngine):
    """The program compiled by Inductor, for each input shape."""

    def __init__(self, model: Deployed, options: EngineOptions) -> None:
        super().__init__(model, options)
        self._network = torch.compile(self._network, fullgraph=True, dynamic=False)


class GraphEngine(TorchEngine):
    """The program captured in a CUDA graph for each input shape: one launch per batch, for any number of layers."""

    def __init__(self, model: Deployed, options: EngineOptions) -> None:
        if not options.on_gpu:
            raise EngineError("torch-graph replays CUDA graphs: it needs --device gpu; on the CPU use onnxruntime")
        super().__init__(model, options)
        self._captured = PerShape(self._capture)

    def run(self, images: Images) -> EngineOutput:
        """Return the output for images."""
        captured = self._captured.get(images.shape)
        with torch.cuda.device(self._device):
            result: EngineOutput = captured.run(images)
        return result

    def _capture(self, shape: tuple[int, ...]) -> _Captured:
        with torch.cuda.device(self._device), torch.inference_mode(), _best_algorithms(), self._region():
            return _Captured(self._network, shape, self._device)


class _Captured:
    """A CUDA graph of the network for one shape, with pinned host memory."""

    def __init__(self, network: Callable[[Tensor], Tensor], shape: tuple[int, ...], device: torch.device) -> None:
        self._staged = torch.empty(shape, pin_memory=True)
        self._input = torch.zeros(shape, device=device).to(memory_format=torch.channels_last)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # warm up: cuDNN chooses algorithms, libraries allocate memory
            for _ in range(3):
                network(self._input)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with capture_into(self._graph):
            self._output = network(self._input)
        self._received = torch.empty(self._output.shape, dtype=self._output.dtype, pin_memory=True)

    def run(self, images: Images) -> EngineOutput:
        with torch.inference_mode():
            self._staged.copy_(torch.from_numpy(images))
            self._input.copy_(self._staged, non_blocking=True)
            self._graph.replay()
            self._received.copy_(self._output, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        result: EngineOutput = self._received.numpy().copy()  # the next batch overwrites it
        return result


def use_threads(count: int) -> None:
    """Set the number of torch threads, which all engines of a process share."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@contextlib.contextmanager
def _best_algorithms() -> Iterator[None]:
    """Let cuDNN benchmark its algorithms, because a graph is replayed many times."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _module(program: ExportedProgram, device: torch.device) -> Any:
    """Return a program as a module on a device; tensors that it creates are on this device too."""
    from torch.export.passes import move_to_device_pass

    if device.type == "cpu":
        return program.module()
    module: Any = move_to_device_pass(program, device).module()
    return module.to(memory_format=torch.channels_last)  # the layout of Tensor Cores
