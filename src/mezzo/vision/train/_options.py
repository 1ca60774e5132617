"""The options of a run that do not belong to its recipe: precision, device, files, checkpoints."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from mezzo._options import FP8_HELP, Option, check_options, parse_settings
from mezzo.dtypes import LEVELS, PRECISION_DTYPES
from mezzo.errors import OptionError

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
        if self.fsdp and self.amp_level == "O3":
            raise OptionError(
                "amp_level=O3 together with fsdp: weights are gathered for each use, and would be converted to FP8 each "
                "time; use O2, or leave fsdp out"
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
