"""What a profile is: the rules of one repository's TIPC script, as data.

TIPC ("training and inference pipeline certification") texts are run by a shell script,
`test_train_inference_python.sh`. Each Paddle repository has its own variant of it. A `Profile` describes one variant;
the planner asks it for rules and never for its name.

To add a profile, edit `_profiles.py` only: derive it from the most similar one (`_OCR.derive("mine", ...)`), name the
words by which its script is recognised (`script_words`), and put it into `PROFILES`, before every profile whose words
its script has too. A text with its lines in other places needs a table in `_layouts.py` as well.

A template is a tuple of slots that are joined by one blank. `<name>` is computed by the planner; `{gpu}` and `{ips}`
are filled in; everything else is literal. An empty slot is the extra blank that the original's commands have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Template = tuple[str, ...]


def template(head: Template, words: str) -> Template:
    """Return a template of a head and of words; `_` is an empty slot."""
    return (*head, *("" if word == "_" else word for word in words.split()))


@dataclass(frozen=True)
class TrainingTemplates:
    """The commands of a training: without a launcher, with one, over several hosts. An empty one runs nothing."""

    plain: Template = ()
    launch: Template = ()
    hosts: Template = ()


@dataclass(frozen=True)
class OutputRule:
    """Where the output of a command goes; its texts may hold {log}, {save} and {logs}.

    {log} is the usual path of the log, {save} the folder of the training, {logs} the folder of all logs.
    """

    how: str = "inherited"  # inherited | tee | file | text: `text` is a redirection that is part of the command
    log: str = ""
    status: str = "{log}"  # the path that the status line shows
    redirect: str = ""  # end of the command; {log} is the path of `log`


TERMINAL = OutputRule()
NO_LOG = OutputRule(status="")
TEE = OutputRule("tee", "{log}")
FILE = OutputRule("file", "{log}")
REDIRECT = OutputRule("text", "{log}", redirect=" > {log} 2>&1 ")


@dataclass(frozen=True)
class TrainerRule:
    """How a script finds out what a trainer of its list means: by the key of one line."""

    line: str  # field whose key is compared with the trainer; `to_static` is the line after its own header
    test: str = "quoted"  # quoted | unquoted | pattern: how the script writes the comparison
    script: str = "{value}"  # the command; {value} of that line, {norm} the one of a plain training
    export: str = "norm_export"  # field with the export command
    is_quantised: bool = False
    passes_value: bool = False  # the value is an argument at its own place

    def quoted(self) -> "TrainerRule":
        """Return the rule as a script writes it that quotes both sides of all comparisons."""
        return replace(self, test="quoted")


NORM = TrainerRule("norm")
PACT = TrainerRule("pact", "unquoted", export="pact_export", is_quantised=True)
FPGM = TrainerRule("fpgm", export="fpgm_export")
DISTILL = TrainerRule("distill", export="distill_export")
KEY1 = TrainerRule("key1", "unquoted", export="export1")
KEY2 = TrainerRule("key2", "pattern", export="export2")
TO_STATIC = TrainerRule("to_static", script="{norm}  {value}")
USUAL_TRAINERS = (PACT, FPGM, DISTILL, KEY1, KEY2)


@dataclass(frozen=True)
class Profile:
    """The rules of one repository's script."""

    name: str
    layout: str  # which line holds which field, see `_layouts`

    # How the profile is recognised
    script_words: tuple[str, ...] = ()  # all of them stand in the repository's script
    repository_files: tuple[str, ...] = ()  # all of them are in the repository
    dialects: tuple[str, ...] = ()  # forms of texts that get this profile where the repository does not tell
    runs_mezzo: bool = False  # the commands are mezzo's own; only mezzo's repositories get it

    # From the text to fields
    lines_read: int | None = None  # physical lines; None: all
    first_colon: bool = False  # a value is all that follows the first colon
    task_before_model: bool = False  # the line of the model is `model_name:task:model`
    epochs: str = "by mode"  # by mode | as written | ignored
    default_epochs: str = ""
    batch: str = "by mode"  # by mode | as written
    train_model: str = "as written"

    # Where things go
    log_dir: str = "./test_tipc/output/{model}/{mode}"
    status_file: str = "results_python.log"
    status: str = " - {model} - {cmd} - {log} "
    banner: bool = False
    log_name: str = "{trainer}_gpus_{gpus}_autocast_{autocast}"
    save_name: str = "{log_name}{hosts}"  # {hosts}: `_nodes_2` for several hosts only; {nodes}: always
    checkpoint: str = "{save}/{sub}{train_model}"
    checkpoint_sub: str = ""
    special_subs: Mapping[str, str] = field(default_factory=dict)  # by a part of the model's name
    checkpoint_fallback: str = ""

    # Training
    loops_over: str = "trainers"  # trainers | lists: what a supplementary text repeats its training for
    hosts_above: int = 15  # a longer list of addresses means several hosts
    counts_launched_hosts: bool = False  # one card on several hosts counts as one host
    train: TrainingTemplates = field(default_factory=TrainingTemplates)
    trainers: tuple[TrainerRule, ...] = USUAL_TRAINERS
    skips_unknown_trainers: bool = False  # otherwise they are plain trainings
    amp: Mapping[str, str] = field(default_factory=dict)  # arguments by the text's word for the precision
    amp_otherwise: str = " "
    amp_of_models: Mapping[str, str] = field(default_factory=dict)  # added by a part of the model's name
    amp_level: Mapping[str, str] = field(default_factory=dict)
    benchmark_amp: Mapping[str, str] = field(default_factory=dict)  # instead of `amp` in mode benchmark_train
    benchmark_keys: Mapping[str, str] = field(default_factory=dict)  # other keys for the precision, there
    use_gpu: str = "item"  # item | whole | whole-or-false | never: which part of the line is passed
    short_training: str = ""  # added to the command of trainings that are neither whole nor benchmarks
    whole_training_slots: Mapping[str, str] = field(default_factory=dict)  # of trainings on the whole data
    carry: str = ""  # weights of a plain training that pact and fpgm start from, a slot; "empty": none
    last_line: str = "ignored"  # ignored | in benchmarks | one pair: when log_iters of the last line is passed on
    output: OutputRule = NO_LOG
    launched_output: OutputRule | None = None  # of trainings with a launcher; None: as the others
    time_limit: float | None = None
    benchmark_time_limit: float | None = None
    judged_by: str = ""  # the training log whose copying decides; empty: the exit status
    before_training: Template = ()  # commands of the script itself
    at_the_end: Mapping[str, Template] = field(default_factory=dict)  # the same, by model; "" for all
    pauses: bool = False

    # CUDA_VISIBLE_DEVICES
    several_env: str = "first"  # of several cards: first | all
    hosts_env: str = "none"  # of several hosts: first | none
    env_set: tuple[str, ...] = ()  # before: devices (one card only), training (without launcher), eval
    env_removed: tuple[str, ...] = ("after inference",)  # before training, after inference, after trainer
    extra_env: Mapping[str, str] = field(default_factory=dict)  # exported from the first training on

    # Evaluation and export
    evaluation: Template = ("<python>", "<eval>", "<checkpoint>", "<use_gpu>", "<eval1>")
    export: Template = ("<python>", "<export>", "<weight>", "<save_infer>")
    onnx_export: Template = ()  # run before, where the text asks for it
    after_export: Template = ()  # commands of the script itself
    follow_output: OutputRule = TERMINAL  # of evaluations and exports

    # Inference
    model_dir: str = "{save}"
    model_sub: str = "unless null"  # unless null | if set | always | never: when the text's folder is added
    model_file: str = ""  # in that folder; may name {i_model}
    data: str = "train_img"  # the field with the data, empty: none
    cpu_loops: tuple[str, ...] = ("mkldnn", "threads", "batch", "prec")
    cpu_skip: tuple[str, ...] = ()
    cpu: Template = ()
    cpu_log: str = "python_infer_cpu_usemkldnn_{mkldnn}_threads_{threads}_precision_{prec}_batchsize_{batch}.log"
    cpu_known: str = ""  # another name for the log that documents use, in the folder of logs and in the one above
    cpu_results: str = ""
    gpu_loops: tuple[str, ...] = ("trt", "prec", "batch")
    gpu_skip: tuple[str, ...] = ()
    gpu: Template = ()
    gpu_log: str = "python_infer_gpu_usetrt_{trt}_precision_{prec}_batchsize_{batch}.log"
    gpu_known: str = ""
    passes_benchmark: bool = True
    infer_tee: bool = False
    infer_cwd: str = ""

    # Modes that only infer
    whole: str = "models"  # models | kinds of export | one model | quantised model | deploy folder
    whole_needs_model: bool = False
    whole_sets_env: bool = True
    whole_dir: str = "{model}{klquant}"  # where exported models go; {parent} of {model}
    whole_export: Template = ("<python>", "<export>", "<weight>", "<save_infer>")
    whole_log: str = ""
    whole_gpu: str = "0"
    whole_quantised: str = "word"  # word (an empty one vanishes, the next word takes its place) | value | never
    kl: str = "train"  # what klquant_whole_infer does: train | whole | layout | nothing

    def derive(self, name: str, **changes: Any) -> "Profile":
        """Return a profile with other rules; how it is recognised is not inherited."""
        unknown: dict[str, Any] = {"script_words": (), "repository_files": (), "dialects": ()}
        return replace(self, name=name, **(unknown | changes))
