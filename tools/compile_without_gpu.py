"""Compile a training step for an H200 on a machine without a GPU, and print the kernels with the bytes that they move.

    make .torch/2.11.0/.ready
    PYTHONPATH=src .torch/2.11.0/bin/python tools/compile_without_gpu.py pp_humanseg_server
    PYTHONPATH=src .torch/2.11.0/bin/python tools/compile_without_gpu.py transformers:llama-1b --layers 6 --compact --fuse

Nothing runs: tensors have no memory, and the generated code is read, not executed. This shows whether a step compiles for
CUDA, what Inductor fuses, and how much time the memory alone needs. It does not show how fast a kernel is, and it knows
neither cuDNN's nor cuBLAS's choices.

It needs Linux, a C compiler, and a build of torch with CUDA (PyPI's, in the environment of `make test-torch`) on a machine
without a driver. torch asks the driver for a device in many places, in Python and in C: a small library answers in its
place, and the functions below in torch's. Written for torch 2.11; another release may ask in more places.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MEMORY_GB_PER_S = 4300
"""What a copy inside an H200 reaches."""
_PROPERTIES = {
    "name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 150 * 2**30,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
    "warp_size": 32, "L2_cache_size": 60 * 2**20, "shared_memory_per_block": 49152, "is_integrated": 0,
    "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472, "gcnArchName": "",
}  # fmt: skip

_RUNTIME = r"""
#include <string.h>
static long next = 1000;
#define NEW(handle) *(handle) = (void *)(next += 16); return 0
int cudaGetDevice(int *d) { *d = 0; return 0; }
int cudaSetDevice(int d) { return 0; }
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
int cudaStreamCreateWithPriority(void **s, unsigned f, int p) { NEW(s); }
int cudaStreamIsCapturing(void *s, int *status) { *status = 0; return 0; }
int cudaStreamQuery(void *s) { return 0; }
int cudaStreamSynchronize(void *s) { return 0; }
int cudaStreamWaitEvent(void *s, void *e, unsigned f) { return 0; }
int cudaEventCreateWithFlags(void **e, unsigned f) { NEW(e); }
int cudaEventRecord(void *e, void *s) { return 0; }
int cudaEventQuery(void *e) { return 0; }
int cudaEventDestroy(void *e) { return 0; }
/* The offsets of CUDA 13 in cudaDeviceProp: threads per block, capability, multiprocessors. */
int cudaGetDeviceProperties(char *p, int d) {
  memset(p, 0, 700);
  strcpy(p, "NVIDIA H200");
  *(long *)(p + 288) = 150l << 30;
  *(int *)(p + 308) = 32; *(int *)(p + 320) = 1024;
  *(int *)(p + 360) = 9; *(int *)(p + 364) = 0; *(int *)(p + 384) = 132;
  return 0;
}
/* c10::cuda::MaybeSetDevice and SetDevice */
int _ZN3c104cuda14MaybeSetDeviceEa(signed char d) { return 0; }
int _ZN3c104cuda9SetDeviceEab(signed char d, _Bool force) { return 0; }
"""
_DRIVER = r"""
int cuInit(unsigned f) { return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { *f = 0; *active = 1; return 0; }
"""
_FOLDER = "MEZZO_WITHOUT_GPU"
"""Variable of the second process: the folder of its libraries."""
_ROW_WIDTH = 160


def start_again_without_driver() -> None:
    """Replace this process by one whose CUDA runtime is the library above."""
    folder = Path(tempfile.mkdtemp(prefix="without_gpu_"))
    for name, code in (("libcudart_stub.so", _RUNTIME), ("libcuda.so.1", _DRIVER)):
        subprocess.run(
            ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-xc", "-", "-o", str(folder / name)],
            input=code.encode(), check=True,
        )  # fmt: skip
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {
        **os.environ,
        "LD_PRELOAD": str(folder / "libcudart_stub.so"),
        "LD_LIBRARY_PATH": ":".join(paths),
        _FOLDER: str(folder),
    }
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def pretend_to_have_a_gpu() -> None:
    """Answer torch's and Triton's questions about a device as an H200 would."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._prims_common import suggest_memory_format
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    for each in (joint_graph, post_grad):  # their patterns are traced on tensors with memory
        each.lazy_init(torch.device("cpu"))
        each.lazy_init = lambda *_: None
    properties = SimpleNamespace(**_PROPERTIES)
    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
        "get_device_capability": (9, 0), "get_device_name": properties.name, "is_initialized": False,
        "synchronize": None, "set_device": None, "is_bf16_supported": True, "_lazy_init": None, "current_stream": stream,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        "get_compute_capability": 90, "get_raw_stream": 0, "exchange_device": 0, "maybe_exchange_device": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        for owner in (torch.cuda, torch.cuda.random, CudaInterface, CudaInterface.Worker):
            if hasattr(owner, name):
                answering = lambda *_, _answer=answer, **__: _answer  # noqa: E731
                setattr(owner, name, staticmethod(answering) if isinstance(owner, type) else answering)
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch.accelerator.is_available = lambda: False
    fake_tensor.init_gpu_context = lambda *_: None
    torch._C._select_conv_backend = lambda *_, **__: "cudnn"
    torch._C._conv_determine_backend_memory_format = lambda x, weight, backend: (
        torch.channels_last
        if x.dim() == 4 and torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight))
        else torch.contiguous_format
    )
    sizes = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0), get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(get_device_properties=lambda device: sizes),
    )  # fmt: skip
    driver.set_active(active)
    _fold_constants_on_the_cpu(joint_graph.UniformValueConstantFolder)


def _fold_constants_on_the_cpu(folder: Any) -> None:
    import torch
    from torch.utils._pytree import tree_map

    find, deduce = torch.fx.Interpreter.fetch_args_kwargs_from_env, folder._deduce_value

    def on_cpu(self: Any, node: Any) -> Any:
        return tree_map(lambda each: torch.device("cpu") if isinstance(each, torch.device) else each, find(self, node))

    def deduced(self: Any, node: Any) -> Any:
        if node.target is torch.ops.aten.full.default and len(node.args) == 2:
            (_, value), options = on_cpu(self, node)
            if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return torch.ops.aten.full.default([1], value, **options)
        return deduce(self, node)

    folder.fetch_args_kwargs_from_env, folder._deduce_value = on_cpu, deduced


@dataclass(frozen=True)
class Kernel:
    """A call in the generated code."""

    name: str
    """Of the operator; `triton` for a kernel of Inductor."""
    bytes: int
    shape: str
    origins: str
    """The operators that it computes."""


class _Compiled(Exception):
    """All code was generated."""


@contextmanager
def generated_code(found: list[tuple[list[Kernel], str]]) -> Iterator[None]:
    """Collect the kernels and the code of forward and backward; the call that compiles ends there."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering

    def stop(*_: Any) -> Any:
        raise _Compiled

    def generate(graph: Any) -> Any:
        code = graph.codegen()[0].value
        nodes = [node for node in graph.scheduler.nodes if type(node).__name__ != "NopKernelSchedulerNode"]
        found.append(([_kernel(node) for node in nodes], code))
        return SimpleNamespace(call=stop, __file__="", runner=None, recursively_apply_fns=None)

    GraphLowering.compile_to_module = generate
    settings = {"compile_threads": 1, "fx_graph_cache": False, "shape_padding": False}  # the last one measures on a GPU
    autograd = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    with torch._inductor.config.patch(settings), torch._functorch.config.patch(autograd):
        try:
            yield
        except Exception as error:
            chain: BaseException | None = error
            while chain is not None and not isinstance(chain, _Compiled):
                chain = chain.__cause__ or chain.__context__
            if chain is None:
                raise


def _kernel(node: Any) -> Kernel:
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    origins = Counter(
        getattr(each.target, "__name__", str(each.target)) for part in parts for each in part.get_origins()
    )
    is_triton = type(node).__name__ != "ExternKernelSchedulerNode"
    operator = getattr(node.node, "python_kernel_name", None) or getattr(node.node, "op_overload", None)
    name = "triton" if is_triton else str(operator or type(node.node).__name__).removeprefix("torch.ops.")
    sizes = getattr(getattr(node.node, "layout", None), "size", "")  # an operator with several results has none
    shape = getattr(node, "group", ("", ""))[1] if is_triton else sizes
    listed = " ".join(name if count == 1 else f"{name}*{count}" for name, count in sorted(origins.items()))
    return Kernel(name, node.get_read_write_buffers_sizes(), str(shape), listed)


def compile_step_of(options: argparse.Namespace) -> list[tuple[list[Kernel], str]]:
    """Return kernels and code of forward and backward."""
    import torch

    import mezzo
    from mezzo._torch import step_tier
    from mezzo.amp import fuse_parts
    from mezzo.bench._networks import NetworkSizes, find_network
    from mezzo.kernels import torch_operators_only
    from mezzo.static import _masks
    from mezzo.static._graph import Capture
    from mezzo.static._region import CastRules, casting_region
    from mezzo.static._step import forward_and_loss

    step_tier._works_on = lambda kind: None if kind == "cuda" else "not pretended"
    _masks._Masks._value = _on_cpu(_masks._Masks._value)
    sizes = {name: getattr(options, name) for name in ("batch_size", "image_size", "layers", "length", "words")}
    network = find_network(options.model, NetworkSizes(size=512, simple_net_batch=2048, **sizes))
    half = torch.float16 if network.dtype == "float16" else torch.bfloat16
    model, loss_fn = network.create().train(), network.make_loss()
    inputs, target = network.draw()
    if options.fuse and not options.stock:
        fuse_parts(model, [])
    mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    on_gpu = _Copies(mode, is_channels_last=network.kind == "images")
    on_gpu.replace(model, *([loss_fn] if isinstance(loss_fn, torch.nn.Module) else []))
    batch = on_gpu(inputs), on_gpu(target)
    found: list[tuple[list[Kernel], str]] = []
    with mode, generated_code(found):
        if options.stock:
            call = torch.compile(lambda x, y: loss_fn(model(x), y), fullgraph=True)
            with torch.autocast("cuda", half), torch_operators_only():
                call(*batch)
        masters = "compact" if options.compact else None
        precision = mezzo.Precision(options.level, half, master_weight=masters)
        precision.prepare(model, network.make_optimizer(model))
        if options.fuse and network.fuse_loss is not None:
            loss_fn = network.fuse_loss(model)
        capture = Capture(CastRules(precision.policy), "inductor")
        capture.saves_memory = options.saves_memory
        with casting_region(capture.precision) if precision.policy else nullcontext():
            capture.compile(forward_and_loss(model, loss_fn, None))(*batch)
    return found


def _on_cpu(value: Any) -> Any:
    """Compute the values of masks on the CPU: they are needed, and a tensor without memory has none."""
    import torch
    from torch.fx.node import map_aggregate

    def computed(self: Any, node: Any, values: dict[Any, Any]) -> Any:
        def move(each: Any) -> Any:
            return torch.device("cpu") if isinstance(each, torch.device) else each

        on_gpu = node.args, node.kwargs  # other nodes may need this one, too
        node.args, node.kwargs = map_aggregate(node.args, move), map_aggregate(node.kwargs, move)
        try:
            for each in node.all_input_nodes:
                computed(self, each, values)
            with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.device("cpu"):
                return value(self, node, values)
        finally:
            node.args, node.kwargs = on_gpu

    return computed


class _Copies:
    """Copies of tensors on the GPU that does not exist, the same one for the same tensor."""

    def __init__(self, mode: Any, *, is_channels_last: bool) -> None:
        self._mode, self._is_channels_last = mode, is_channels_last
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, tensor: Any) -> Any:
        import torch

        if id(tensor) not in self._known:
            is_last = self._is_channels_last and tensor.dim() == 4
            strides = (tensor.to(memory_format=torch.channels_last) if is_last else tensor).stride()
            with self._mode:
                copy: Any = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cuda:0")
            if isinstance(tensor, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, tensor.requires_grad)
            self._known[id(tensor)] = copy, tensor
        return self._known[id(tensor)][0]

    def replace(self, *modules: Any) -> None:
        """Put copies in the place of all tensors of modules."""
        import torch

        for module in [each for root in modules for each in root.modules()]:
            for store in (module._parameters, module._buffers, module.__dict__):
                store.update({name: self(each) for name, each in store.items() if isinstance(each, torch.Tensor)})


def show(found: list[tuple[list[Kernel], str]], rows: int) -> None:
    """Print the bytes by operator, and the kernels that move most."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for kernels, _ in found:
        for kernel in kernels:
            totals[kernel.name][0] += 1
            totals[kernel.name][1] += kernel.bytes
    print(f"{'calls':>6} {'MB':>9} {'ms':>7}  operator")
    for name, (count, size) in sorted(totals.items(), key=lambda each: -each[1][1]):
        print(f"{count:6} {size / 1e6:9,.0f} {size / MEMORY_GB_PER_S / 1e6:7.2f}  {name}")
    for part, (kernels, _) in zip(("forward", "backward"), found, strict=False):
        alike: dict[Kernel, int] = Counter(kernels)
        print(f"\n{part}: the kernels that move most")
        for kernel, count in sorted(alike.items(), key=lambda each: -each[0].bytes * each[1])[:rows]:
            size = kernel.bytes * count / 1e6
            what = f"{kernel.name} {kernel.shape} {kernel.origins}"
            print(f"{count:6} {size:9,.0f} {size / MEMORY_GB_PER_S:7.2f}  {what}"[:_ROW_WIDTH])


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name of `mezzo bench static --model`")
    parser.add_argument("--level", default="O2")
    parser.add_argument(
        "--stock", action="store_true", help="torch.compile and torch.autocast with torch's own operators"
    )
    parser.add_argument("--fuse", action="store_true", help="as prepare(fuse=True), with the head inside the loss")
    parser.add_argument("--compact", action="store_true", help="compact masters")
    parser.add_argument("--saves-memory", action="store_true")
    for name in ("--batch-size", "--layers", "--length", "--words"):
        parser.add_argument(name, type=int)
    parser.add_argument("--image-size", type=int, nargs=2)
    parser.add_argument("--rows", type=int, default=20, help="kernels to print of forward and backward")
    parser.add_argument("--code", type=Path, metavar="FOLDER", help="write the generated code there")
    options = parser.parse_args()
    import torch

    from mezzo.errors import OptionError

    if torch.version.cuda is None:
        print(
            f"torch {torch.__version__} has no CUDA: use the build of PyPI (make .torch/2.11.0/.ready)", file=sys.stderr
        )
        return 2
    if _FOLDER not in os.environ:
        start_again_without_driver()
    try:
        pretend_to_have_a_gpu()
        found = compile_step_of(options)
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(os.environ[_FOLDER])
    show(found, options.rows)
    if options.code is not None:
        options.code.mkdir(parents=True, exist_ok=True)
        for part, (_, code) in zip(("forward", "backward"), found, strict=False):
            (options.code / f"{part}.py").write_text(code, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
