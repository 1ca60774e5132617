"""Export a network: write into a temporary folder, verify, then move into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from mezzo._version import version_of
from mezzo.errors import RunError, require
from mezzo.export import Deployed, OutputOp, TaskName, sha256
from mezzo.export._files import trace, write_onnx
from mezzo.export._fold import fold_batch_norms
from mezzo.export._int8 import write_int8
from mezzo.export._network import Deployable
from mezzo.export._options import ExportError, ExportOptions
from mezzo.export._programs import write_program
from mezzo.export._verify import Check, random_inputs, verify
from mezzo.files import report_write_errors

VERIFIED_IMAGES = 16

PrintLine = Callable[[str], None]
ReadImages = Callable[[Sequence[Path], Deployed], Iterable[NDArray[Any]]]
"""Reads image files as batches for the model: (batch, channels, height, width), float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The facts about a network that its weights do not hold."""

    task: TaskName
    model_name: str
    num_classes: int
    transforms: tuple[Mapping[str, Any], ...]
    """Preprocessing from an image to the input: `type` and its arguments."""
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The exported model and its checks."""

    model: Deployed
    checks: tuple[Check, ...]


def export_model(
    network: nn.Module,
    description: Description,
    options: ExportOptions,
    *,
    images: Sequence[Path] = (),
    calibration: Sequence[Path] = (),
    read_images: ReadImages | None = None,
    say: PrintLine = lambda line: None,
) -> ExportReport:
    """Write a network as `torch.export` program, ONNX and deploy.yaml, and verify every file against it.

    Args:
        network: Returns logits, or a list with the logits first; it is not changed.
        description: Facts about the network for deploy.yaml.
        options: Folder, precisions and formats.
        images: Real images for verification; a few of them, evenly spread, are used.
        calibration: Real images to calibrate int8 with; by default `images`.
        read_images: Reads and transforms image files. `mezzo.vision.infer.read_batches` applies the
            transforms of the description.
        say: Called with a line about each step.

    Raises:
        ExportError: int8 without images, or images without `read_images`.
        RunError: The network cannot be exported, or a file exceeds its tolerance. The folder is
            then unchanged.
    """
    if options.with_onnx:
        require("onnx", "onnxscript", "onnxruntime", extra="export")
    if len(description.class_names) not in (0, description.num_classes):
        names, classes = len(description.class_names), description.num_classes
        raise ExportError(f"{names} class names for {classes} classes: give one per class, or none")
    if description.task == "classification" and options.output_op == "argmax":
        raise ExportError("output_op argmax is for segmentation; a classifier needs softmax or none")
    if "int8" in options.precisions and not (calibration or images):
        raise ExportError("int8 takes the ranges of its activations from images: give --calibration FOLDER")
    if (images or calibration) and read_images is None:
        raise ExportError("image files need read_images=, such as mezzo.vision.infer.read_batches")
    stage = options.save_dir / f".export-{os.getpid()}"
    with report_write_errors(stage):
        stage.mkdir(parents=True, exist_ok=True)
    try:
        output_op = options.output_op or ("argmax" if description.task == "segmentation" else "softmax")
        model = _described(description, options, output_op, stage)
        real = _Images(images, calibration or images, read_images or (lambda paths, model: ()))
        model, checks = _write_all(network, model, options, real, say)
        bad = [check for check in checks if not check.is_fine]
        if bad:
            raise RunError(f"nothing was exported: {len(bad)} of {len(checks)} checks failed, first {bad[0]}")
        return ExportReport(_put_in_place(model, options.save_dir), tuple(checks))
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _described(description: Description, options: ExportOptions, output_op: OutputOp, folder: Path) -> Deployed:
    return Deployed(
        folder=folder,
        task=description.task,
        model_name=description.model_name,
        num_classes=description.num_classes,
        class_names=description.class_names,
        input_shape=options.input_shape,
        output_op=output_op,
        transforms=description.transforms,
        variants={},
        files={},
        made_by={"mezzo": version_of() or "from sources", "torch": str(torch.__version__)},
    )


@dataclass(frozen=True, slots=True)
class _Images:
    """Real images for verification and for the calibration of int8."""

    verification: Sequence[Path]
    calibration: Sequence[Path]
    read: ReadImages

    def to_verify(self, model: Deployed) -> list[NDArray[Any]]:
        return list(self.read(_spread(self.verification, max(VERIFIED_IMAGES, model.input_shape[0])), model))

    def to_calibrate(self, model: Deployed, most: int) -> Iterable[NDArray[Any]]:
        return self.read(_spread(self.calibration, most), model)


def _write_all(
    network: nn.Module, model: Deployed, options: ExportOptions, images: _Images, say: PrintLine
) -> tuple[Deployed, list[Check]]:
    right = Deployable(network, model.output_op)
    inputs = _accepted(right, model, random_inputs(model.input_shape), say)
    takes_any_size = len(inputs) == len(random_inputs(model.input_shape))
    real = images.to_verify(model)
    if real:
        inputs.append((f"{sum(len(batch) for batch in real)} real images", real))
    if "int8" in options.precisions and not real:
        raise ExportError("int8 needs real images for verification, at least one whole batch; give more images")
    say(f"tracing {model.model_name}")
    folded = fold_batch_norms(right, trace(right, inputs[0][1][0].shape)).get_submodule("network")
    checks = []
    for precision in dict.fromkeys(("fp32", *options.precisions)):
        say(f"exporting {model.model_name} in {precision}")
        lowered = Deployable(folded, model.output_op, "fp32" if precision == "int8" else precision)
        written = _write_variant(lowered, takes_any_size, model, precision, options, images, say)
        hashes = {name: sha256(model.folder / name) for name in written.values()}
        variants = {**model.variants, precision: written}
        model = replace(model, variants=variants, files={**model.files, **hashes})
        # int8 is calibrated on real images, so random images cannot test it.
        used = inputs[-1:] if precision == "int8" else inputs
        for check in verify(right, model, precision, used, min_agreement=options.min_agreement):
            say(str(check))
            checks.append(check)
    return model, checks


def _spread(paths: Sequence[Path], most: int) -> Sequence[Path]:
    """Return at most `most` paths, evenly spread: the first files of a folder may all be of one class."""
    return paths[:: max(1, len(paths) // most)][:most]


def _accepted(
    network: Deployable, model: Deployed, inputs: list[tuple[str, list[NDArray[Any]]]], say: PrintLine
) -> list[tuple[str, list[NDArray[Any]]]]:
    """Return the inputs that the network accepts.

    Raises:
        RunError: The network accepts none of them.
    """
    taken, reason = [], ""
    for what, images in inputs:
        try:
            with torch.inference_mode():
                logits = network.logits(torch.from_numpy(images[0]))
        except Exception as error:  # noqa: BLE001  # a user's network can raise anything
            reason = " ".join(str(error).split())[:200]
            say(f"{what}: the network itself refuses this size: {reason}")
        else:
            _check_fit(model, logits)
            taken.append((what, images))
    if not taken:
        raise RunError(f"the network takes no image of {inputs[0][0]}: {reason}; give --input_shape")
    return taken


def _check_fit(model: Deployed, logits: torch.Tensor) -> None:
    """Compare the description with the logits of the network.

    Raises:
        ExportError: The network has another number of classes, or is for another task.
    """
    wanted = {"classification": 2, "segmentation": 4}[model.task]
    shape = tuple(logits.shape)
    if logits.dim() != wanted:
        kinds = {2: "classification", 4: "segmentation"}
        raise ExportError(f"the network gives {shape}, which is {kinds.get(len(shape), 'neither')}, not {model.task}")
    if shape[1] != model.num_classes:
        raise ExportError(f"the network has {shape[1]} classes, num_classes is {model.num_classes}")


def _write_variant(
    lowered: Deployable,
    takes_any_size: bool,
    model: Deployed,
    precision: str,
    options: ExportOptions,
    images: _Images,
    say: PrintLine,
) -> dict[str, str]:
    """Write the files of a precision; return their names."""
    suffix = "" if precision == "fp32" else f"_{precision}"
    onnx, program = f"model{suffix}.onnx", f"model{suffix}.pt2"
    if precision == "int8":
        write_int8(
            model.folder / "model.onnx",
            model.folder / onnx,
            images.to_calibrate(model, options.calibration_images),
        )
        return {"onnx": onnx}
    traced = trace(lowered, model.input_shape, takes_any_size=takes_any_size)
    write_program(traced, model.folder / program, shown=options.save_dir / program)
    if not options.with_onnx:
        return {"program": program}
    if precision == "bf16":
        say("bf16: no ONNX file, since ONNX Runtime has no bfloat16 convolution; torch engines run the program")
        return {"program": program}
    write_onnx(traced, model.folder / onnx)
    return {"program": program, "onnx": onnx}


def _put_in_place(model: Deployed, folder: Path) -> Deployed:
    """Move the files into place, deploy.yaml last: engines load only files that it names."""
    for name in model.files:
        os.replace(model.folder / name, folder / name)
    placed = replace(model, folder=folder)
    placed.write()
    return placed
