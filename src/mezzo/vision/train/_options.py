"""What belongs to a run and not to the recipe: where, how precise, how often, how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mezzo._arguments import check_at_least
from mezzo.errors import MezzoError, unknown_choice
from mezzo.model.parallel import DIST_TIMEOUT_S
from mezzo.record import glog_asks_for_operators

_LAYOUTS = ("NCHW", "NHWC")


class OptionError(MezzoError):
    """An option has a value that it cannot have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options of a training or evaluation run."""

    save_dir: Path = Path("output")
    """Checkpoints, logs and the resolved configuration go there."""

    precision: str = "fp32"
    """`fp32`, `fp16` or `bf16`."""

    amp_level: str | None = None
    """`O0`, `OD`, `O1`, `O2` or `O3`; counts where the precision is not fp32. None is `O1`."""

    fp8: Mapping[str, Any] | None = None
    """O3: settings of an `amp.Fp8Recipe`."""

    amp_use_promote: bool | None = None
    """O2 and O3: see `amp.auto_cast`. None is its default."""

    amp_lists: Path | None = None
    """A file of lists, added to those of the task; see `amp.read_lists`."""

    device: str = "auto"
    """`auto` takes the GPU if there is one; `gpu` and `cuda` are the same."""

    seed: int = 0
    """Of weights, order, augmentation and dropout."""

    workers: int = 2
    """Processes that read data, for each process that trains; 0 reads in the training process."""

    log_every: int = 10
    """Steps between two log lines."""

    save_every: int | None = None
    """Steps between two checkpoints; None: once an epoch for classification, 1000 for segmentation."""

    do_eval: bool = False
    """Evaluate at every checkpoint and keep the best."""

    keep_checkpoints: int = 5
    """So many `iter_N` folders stay."""

    early_stop_after: int | None = None
    """Stop after so many evaluations in a row without a better result."""

    resume: Path | str | None = None
    """A checkpoint folder, or a run's folder, whose newest checkpoint is then taken. `auto`: the newest whole checkpoint
    of `save_dir`; if there is none, the run begins anew."""

    force: bool = False
    """Take over the lock of `save_dir` from a process of another host that is dead, without waiting five minutes."""

    dist_timeout: float = DIST_TIMEOUT_S
    """How long a process waits for the others, in seconds."""

    start_epoch: int = 0
    """Begin counting there, without a checkpoint."""

    pretrained: Path | str | None = None
    """Weights to start from: a file, an archive, a folder or a URL."""

    use_ema: bool = False
    """Keep a moving average of the weights; it is what is evaluated and kept as the best."""

    data_format: str | None = None
    """`NHWC` is channels-last; None: channels-last on a GPU."""

    sync_bn: bool = False
    """Batch norm over all processes."""

    fsdp: bool = False
    """Share weights, gradients and optimizer state among the processes."""

    log_ops: bool = False
    """Print the table of operators and dtypes of the first step."""

    to_static: bool = False
    """On a GPU, capture the step once in a CUDA graph and replay it."""

    eval_batch_size: int | None = None
    """None: the batch size for classification; 1 for segmentation, whose images may differ in size."""

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("workers", 0), ("log_every", 1), ("keep_checkpoints", 1), ("start_epoch", 0)):
            check_at_least(name, getattr(self, name), least, raising=OptionError)
        for name in ("save_every", "early_stop_after", "eval_batch_size"):
            check_at_least(name, getattr(self, name), raising=OptionError)
        if not 1 <= self.dist_timeout <= 1e8:
            raise OptionError(f"dist_timeout={self.dist_timeout}: must be from 1 to 1e8 seconds")
        if self.seed >= 2**63:
            raise OptionError(f"seed={self.seed}: must be below 2**63")
        if self.fsdp and self.use_ema:
            raise OptionError("use_ema together with fsdp: the average of shared weights is not kept; leave one out")
        if self.amp_lists is not None and (self.precision == "fp32" or self.amp_level == "O0"):
            raise OptionError(
                f"amp_lists={self.amp_lists} with fp32: there is nothing to apply it to; add --precision fp16 or bf16 and "
                "an --amp_level above O0"
            )
        if self.fp8 is not None and self.amp_level != "O3":
            raise OptionError(
                f"fp8 with amp_level={self.amp_level}: FP8 products are level O3's; add --amp_level O3, or leave it out"
            )
        if self.fsdp and self.amp_level == "O3":
            raise OptionError(
                "amp_level=O3 together with fsdp: weights are gathered anew for each use, and would be converted to FP8 each "
                "time; use O2, or leave fsdp out"
            )
        if self.data_format is not None and self.data_format not in _LAYOUTS:
            raise OptionError(unknown_choice("data_format", self.data_format, _LAYOUTS))

    def wants_operator_table(self) -> bool:
        """Whether the first step is recorded: `log_ops`, or `GLOG_v=5` in the environment as in the documents."""
        return self.log_ops or glog_asks_for_operators()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
