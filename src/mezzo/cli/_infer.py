"""`mezzo infer`: also what deploy/python/infer.py and deploy/inference_python/infer.py call."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mezzo.cli._flags import NO, Flag, switch
from mezzo.cli._options import UsageError, option
from mezzo.cli._show import progress_bar
from mezzo.devices import CPU_OR_GPU, parse_device
from mezzo.errors import require
from mezzo.files import say, write_text
from mezzo.report import stamped

if TYPE_CHECKING:
    from mezzo.export import Deployed
    from mezzo.vision.infer import InferResult

SWITCHES = "--use-gpu --benchmark --enable-mkldnn --use-trt --with-argmax --print-detail --enable-auto-tune".split()
"""Options that take True or False, or stand alone."""


DEMO = (Path("images/demo.jpg"), Path("data/test/demo.jpg"), Path("lite_data/test/demo.jpg"))
"""Where an image is looked for without --img-path: the places that the documents use."""


def infer(
    model: Annotated[Path, option("Folder of an export, or its deploy.yaml.", "--config", "--model-dir", "--model")],
    images: Annotated[
        Path | None, option("Image, folder or list [images/demo.jpg].", "--image-path", "--img-path", "--images")
    ] = None,
    device: Annotated[str, option("cpu, gpu, gpu:N or auto.", "--device")] = "auto",
    use_gpu: Annotated[Flag | None, switch("The same as --device gpu or cpu.", "--use-gpu")] = None,
    engine: Annotated[
        str | None, option("auto, onnxruntime, openvino, torch, torch-graph, torch-compiled, torch-aoti.", "--engine")
    ] = None,
    precision: Annotated[str, option("fp32, fp16, bf16 or int8.", "--precision")] = "fp32",
    batch_size: Annotated[int, option("Images a run.", "--batch-size", "-b")] = 1,
    max_batch_size: Annotated[int | None, option("Largest --batch-size that is allowed.", "--max-batch-size")] = None,
    threads: Annotated[int, option("Of the CPU; 0: one a core.", "--cpu-threads", "--threads")] = 0,
    warmup: Annotated[int | None, option("Runs before timing [0; 3 with --benchmark].", "--warmup")] = None,
    save_dir: Annotated[Path | None, option("Results go there [segmentation: output].", "--save-dir")] = None,
    benchmark: Annotated[Flag, switch("Print the benchmark report.", "--benchmark")] = NO,
    top_k: Annotated[int, option("Classes named for an image.", "--top-k")] = 1,
    resize_size: Annotated[int | None, option("Other short side (classification).", "--resize-size")] = None,
    crop_size: Annotated[int | None, option("Other crop (classification).", "--crop-size")] = None,
    save_log_path: Annotated[Path | None, option("The report goes to this file too.", "--save-log-path")] = None,
    model_name: Annotated[str | None, option("In the report.", "--model-name")] = None,
    enable_mkldnn: Annotated[Flag, switch("In the report; engines use it anyway.", "--enable-mkldnn")] = NO,
    use_trt: Annotated[Flag, switch("TensorRT: not here.", "--use-trt")] = NO,
    with_argmax: Annotated[Flag, switch("Accepted: labels are made either way.", "--with-argmax")] = NO,
    print_detail: Annotated[Flag, switch("Say which files were written.", "--print-detail")] = NO,
    enable_auto_tune: Annotated[Flag, switch("Accepted, for TensorRT.", "--enable-auto-tune")] = NO,
) -> int:
    """Predict images with an exported model: classes are printed, label maps, overlays and cut-outs written."""
    require("cv2", "PIL", extra="vision")
    if use_trt:
        raise UsageError(
            "--use_trt: there is no TensorRT engine in mezzo; leave it out, a GPU then replays CUDA graphs"
        )
    if max_batch_size is not None and batch_size > max_batch_size:
        raise UsageError(f"--batch-size {batch_size} is more than --max-batch-size {max_batch_size}")
    from mezzo.export import EngineOptions, read_deployed
    from mezzo.vision.infer import InferOptions, infer

    deployed = read_deployed(model)
    run = EngineOptions(device=_device(device, use_gpu), threads=threads, precision=precision)
    options = InferOptions(
        images=_images(images), engine=engine, run=run, batch_size=batch_size, save_dir=_save_dir(save_dir, deployed),
        warmup=(3 if benchmark else 0) if warmup is None else warmup, top_k=top_k, benchmark=bool(benchmark),
        model_name=model_name, resize_size=resize_size, crop_size=crop_size,
        settings={"enable_mkldnn": bool(enable_mkldnn), "enable_tensorrt": bool(use_trt)},
    )  # fmt: skip
    with progress_bar() as report:
        result = infer(deployed, options, say=say, progress=lambda done, total: report("images", done, total))
    return _show(result, options.save_dir, bool(print_detail), save_log_path)


def _device(name: str, use_gpu: Flag | None) -> str:
    """Return the device; `--use-gpu` overrides the kind in `--device`, not its number."""
    if use_gpu is None:
        return name
    index = parse_device(name, CPU_OR_GPU, "--device {}").number
    return f"cuda:{index or 0}" if use_gpu else "cpu"


def _images(given: Path | None) -> Path:
    """Return the images; the documents' certification names none, then it is a usual one."""
    if given is not None:
        return given
    found = next((path for path in DEMO if path.is_file()), None)
    if found is None:
        raise UsageError(f"no images: give --image-path FILE, FOLDER or LIST (there is no ./{DEMO[0]} either)")
    say(f"no --img-path: ./{found} is used")
    return found


def _save_dir(given: Path | None, model: "Deployed") -> Path | None:
    return Path("output") if given is None and model.task == "segmentation" else given


def _show(result: "InferResult", save_dir: Path | None, print_detail: bool, log: Path | None) -> int:
    for name, what in result.choice.tried.items():
        say(f"engine {name}: {what}")
    if result.choice.tried:
        how = "remembered" if result.choice.is_remembered else "chosen"
        say(f"engine {how}: {result.choice.engine}")
    if print_detail:
        for path in result.files:
            say(str(path))
    if result.report is not None:
        lines = "\n".join(stamped(line, datetime.now()) for line in result.report.lines())
        say(lines)
        if log is not None:
            write_text(log, f"{lines}\n")
    where = f"; {len(result.files)} files in {save_dir}" if result.files else ""
    say(f"{result.images} images predicted, {len(result.refused)} skipped{where}")
    return 1 if result.refused else 0
