"""`mezzo export`: also what tools/export.py and tools/export_model.py call."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mezzo.cli._flags import NO, Flag, switch
from mezzo.cli._options import UsageError, option
from mezzo.errors import require
from mezzo.files import FileError, MiB, read_text, say

SWITCHES = "--without-argmax --with-softmax --no-onnx".split()
"""Options that take True or False, or stand alone."""

if TYPE_CHECKING:
    from mezzo.export import ExportOptions, ExportReport


def export(
    config: Annotated[Path | None, option("A PaddleSeg YAML file.", "--config")] = None,
    model: Annotated[str | None, option("A classifier, instead of --config.", "--model")] = None,
    weights: Annotated[
        str | None, option("Weights: file, archive, folder or URL.", "--model-path", "--pretrained")
    ] = None,
    save_dir: Annotated[Path, option("Results go there.", "--save-dir", "--save-inference-dir")] = Path("output"),
    input_shape: Annotated[
        tuple[int, int, int, int] | None, option("Batch, channels, height, width; -1: free [all].", "--input-shape")
    ] = None,
    output_op: Annotated[str | None, option("argmax, softmax or none.", "--output-op")] = None,
    without_argmax: Annotated[Flag, switch("The same as --output-op none.", "--without-argmax")] = NO,
    with_softmax: Annotated[Flag, switch("The same as --output-op softmax.", "--with-softmax")] = NO,
    precision: Annotated[str, option("fp32, and beside it: fp16, bf16, int8 (commas).", "--precision")] = "fp32",
    calibration: Annotated[
        Path | None, option("Images for int8 and verification: folder, list.", "--calibration")
    ] = None,
    calibration_images: Annotated[int, option("How many are used for int8.", "--calibration-images")] = 100,
    min_agreement: Annotated[float | None, option("Smallest share of equal classes.", "--min-agreement")] = None,
    no_onnx: Annotated[Flag, switch("Write torch.export programs alone.", "--no-onnx")] = NO,
    class_names: Annotated[Path | None, option("Text file, a name a line.", "--class-names")] = None,
    num_classes: Annotated[
        int | None, option("Classes of --model [those of the weights; 1000 without].", "--num-classes")
    ] = None,
    img_size: Annotated[int, option("Side of the crop (--model).", "--img-size")] = 224,
    resize_size: Annotated[int, option("Short side before it (--model).", "--resize-size")] = 256,
    device: Annotated[str, option("Accepted; exporting is done on the CPU.", "--device")] = "cpu",
    opts: Annotated[list[str] | None, option("Change a value of the file: a.b=c.", "--opts")] = None,
) -> int:
    """Export a network as torch.export program, ONNX and deploy.yaml; every file is verified against the network."""
    require("cv2", "PIL", "safetensors", extra="vision")
    if (config is None) == (model is None):
        came = "neither" if config is None else "both"
        raise UsageError(f"{came} of --config and --model: give --config FILE.yml, or --model with a classifier's name")
    if num_classes is not None and num_classes < 1:
        raise UsageError(f"--num-classes {num_classes}: must be at least 1")
    from mezzo.export import ExportOptions, export_model
    from mezzo.vision.export import describe_classifier, export_recipe
    from mezzo.vision.infer import find_images, read_batches

    options = ExportOptions(
        save_dir=save_dir,
        input_shape=input_shape or (-1, 3, -1, -1),
        output_op=_output_op(output_op, bool(without_argmax), bool(with_softmax)),
        precisions=tuple(word.strip() for word in precision.split(",")),
        min_agreement=min_agreement,
        calibration_images=calibration_images,
        with_onnx=not no_onnx,
    )
    names = _names(class_names)
    images = find_images(calibration) if calibration is not None else []
    if config is not None:
        from mezzo.vision.recipes import load_recipe

        recipe = load_recipe(config, opts=opts or ())
        report = export_recipe(recipe, weights, options, calibration=images, class_names=names, say=say)
    else:
        network, classes = _classifier(str(model), num_classes, weights)
        described = describe_classifier(
            str(model), classes, image_size=img_size, resize_size=resize_size, class_names=names
        )
        report = export_model(
            network, described, options, images=images, calibration=images, read_images=read_batches, say=say
        )
    _show(report, options)
    return 0


def _output_op(given: str | None, without_argmax: bool, with_softmax: bool) -> Any:
    from mezzo.errors import unknown_choice
    from mezzo.export import OUTPUT_OPS

    if given is None:
        return "softmax" if with_softmax else "none" if without_argmax else None
    if given not in OUTPUT_OPS:
        raise UsageError(unknown_choice("output_op", given, OUTPUT_OPS))
    return given


def _names(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        text = read_text(path, limit=16 * MiB)
    except FileError as error:
        raise UsageError(f"--class-names: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _classifier(name: str, num_classes: int | None, weights: str | None) -> tuple[Any, int]:
    """Return a classifier and its number of classes: as asked for, else that of the weights."""
    from mezzo.checkpoint import find_weights
    from mezzo.vision.models import count_classes, create_model, load_trained, model_info

    if weights is None:
        classes = num_classes or model_info(name).num_classes
        say(f"no weights given (--pretrained): the network is exported as it was initialised, {classes} classes")
        return create_model(name, num_classes=classes), classes
    file = find_weights(weights)
    classes = num_classes or count_classes(name, file) or model_info(name).num_classes
    network = create_model(name, num_classes=classes)
    say(f"{load_trained(network, file)}; {classes} classes")
    return network, classes


def _show(report: "ExportReport", options: "ExportOptions") -> None:
    worst = max(check.error for check in report.checks if check.precision == "fp32")
    say(f"maximum error of fp32: {worst:.2e}")
    say(f"exported to {options.save_dir}: {', '.join(report.model.files)}, deploy.yaml")
