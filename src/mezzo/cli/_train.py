"""`mezzo train`, `mezzo eval`, `mezzo prepare`: also what the documents' scripts call."""

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mezzo.cli._flags import Flag, switch
from mezzo.cli._options import FP8_HELP, option, read_fp8
from mezzo.cli._training import Given
from mezzo.errors import require
from mezzo.files import say

_Path: TypeAlias = Path | None
_Int: TypeAlias = int | None
_Float: TypeAlias = float | None
_Text: TypeAlias = str | None
_Texts: TypeAlias = list[str] | None
_Switch: TypeAlias = Flag | None
SWITCHES = ("--amp-use-promote",)
_PROMOTE_HELP = "O2, O3: operators on no list stay float32 where an input is."


def train(
    config: Annotated[_Path, option("A PaddleSeg YAML file: train by it.", "--config")] = None,
    data_path: Annotated[
        _Path, option("Folder of images: train a classifier on it [data, lite_data, ILSVRC2012].", "--data-path")
    ] = None,
    model: Annotated[_Text, option("Classifier [mobilenet_v3_small].", "--model")] = None,
    num_classes: Annotated[_Int, option("Classes [counted in the data].", "--num-classes")] = None,
    precision: Annotated[_Text, option("fp32, fp16 or bf16.", "--precision")] = None,
    amp_level: Annotated[_Text, option("O0, OD, O1, O2 or O3.", "--amp-level")] = None,
    fp8: Annotated[_Text, option(FP8_HELP, "--fp8")] = None,
    amp_use_promote: Annotated[_Switch, switch(_PROMOTE_HELP, "--amp-use-promote")] = None,
    amp_lists: Annotated[
        _Path, option("Lists of `mezzo bisect`: what stays in float32 or half.", "--amp-lists")
    ] = None,
    batch_size: Annotated[_Int, option("Samples of one process.", "--batch-size", "-b")] = None,
    learning_rate: Annotated[_Float, option("First learning rate.", "--learning-rate", "--lr")] = None,
    iters: Annotated[_Int, option("Steps, also of the decay (with --config).", "--iters")] = None,
    epochs: Annotated[_Int, option("Epochs (classifier) [90].", "--epochs")] = None,
    opt: Annotated[_Text, option("Optimizer: sgd, rmsprop, adam, adamw.", "--opt")] = None,
    momentum: Annotated[_Float, option("Momentum [0.9].", "--momentum")] = None,
    weight_decay: Annotated[_Float, option("Weight decay [1e-4].", "--wd", "--weight-decay")] = None,
    lr_step_size: Annotated[_Int, option("Epochs between decays [30].", "--lr-step-size")] = None,
    lr_gamma: Annotated[_Float, option("Factor of a decay [0.1].", "--lr-gamma")] = None,
    auto_augment: Annotated[_Text, option("imagenet, ra or ta_wide.", "--auto-augment")] = None,
    random_erase: Annotated[_Float, option("Probability of erasing a part.", "--random-erase")] = None,
    crop_scale: Annotated[_Float, option("Smallest share of an image in a crop [0.08].", "--crop-scale")] = None,
    image_size: Annotated[_Int, option("Side of the crop [224].", "--image-size", "--crop-size")] = None,
    resize_size: Annotated[_Int, option("Short side before the evaluation's crop [256].", "--resize-size")] = None,
    save_dir: Annotated[_Path, option("Results go there [output].", "--save-dir", "--output-dir")] = None,
    resume: Annotated[
        _Text,
        option("Checkpoint or run to go on from; auto: the newest whole one.", "--resume", "--resume-model"),
    ] = None,
    force: Annotated[bool, option("Take over the lock of a run that died on another host.", "--force")] = False,
    pretrained: Annotated[_Text, option("Weights to start from: file, archive, folder or URL.", "--pretrained")] = None,
    start_epoch: Annotated[_Int, option("Count epochs from there.", "--start-epoch")] = None,
    device: Annotated[str, option("auto, cpu, gpu or gpu:N.", "--device")] = "auto",
    seed: Annotated[int, option("Of everything random.", "--seed")] = 0,
    workers: Annotated[_Int, option("Processes that read data.", "--workers", "-j", "--num-workers")] = None,
    log_every: Annotated[_Int, option("Steps between lines.", "--log-iters", "--print-freq")] = None,
    save_every: Annotated[_Int, option("Steps between checkpoints.", "--save-interval")] = None,
    keep_checkpoints: Annotated[_Int, option("Checkpoints that stay.", "--keep-checkpoint-max")] = None,
    early_stop_after: Annotated[
        _Int, option("Evaluations without gain before the end.", "--early-stop-intervals")
    ] = None,
    dist_timeout: Annotated[_Float, option("Seconds to wait for other processes [1800].", "--dist-timeout")] = None,
    data_format: Annotated[_Text, option("NCHW or NHWC (channels-last).", "--data-format")] = None,
    do_eval: Annotated[bool, option("Evaluate at each checkpoint.", "--do-eval")] = False,
    use_ema: Annotated[bool, option("Keep a moving average of the weights.", "--use-ema")] = False,
    sync_bn: Annotated[bool, option("Batch norm over all processes.", "--sync-bn")] = False,
    fsdp: Annotated[bool, option("Share weights among processes (FSDP2).", "--fsdp")] = False,
    log_ops: Annotated[bool, option("Print operators and dtypes of the first step.", "--log-ops")] = False,
    to_static: Annotated[bool, option("Capture the step, compile it, replay it.", "--to-static-training")] = False,
    use_vdl: Annotated[bool, option("Accepted; TensorBoard events are always written.", "--use-vdl")] = False,
    test_only: Annotated[bool, option("Evaluate, do not train.", "--test-only")] = False,
    opts: Annotated[_Texts, option("Change a value of the file: a.b=c.", "--opts")] = None,
    more_opts: Annotated[_Texts, typer.Argument(hidden=True)] = None,
) -> int:
    """Train by a configuration (--config) or a classifier on images (--data-path); under torchrun on many devices."""
    require("cv2", "PIL", "safetensors", extra="vision")
    given = Given(
        config=config, data_path=data_path, model=model, num_classes=num_classes, precision=precision,
        amp_level=amp_level, batch_size=batch_size,
        learning_rate=learning_rate, iters=iters, epochs=epochs, opt=opt, momentum=momentum, weight_decay=weight_decay,
        lr_step_size=lr_step_size, lr_gamma=lr_gamma, auto_augment=auto_augment, random_erase=random_erase,
        crop_scale=crop_scale, image_size=image_size, resize_size=resize_size, start_epoch=start_epoch,
        opts=(*(opts or ()), *_extra(opts, more_opts)),
    )  # fmt: skip
    options = given.options(
        save_dir=save_dir, resume=Path(resume) if resume not in (None, "auto") else resume, force=force,
        dist_timeout=dist_timeout, pretrained=pretrained, device=device, seed=seed, workers=workers,
        log_every=log_every, save_every=save_every, keep_checkpoints=keep_checkpoints, early_stop_after=early_stop_after,
        data_format=data_format, do_eval=do_eval or given.has_validation(), use_ema=use_ema, sync_bn=sync_bn, fsdp=fsdp,
        log_ops=log_ops, to_static=to_static, amp_lists=amp_lists, fp8=read_fp8(fp8),
        amp_use_promote=_as_bool(amp_use_promote),
    )  # fmt: skip
    from mezzo.vision.train import evaluate, train  # torch takes seconds to import: not for --help

    _say_assumed(given)
    if test_only:
        evaluate(given.recipe(pretrained or resume), options)
    else:
        train(given.recipe(), options)
    return 0


def _say_assumed(given: Given) -> None:
    """Say, in the first process, what the command line leaves open and the documents' defaults fill in."""
    if (line := given.assumed()) is not None and os.environ.get("RANK", "0") == "0":
        say(line)


def _as_bool(flag: Flag | None) -> bool | None:
    return None if flag is None else bool(flag)


def _extra(opts: list[str] | None, more: list[str] | None) -> list[str]:
    """Return the values that follow the first one of `--opts a=1 b=2`."""
    if more and not opts:
        raise typer.BadParameter(f"unexpected argument {more[0]!r}; options begin with --")
    return more or []


def evaluate(
    config: Annotated[_Path, option("A PaddleSeg YAML file.", "--config")] = None,
    data_path: Annotated[_Path, option("Folder of images, for a classifier.", "--data-path")] = None,
    model: Annotated[_Text, option("Classifier [mobilenet_v3_small].", "--model")] = None,
    weights: Annotated[_Text, option("Weights: file, archive, folder or URL.", "--model-path", "--pretrained")] = None,
    num_classes: Annotated[_Int, option("Classes [counted in the data].", "--num-classes")] = None,
    precision: Annotated[_Text, option("fp32, fp16 or bf16.", "--precision")] = None,
    amp_level: Annotated[_Text, option("O0, OD, O1, O2 or O3.", "--amp-level")] = None,
    fp8: Annotated[_Text, option(FP8_HELP, "--fp8")] = None,
    amp_use_promote: Annotated[_Switch, switch(_PROMOTE_HELP, "--amp-use-promote")] = None,
    amp_lists: Annotated[
        _Path, option("Lists of `mezzo bisect`: what stays in float32 or half.", "--amp-lists")
    ] = None,
    batch_size: Annotated[_Int, option("Samples of one process.", "--batch-size", "-b")] = None,
    image_size: Annotated[_Int, option("Side of the crop [224].", "--image-size", "--crop-size")] = None,
    resize_size: Annotated[_Int, option("Short side before the crop [256].", "--resize-size")] = None,
    device: Annotated[str, option("auto, cpu, gpu or gpu:N.", "--device")] = "auto",
    workers: Annotated[_Int, option("Processes that read data.", "--workers", "-j", "--num-workers")] = None,
    opts: Annotated[_Texts, option("Change a value of the file: a.b=c.", "--opts")] = None,
    more_opts: Annotated[_Texts, typer.Argument(hidden=True)] = None,
) -> int:
    """Evaluate weights on the validation data of a configuration or of a folder of images."""
    require("cv2", "PIL", "safetensors", extra="vision")
    given = Given(
        config=config, data_path=data_path, model=model, num_classes=num_classes, precision=precision,
        amp_level=amp_level, batch_size=batch_size,
        image_size=image_size, resize_size=resize_size, opts=(*(opts or ()), *_extra(opts, more_opts)),
    )  # fmt: skip
    from mezzo.vision.train import evaluate

    options = given.options(
        pretrained=weights, device=device, workers=workers, eval_batch_size=batch_size, amp_lists=amp_lists,
        fp8=read_fp8(fp8), amp_use_promote=_as_bool(amp_use_promote),
    )  # fmt: skip
    _say_assumed(given)
    evaluate(given.recipe(weights), options)
    return 0


def prepare(
    name: Annotated[str, typer.Argument(help="imagenet_lite, mini_supervisely or cityscapes.")],
    directory: Annotated[Path, typer.Argument(help="Folder to make.")],
) -> int:
    """Make a small data set to try commands on: generated, the same each time, and learnable."""
    require("cv2", "PIL", extra="vision")
    from mezzo.cli._show import progress_bar
    from mezzo.vision.data import prepare

    with progress_bar() as report:
        made = prepare(name, directory, progress=lambda done, total: report(name, done, total))
    say(made)
    return 0
