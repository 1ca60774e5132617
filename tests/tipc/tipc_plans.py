"""Texts, plans and runs that several tests use."""

import json
import sys
from pathlib import Path

from mezzo.tipc import LineProgress, MachineInfo, Plan, PlanStep, RunnerOptions, load_run, run_plan

MODE = "lite_train_lite_infer"
CONFIG = """\
===train_params===
model_name:net
python:python3.7
gpu_list:0|0,1
use_gpu:null|null
cast:null
--iters:lite_train_lite_infer=5
--save_dir:
--batch_size:lite_train_lite_infer=2
--model_path:null
train_model_name:best_model/model.pdparams
train_infer_img_dir:img
null:null
##
trainer:amp_train
amp_train:tools/train.py --config configs/net/net.yml --precision fp16 --amp_level O1
pact_train:null
fpgm_train:null
distill_train:null
null:null
null:null
##
===eval_params===
eval:null
null:null
##
===export_params===
--save_dir:
--model_path:
norm_export:tools/export.py --config configs/net/net.yml
quant_export:null
fpgm_export:null
distill_export:null
export1:null
export2:null
===infer_params===
infer_model:null
infer_export:null
infer_quant:False
inference:deploy/python/infer.py
--device:cpu|gpu
--enable_mkldnn:True
--cpu_threads:6
--batch_size:1
--use_trt:False
--precision:fp32|fp16
--config:
--image_path:img
--save_log_path:null
--benchmark:True
--save_dir:
--model_name:net
"""

RECIPE = """\
batch_size: 4
iters: 100
train_dataset: {type: Cityscapes, dataset_root: d, mode: train, transforms: [{type: Normalize}]}
model: {type: PPLiteSeg, backbone: {type: STDC1, pretrained: 'https://h/w.tar.gz'}}
loss: {types: [{type: CrossEntropyLoss}], coef: [1, 1, 1]}
optimizer: {type: sgd}
lr_scheduler: {type: PolynomialDecay, learning_rate: 0.01}
"""

EXAMPLES = [json.loads(line) for line in Path(__file__).with_name("examples.jsonl").read_text("utf-8").splitlines()]
"""Commands that real repositories ran, with the texts they ran."""


def write_repository(folder):
    """Write a configuration, `c.txt`, whose commands are small scripts of its own."""
    config = CONFIG.replace("python3.7", Path(sys.executable).name).replace("gpu_list:0|0,1", "gpu_list:-1")
    (folder / "c.txt").write_text(config)
    for name in ("tools/train.py", "tools/export.py", "deploy/python/infer.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("import sys; print(sys.argv)")
    (folder / "configs/net").mkdir(parents=True)
    (folder / "configs/net/net.yml").write_text("")


def plan_of(*steps, model="m", mode=MODE):
    return Plan(model, mode, "seg", "out", "out/results_python.log", False, tuple(steps))


def step(name, command, *, needs=(), kind=None, **more):
    more.setdefault("status", f" - m - {command} - ")
    kind = kind or name.split("-")[0]
    return PlanStep(name, kind, command, command, log=f"out/{name}.log", needs=tuple(needs), **more)


def run_here(folder, plan, progress=None, machine=None, **options):
    """Run a plan in a folder and return status, records by step, and the lines that were shown."""
    lines = []
    result = run_plan(
        plan,
        root=folder,
        folder=folder / "run",
        config=Path("c.txt"),
        config_text="text",
        machine=machine or MachineInfo(0, 2, {"GPUs": "none"}, {}),
        options=RunnerOptions(**options),
        progress=progress or LineProgress(lines.append),
    )
    records = {record.step: record for record in load_run(folder / "run").records}
    return result, records, lines


def planned_lines(plan, failed=()):
    """Return the lines that a run of a plan writes to the status file; `failed` are commands that fail."""
    lines = [plan.banner_line] if plan.banner else []
    steps = [step for step in plan.steps if step.status is not None]
    return lines + [step.status_line(" ".join(step.words) not in failed) for step in steps]
