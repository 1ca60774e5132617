"""Whose commands: for each repository the templates of its commands and its rules, as data; `_layouts` has its lines.

A template is a tuple of slots that are joined by one blank: `<name>` is computed by the planner, everything else is
meant literally (`{gpu}` and `{ips}` are filled in); an empty slot leaves the extra blank that the original's texts have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

Slots = tuple[str, ...]


_LAUNCH: Slots = ("<python>", "-m", "paddle.distributed.launch", "--gpus={gpu}")
_HOSTS: Slots = ("<python>", "-m", "paddle.distributed.launch", "--ips={ips}", "--gpus={gpu}")
_LAUNCH_DEVICES: Slots = ("<python>", "-m", "paddle.distributed.launch", "--devices={gpu}")
_HOSTS_DEVICES: Slots = ("<python>", "-m", "paddle.distributed.launch", "--ips={ips}", "--devices={gpu}")
_GLOBAL_AMP = "Global.use_amp=True Global.scale_loss=1024.0 Global.use_dynamic_loss_scaling=True"
_CLAS_AMP = "-o AMP.use_amp=True -o AMP.scale_loss=128 -o AMP.use_dynamic_loss_scaling=True -o AMP.level="
_TAIL_1 = " - {cmd}!  "
_TAIL_2 = " - {model} - {cmd}!  "
_TAIL_3 = " - {model} - {cmd} - {log} "
_CPU_LOG = "usemkldnn_{mkldnn}_threads_{threads}_precision_{prec}_batchsize_{batch}"
_GPU_LOG = "usetrt_{trt}_precision_{prec}_batchsize_{batch}.log"


@dataclass(frozen=True)
class Trainings:
    """The three templates of a training: without launcher, with one, over several hosts. An empty one runs nothing."""

    plain: Slots = ()
    launch: Slots = ()
    hosts: Slots = ()


@dataclass(frozen=True)
class Profile:
    """The rules of one repository's script."""

    name: str
    layout: str
    # from the text to fields
    keep: int | None = None  # physical lines that are read
    first_colon: bool = False
    epoch: str = "mode"  # mode | plain | clas
    batch: str = "mode"
    train_model: str = "plain"
    # where things go
    log_dir: str = "./test_tipc/output/{model}/{mode}"
    status_file: str = "results_python.log"
    tail: str = _TAIL_3
    banner: bool = False
    save_suffix: str = "hosts"  # hosts | always | log | early
    # training
    hosts_above: int = 15  # a longer list of addresses means several hosts
    train: Trainings = field(default_factory=Trainings)
    amp: Mapping[str, str] = field(default_factory=dict)
    amp_otherwise: str = " "
    amp_level: Mapping[str, str] = field(default_factory=dict)
    use_gpu: str = "item"  # item | whole | whole-or-false | never
    several_env: str = "first"  # CUDA_VISIBLE_DEVICES of several cards: first | all
    hosts_env: str = "none"
    env_on_entry: bool = False
    env_removed_before_training: bool = False
    env_before_plain: bool = False
    env_before_eval: bool = False
    env_removed: str = "inference"  # after inference | trainer
    extra_env: Mapping[str, str] = field(default_factory=dict)  # exported from the first training on
    trainers: tuple[str, ...] = ("pact", "fpgm", "distill", "key1", "key2")
    unknown_trainer: str = "norm"  # norm | skipped
    carry: str = ""  # "" | norm | empty: pretrained weights of pact and fpgm trainings
    output: str = "inherited"  # inherited | tee | file | text | video | rec
    time_limit: float | None = None
    judged_by: str = ""  # the training log whose copying decides; empty: the exit status
    before_training: Slots = ()  # commands of the script itself
    afterwards: Mapping[str, Slots] = field(default_factory=dict)  # by model; "" for all
    log_iters: str = "never"  # never | benchmark | always: when the last line's log_iters is passed on
    pauses: bool = False
    checkpoint_sub: str = ""  # "" | model | clas
    checkpoint_fallback: str = ""
    # evaluation and export
    evaluation: Slots = ("<python>", "<eval>", "<checkpoint>", "<use_gpu>", "<eval1>")
    export: Slots = ("<python>", "<export>", "<weight>", "<save_infer>")
    redirect: str = ""  # end of the text of evaluations and exports, {log} filled in
    outside: str = ""  # "" | tee | file: where their output goes besides
    # inference
    model_dir: str = (
        "sub"  # sub | deploy | plain | model | sub-unless-empty | as-written | video | static | static-deploy
    )
    data: str = "train_img"  # train_img | i_img | none
    cpu_loops: tuple[str, ...] = ("mkldnn", "threads", "batch", "prec")
    cpu_skip: tuple[str, ...] = ()
    cpu: Slots = ()
    cpu_log: str = f"python_infer_cpu_{_CPU_LOG}.log"
    cpu_known: str = ""  # another name for the log that documents use, in the folder of logs and in the one above
    cpu_results: str = ""
    gpu_loops: tuple[str, ...] = ("trt", "prec", "batch")
    gpu_skip: tuple[str, ...] = ()
    gpu: Slots = ()
    gpu_log: str = f"python_infer_gpu_{_GPU_LOG}"
    gpu_known: str = ""
    infer_tee: bool = False
    infer_cwd: str = ""
    # whole_infer
    whole: str = "standard"  # standard | detection | tutorial | clas | rs | panoptic | passl | none
    whole_dir: str = "model"  # model | parent
    whole_log: bool = False
    whole_gpu: str = "0"
    kl: str = "train"  # what klquant_whole_infer does: train | whole | layout | nothing
    launcher: str = ""  # ours: torchrun


def _slots(head: Slots, tail: str) -> Slots:
    return (*head, *(word if word != "_" else "" for word in tail.split()))


_OLD_ARGS = "<use_gpu> {gap}<save> {first} <autocast> <batch> <param1> <amp>"


def _trainings(args: str, gap: str = "_ ", end: str = "", heads: tuple[Slots, Slots] = (_LAUNCH, _HOSTS)) -> Trainings:
    """Make the three templates: {gap} is an extra blank of plain ones, {first} the order of epoch and pretrain."""
    plain = args.format(gap=gap, first="<epoch> <pretrain>") + end
    launch = args.format(gap="", first="<epoch> <pretrain>")
    hosts = args.format(gap="", first="<pretrain> <epoch>")
    return Trainings(
        _slots(("<python>", "<run>"), plain), _slots((*heads[0], "<run>"), launch), _slots((*heads[1], "<run>"), hosts)
    )


_INFER_HEAD: Slots = ("<python>", "<script>")
_OCR_CPU = _slots(_INFER_HEAD, "<gpu!> <mkldnn> <threads> <model> <batch> <p0> <data> <bench> <prec> <p1>")
_OCR_GPU = _slots(_INFER_HEAD, "<gpu!> <trt> <prec> <model> <batch> <data> <bench> <p1> <p0>")
_REC_CPU = _slots(_INFER_HEAD, "<gpu!> <mkldnn!> <threads> <model> <batch> <data> <bench> <prec> <p1>")
_REC_GPU = _slots(_INFER_HEAD, "<gpu!> <trt> <prec> <model> <batch> <data> <bench> <p1>")

_OCR_2022 = Profile(
    "ocr-2022",
    "standard-51",
    keep=51,
    log_dir="./test_tipc/output/{model}",
    tail=_TAIL_1,
    hosts_above=26,
    train=_trainings(_OLD_ARGS, end=" _"),
    amp={"amp": _GLOBAL_AMP},
    env_before_plain=True,
    env_before_eval=True,
    cpu_skip=("quant_nomkl", "fp16_nomkl", "quant_int8"),
    cpu=_OCR_CPU,
    gpu_skip=("nq_int8", "low_notrt"),
    gpu=_OCR_GPU,
    whole_gpu="",
    kl="layout",
)
_SPEECH = replace(_OCR_2022, name="speech", log_dir="./test_tipc/output", env_before_plain=False)
_OCR = replace(
    _OCR_2022,
    name="ocr",
    keep=None,
    log_dir="./test_tipc/output/{model}/{mode}",
    tail=_TAIL_3,
    hosts_above=15,
    train=_trainings("<use_gpu> {gap}<save> {first} _ <batch> <amp> <param1>"),
    env_before_plain=False,
    trainers=("pact", "fpgm", "distill", "static2", "key2"),
    judged_by="{save}/train.log",
    redirect=" > {log} 2>&1 ",
    cpu_skip=("fp16_nomkl", "quant_int8"),
    cpu_log=f"python_infer_cpu_gpus_{{gpu}}_{_CPU_LOG}.log",
    gpu_log=f"python_infer_gpu_gpus_{{gpu}}_{_GPU_LOG}",
    whole_log=True,
    whole_gpu="0",
    kl="train",
)
_TEMPLATE = replace(
    _OCR_2022,
    name="template",
    log_dir="./test_tipc/output",
    env_before_plain=False,
    env_before_eval=False,
    env_on_entry=True,
    env_removed_before_training=True,
    carry="norm",
    cpu=_slots(_INFER_HEAD, "<gpu!> <mkldnn!> <threads> <model> <batch> <p0> <data> <bench> <prec> <p1>"),
    gpu_skip=("nq_int8", "low_notrt", "q_strict"),
    whole_dir="parent",
)
_NLP_EARLY = replace(  # PaddleNLP's first scripts, which papers have copied
    _TEMPLATE,
    name="nlp-early",
    export=("<python>", "<export>", "<weight>", "<save_infer as written>", "<export1>"),
    model_dir="as-written",
    cpu=_REC_CPU,
    gpu=_REC_GPU,
)
_SEG = Profile(
    "seg",
    "seg-52",
    tail=_TAIL_3 + " ",
    banner=True,
    train=_trainings(_OLD_ARGS, heads=(_LAUNCH_DEVICES, _HOSTS_DEVICES)),
    amp={"amp": _GLOBAL_AMP},
    env_on_entry=True,
    trainers=("pact", "fpgm", "distill", "key1", "key2", "static1"),
    carry="norm",
    output="tee",
    log_iters="benchmark",
    checkpoint_fallback="iter_{epoch}/model.pdparams",
    outside="tee",
    model_dir="deploy",
    cpu_skip=("quant_nomkl", "fp16_nomkl", "quant_int8", "nq_fp32"),
    cpu=_slots(_INFER_HEAD, "<gpu!> <mkldnn!> <threads> <model> <batch> <data> <bench> <prec> <p1r> <p2>"),
    cpu_log=f"python_infer_cpu_gpu_{{gpu}}_{_CPU_LOG}.log",
    cpu_results=f"python_infer_cpu_{_CPU_LOG}_results",
    gpu_skip=("nq_int8", "low_notrt", "q_strict"),
    gpu=_slots(_INFER_HEAD, "<gpu!> <trt> <prec> <model> <batch> <data> <bench> <p2>"),
    gpu_log=f"python_infer_gpu_gpu_{{gpu}}_{_GPU_LOG}",
    whole_dir="parent",
    kl="whole",
)
_SEG_26 = replace(  # reads every line, no folder for the mode, passes the model's name to inference
    _SEG,
    name="seg-2.6",
    log_dir="./test_tipc/output/{model}",
    tail=_TAIL_2,
    train=_trainings(_OLD_ARGS),
    trainers=("pact", "fpgm", "distill", "key1", "key2"),
    carry="empty",  # the script never sets the weights that it means to carry over
    log_iters="always",
    output="inherited",
    outside="",
    cpu_log=f"python_infer_cpu_{_CPU_LOG}.log",
    gpu_log=f"python_infer_gpu_{_GPU_LOG}",
    kl="nothing",
)
_SEG_2022_04 = replace(
    _SEG_26,
    name="seg-2022-04",
    keep=51,
    tail=_TAIL_1,
    hosts_above=26,
    train=_trainings(_OLD_ARGS, end=" _"),
    carry="norm",
    log_iters="never",
)
_MEDSEG = replace(
    _SEG_2022_04,
    name="medseg",
    keep=None,
    log_dir="./test_tipc/output/{model}/{mode}",
    tail=_TAIL_2,
    hosts_above=15,
    train=_trainings(_OLD_ARGS.replace("<autocast>", "_")),
    output="tee",
    outside="tee",
    before_training=("pip install -r requirements.txt",),
    checkpoint_fallback="best_model/model.pdparams",
    kl="nothing",
)
_CLAS_ARGS = "<use_gpu> <save> {first} <amp> <batch> <param1> -o Global.print_mem_info=True"
_CLAS_LAUNCHED = ("-o Global.log_ranks=0,1,2,3,4,5,6,7",)
_CLAS_TRAININGS = _trainings(_CLAS_ARGS, end=" _", heads=(_LAUNCH_DEVICES, _HOSTS_DEVICES))
_CLAS = Profile(
    "clas",
    "standard-51",
    epoch="clas",
    batch="plain",
    log_dir="{root}/test_tipc/output/{model}/{mode}",
    tail=_TAIL_3 + "! ",
    save_suffix="always",
    train=Trainings(
        _CLAS_TRAININGS.plain, _CLAS_TRAININGS.launch + _CLAS_LAUNCHED, _CLAS_TRAININGS.hosts + _CLAS_LAUNCHED
    ),
    amp={"fp16": _CLAS_AMP + "O2", "amp": _CLAS_AMP + "O1"},
    amp_otherwise="-o AMP.use_amp=False",
    use_gpu="whole",
    env_on_entry=True,
    env_removed="trainer",
    trainers=("pact", "fpgm", "distill", "static19", "key2"),
    judged_by="{save}/{sub}/train.log",
    pauses=True,
    checkpoint_sub="clas",
    redirect=" > {log} 2>&1",
    model_dir="plain",
    data="i_img",
    cpu=_slots(_INFER_HEAD, "<gpu!> <mkldnn!> <threads> <model> <batch> <data> <bench> <p1>"),
    cpu_log=f"python_infer_cpu_gpus_{{gpu}}_{_CPU_LOG}.log",
    gpu_skip=("true_notrt",),
    gpu=_slots(_INFER_HEAD, "<gpu!> <trt> <prec> <model> <batch> <data> <bench>"),
    gpu_log=f"python_infer_gpu_gpus_{{gpu}}_{_GPU_LOG}",
    infer_cwd="deploy",
    whole="clas",
)
_DET_ARGS = "log_iter=1 <use_gpu> <save> <epoch> <pretrain> <batch> <filename> <shuffle> <amp_level> <ce> <amp>"
_DET_ARGS += " <to_static> <param1>"
_DET = Profile(
    "det",
    "standard-51",
    first_colon=True,
    tail=_TAIL_3 + " ",
    train=Trainings(
        _slots(("<python>", "<run>", "LearningRate.base_lr=0.0001"), _DET_ARGS),
        _slots((*_LAUNCH, "<run>"), _DET_ARGS),
        _slots((*_HOSTS, "<run>"), _DET_ARGS),
    ),
    amp={"amp": "--amp", "fp16": "--amp"},
    amp_level={"amp": "amp_level=O1", "fp16": "amp_level=O2"},
    use_gpu="whole-or-false",
    env_on_entry=True,
    trainers=("norm", "pact", "fpgm", "distill", "key1", "key2", "static-argument"),
    unknown_trainer="skipped",
    output="file",
    time_limit=300.0,
    checkpoint_sub="model",
    evaluation=("<python>", "<eval>", "<weight>", "<use_gpu>", "<eval1>"),
    export=("<python>", "<export>", "<weight>", "<filename>", "<save_infer>", ""),
    outside="file",
    model_dir="model",
    cpu_loops=("mkldnn", "threads", "batch"),
    cpu_skip=("quant_nomkl",),
    cpu=_CLAS.cpu,
    cpu_log="python_infer_cpu_gpus_{gpu}_usemkldnn_{mkldnn}_threads_{threads}_mode_paddle_batchsize_{batch}.log",
    gpu_loops=("prec", "batch"),
    gpu_skip=("det",),
    gpu=_slots(_INFER_HEAD, "<gpu!> <prec> <model> <batch> <data> <bench> <p1>"),
    gpu_log="python_infer_gpu_gpus_{gpu}_mode_{prec}_batchsize_{batch}.log",
    whole="detection",
    kl="whole",
)
_YOLO = replace(
    _DET,
    name="yolo",
    train=replace(_DET.train, hosts=(*_DET.train.hosts[:-2], "<to_static><param1>")),
    amp_level={"amp": "amp_level=O2", "fp16": "amp_level=O2"},
)
_TUTORIAL_ARGS: Slots = ("<run>", "<save>", "<epoch>", "<pretrain>", "<batch>")
_TUTORIAL = Profile(
    "tutorial",
    "tutorial-32",
    keep=32,
    tail=_TAIL_2,
    save_suffix="log",
    train=Trainings(("<python>", *_TUTORIAL_ARGS), (*_LAUNCH, *_TUTORIAL_ARGS), (*_HOSTS, *_TUTORIAL_ARGS)),
    use_gpu="never",
    hosts_env="first",
    env_before_eval=True,
    trainers=(),
    evaluation=("<python>", "<eval>", "<checkpoint>"),
    redirect=" > {log} 2>&1 ",
    model_dir="plain",
    data="none",
    cpu_loops=("batch",),
    cpu=_slots(_INFER_HEAD, "<gpu!> <model> <batch> <data> <bench>"),
    cpu_log="python_infer_cpu_batchsize_{batch}.log",
    gpu_loops=("batch",),
    gpu=_slots(_INFER_HEAD, "<gpu!> <model> <batch> <data> <bench>"),
    gpu_log="python_infer_gpu_batchsize_{batch}.log",
    whole="tutorial",
)
_TUTORIAL_EARLY = replace(
    _TUTORIAL, name="tutorial-early", log_dir="./log/{model}/{mode}", tail=_TAIL_1, save_suffix="early", redirect=""
)
_UNINSTALLED = {
    "A2C": "gym atari-py opencv-python",
    "CQL": "gym mujoco-py d4rl",
    "DDPG": "gym mujoco-py",
    "DQN": "gym pygame",
    "DQN_variant": "gym tqdm atari-py",
    "ES": "gym mujoco-py",
    "MADDPG": "PettingZoo gym",
    "OAC": "gym mujoco-py",
    "PPO": "gym mujoco-py",
    "QuickStart": "gym",
    "SAC": "gym mujoco-py",
}
_PARL = replace(
    _TUTORIAL_EARLY,
    name="parl",
    afterwards={
        "": ("{python} -m pip install --upgrade pip",),
        **{
            model: (
                *(("xparl stop",) if model in ("A2C", "ES") else ()),
                *(f"{{python}} -m pip uninstall {package} -y" for package in packages.split()),
            )
            for model, packages in _UNINSTALLED.items()
        },
    },
)
_GAN_ARGS = "<use_gpu> {gap}<save> {first} <batch> <amp> <amp_level> <param1>"
_GAN = Profile(
    "gan",
    "standard-51",
    hosts_above=26,
    train=_trainings(_GAN_ARGS, end=" _"),
    amp={"fp16": "--amp"},
    amp_level={"fp16": "--amp_level=O2"},
    use_gpu="never",
    several_env="all",
    env_on_entry=True,
    extra_env={"FLAGS_cudnn_deterministic": "True"},
    trainers=("static2",),
    judged_by="{save}/*/log.txt",
    redirect=" > {log} 2>&1",
    export=("<python>", "<export>", "", "<checkpoint path>", "<save_infer key>", "<save path>"),
    model_dir="sub-unless-empty",
    cpu_skip=("quant_nomkl",),
    cpu=_slots(_INFER_HEAD, "<gpu!> <model>"),
    gpu_skip=("nq_int8", "low_notrt", "q_strict"),
    gpu=_REC_GPU,
    whole_dir="parent",
    whole_log=True,
    kl="whole",
)
_3D = replace(
    _GAN,
    name="3d",
    tail=_TAIL_1,
    train=replace(
        _trainings(_GAN_ARGS),
        launch=_slots((*_LAUNCH, "<run>"), "<use_gpu> <param1> <epoch> <pretrain> <batch> <amp> <amp_level> <param1>"),
    ),
    judged_by="{save}/log.txt",
    before_training=("rm -rf {save}",),
)
_NLP = replace(
    _OCR_2022,
    name="nlp",
    keep=None,
    log_dir="{root}/test_tipc/output/{model}/{mode}",
    tail=_TAIL_3,
    save_suffix="always",
    train=_trainings(_OLD_ARGS),
    env_before_plain=False,
    trainers=("pact", "fpgm", "distill", "key1", "key2", "static2"),
    output="text",
    redirect=" >{log} 2>&1",
    cpu_log=f"python_infer_cpu_gpus_{{gpu}}_{_CPU_LOG}.log",
    gpu_log=f"python_infer_gpu_gpus_{{gpu}}_{_GPU_LOG}",
    kl="whole",
)
_VIDEO_LAUNCH: Slots = ("<python>", "-B", "-m", "paddle.distributed.launch", '--devices="{gpu}"')
_VIDEO_HOSTS: Slots = ("<python>", "-B", "-m", "paddle.distributed.launch", "--ips={ips}", '--devices="{gpu}"')
_VIDEO = Profile(
    "video",
    "standard-51",
    epoch="plain",
    batch="plain",
    save_suffix="always",
    train=_trainings(
        "<amp> <use_gpu> {gap}<save> {first} <batch> <param1> <param2>", heads=(_VIDEO_LAUNCH, _VIDEO_HOSTS)
    ),
    amp={"fp16": "--amp --amp_level 'O2'"},
    env_on_entry=True,
    trainers=("pact", "fpgm", "distill", "amp19", "key2", "static2"),
    carry="empty",
    output="video",
    judged_by="{log}/train.log",
    evaluation=("<python>", "<eval>", "<use_gpu>", "<video eval>"),
    redirect=" > {log} 2>&1 ",
    model_dir="video",
    data="i_img",
    cpu_skip=("quant_nomkl", "fp16_nomkl", "quant_int8"),
    cpu=_REC_CPU,
    cpu_log=f"python_infer_cpu_gpus_{{gpu}}_{_CPU_LOG}.log",
    gpu_skip=("nq_int8", "low_notrt", "q_strict"),
    gpu=_REC_GPU,
    gpu_log=f"python_infer_gpu_gpus_{{gpu}}_{_GPU_LOG}",
    whole_dir="parent",
    whole_log=True,
    whole_gpu="",
    kl="nothing",
)
_REC = replace(
    _TEMPLATE,
    name="rec",
    train_model="mode",
    log_dir="./test_tipc/output/{model}/{mode}",
    status_file="results.log",
    tail=" - {model} - {cmd} - {log}!  ",
    save_suffix="log",
    train=replace(_trainings(_OLD_ARGS, end=" _", heads=(_LAUNCH, _HOSTS_DEVICES)), launch=()),
    output="rec",
    cpu=_REC_CPU,
    cpu_log=f"python_infer_cpu_gpus_{{device}}_{_CPU_LOG}.log",
    gpu=_REC_GPU,
    gpu_log=f"python_infer_gpu_gpus_{{device}}_{_GPU_LOG}",
    kl="nothing",
)
_RS_ARGS = "<config> <use_gpu> <save> {first} <autocast> <batch> <param1> <amp>"
_RS = Profile(
    "rs",
    "rs-53",
    log_dir="./test_tipc/output/{task}/{model}/{mode}",
    tail=_TAIL_2,
    banner=True,
    train=_trainings(_RS_ARGS),
    amp={"amp": _GLOBAL_AMP},
    amp_otherwise="",
    env_on_entry=True,
    carry="norm",
    output="tee",
    evaluation=("<python>", "<eval>", "<checkpoint pdparams>", "<use_gpu>", "<eval1>"),
    export=("<python>", "<export>", "<weight>", "<save_infer static>", "<shape>"),
    outside="tee",
    model_dir="static",
    cpu_loops=("mkldnn", "prec", "threads", "batch"),
    cpu_skip=("mkl_required",),
    cpu=_slots(_INFER_HEAD, "<config> <gpu> <mkldnn> <threads> <model> <batch> <bench> <prec> <p1> <p2>"),
    gpu_skip=("fp16_notrt",),
    gpu=_slots(_INFER_HEAD, "<config> <gpu> <trt> <prec> <model> <batch> <bench> <p2>"),
    infer_tee=True,
    whole="rs",
)
_PANOPTIC = replace(
    _RS,
    name="panoptic",
    layout="panoptic-55",
    log_dir="./test_tipc/output/{model}/{mode}",
    train=_trainings(_RS_ARGS, heads=(_LAUNCH_DEVICES, _HOSTS_DEVICES)),
    env_removed="trainer",
    export=("<python>", "<export>", "<export config>", "<weight pdparams>", "<save_infer static>", "<shape apart>"),
    model_dir="static-deploy",
    cpu=_slots(_INFER_HEAD, "<model> <data> <gpu> <mkldnn> <threads> <batch> <bench> <prec> <p1> <p2>"),
    gpu=_slots(_INFER_HEAD, "<model> <data> <gpu> <trt> <prec> <batch> <bench> <p2>"),
    whole="panoptic",
)
_DBNET = replace(
    _OCR,
    name="dbnet",
    amp={"amp": "amp.scale_loss=1024.0 amp.use_dynamic_loss_scaling=True amp.amp_level=O2"},
    amp_otherwise="amp=None",
)
_PASSL = replace(
    _CLAS,
    name="passl",
    layout="passl",
    epoch="mode",
    log_dir="./log/{model}/{mode}",
    tail=_TAIL_2,
    save_suffix="hosts",
    hosts_above=26,
    train=_trainings("<use_gpu> {gap}<save> {first} <autocast> <batch> <param1>", end=" _"),
    amp={},
    amp_otherwise=" ",
    env_removed_before_training=True,
    trainers=("pact", "fpgm", "distill", "key1", "key2"),
    judged_by="",
    checkpoint_sub="model",
    export=("<python>", "<export>", "<weight>", "<save_infer>", "<linear>"),
    redirect="",
    cpu_loops=("mkldnn", "threads", "batch"),
    cpu_skip=("quant_nomkl",),
    cpu_log="infer_cpu_usemkldnn_{mkldnn}_threads_{threads}_batchsize_{batch}.log",
    gpu_skip=("true_notrt", "q_strict"),
    gpu_log=f"infer_gpu_{_GPU_LOG}",
    whole="passl",
)
_SUPPLEMENTARY = Profile(
    "supplementary",
    "supplementary",
    log_dir="./test_tipc/extra_output",
    tail=_TAIL_1,
    hosts_above=26,
    train=_trainings(
        "<use_gpu> <unset> <unset> <epoch> <pretrain> <checkpoints> <unset> <autocast> <batch> _ <list1> <list2> <list3> <amp>",
        gap="",
    ),
    amp={"amp": "AMP.use_amp=True"},
    env_removed_before_training=True,
    trainers=(),
    whole="none",
)
_MEZZO_LAUNCH: Slots = ("<python>", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node={count}")
_MEZZO_HOSTS: Slots = (
    "<python>",
    "-m",
    "torch.distributed.run",
    "--nnodes={nodes}",
    "--nproc_per_node={count}",
    "--rdzv_backend=c10d",
)
_MEZZO_HOSTS = (*_MEZZO_HOSTS, "--rdzv_endpoint={master}:29400")
_MEZZO = replace(
    _SEG,
    name="mezzo",
    train=_trainings(_OLD_ARGS, heads=(_MEZZO_LAUNCH, _MEZZO_HOSTS)),
    cpu_known=_SEG_26.cpu_log,
    gpu_known=_SEG_26.gpu_log,
    launcher="torchrun",
)
_MEZZO_TUTORIAL = replace(
    _TUTORIAL,
    name="mezzo-tutorial",
    train=Trainings(("<python>", *_TUTORIAL_ARGS), (*_MEZZO_LAUNCH, *_TUTORIAL_ARGS), (*_MEZZO_HOSTS, *_TUTORIAL_ARGS)),
    launcher="torchrun",
)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            _OCR,
            _OCR_2022,
            _SPEECH,
            replace(_SPEECH, name="science"),
            _TEMPLATE,
            _NLP_EARLY,
            _SEG,
            _SEG_26,
            _SEG_2022_04,
            _MEDSEG,
            _CLAS,
            _DET,
            _YOLO,
            _TUTORIAL,
            _TUTORIAL_EARLY,
            _PARL,
            _GAN,
            _3D,
            _NLP,
            _VIDEO,
            _REC,
            _RS,
            _PANOPTIC,
            _DBNET,
            _PASSL,
            _SUPPLEMENTARY,
            _MEZZO,
            _MEZZO_TUTORIAL,
        )
    }
)
