"""Predict images: read, run, write. A file that cannot be read does not stop the others."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mezzo._version import version_of
from mezzo.errors import OptionError, RunError
from mezzo.export import ENGINES, Choice, Deployed, DeployError, Engine, EngineOutput, PrintLine, load_engine
from mezzo.files import write_text
from mezzo.vision.infer._report import BenchmarkEnvironment, BenchmarkReport
from mezzo.vision.infer._sheet import SHOWN, SheetRow, contact_sheet
from mezzo.vision.infer._sources import InputBatch, Refused, compose_transforms, find_images, read_inputs
from mezzo.vision.infer._stages import StageTimer
from mezzo.vision.infer._usage import UsageSampler
from mezzo.vision.infer.classes import ClassScore, format_classes, top_classes
from mezzo.vision.infer.maps import Labels, result_names, save_maps, to_labels
from mezzo.vision.options import InferOptions

PREDICTIONS, REPORT, SHEET = "predictions.jsonl", "benchmark.json", "sheet.png"
DEMO_IMAGES = (Path("images/demo.jpg"), Path("data/test/demo.jpg"), Path("lite_data/test/demo.jpg"))
"""The demo images of the documents."""

CountImages = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class InferResult:
    """The result of a prediction."""

    images: int
    """Number of predicted images."""
    refused: tuple[Refused, ...]
    files: tuple[Path, ...]
    choice: Choice
    report: BenchmarkReport | None


def infer(
    model: Deployed,
    options: InferOptions,
    *,
    say: PrintLine = lambda line: None,
    progress: CountImages = lambda done, total: None,
) -> InferResult:
    """Predict images: print classes, or write label maps.

    Args:
        model: The exported model.
        options: Which images, how, and what becomes of the results.
        say: Takes the line of each classified image, and of each image that cannot be read.
        progress: Takes how many images are done, of how many.

    Raises:
        MezzoError: There is no image or engine, options do not fit the model, or no image could be read.
    """
    model = _with_sizes(model, options)
    place = options.images or _demo_image(say)
    paths = find_images(place)
    batches = read_inputs(paths, compose_transforms(model), _batch_size(model, options))
    engine: Engine | None = None
    choice = Choice("", {})
    results = _Results(model, options, dict(zip(paths, result_names(paths, place), strict=True)), say)
    timer, refused = StageTimer(), list[Refused]()
    sampler = UsageSampler(options.run.gpu_index)
    with contextlib.ExitStack() as watch:
        while True:
            begun = timer.now()
            batch = next(batches, None)
            if batch is None:
                break
            if isinstance(batch, Refused):
                refused.append(batch)
                say(f"skipped: {batch}")
            else:
                if engine is None:
                    spent = timer.now() - begun
                    engine, choice = _ready(model, options, batch)
                    watch.enter_context(sampler)
                    begun = timer.now() - spent  # do not count loading and warm-up in the first batch
                try:
                    with timer.cycle(samples=len(batch.paths), begun=begun):
                        timer.stamp()
                        output = _run(engine, batch, model)
                        timer.stamp()
                        done = results.read(output, batch)
                except RunError as error:  # the network does not accept images of this size
                    failed = [Refused(path, str(error)) for path in batch.paths]
                    refused += failed
                    for each in failed:
                        say(f"skipped: {each}")
                else:
                    results.keep(done, batch)
            progress(len(results.names_done) + len(refused), len(paths))
    if engine is None or not results.names_done:
        raise RunError(f"{place}: none of {len(paths)} images could be used, first: {refused[0]}")
    report = _report(model, options, choice, timer, sampler) if options.benchmark else None
    return InferResult(len(results.names_done), tuple(refused), tuple(results.finish(report)), choice, report)


def _demo_image(say: PrintLine) -> Path:
    """Return the demo image that the documents use without naming it."""
    found = next((path for path in DEMO_IMAGES if path.is_file()), None)
    if found is None:
        raise OptionError(f"no images: give --image-path FILE, FOLDER or LIST (there is no ./{DEMO_IMAGES[0]} either)")
    say(f"no --img-path: ./{found} is used")
    return found


def _with_sizes(model: Deployed, options: InferOptions) -> Deployed:
    """Return the model with the sizes of the options in its transforms."""
    wanted = {"ResizeShort": options.resize_size, "CenterCrop": options.crop_size}
    if all(size is None for size in wanted.values()):
        return model
    if model.task != "classification":
        raise OptionError("resize_size and crop_size are for classification; this model does segmentation")
    has = {item.get("type") for item in model.transforms}
    for kind, size in wanted.items():
        if size is not None and kind not in has:
            raise OptionError(f"the model's transforms have no {kind} whose size could be {size}; see its deploy.yaml")
    changed = [
        {**item, "size": wanted[item["type"]]} if wanted.get(str(item.get("type"))) else item
        for item in model.transforms
    ]
    return replace(model, transforms=tuple(changed))


def _batch_size(model: Deployed, options: InferOptions) -> int:
    fixed = model.input_shape[0]
    if fixed not in (-1, options.batch_size):
        raise OptionError(
            f"batch_size={options.batch_size}: the model was exported for batches of {fixed}; "
            "use that, or export with a free batch (-1)"
        )
    return options.batch_size


def _ready(model: Deployed, options: InferOptions, batch: InputBatch) -> tuple[Engine, Choice]:
    engine, choice = load_engine(model, options.run, options.engine, batch.images.shape)
    for _ in range(options.warmup_runs):
        _run(engine, batch, model)
    return engine, choice


def _run(engine: Engine, batch: InputBatch, model: Deployed) -> EngineOutput:
    size, wanted = batch.images.shape[1:], model.input_shape[1:]
    if any(free not in (-1, came) for came, free in zip(size, wanted, strict=True)):
        raise DeployError(
            f"{batch.paths[0]}: is {size} for the network, but the model was exported for {wanted}; "
            "export it with a free size (-1)"
        )
    fixed, count = model.input_shape[0], len(batch.images)
    if fixed < 0 or fixed == count:
        return engine.run(batch.images)
    filled = np.concatenate([batch.images, np.repeat(batch.images[-1:], fixed - count, axis=0)])
    return engine.run(filled)[:count]


class _Results:
    """Prints, writes and draws the outputs."""

    def __init__(self, model: Deployed, options: InferOptions, names: Mapping[Path, Path], say: PrintLine) -> None:
        self._model, self._options, self._say = model, options, say
        self._names = names
        self.names_done: list[Path] = []
        self._lines: list[dict[str, Any]] = []
        self._rows: list[SheetRow] = []
        self._files: list[Path] = []

    def read(self, output: EngineOutput, batch: InputBatch) -> list[Any]:
        """Return the best classes or the label map of each image of a batch."""
        model = self._model
        if model.task == "classification":
            return list(top_classes(output, self._options.top_k, model.class_names or None))
        sizes = [original.shape[:2] for original in batch.originals]
        return [
            to_labels(one, undo, (height, width), model.num_classes, batch.images.shape[2:])
            for one, undo, (height, width) in zip(output, batch.undo, sizes, strict=True)
        ]

    def keep(self, done: Sequence[Any], batch: InputBatch) -> None:
        """Print or write the results of a batch."""
        for one, path, image in zip(done, batch.paths, batch.originals, strict=True):
            self.names_done.append(path)
            if self._model.task == "classification":
                self._keep_classes(one, path)
            elif self._options.save_dir is not None:
                self._keep_labels(one, path, image, self._options.save_dir)

    def _keep_classes(self, scores: Sequence[ClassScore], path: Path) -> None:
        self._say(format_classes(path, scores))
        found = [{"class_id": s.index, "class_name": s.name, "score": s.score} for s in scores]
        self._lines.append({"image": str(path), "classes": found})

    def _keep_labels(self, labels: Labels, path: Path, image: Any, folder: Path) -> None:
        model, name = self._model, self._names[path]
        self._files += save_maps(
            folder, name, image, labels, num_classes=model.num_classes, with_cut_out=model.is_person_model
        )
        if len(self._rows) < SHOWN:
            self._rows.append((str(name), image, labels))

    def finish(self, report: BenchmarkReport | None) -> list[Path]:
        """Write the files about all images; return all written files."""
        folder, model = self._options.save_dir, self._model
        if folder is None:
            return []
        if self._lines:
            write_text(folder / PREDICTIONS, "".join(json.dumps(line) + "\n" for line in self._lines))
            self._files.append(folder / PREDICTIONS)
        if self._rows:
            contact_sheet(self._rows, folder / SHEET, num_classes=model.num_classes, class_names=model.class_names)
            self._files.append(folder / SHEET)
        if report is not None:
            write_text(folder / REPORT, json.dumps(report.as_dict(), indent=1))
            self._files.append(folder / REPORT)
        return self._files


def _report(
    model: Deployed, options: InferOptions, choice: Choice, timer: StageTimer, sampler: UsageSampler
) -> BenchmarkReport:
    package = ENGINES[choice.engine].package
    shape = model.input_shape[1:]
    return BenchmarkReport(
        model_name=model.model_name if options.model_name is None else options.model_name,
        precision=options.run.precision,
        batch_size=options.batch_size,
        input_shape="dynamic" if -1 in shape else str(list(shape)),
        runtime_device="gpu" if options.run.on_gpu else "cpu",
        ir_optim=True,
        enable_memory_optim=True,
        enable_tensorrt=False,
        enable_mkldnn=options.enable_mkldnn,
        cpu_threads=options.run.threads or os.cpu_count(),
        usage=sampler.usage,
        times=timer.times(),
        env=BenchmarkEnvironment.query(engine=choice.engine, engine_version=version_of(package)),
        warmup_runs=options.warmup_runs,
    )
