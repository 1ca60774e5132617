"""Engines by name, and the choice of the fastest one that agrees with the others."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from mezzo._version import version_of
from mezzo.errors import RunError, unknown_choice
from mezzo.export._deployed import Deployed
from mezzo.export._engine import Engine, EngineOutput, Guarded, Images
from mezzo.export._engine_options import AUTO, EngineOptions
from mezzo.export._errors import DeployError, EngineError
from mezzo.files import FileError, MiB, read_json, write_text

FILE = "engine.json"
TRIALS, WARMUP = 5, 2
#: Tolerance per precision: share of labels that differ from torch's, or largest difference of
#: probabilities or logits, divided by their standard deviation.
AGREEMENT = {"fp32": 1e-3, "fp16": 0.05, "bf16": 0.1, "int8": 0.1}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Where the class of an engine is defined, and its devices."""

    module: str
    name: str
    package: str
    """The package whose version a stored choice depends on."""
    devices: tuple[str, ...]
    is_brief: bool = True
    """Whether it loads without compilation; `auto` tries only these engines."""

    def make(self, model: Deployed, options: EngineOptions) -> Engine:
        """Return the engine, loaded."""
        return Guarded(getattr(import_module(self.module), self.name)(model, options), self.name)


ENGINES: Mapping[str, EngineKind] = {
    "onnxruntime": EngineKind("mezzo.export._onnxruntime", "OnnxRuntimeEngine", "onnxruntime", ("cpu", "cuda")),
    "openvino": EngineKind("mezzo.export._openvino", "OpenVinoEngine", "openvino", ("cpu",)),
    "torch-graph": EngineKind("mezzo.export._torch_engines", "GraphEngine", "torch", ("cuda",)),
    "torch": EngineKind("mezzo.export._torch_engines", "TorchEngine", "torch", ("cpu", "cuda")),
    "torch-compiled": EngineKind(
        "mezzo.export._torch_engines", "CompiledEngine", "torch", ("cpu", "cuda"), is_brief=False
    ),
    "torch-aoti": EngineKind("mezzo.export._aoti", "AotiEngine", "torch", ("cpu",), is_brief=False),
}


def brief_engines(device: str) -> list[str]:
    """Return the engines of a device that need no compilation."""
    place = "cuda" if EngineOptions(device=device).on_gpu else "cpu"
    return [name for name, kind in ENGINES.items() if place in kind.devices and kind.is_brief]


def default_engine(options: EngineOptions) -> str:
    """Return the default engine of a device."""
    return "torch-graph" if options.on_gpu else "onnxruntime"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen engine, and the results of all that were tried."""

    engine: str
    tried: Mapping[str, str]
    """Per engine: its time, or why it is not used."""
    is_remembered: bool = False


def load_engine(
    model: Deployed, options: EngineOptions, engine: str | None = None, shape: tuple[int, ...] | None = None
) -> tuple[Engine, Choice]:
    """Return a loaded engine and how it was chosen.

    Args:
        model: The exported model.
        options: Device, threads, precision.
        engine: A name of ENGINES; `auto` for the fastest; None for the default of the device.
        shape: Input shape for the trials of `auto`.

    Raises:
        EngineError: The engine is unknown, not installed, or does not support the options.
    """
    if engine == "tensorrt":
        raise EngineError("there is no TensorRT engine in mezzo; on a GPU use --engine torch-graph")
    if engine == AUTO:
        choice = choose(model, options, shape or usual_shape(model))
        return ENGINES[choice.engine].make(model, options), choice
    name = engine or default_engine(options)
    if name not in ENGINES:
        raise EngineError(unknown_choice("engine", name, [AUTO, *ENGINES]))
    return ENGINES[name].make(model, options), Choice(name, {})


def usual_shape(model: Deployed) -> tuple[int, ...]:
    """Return a shape to try a model with: its own, with 1 and 224 for free sizes."""
    batch, channels, height, width = model.input_shape
    return (max(batch, 1), channels, 224 if height < 0 else height, 224 if width < 0 else width)


def choose(model: Deployed, options: EngineOptions, shape: tuple[int, ...]) -> Choice:
    """Return the fastest engine whose outputs agree with torch's; the choice is stored beside the model.

    Raises:
        RunError: No engine works.
    """
    key = _key(model, options, shape)
    remembered = _recall(model.folder / FILE, key)
    if remembered is not None:
        return remembered
    images = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    tried: dict[str, str] = {}
    times: dict[str, float] = {}
    right = _reference(model, options, images, tried)
    for name in brief_engines(options.device):
        try:
            seconds, output = _timed(ENGINES[name].make(model, options), images)
        except (EngineError, DeployError, RunError) as error:
            tried[name] = str(error)
            continue
        distance = 0.0 if right is None else difference(output, right)
        if distance > AGREEMENT[options.precision]:
            tried[name] = f"{seconds * 1e3:.2f} ms, but its output differs by {distance:.2g}"
        else:
            tried[name], times[name] = f"{seconds * 1e3:.2f} ms", seconds
    if not times:
        raise RunError("no engine works: " + "; ".join(f"{name}: {why}" for name, why in tried.items()))
    choice = Choice(min(times, key=lambda name: times[name]), tried)
    _remember(model.folder / FILE, key, choice)
    return choice


def difference(output: EngineOutput, right: EngineOutput) -> float:
    """Return the share of different labels, or the largest difference over the standard deviation of `right`."""
    if np.issubdtype(right.dtype, np.integer):
        return float(np.mean(output != right))
    scale = float(right.std()) or 1.0
    return float(np.abs(output.astype(np.float64) - right).max()) / scale


def _reference(model: Deployed, options: EngineOptions, images: Images, tried: dict[str, str]) -> EngineOutput | None:
    """Return torch's float32 output, the reference for all engines; None if there is no program."""
    plain = EngineOptions(device=options.device, threads=options.threads)
    try:
        return ENGINES["torch"].make(model, plain).run(images)
    except (DeployError, RunError) as error:
        tried["reference"] = str(error)
        return None


def _timed(engine: Engine, images: Images) -> tuple[float, EngineOutput]:
    for _ in range(WARMUP):
        output = engine.run(images)
    times = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        output = engine.run(images)
        times.append(time.perf_counter() - begun)
    return sorted(times)[TRIALS // 2], output


def _key(model: Deployed, options: EngineOptions, shape: tuple[int, ...]) -> str:
    """Return the key of a stored choice: files, machine, versions."""
    versions = {kind.package: version_of(kind.package) for kind in ENGINES.values()}
    machine = (platform.node(), platform.processor(), platform.machine(), os.cpu_count())
    return json.dumps((sorted(model.files.items()), asdict(options), shape, versions, machine))


def _recall(path: Path, key: str) -> Choice | None:
    """Return the stored choice of the same key; None if there is none or the file is damaged."""
    try:
        found = read_json(path, limit=MiB)[key]
        engine, tried = found["engine"], dict(found["tried"])
    except (FileError, ValueError, LookupError, TypeError):
        return None
    is_known = isinstance(engine, str) and engine in ENGINES and all(isinstance(why, str) for why in tried.values())
    return Choice(engine, tried, is_remembered=True) if is_known else None


def _remember(path: Path, key: str, choice: Choice) -> None:
    if path.is_symlink():  # an untrusted model may contain a link to any file of this machine
        return
    try:
        stored = read_json(path, limit=MiB)
    except FileError:
        stored = {}
    kept = dict(list(stored.items())[-63:]) if isinstance(stored, dict) else {}
    kept[key] = {"engine": choice.engine, "tried": dict(choice.tried)}
    try:
        write_text(path, json.dumps(kept, indent=1))
    except RunError:
        return  # a read-only folder: the next load tries again
