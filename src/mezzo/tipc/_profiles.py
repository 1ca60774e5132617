"""The profiles of all known repositories. `_profile` says what their fields mean and how to add one."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mezzo.tipc._profile import (
    DISTILL,
    FILE,
    FPGM,
    KEY1,
    KEY2,
    NO_LOG,
    NORM,
    PACT,
    REDIRECT,
    TEE,
    TERMINAL,
    TO_STATIC,
    USUAL_TRAINERS,
    OutputRule,
    Profile,
    Template,
    TrainingTemplates,
    template,
)

_LAUNCH: Template = ("<python>", "-m", "paddle.distributed.launch", "--gpus={gpu}")
_HOSTS: Template = ("<python>", "-m", "paddle.distributed.launch", "--ips={ips}", "--gpus={gpu}")
_LAUNCH_DEVICES: Template = ("<python>", "-m", "paddle.distributed.launch", "--devices={gpu}")
_HOSTS_DEVICES: Template = ("<python>", "-m", "paddle.distributed.launch", "--ips={ips}", "--devices={gpu}")
_GLOBAL_AMP = "Global.use_amp=True Global.scale_loss=1024.0 Global.use_dynamic_loss_scaling=True"
_CLAS_AMP = "-o AMP.use_amp=True -o AMP.scale_loss=128 -o AMP.use_dynamic_loss_scaling=True -o AMP.level="
_STATUS_1 = " - {cmd}!  "
_STATUS_2 = " - {model} - {cmd}!  "
_STATUS_3 = " - {model} - {cmd} - {log} "
_CPU_LOG = "usemkldnn_{mkldnn}_threads_{threads}_precision_{prec}_batchsize_{batch}"
_GPU_LOG = "usetrt_{trt}_precision_{prec}_batchsize_{batch}.log"

_OLD_ARGS = "<use_gpu> {gap}<save> {first} <autocast> <batch> <param1> <amp>"


def _trainings(
    args: str, gap: str = "_ ", end: str = "", heads: tuple[Template, Template] = (_LAUNCH, _HOSTS)
) -> TrainingTemplates:
    """Make the three templates: {gap} is an extra blank of plain ones, {first} the order of epoch and pretrain."""
    plain = args.format(gap=gap, first="<epoch> <pretrain>") + end
    launch = args.format(gap="", first="<epoch> <pretrain>")
    hosts = args.format(gap="", first="<pretrain> <epoch>")
    return TrainingTemplates(
        template(("<python>", "<run>"), plain),
        template((*heads[0], "<run>"), launch),
        template((*heads[1], "<run>"), hosts),
    )


_INFER_HEAD: Template = ("<python>", "<script>")
_OCR_CPU = template(_INFER_HEAD, "<gpu!> <mkldnn> <threads> <model> <batch> <p0> <data> <bench> <prec> <p1>")
_OCR_GPU = template(_INFER_HEAD, "<gpu!> <trt> <prec> <model> <batch> <data> <bench> <p1> <p0>")
_REC_CPU = template(_INFER_HEAD, "<gpu!> <mkldnn!> <threads> <model> <batch> <data> <bench> <prec> <p1>")
_REC_GPU = template(_INFER_HEAD, "<gpu!> <trt> <prec> <model> <batch> <data> <bench> <p1>")

_JUDGED = OutputRule(status="{save}.log")
_NLP_REDIRECT = OutputRule("text", "{log}", redirect=" >{log} 2>&1")

_OCR_2022 = Profile(
    "ocr-2022",
    "standard-51",
    lines_read=51,
    log_dir="./test_tipc/output/{model}",
    status=_STATUS_1,
    hosts_above=26,
    train=_trainings(_OLD_ARGS, end=" _"),
    amp={"amp": _GLOBAL_AMP},
    cpu_skip=("quant_nomkl", "fp16_nomkl", "quant_int8"),
    cpu=_OCR_CPU,
    gpu_skip=("nq_int8", "low_notrt"),
    gpu=_OCR_GPU,
    whole_gpu="",
    kl="layout",
    env_set=("training", "eval"),
    script_words=("func_inference",),
    dialects=("kl-20",),
)
_SPEECH = _OCR_2022.derive("speech", log_dir="./test_tipc/output", env_set=("eval",))
_OCR = _OCR_2022.derive(
    "ocr",
    lines_read=None,
    log_dir="./test_tipc/output/{model}/{mode}",
    status=_STATUS_3,
    hosts_above=15,
    train=_trainings("<use_gpu> {gap}<save> {first} _ <batch> <amp> <param1>"),
    trainers=(PACT, FPGM, DISTILL, TO_STATIC, KEY2),
    judged_by="{save}/train.log",
    follow_output=REDIRECT,
    cpu_skip=("fp16_nomkl", "quant_int8"),
    cpu_log=f"python_infer_cpu_gpus_{{gpu}}_{_CPU_LOG}.log",
    gpu_log=f"python_infer_gpu_gpus_{{gpu}}_{_GPU_LOG}",
    whole_log="{logs}_export_{index}.log",
    whole_gpu="0",
    kl="train",
    env_set=("eval",),
    output=_JUDGED,
    script_words=("func_inference", "train.log"),
    dialects=("standard-51",),
)
_TEMPLATE = _OCR_2022.derive(
    "template",
    log_dir="./test_tipc/output",
    carry="<checkpoint>",
    cpu=template(_INFER_HEAD, "<gpu!> <mkldnn!> <threads> <model> <batch> <p0> <data> <bench> <prec> <p1>"),
    gpu_skip=("nq_int8", "low_notrt", "q_strict"),
    whole_dir="{parent}",
    env_set=("devices",),
    env_removed=("before training", "after inference"),
    script_words=("func_inference", "load_norm_train_model"),
)
_NLP_EARLY = _TEMPLATE.derive(  # PaddleNLP's first scripts, which papers have copied
    "nlp-early",
    export=("<python>", "<export>", "<weight>", "<save_infer as written>", "<export1>"),
    model_dir="{save_infer}",
    model_sub="if set",
    cpu=_REC_CPU,
    gpu=_REC_GPU,
)
_SEG = Profile(
    "seg",
    "seg-52",
    status=_STATUS_3 + " ",
    banner=True,
    train=_trainings(_OLD_ARGS, heads=(_LAUNCH_DEVICES, _HOSTS_DEVICES)),
    amp={"amp": _GLOBAL_AMP},
    trainers=(*USUAL_TRAINERS, replace(TO_STATIC, script="{norm} {value}")),
    carry="<checkpoint>",
    output=TEE,
    last_line="in benchmarks",
    checkpoint_fallback="iter_{epoch}/model.pdparams",
    follow_output=TEE,
    model_file="deploy.yaml",
    cpu_skip=("quant_nomkl", "fp16_nomkl", "quant_int8", "nq_fp32"),
    cpu=template(_INFER_HEAD, "<gpu!> <mkldnn!> <threads> <model> <batch> <data> <bench> <prec> <p1r> <p2>"),
    cpu_log=f"python_infer_cpu_gpu_{{gpu}}_{_CPU_LOG}.log",
    cpu_results=f"python_infer_cpu_{_CPU_LOG}_results",
    gpu_skip=("nq_int8", "low_notrt", "q_strict"),
    gpu=template(_INFER_HEAD, "<gpu!> <trt> <prec> <model> <batch> <data> <bench> <p2>"),
    gpu_log=f"python_infer_gpu_gpu_{{gpu}}_{_GPU_LOG}",
    whole_dir="{parent}",
    kl="whole",
    env_set=("devices",),
    benchmark_amp={"fp16": "--amp_level=O2"},
    benchmark_keys={"Global.auto_cast": "--precision"},
    script_words=("deploy.yaml", "${model_name}/${MODE}"),
    dialects=("seg-52",),
)
_SEG_26 = _SEG.derive(  # reads every line, has no folder for the mode, passes the model's name to inference
    "seg-2.6",
    log_dir="./test_tipc/output/{model}",
    status=_STATUS_2,
    train=_trainings(_OLD_ARGS),
    trainers=USUAL_TRAINERS,
    carry="empty",  # the script never sets the weights that it means to carry over
    last_line="one pair",
    output=NO_LOG,
    follow_output=TERMINAL,
    cpu_log=f"python_infer_cpu_{_CPU_LOG}.log",
    gpu_log=f"python_infer_gpu_{_GPU_LOG}",
    kl="nothing",
    benchmark_amp={},
    benchmark_keys={},
    script_words=("deploy.yaml",),
)
_SEG_2022_04 = _SEG_26.derive(
    "seg-2022-04",
    lines_read=51,
    status=_STATUS_1,
    hosts_above=26,
    train=_trainings(_OLD_ARGS, end=" _"),
    carry="<checkpoint>",
    last_line="ignored",
    script_words=("deploy.yaml", "-le 26"),
)
_MEDSEG = _SEG_2022_04.derive(
    "medseg",
    lines_read=None,
    log_dir="./test_tipc/output/{model}/{mode}",
    status=_STATUS_2,
    hosts_above=15,
    train=_trainings(_OLD_ARGS.replace("<autocast>", "_")),
    output=TEE,
    follow_output=TEE,
    before_training=("pip install -r requirements.txt",),
    checkpoint_fallback="best_model/model.pdparams",
    kl="nothing",
    script_words=("best_model/model.pdparams",),
)
_CLAS_ARGS = "<use_gpu> <save> {first} <amp> <batch> <param1> -o Global.print_mem_info=True"
_CLAS_LAUNCHED = ("-o Global.log_ranks=0,1,2,3,4,5,6,7",)
_CLAS_TRAININGS = _trainings(_CLAS_ARGS, end=" _", heads=(_LAUNCH_DEVICES, _HOSTS_DEVICES))
_CLAS = Profile(
    "clas",
    "standard-51",
    epochs="ignored",
    batch="as written",
    log_dir="{root}/test_tipc/output/{model}/{mode}",
    status=_STATUS_3 + "! ",
    save_name="{log_name}{nodes}",
    train=TrainingTemplates(
        _CLAS_TRAININGS.plain, _CLAS_TRAININGS.launch + _CLAS_LAUNCHED, _CLAS_TRAININGS.hosts + _CLAS_LAUNCHED
    ),
    amp={"fp16": _CLAS_AMP + "O2", "amp": _CLAS_AMP + "O1"},
    amp_otherwise="-o AMP.use_amp=False",
    use_gpu="whole",
    trainers=(PACT, FPGM, DISTILL, replace(TO_STATIC, line="key1"), KEY2),
    judged_by="{save}/{sub}/train.log",
    pauses=True,
    checkpoint_sub="{model}/",
    special_subs={"GeneralRecognition": "RecModel/", "MetaBIN_ResNet50": "RecModel/"},
    follow_output=OutputRule("text", "{log}", redirect=" > {log} 2>&1"),
    model_sub="never",
    data="i_img",
    cpu=template(_INFER_HEAD, "<gpu!> <mkldnn!> <threads> <model> <batch> <data> <bench> <p1>"),
    cpu_log=f"python_infer_cpu_gpus_{{gpu}}_{_CPU_LOG}.log",
    gpu_skip=("true_notrt",),
    gpu=template(_INFER_HEAD, "<gpu!> <trt> <prec> <model> <batch> <data> <bench>"),
    gpu_log=f"python_infer_gpu_gpus_{{gpu}}_{_GPU_LOG}",
    infer_cwd="deploy",
    whole="quantised model",
    whole_sets_env=False,
    env_set=("devices",),
    env_removed=("after trainer",),
    output=_JUDGED,
    amp_of_models=dict.fromkeys(
        ("CLIP_vit_base_patch16_224", "SwinTransformer_base_patch4_window7_224_ampo2_ultra"),
        " -o Arch.use_fused_attn=True -o Arch.use_fused_linear=True",
    ),
    script_words=("CLS_ROOT_PATH",),
    dialects=("clas-52",),
)
_DET_ARGS = "log_iter=1 <use_gpu> <save> <epoch> <pretrain> <batch> <filename> <shuffle> <amp_level> <ce> <amp>"
_DET_ARGS += " <to_static> <param1>"
_DET = Profile(
    "det",
    "standard-51",
    first_colon=True,
    status=_STATUS_3 + " ",
    train=TrainingTemplates(
        template(("<python>", "<run>", "LearningRate.base_lr=0.0001"), _DET_ARGS),
        template((*_LAUNCH, "<run>"), _DET_ARGS),
        template((*_HOSTS, "<run>"), _DET_ARGS),
    ),
    amp={"amp": "--amp", "fp16": "--amp"},
    amp_level={"amp": "amp_level=O1", "fp16": "amp_level=O2"},
    use_gpu="whole-or-false",
    trainers=(
        NORM,
        *(rule.quoted() for rule in USUAL_TRAINERS),
        replace(TO_STATIC, script="{norm}", passes_value=True),
    ),
    skips_unknown_trainers=True,
    output=FILE,
    time_limit=300.0,
    checkpoint_sub="{model}/",
    evaluation=("<python>", "<eval>", "<weight>", "<use_gpu>", "<eval1>"),
    export=("<python>", "<export>", "<weight>", "<filename>", "<save_infer>", ""),
    follow_output=FILE,
    model_dir="{save}/{model}",
    model_sub="never",
    cpu_loops=("mkldnn", "threads", "batch"),
    cpu_skip=("quant_nomkl",),
    cpu=_CLAS.cpu,
    cpu_log="python_infer_cpu_gpus_{gpu}_usemkldnn_{mkldnn}_threads_{threads}_mode_paddle_batchsize_{batch}.log",
    gpu_loops=("prec", "batch"),
    gpu_skip=("det",),
    gpu=template(_INFER_HEAD, "<gpu!> <prec> <model> <batch> <data> <bench> <p1>"),
    gpu_log="python_infer_gpu_gpus_{gpu}_mode_{prec}_batchsize_{batch}.log",
    whole="kinds of export",
    whole_export=("<python>", "<export>", "<weight>", "<filename>", "<save_infer>", ""),
    kl="whole",
    env_set=("devices",),
    benchmark_time_limit=300.0,
    counts_launched_hosts=True,
    onnx_export=("<python>", "<export>", "<weight>", "<filename>", "export_onnx=True", "<save_infer>"),
    after_export=("cp {save}/{model}/* {save}/",),
    repository_files=("test_tipc/utils_func.sh",),
)
_YOLO = _DET.derive(
    "yolo",
    train=replace(_DET.train, hosts=(*_DET.train.hosts[:-2], "<to_static><param1>")),
    amp_level={"amp": "amp_level=O2", "fp16": "amp_level=O2"},
    time_limit=None,
    repository_files=("test_tipc/utils_func.sh", "configs/yolov5"),
)
_TUTORIAL_ARGS: Template = ("<run>", "<save>", "<epoch>", "<pretrain>", "<batch>")
_TUTORIAL = Profile(
    "tutorial",
    "tutorial-32",
    lines_read=32,
    status=_STATUS_2,
    save_name="{log_name}{nodes}.log",
    train=TrainingTemplates(("<python>", *_TUTORIAL_ARGS), (*_LAUNCH, *_TUTORIAL_ARGS), (*_HOSTS, *_TUTORIAL_ARGS)),
    use_gpu="never",
    hosts_env="first",
    trainers=(),
    evaluation=("<python>", "<eval>", "<checkpoint>"),
    follow_output=REDIRECT,
    model_sub="never",
    data="",
    cpu_loops=("batch",),
    cpu=template(_INFER_HEAD, "<gpu!> <model> <batch> <data> <bench>"),
    cpu_log="python_infer_cpu_batchsize_{batch}.log",
    gpu_loops=("batch",),
    gpu=template(_INFER_HEAD, "<gpu!> <model> <batch> <data> <bench>"),
    gpu_log="python_infer_gpu_batchsize_{batch}.log",
    whole="one model",
    env_set=("eval",),
    whole_log="{logs}/export_{index}.log",
    script_words=("trainer_py",),
    dialects=("tutorial-32",),
)
_TUTORIAL_EARLY = _TUTORIAL.derive(
    "tutorial-early",
    log_dir="./log/{model}/{mode}",
    status=_STATUS_1,
    log_name="{trainer}_gpus_{gpus}",
    save_name="{log_name}{hosts}",
    follow_output=TERMINAL,
    whole_log="",
    script_words=("trainer_py", "./log/${model_name}"),
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
_PARL = _TUTORIAL_EARLY.derive(
    "parl",
    at_the_end={
        "": ("{python} -m pip install --upgrade pip",),
        **{
            model: (
                *(("xparl stop",) if model in ("A2C", "ES") else ()),
                *(f"{{python}} -m pip uninstall {package} -y" for package in packages.split()),
            )
            for model, packages in _UNINSTALLED.items()
        },
    },
    script_words=("xparl",),
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
    extra_env={"FLAGS_cudnn_deterministic": "True"},
    trainers=(TO_STATIC,),
    judged_by="{save}/*/log.txt",
    follow_output=OutputRule("text", "{log}", redirect=" > {log} 2>&1"),
    export=("<python>", "<export>", "", "<checkpoint path>", "<save_infer key>", "<save path>"),
    model_sub="if set",
    cpu_skip=("quant_nomkl",),
    cpu=template(_INFER_HEAD, "<gpu!> <model>"),
    gpu_skip=("nq_int8", "low_notrt", "q_strict"),
    gpu=_REC_GPU,
    whole_dir="{parent}",
    whole_log="{logs}_export_{index}.log",
    kl="whole",
    env_set=("devices",),
    output=_JUDGED,
    passes_benchmark=False,
    whole_quantised="never",
    script_words=("set_export_weight_path",),
)
_3D = _GAN.derive(
    "3d",
    status=_STATUS_1,
    train=replace(
        _trainings(_GAN_ARGS),
        launch=template(
            (*_LAUNCH, "<run>"), "<use_gpu> <param1> <epoch> <pretrain> <batch> <amp> <amp_level> <param1>"
        ),
    ),
    judged_by="{save}/log.txt",
    before_training=("rm -rf {save}",),
    script_words=("rm -rf ${LOG_PATH}/${trainer}_gpus_${gpu}_autocast_${autocast}",),
)
_NLP = _OCR_2022.derive(
    "nlp",
    lines_read=None,
    log_dir="{root}/test_tipc/output/{model}/{mode}",
    status=_STATUS_3,
    save_name="{log_name}{nodes}",
    train=_trainings(_OLD_ARGS),
    trainers=(*USUAL_TRAINERS, TO_STATIC),
    output=_NLP_REDIRECT,
    launched_output=TERMINAL,
    follow_output=_NLP_REDIRECT,
    cpu_log=f"python_infer_cpu_gpus_{{gpu}}_{_CPU_LOG}.log",
    gpu_log=f"python_infer_gpu_gpus_{{gpu}}_{_GPU_LOG}",
    kl="whole",
    env_set=("eval",),
    script_words=("ROOT_PATH",),
)
_VIDEO_LAUNCH: Template = ("<python>", "-B", "-m", "paddle.distributed.launch", '--devices="{gpu}"')
_VIDEO_HOSTS: Template = ("<python>", "-B", "-m", "paddle.distributed.launch", "--ips={ips}", '--devices="{gpu}"')
_VIDEO = Profile(
    "video",
    "standard-51",
    epochs="as written",
    batch="as written",
    save_name="{log_name}{nodes}",
    train=_trainings(
        "<amp> <use_gpu> {gap}<save> {first} <batch> <param1> <param2>", heads=(_VIDEO_LAUNCH, _VIDEO_HOSTS)
    ),
    amp={"fp16": "--amp --amp_level 'O2'"},
    trainers=(PACT, FPGM, DISTILL, replace(KEY1, export="norm_export"), KEY2, TO_STATIC),
    carry="empty",
    output=OutputRule("text", "{logs}/train.log", "{save}.log", " > {log} 2>&1"),
    judged_by="{logs}/train.log",
    evaluation=("<python>", "<eval>", "<use_gpu>", "<eval1 checkpoint>"),
    follow_output=REDIRECT,
    model_sub="never",
    model_file="{i_model}",
    data="i_img",
    cpu_skip=("quant_nomkl", "fp16_nomkl", "quant_int8"),
    cpu=_REC_CPU,
    cpu_log=f"python_infer_cpu_gpus_{{gpu}}_{_CPU_LOG}.log",
    gpu_skip=("nq_int8", "low_notrt", "q_strict"),
    gpu=_REC_GPU,
    gpu_log=f"python_infer_gpu_gpus_{{gpu}}_{_GPU_LOG}",
    whole_dir="{parent}",
    whole_log="{logs}_export_{index}.log",
    whole_gpu="",
    kl="nothing",
    env_set=("devices",),
    short_training=" --max_iters=30",
    whole_training_slots={"<epoch>": "", "<batch>": " ", "<param1>": " ", "<param2>": " "},
    checkpoint="{save}/{pp_model}_epoch_00001.pdparams",
    script_words=("--max_iters=30",),
)
_REC = _TEMPLATE.derive(
    "rec",
    train_model="by mode",
    log_dir="./test_tipc/output/{model}/{mode}",
    status_file="results.log",
    status=" - {model} - {cmd} - {log}!  ",
    save_name="{log_name}{nodes}.log",
    train=replace(_trainings(_OLD_ARGS, end=" _", heads=(_LAUNCH, _HOSTS_DEVICES)), launch=()),
    output=OutputRule("file", "{save}.log", "{save}"),
    launched_output=OutputRule(status="{save}"),
    follow_output=OutputRule(status="{save}"),
    cpu=_REC_CPU,
    cpu_log=f"python_infer_cpu_gpus_{{device}}_{_CPU_LOG}.log",
    gpu=_REC_GPU,
    gpu_log=f"python_infer_gpu_gpus_{{device}}_{_GPU_LOG}",
    kl="nothing",
    script_words=("results.log",),
)
_RS_ARGS = "<config> <use_gpu> <save> {first} <autocast> <batch> <param1> <amp>"
_RS = Profile(
    "rs",
    "rs-53",
    log_dir="./test_tipc/output/{task}/{model}/{mode}",
    status=_STATUS_2,
    banner=True,
    train=_trainings(_RS_ARGS),
    amp={"amp": _GLOBAL_AMP},
    amp_otherwise="",
    carry="<checkpoint pdparams>",
    output=TEE,
    evaluation=("<python>", "<eval>", "<checkpoint pdparams>", "<use_gpu>", "<eval1>"),
    export=("<python>", "<export>", "<weight>", "<save_infer static>", "<shape>"),
    follow_output=TEE,
    model_dir="{save}/static",
    cpu_loops=("mkldnn", "prec", "threads", "batch"),
    cpu_skip=("mkl_required",),
    cpu=template(_INFER_HEAD, "<config> <gpu> <mkldnn> <threads> <model> <batch> <bench> <prec> <p1> <p2>"),
    gpu_skip=("fp16_notrt",),
    gpu=template(_INFER_HEAD, "<config> <gpu> <trt> <prec> <model> <batch> <bench> <p2>"),
    infer_tee=True,
    env_set=("devices",),
    task_before_model=True,
    whole_needs_model=True,
    whole_dir="{model}/static",
    whole_export=("<python>", "<export>", "<weight>", "<save_infer>", "<shape>"),
    whole_quantised="value",
    script_words=("task_name",),
    dialects=("rs-53",),
)
_PANOPTIC = _RS.derive(
    "panoptic",
    layout="panoptic-55",
    log_dir="./test_tipc/output/{model}/{mode}",
    train=_trainings(_RS_ARGS, heads=(_LAUNCH_DEVICES, _HOSTS_DEVICES)),
    export=("<python>", "<export>", "<export config>", "<weight pdparams>", "<save_infer static>", "<shape apart>"),
    model_sub="always",
    model_file="deploy.yaml",
    cpu=template(_INFER_HEAD, "<model> <data> <gpu> <mkldnn> <threads> <batch> <bench> <prec> <p1> <p2>"),
    gpu=template(_INFER_HEAD, "<model> <data> <gpu> <trt> <prec> <batch> <bench> <p2>"),
    env_removed=("after trainer",),
    task_before_model=False,
    # whole_infer uses variables of the training branch, which are empty there
    whole_export=("<python>", "", "<export config>", "<weight pdparams>", "<unset>", "<shape apart>"),
    script_words=("export_config_key",),
    dialects=("panoptic-55",),
)
_DBNET = _OCR.derive(
    "dbnet",
    amp={"amp": "amp.scale_loss=1024.0 amp.use_dynamic_loss_scaling=True amp.amp_level=O2"},
    amp_otherwise="amp=None",
    script_words=("amp.scale_loss",),
)
_PASSL = _CLAS.derive(
    "passl",
    layout="passl",
    epochs="by mode",
    log_dir="./log/{model}/{mode}",
    status=_STATUS_2,
    save_name="{log_name}{hosts}",
    hosts_above=26,
    train=_trainings("<use_gpu> {gap}<save> {first} <autocast> <batch> <param1>", end=" _"),
    amp={},
    amp_otherwise=" ",
    trainers=USUAL_TRAINERS,
    judged_by="",
    checkpoint_sub="{model}/",
    export=("<python>", "<export>", "<weight>", "<save_infer>", "<linear>"),
    follow_output=TERMINAL,
    cpu_loops=("mkldnn", "threads", "batch"),
    cpu_skip=("quant_nomkl",),
    cpu_log="infer_cpu_usemkldnn_{mkldnn}_threads_{threads}_batchsize_{batch}.log",
    gpu_skip=("true_notrt", "q_strict"),
    gpu_log=f"infer_gpu_{_GPU_LOG}",
    whole="deploy folder",
    whole_sets_env=True,
    env_removed=("before training", "after trainer"),
    default_epochs="2",
    special_subs={},
    output=NO_LOG,
    script_words=("lin_py",),
    dialects=("passl",),
)
_SUPPLEMENTARY = Profile(
    "supplementary",
    "supplementary",
    log_dir="./test_tipc/extra_output",
    status=_STATUS_1,
    hosts_above=26,
    train=_trainings(
        "<use_gpu> <unset> <unset> <epoch> <pretrain> <checkpoints> <unset> <autocast> <batch> _ <list1> <list2> <list3> <amp>",
        gap="",
    ),
    amp={"amp": "AMP.use_amp=True"},
    trainers=(),
    loops_over="lists",
    dialects=("supplementary",),
    env_removed=("before training",),
)
_MEZZO_LAUNCH: Template = ("<python>", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node={count}")
_MEZZO_HOSTS: Template = (
    "<python>",
    "-m",
    "torch.distributed.run",
    "--nnodes={nodes}",
    "--nproc_per_node={count}",
    "--rdzv_backend=c10d",
)
_MEZZO_HOSTS = (*_MEZZO_HOSTS, "--rdzv_endpoint={master}:29400")
_MEZZO = _SEG.derive(
    "mezzo",
    train=_trainings(_OLD_ARGS, heads=(_MEZZO_LAUNCH, _MEZZO_HOSTS)),
    cpu_known=_SEG_26.cpu_log,
    gpu_known=_SEG_26.gpu_log,
    runs_mezzo=True,
    dialects=("seg-52",),
)
_MEZZO_TUTORIAL = _TUTORIAL.derive(
    "mezzo-tutorial",
    train=TrainingTemplates(
        ("<python>", *_TUTORIAL_ARGS), (*_MEZZO_LAUNCH, *_TUTORIAL_ARGS), (*_MEZZO_HOSTS, *_TUTORIAL_ARGS)
    ),
    runs_mezzo=True,
    dialects=("tutorial-32",),
)

# In the order in which a repository's script is compared with them: what more words tell comes first.
PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            _YOLO,
            _DET,
            _CLAS,
            _PASSL,
            _VIDEO,
            _NLP,
            _3D,
            _GAN,
            _REC,
            _RS,
            _PANOPTIC,
            _DBNET,
            _MEDSEG,
            _SEG_2022_04,
            _SEG,
            _SEG_26,
            _PARL,
            _TUTORIAL_EARLY,
            _TUTORIAL,
            _OCR,
            _TEMPLATE,
            _OCR_2022,
            _SPEECH,
            _SPEECH.derive("science", dialects=("science",)),
            _NLP_EARLY,
            _SUPPLEMENTARY,
            _MEZZO,
            _MEZZO_TUTORIAL,
        )
    }
)
