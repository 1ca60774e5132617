"""`mezzo infer`; deploy/python/infer.py and deploy/inference_python/infer.py call it too."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mezzo._options import Option, Subset
from mezzo.cli._show import progress_bar
from mezzo.errors import OptionError, require
from mezzo.export import EngineOptions
from mezzo.files import say, write_text
from mezzo.report import stamped
from mezzo.vision.options import InferOptions

if TYPE_CHECKING:
    from mezzo.vision.infer import InferResult


def infer(
    model: Annotated[Path, Option("Folder of an export, or its deploy.yaml.", "--config", "--model-dir", "--model")],
    engine: Annotated[EngineOptions, Subset(device="auto")],
    options: InferOptions,
    use_gpu: Annotated[bool | None, Option("The same as --device gpu or cpu.")] = None,
    max_batch_size: Annotated[int | None, Option("Largest --batch-size that is allowed.")] = None,
    save_log_path: Annotated[Path | None, Option("File to write the report to as well.")] = None,
    print_detail: Annotated[bool, Option("Print which files were written.")] = False,
    use_trt: Annotated[bool, Option("Refused: there is no TensorRT engine.")] = False,
    with_argmax: Annotated[bool, Option("Accepted; labels are written either way.")] = False,
    enable_auto_tune: Annotated[bool, Option("Accepted; it is about TensorRT.")] = False,
) -> int:
    """Predict images with an exported model.

    Classes are printed; label maps, overlays and cut-outs are written.
    """
    require("cv2", "PIL", extra="vision")
    if use_trt:
        raise OptionError("--use_trt: there is no TensorRT engine; leave it out, a GPU then replays CUDA graphs")
    if max_batch_size is not None and options.batch_size > max_batch_size:
        raise OptionError(f"--batch-size {options.batch_size} is more than --max-batch-size {max_batch_size}")
    from mezzo.export import read_deployed
    from mezzo.vision.infer import infer

    if use_gpu is not None:
        engine = replace(engine, device=f"gpu:{engine.gpu_index or 0}" if use_gpu else "cpu")
    deployed = read_deployed(model)
    save_dir = options.save_dir or (Path("output") if deployed.task == "segmentation" else None)
    options = replace(options, run=engine, save_dir=save_dir)
    with progress_bar() as report:
        result = infer(deployed, options, say=say, progress=lambda done, total: report("images", done, total))
    _print_result(result, save_dir, print_detail, save_log_path)
    return 1 if result.refused else 0


def _print_result(result: "InferResult", save_dir: Path | None, print_detail: bool, log: Path | None) -> None:
    for name, outcome in result.choice.tried.items():
        say(f"engine {name}: {outcome}")
    if result.choice.tried:
        say(f"engine {'remembered' if result.choice.is_remembered else 'chosen'}: {result.choice.engine}")
    for path in result.files if print_detail else ():
        say(str(path))
    if result.report is not None:
        lines = "\n".join(stamped(line, datetime.now()) for line in result.report.lines())
        say(lines)
        if log is not None:
            write_text(log, f"{lines}\n")
    where = f"; {len(result.files)} files in {save_dir}" if result.files else ""
    say(f"{result.images} images predicted, {len(result.refused)} skipped{where}")
