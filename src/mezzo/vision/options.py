"""The options of the application: what is trained, how a run goes, how images are predicted.

Each field has its type, its default and an `Option` with help and spellings. The commands, the check
of YAML files and the tables of the documentation are made from them. Importing this module does not
import torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from mezzo._options import FP8_HELP, Option, check_options, parse_settings
from mezzo.dtypes import LEVELS, PRECISION_DTYPES
from mezzo.errors import OptionError
from mezzo.export import AUTO, ENGINE_NAMES, EngineOptions
from mezzo.vision.shipped import RECIPE_HELP, RECIPES

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OPTIMIZERS = ("sgd", "rmsprop", "adam", "adamw")
POLICIES = ("imagenet", "ra", "ta_wide")
FIRST_RATE, BATCH_SIZE = 0.1, 256


def classifiers() -> Iterable[str]:
    """Return the names of all classifiers."""
    from mezzo.vision.models import list_models, model_info

    return [name for name in list_models() if model_info(name).task == "classification"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierOptions:
    """How a classifier is trained on a folder of images."""

    data_path: Annotated[
        Path | str | None,
        Option("Folder of images to train a classifier on.", "--data-path", default_text="data, lite_data, ILSVRC2012"),
    ] = None
    """It has train/CLASS/x.jpg and val/CLASS/x.jpg, or train_list.txt and val_list.txt."""
    model: Annotated[str, Option("Classifier, a name of `mezzo models`.", suggest=classifiers)] = "mobilenet_v3_small"
    num_classes: Annotated[int | None, Option("Number of classes.", default_text="as in the data")] = None
    lr: Annotated[
        float | None,
        Option("First learning rate.", "--learning-rate", "--lr", default_text=f"{FIRST_RATE}, or that of the file"),
    ] = None
    batch_size: Annotated[
        int | None,
        Option("Samples per process.", "--batch-size", "-b", default_text=f"{BATCH_SIZE}, or that of the file"),
    ] = None
    epochs: Annotated[int, Option("Passes over the training data.")] = 90
    opt: Annotated[str, Option(f"Optimizer: {', '.join(OPTIMIZERS)}.", suggest=lambda: OPTIMIZERS)] = "sgd"
    momentum: Annotated[float, Option("Momentum of sgd and rmsprop.")] = 0.9
    weight_decay: Annotated[float, Option("Weight decay of all parameters.", "--wd", "--weight-decay")] = 1e-4
    lr_step_size: Annotated[int, Option("Epochs between two decays of the learning rate.")] = 30
    lr_gamma: Annotated[float, Option("Factor of each decay.")] = 0.1
    auto_augment: Annotated[
        str | None, Option(f"Augmentation policy: {', '.join(POLICIES)}.", suggest=lambda: POLICIES)
    ] = None
    random_erase: Annotated[float, Option("Probability that a part of an image is covered.")] = 0.0
    crop_scale: Annotated[float, Option("Smallest share of an image in a training crop.")] = 0.08
    image_size: Annotated[int, Option("Side of the network's input.", "--image-size", "--crop-size")] = 224
    resize_size: Annotated[int, Option("Short side before the centre crop of an evaluation.")] = 256
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of each channel of images from 0 to 1."""
    std: tuple[float, ...] = IMAGENET_STD


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeOptions(ClassifierOptions):
    """What is trained: `config` names a PaddleSeg file, `data_path` the images of a classifier."""

    config: Annotated[Path | None, Option("PaddleSeg YAML file to train by.")] = None
    recipe: Annotated[str | None, Option(RECIPE_HELP, suggest=lambda: RECIPES)] = None
    iters: Annotated[int | None, Option("Steps of the run and of the decay (only with --config).")] = None
    opts: Annotated[
        tuple[str, ...], Option("Values to change in the file (only with --config).", metavar="KEY=VALUE...")
    ] = ()


LARGEST_SEED = 2**63 - 1
LONGEST_TIMEOUT_S = 1e8


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options of a training or evaluation run."""

    precision: Annotated[
        str | None,
        Option(
            "fp32, fp16 or bf16.",
            choices=tuple(PRECISION_DTYPES),
            default_text="fp32; fp16 for a classifier with an --amp-level above O0",
        ),
    ] = None
    amp_level: Annotated[
        str | None,
        Option(f"{', '.join(LEVELS)}; used unless the precision is fp32.", choices=LEVELS, default_text="O1"),
    ] = None
    fp8: Annotated[Mapping[str, Any] | None, Option(FP8_HELP, parse=parse_settings)] = None
    amp_use_promote: Annotated[
        bool | None, Option("O2, O3: operators on no list compute in float32 if an input is float32.")
    ] = None
    amp_lists: Annotated[Path | None, Option("File of operators and layers for float32 or half (mezzo bisect).")] = None
    pretrained: Annotated[
        Path | str | None,
        Option("Weights to start from or to evaluate: file, archive, folder or URL.", "--pretrained", "--model-path"),
    ] = None
    device: Annotated[
        str, Option("auto, cpu, gpu or gpu:N; auto is the GPU if there is one.", suggest=lambda: ("auto", "cpu", "gpu"))
    ] = "auto"
    seed: Annotated[int, Option("Seed of weights, order, augmentation and dropout.", at_least=0)] = 0
    workers: Annotated[
        int,
        Option(
            "Processes that read data, per training process; 0: none.", "--workers", "-j", "--num-workers", at_least=0
        ),
    ] = 2
    save_dir: Annotated[
        Path, Option("Folder of checkpoints, logs and the configuration.", "--save-dir", "--output-dir")
    ] = Path("output")
    log_every: Annotated[int, Option("Steps between two log lines.", "--log-iters", "--print-freq", at_least=1)] = 10
    save_every: Annotated[
        int | None,
        Option(
            "Steps between two checkpoints.",
            "--save-interval",
            at_least=1,
            default_text="an epoch; 1000 with --config",
        ),
    ] = None
    keep_checkpoints: Annotated[
        int, Option("Number of iter_N folders to keep.", "--keep-checkpoint-max", at_least=1)
    ] = 5
    do_eval: Annotated[
        bool, Option("Evaluate at each checkpoint and keep the best. A classifier with val images always does.")
    ] = False
    early_stop_after: Annotated[
        int | None, Option("Stop after this many evaluations without a gain.", "--early-stop-intervals", at_least=1)
    ] = None
    resume: Annotated[
        Path | str | None,
        Option(
            "Checkpoint or run to continue. auto: the newest undamaged checkpoint of --save-dir, if any.",
            "--resume",
            "--resume-model",
        ),
    ] = None
    force: Annotated[bool, Option("Take over the lock of a run that died on another host.")] = False
    dist_timeout: Annotated[float, Option("Seconds to wait for other processes.")] = 1800.0
    start_epoch: Annotated[int, Option("Number of the first epoch, without a checkpoint.", at_least=0)] = 0
    use_ema: Annotated[bool, Option("Keep a moving average of the weights; evaluate and save it.")] = False
    data_format: Annotated[
        str | None,
        Option(
            "NCHW or NHWC (channels-last).",
            choices=("NCHW", "NHWC"),
            default_text="NHWC on a GPU",
        ),
    ] = None
    sync_bn: Annotated[bool, Option("Compute batch norm over all processes.")] = False
    fsdp: Annotated[bool, Option("Shard weights, gradients and optimizer state over the processes (FSDP2).")] = False
    log_ops: Annotated[bool, Option("Print the operators and dtypes of the first step.")] = False
    wandb: Annotated[bool, Option("Also log the numbers to Weights & Biases. WANDB_MODE=offline needs no network.")] = (
        False
    )
    to_static: Annotated[bool, Option("Capture the step once, compile it and replay it.", "--to-static-training")] = (
        False
    )
    eval_batch_size: int | None = None
    """None: the batch size for classification; 1 for segmentation, whose images may differ in size."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.eval_batch_size is not None and self.eval_batch_size < 1:
            raise OptionError(f"eval_batch_size={self.eval_batch_size}: must be at least 1")
        if not 1 <= self.dist_timeout <= LONGEST_TIMEOUT_S:
            raise OptionError(f"dist_timeout={self.dist_timeout}: must be from 1 to {LONGEST_TIMEOUT_S:g} seconds")
        if self.seed > LARGEST_SEED:
            raise OptionError(f"seed={self.seed}: must be below 2**63")
        if self.fsdp and self.use_ema:
            raise OptionError("use_ema together with fsdp: sharded weights have no moving average; leave one out")
        if self.amp_lists is not None and (self.precision == "fp32" or self.amp_level == "O0"):
            raise OptionError(
                f"amp_lists={self.amp_lists} with fp32: lists have no effect there; add --precision fp16 or bf16 and "
                "an --amp_level above O0"
            )
        if self.fp8 is not None and self.amp_level != "O3":
            raise OptionError(
                f"fp8 with amp_level={self.amp_level}: only level O3 has FP8 products; add --amp_level O3, or leave it out"
            )
        if self.fsdp and self.fp8 is not None and self.fp8.get("scaling") == "delayed":
            raise OptionError(
                "fp8 scaling=delayed together with fsdp: each process would keep scales of its own; use scaling=current"
            )

    def with_precision_for(self, task: str) -> "RunOptions":
        """Return the options with a precision: without one, a classifier with a level above O0 trains in fp16."""
        is_half = task == "classification" and self.amp_level not in (None, "O0")
        return self if self.precision is not None else replace(self, precision="fp16" if is_half else "fp32")

    def wants_operator_table(self) -> bool:
        """Return whether the first step is recorded: `log_ops`, or `GLOG_v=5` in the environment as in Paddle."""
        from mezzo.record import glog_asks_for_operators

        return self.log_ops or glog_asks_for_operators()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


BENCHMARK_WARMUP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class InferOptions:
    """Which images are predicted, how, and what is written."""

    images: Annotated[
        Path | None,
        Option(
            "Image, folder of images, or list of images.",
            "--image-path",
            "--img-path",
            "--images",
            default_text="images/demo.jpg",
        ),
    ] = None
    """None: the first of the documents' demo images that exists."""
    engine: Annotated[
        str | None,
        Option(
            f"{', '.join((AUTO, *ENGINE_NAMES))}.",
            suggest=lambda: (AUTO, *ENGINE_NAMES),
            default_text="onnxruntime; torch-graph on a GPU",
        ),
    ] = None
    """`auto` takes the fastest; None the usual one of the device."""
    run: EngineOptions = field(default_factory=EngineOptions)
    batch_size: Annotated[int, Option("Images per run.", "--batch-size", "-b", at_least=1)] = 1
    save_dir: Annotated[Path | None, Option("Folder of the results.", default_text="segmentation: output")] = None
    """None writes nothing."""
    warmup: Annotated[
        int | None,
        Option("Untimed runs before the first.", at_least=0, default_text=f"0; {BENCHMARK_WARMUP} with --benchmark"),
    ] = None
    top_k: Annotated[int, Option("Classes to name per image.", at_least=1)] = 1
    benchmark: Annotated[bool, Option("Print the benchmark report.")] = False
    model_name: Annotated[str | None, Option("Name of the model in the report.")] = None
    resize_size: Annotated[
        int | None, Option("Short side before the crop (classification).", at_least=1, default_text="as exported")
    ] = None
    crop_size: Annotated[
        int | None, Option("Side of the crop (classification).", at_least=1, default_text="as exported")
    ] = None
    enable_mkldnn: Annotated[bool, Option("Shown in the report; engines use oneDNN by themselves.")] = False

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def warmup_runs(self) -> int:
        """Untimed runs before the first."""
        return self.warmup if self.warmup is not None else BENCHMARK_WARMUP if self.benchmark else 0
