"""`mezzo export`; tools/export.py and tools/export_model.py call it too."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mezzo._options import Option, Subset
from mezzo.errors import OptionError, require
from mezzo.export import ExportOptions
from mezzo.files import FileError, MiB, read_text, say
from mezzo.vision.options import classifiers
from mezzo.vision.shipped import RECIPE_HELP, RECIPES, config_of

if TYPE_CHECKING:
    from mezzo.export import ExportReport


def export(
    options: Annotated[ExportOptions, Subset(save_dir=Path("output"))],
    config: Annotated[Path | None, Option("PaddleSeg YAML file of the network.")] = None,
    recipe: Annotated[str | None, Option(RECIPE_HELP, suggest=lambda: RECIPES)] = None,
    opts: Annotated[tuple[str, ...], Option("Values to change in the file.", metavar="KEY=VALUE...")] = (),
    model: Annotated[str | None, Option("Classifier, instead of --config.", suggest=classifiers)] = None,
    weights: Annotated[
        str | None, Option("Weights: file, archive, folder or URL.", "--model-path", "--pretrained")
    ] = None,
    num_classes: Annotated[
        int | None, Option("Classes of --model.", at_least=1, default_text="those of the weights; 1000 without")
    ] = None,
    img_size: Annotated[int, Option("Side of the crop (--model).")] = 224,
    resize_size: Annotated[int, Option("Short side before the crop (--model).")] = 256,
    class_names: Annotated[Path | None, Option("Text file with one class name per line.")] = None,
    calibration: Annotated[Path | None, Option("Images for int8 and verification: folder or list.")] = None,
    without_argmax: Annotated[bool, Option("The same as --output-op none.")] = False,
    with_softmax: Annotated[bool, Option("The same as --output-op softmax.")] = False,
    no_onnx: Annotated[bool, Option("Write only torch.export programs.")] = False,
    device: Annotated[str, Option("Accepted; an export uses the CPU.")] = "cpu",
) -> int:
    """Export a network as torch.export program and ONNX.

    Every file is verified against the network; deploy.yaml describes them.
    """
    require("cv2", "PIL", "safetensors", extra="vision")
    config = config_of(config, recipe)
    if (config is None) == (model is None):
        given = "neither" if config is None else "both"
        raise OptionError(
            f"{given} of --config and --model: give --config FILE.yml, or --model with a classifier's name"
        )
    from mezzo.export import export_model
    from mezzo.vision.export import describe_classifier, export_recipe
    from mezzo.vision.infer import find_images, read_batches

    if options.output_op is None:
        options = replace(options, output_op="softmax" if with_softmax else "none" if without_argmax else None)
    options = replace(options, with_onnx=not no_onnx)
    names = _read_names(class_names)
    images = find_images(calibration) if calibration is not None else []
    if config is not None:
        from mezzo.vision.recipes import load_recipe

        loaded = load_recipe(config, opts=opts)
        report = export_recipe(loaded, weights, options, calibration=images, class_names=names, say=say)
    else:
        network, classes = _classifier(str(model), num_classes, weights)
        described = describe_classifier(
            str(model), classes, image_size=img_size, resize_size=resize_size, class_names=names
        )
        report = export_model(
            network, described, options, images=images, calibration=images, read_images=read_batches, say=say
        )
    _print_result(report, options)
    return 0


def _read_names(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        text = read_text(path, limit=16 * MiB)
    except FileError as error:
        raise OptionError(f"--class-names: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _classifier(name: str, num_classes: int | None, weights: str | None) -> tuple[Any, int]:
    """Return a classifier and its number of classes: `num_classes`, otherwise that of the weights."""
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


def _print_result(report: "ExportReport", options: ExportOptions) -> None:
    worst = max(check.error for check in report.checks if check.precision == "fp32")
    say(f"maximum error of fp32: {worst:.2e}")
    say(f"exported to {options.save_dir}: {', '.join(report.model.files)}, deploy.yaml")
