"""From fields to steps: the commands a repository's script would run, in its order, without running anything."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from posixpath import dirname
from typing import Any

from mezzo.tipc._config import Config, ConfigError, Line, parse
from mezzo.tipc._profiles import Profile
from mezzo.tipc._skips import skip_reason
from mezzo.tipc._text import argument, for_mode, item, items, matches, same, says

CVD = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Step:
    """One command of a plan."""

    name: str
    kind: str  # train, eval, export, infer, quantise, extract, linear, shell
    text: str  # as the script composes it, with all its blanks
    env: Mapping[str, str | None] = field(default_factory=dict)  # what the script sets; None: what it removes
    enter: tuple[str, ...] = ()  # changes of directory before it, one after the other, from where the last step was
    log: str = ""  # the file that holds its output, empty where it goes to the terminal only
    output: str = "inherited"  # inherited | tee | file | text (the redirection is part of the text)
    status: str | None = None  # what follows 'Run successfully with command'; None: no line
    judged_by: str = ""  # pattern of the file whose copying the script takes for success; empty: the exit status
    time_limit: float | None = None
    checkpoint: str = ""  # after training: the weights that later steps expect
    fallback: str = ""  # and what they take where that file is missing
    pattern: str = ""  # a path in the text whose wildcards the script expands when it composes the command
    needs: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The steps of one configuration in one mode."""

    model: str
    mode: str
    profile: str
    log_dir: str
    status_file: str
    banner: bool
    steps: tuple[Step, ...]
    left_out: tuple[str, ...] = ()  # combinations that the matrix skips, with the rule
    failure: str = ""  # the script ends here with status 1 and this message

    def as_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan back; raises ValueError that names what is wrong."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        plan = _made(Plan, values, ("left_out",), "plan")
        steps = values["steps"]
        if not isinstance(steps, list):
            raise ValueError("'steps' is no list")
        return replace(plan, steps=tuple(_made(Step, step, ("enter", "needs", "notices"), "step") for step in steps))


def _made(kind: Any, values: Any, tuples: tuple[str, ...], what: str) -> Any:
    names = {each.name for each in fields(kind)}
    if not isinstance(values, dict) or not set(values) <= names:
        unknown = sorted(set(values) - names) if isinstance(values, dict) else [type(values).__name__]
        raise ValueError(f"a {what} has no {', '.join(unknown)}")
    kept = {name: tuple(value) if name in tuples else value for name, value in values.items()}
    try:
        return kind(**kept)
    except TypeError as error:
        raise ValueError(f"incomplete {what}: {error}") from None


def make_plan(text: str, mode: str, profile: Profile, root: str = "$ROOT", gpu_id: str = "", fallback_from: str = "") -> Plan:
    """Plan a text in a mode.

    Args:
        text: The configuration.
        mode: lite_train_lite_infer and so on.
        profile: Whose commands.
        root: What the scripts that use absolute paths take for the working directory.
        gpu_id: Third argument of the scripts, of inference modes.
        fallback_from: Name of the training after which the expected weights were missing.

    """
    return _Planner(text, mode, profile, root, gpu_id, fallback_from).plan()


@dataclass(frozen=True)
class _Devices:
    """One entry of the list of device sets, as the scripts take it apart."""

    index: int
    text: str  # after the hosts were taken off
    ips: str
    env: str  # value for CUDA_VISIBLE_DEVICES, empty for none
    one: bool

    def nodes(self, above: int) -> int:
        return len(items(self.ips, ",")) if len(self.ips) > above else 1


@dataclass
class _Run:
    """What one training knows: the values of its slots."""

    devices: _Devices
    trainer: str
    autocast: str
    nodes: int
    save: str
    base: str
    quantised: str
    slots: dict[str, str]
    train: str = ""  # name of the training step
    last: str = ""  # name of the export


class _Planner:
    def __init__(self, text: str, mode: str, profile: Profile, root: str, gpu_id: str, fallback_from: str) -> None:
        self.mode, self.profile, self.gpu_id, self.fallback_from = mode, profile, gpu_id, fallback_from
        self.kl = mode == "klquant_whole_infer" and profile.kl == "layout"
        self.config = parse(text, profile, "kl-20", 17) if self.kl else parse(text, profile)
        if mode == "klquant_whole_infer" and profile.kl == "nothing":
            self.config = parse("", profile)
        self.log = profile.log_dir.format(root=root, model=self.config.model, mode=mode, task=self.config["task"].value)
        self.steps: list[Step] = []
        self.left_out: list[str] = []
        self.env: dict[str, str | None] = {}
        self.enter: list[str] = []
        self.counts: dict[str, int] = {}
        self.carried = ""  # weights of the last plain training
        self.weight = ""  # argument of the last export: one case of PaddleClas uses an old one
        self.failure = ""
        self.train_model = self._train_model()
        self.linear = ""  # PASSL: an argument that exports repeat once a linear classifier was trained

    # -- fields ---------------------------------------------------------------------------------------------------------------------------

    def _train_model(self) -> str:
        line = self.config["train_model"]
        return for_mode(line.value, self.mode) if self.profile.train_model == "mode" else line.value

    def _epoch(self) -> str:
        line, rule = self.config["epoch"], self.profile.epoch
        if rule == "clas":
            return "1" if self.mode == "benchmark_train" or self.config["use_gpu"].value == "npu" else "2"
        value = line.value if rule == "plain" else for_mode(line.value, self.mode)
        return value or ("2" if self.profile.name == "passl" else "")

    def _batch(self) -> str:
        line = self.config["batch"]
        return line.value if self.profile.batch == "plain" else for_mode(line.value, self.mode)

    def _pair(self, name: str, value: str | None = None) -> str:
        line = self.config[name]
        return argument(line.key, line.value if value is None else value)

    # -- steps ----------------------------------------------------------------------------------------------------------------------------

    def _add(self, kind: str, text: str, **more: Any) -> str:
        count = self.counts[kind] = self.counts.get(kind, 0) + 1
        name = f"{kind}-{count}"
        self.steps.append(Step(name, kind, text, dict(self.env), tuple(self.enter), **more))
        self.enter.clear()
        return name

    def _tail(self, text: str, log: str) -> str:
        return self.profile.tail.format(model=self.config.model, cmd=text, log=log)

    def _export_env(self, devices: _Devices) -> None:
        if devices.env:
            self.env[CVD] = devices.env

    # -- whole ----------------------------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        profile = self.profile
        for command in profile.before_training:
            if "{" not in command:
                self._add("shell", command)
        inference = self.mode == "whole_infer" or (self.mode == "klquant_whole_infer" and profile.kl != "train")
        if profile.name == "supplementary":
            self._supplementary()
        elif inference:
            self._whole_infer()
        else:
            for devices in self._device_sets():
                self._device_set(devices)
        return Plan(
            self.config.model,
            self.mode,
            profile.name,
            self.log,
            f"{self.log}/{profile.status_file}",
            profile.banner,
            tuple(self.steps),
            tuple(dict.fromkeys(self.left_out)),
            self.failure,
        )

    def _device_sets(self) -> Iterator[_Devices]:
        profile = self.profile
        for index, text in enumerate(items(self.config["gpu_list"].value)):
            ips, env = "", ""
            if text == "-1":
                pass
            elif len(text) <= 1:
                env = text
            elif len(text) <= 15:
                env = text if profile.several_env == "all" else item(text.replace(",", "|"), 0)
            else:
                parts = items(text, ";")
                ips = parts[0] if parts else ""
                text = parts[1] if len(parts) > 1 else ""
                env = item(text.replace(",", "|"), 0) if profile.hosts_env == "first" else ""
            yield _Devices(index, text, ips, env, one=len(text) <= 1 and not ips)

    def _device_set(self, devices: _Devices) -> None:
        profile = self.profile
        if profile.env_on_entry and devices.one:
            self._export_env(devices)
        casts = items(self.config["autocast"].value) if "autocast" in _names(profile) else [""]
        for autocast in casts:
            for trainer in items(self.config["trainer"].value):
                self._trainer(devices, autocast, trainer)

    def _chosen(self, trainer: str) -> tuple[str, str, str, str] | None:
        """Return script, export, quantised and the to_static argument of a trainer; None: it is not run."""
        config = self.config
        exports = {"key1": "export1", "key2": "export2"}
        for name in self.profile.trainers:
            line = config["key1" if name in ("static19", "amp19") else name]
            if name.startswith("static") and name != "static19":
                line = config.to_static
            hit = matches(trainer, line.key) if name == "key2" and self.profile.name not in ("det", "yolo") else same(trainer, line.key)
            if not hit:
                continue
            norm, norm_export = config["norm"].value, config["norm_export"].value
            if name == "static-argument":
                return norm, norm_export, "False", line.value
            if name.startswith("static"):
                return norm + (" " if name == "static1" else "  ") + line.value, norm_export, "False", ""
            if name == "amp19":
                return line.value, norm_export, "False", ""
            export = config[exports.get(name, f"{name}_export")].value
            return line.value, export, "True" if name == "pact" else "False", ""
        if self.profile.unknown_trainer == "skipped":
            return None
        return config["norm"].value, config["norm_export"].value, "False", ""

    # -- training -------------------------------------------------------------------------------------------------------------------------

    def _trainer(self, devices: _Devices, autocast: str, trainer: str) -> None:
        profile, config = self.profile, self.config
        chosen = self._chosen(trainer)
        if chosen is None or chosen[0] == "null":
            return
        script, export, quantised, to_static = chosen
        whole_train = "whole_train" in self.mode
        if profile.name == "video" and self.mode != "benchmark_train" and not whole_train:
            script += " --max_iters=30"
        if "autocast" not in _names(profile):
            autocast = "True" if trainer == "amp_train" else "False"
        nodes = devices.nodes(profile.hosts_above)
        base = f"{self.log}/{trainer}_gpus_{devices.text}_autocast_{autocast}"
        if profile.save_suffix == "early":
            base = f"{self.log}/{trainer}_gpus_{devices.text}"
        several = len(devices.ips) > profile.hosts_above
        save = base + {
            "hosts": f"_nodes_{nodes}" if several else "",
            "early": f"_nodes_{nodes}" if several else "",
            "always": f"_nodes_{nodes}",
            "log": f"_nodes_{nodes}.log",
        }[profile.save_suffix]
        slots = self._training_slots(devices, autocast, script, save, to_static)
        if profile.carry and nodes <= 1 and trainer in (config["pact"].key, config["fpgm"].key):
            slots["<pretrain>"] = self.carried if profile.carry == "norm" else ""
        if profile.name == "video" and whole_train:
            slots.update({"<epoch>": "", "<batch>": " ", "<param1>": " ", "<param2>": " "})
        run = _Run(devices, trainer, autocast, nodes, save, base, quantised, slots)
        if not self._train(run):
            return
        self._after_training(run, export)
        if profile.env_removed == "trainer":
            self.env[CVD] = None

    def _training_slots(self, devices: _Devices, autocast: str, script: str, save: str, to_static: str) -> dict[str, str]:
        profile, config = self.profile, self.config
        benchmark = self.mode == "benchmark_train"
        use_gpu = {
            "item": lambda: self._pair("use_gpu", item(config["use_gpu"].value, devices.index)),
            "whole": lambda: self._pair("use_gpu"),
            "whole-or-false": lambda: self._pair("use_gpu", "False" if devices.text == "-1" else None),
            "never": lambda: " ",
        }[profile.use_gpu]()
        key = config["autocast"].key
        amp = profile.amp.get(autocast, profile.amp_otherwise)
        if profile.name in ("seg", "mezzo") and benchmark:
            key = "--precision" if key == "Global.auto_cast" else key
            amp = "--amp_level=O2" if autocast == "fp16" else amp
        if profile.name == "clas" and autocast in ("amp", "fp16") and any(
            word in config.model for word in ("CLIP_vit_base_patch16_224", "SwinTransformer_base_patch4_window7_224_ampo2_ultra")
        ):
            amp += " -o Arch.use_fused_attn=True -o Arch.use_fused_linear=True"
        count = len(items(devices.text, ",")) or 1
        return {
            "<python>": config["python"].value,
            "<run>": script,
            "<use_gpu>": use_gpu,
            "<save>": self._pair("save", save),
            "<epoch>": self._pair("epoch", self._epoch()),
            "<pretrain>": self._pair("pretrain"),
            "<autocast>": argument(key, autocast),
            "<batch>": self._pair("batch", self._batch()),
            "<param1>": self._pair("param1"),
            "<param2>": self._pair("train_img"),
            "<config>": self._pair("config", for_mode(config["config"].value, self.mode)),
            "<filename>": argument("filename", config.model),
            "<shuffle>": "TrainReader.shuffle=False" if benchmark else " ",
            "<ce>": "--enable_ce=True" if benchmark else " ",
            "<amp>": amp,
            "<amp_level>": profile.amp_level.get(autocast, " "),
            "<to_static>": to_static,
            "<checkpoints>": self._pair("checkpoints"),
            "<unset>": " ",
            "{gpu}": devices.text,
            "{ips}": devices.ips,
            "{count}": str(count),
            "{nodes}": str(devices.nodes(profile.hosts_above)),
            "{master}": item(devices.ips.replace(",", "|"), 0),
        }

    def _filled(self, template: tuple[str, ...], slots: Mapping[str, str]) -> str:
        def fill(slot: str) -> str:
            if slot in slots:
                return slots[slot]
            for name in ("{gpu}", "{ips}", "{count}", "{nodes}", "{master}", "<to_static>", "<param1>"):
                if name in slot:
                    slot = slot.replace(name, slots.get(name, ""))
            return slot

        return " ".join(fill(slot) for slot in template)

    def _train(self, run: _Run) -> bool:
        profile, devices = self.profile, run.devices
        plain = len(devices.text) <= 2
        hosts = not plain and len(devices.ips) > profile.hosts_above
        template = profile.plain if plain else profile.hosts if hosts else profile.launch
        if not template:
            self.left_out.append(f"training on {devices.text}: the multi-card branch of this repository's script runs nothing")
            return False
        text = self._filled(template, run.slots)
        if profile.name in ("seg", "mezzo") and self.mode == "benchmark_train":
            for name in ("log_iters", "repeats"):
                if self.config.extra.get(name):
                    text += f" --{name} {self.config.extra[name]}"
        for command in profile.before_training:
            if "{" in command:
                self._add("shell", command.format(save=run.save))
        if profile.env_removed_before_training:
            self.env[CVD] = None
        if profile.env_before_plain and plain:
            self._export_env(devices)
        self.env.update(profile.extra_env)
        if profile.pauses:
            self._add("shell", "sleep 5")
        output, log, shown = "inherited", "", ""
        full = f"{run.base}_nodes_{run.nodes}.log"
        if profile.output == "tee":
            output, log, shown = "tee", full, full
        elif profile.output == "file":
            output, log, shown = "file", full, full
        elif profile.output == "text" and plain:
            output, log, shown = "text", full, full
            text += f" >{full} 2>&1"
        elif profile.output == "text":
            shown = full
        elif profile.output == "video":
            output, log, shown = "text", f"{self.log}/train.log", f"{run.save}.log"
            text += f" > {log} 2>&1"
        elif profile.output == "rec":
            output, log, shown = ("file", f"{run.save}.log", run.save) if plain else ("inherited", "", run.save)
        elif profile.judged_by:
            shown = f"{run.save}.log"
        checkpoint = f"{run.save}/{self._sub()}{self.train_model}"
        fallback = ""
        if profile.checkpoint_fallback:
            fallback = profile.checkpoint_fallback.format(epoch=self._epoch())
        judged = profile.judged_by.format(save=run.save, log=self.log, sub=self._sub().rstrip("/"))
        limit = profile.time_limit if profile.name == "det" or self.mode == "benchmark_train" else None
        run.train = self._add(
            "train",
            text,
            log=log,
            output=output,
            status=self._tail(text, shown),
            judged_by=judged,
            time_limit=limit,
            checkpoint=checkpoint,
            fallback=fallback,
            labels=self._labels(run),
        )
        if profile.pauses:
            self._add("shell", "sleep 5")
        if fallback and self.fallback_from == run.train:
            self.train_model = fallback
        return True

    def _labels(self, run: _Run) -> dict[str, str]:
        return {"devices": run.devices.text, "nodes": str(run.nodes), "trainer": run.trainer, "autocast": run.autocast}

    def _sub(self) -> str:
        rule, model = self.profile.checkpoint_sub, self.config.model
        if rule == "clas" and ("GeneralRecognition" in model or "MetaBIN_ResNet50" in model):
            return "RecModel/"
        return f"{model}/" if rule else ""

    # -- what follows a training ----------------------------------------------------------------------------------------------------------

    def _after_training(self, run: _Run, export: str) -> None:
        profile, config = self.profile, self.config
        path = f"{run.save}/{self._sub()}{self.train_model}"
        if profile.name == "video":
            path = f"{run.save}/{config.model.replace('PP-', 'pp', 1)}_epoch_00001.pdparams"
        slots = run.slots
        slots["<checkpoint>"] = self._pair("pretrain", path)
        slots["<checkpoint path>"] = path
        slots["<checkpoint pdparams>"] = self._pair("pretrain", f"{path}/model.pdparams")
        weight = self._pair("weight", path)
        if self._sub() == "RecModel/":
            weight = self.weight  # the script forgets to set it
        self.weight = slots["<weight>"] = weight
        slots["<weight pdparams>"] = self._pair("weight", f"{path}/model.pdparams")
        slots["<eval>"] = config["eval"].value
        slots["<eval1>"] = self._pair("eval1")
        if profile.carry == "norm" and run.trainer == config["norm"].key and run.nodes <= 1:
            self.carried = slots["<checkpoint pdparams>"] if profile.name in ("rs", "panoptic") else slots["<checkpoint>"]
        last = run.train
        if profile.name == "passl":
            last = self._extract(run, path)
        if says(config["eval"].value):
            if profile.env_before_eval:
                self._export_env(run.devices)
            if profile.name == "video":
                slots["<video eval>"] = self._pair("eval1", path)
                key = config["param1"].key if "whole_train" not in self.mode else ""
                if "lite_infer" in self.mode and key != "null":
                    slots["<video eval>"] += f" {key}={config['param1'].value}"
            self._follow("eval", run, profile.evaluation, f"{run.base}_nodes_{run.nodes}_eval.log", last)
            if profile.pauses:
                self._add("shell", "sleep 5")
        if says(export):
            self._export(run, export, last)

    def _follow(self, kind: str, run: _Run, template: tuple[str, ...], log: str, needs: str) -> str:
        """Add an evaluation or an export."""
        profile = self.profile
        redirect = profile.redirect
        text = self._filled(template, run.slots) + redirect.format(log=log)
        output = "text" if redirect else profile.outside or "inherited"
        shown = run.save if profile.name == "rec" else log
        return self._add(
            kind,
            text,
            log=log if output != "inherited" else "",
            output=output,
            status=self._tail(text, shown),
            pattern=run.slots["<checkpoint path>"] if "<checkpoint path>" in template and "*" in run.slots["<checkpoint path>"] else "",
            needs=(needs,) if needs else (),
            labels=self._labels(run),
        )

    def _extract(self, run: _Run, path: str) -> str:
        """PASSL's own steps between training and export: the weights of the backbone, then a linear classifier on them."""
        config, needs = self.config, run.train
        taken = f"{run.save}/{self._sub()}{config['extract2'].value}"
        if says(config["extract"].value):
            words = (config["python"].value, config["extract"].value, path, self._pair("extract1"), self._pair("extract2", taken))
            text = " ".join((*words, "--remove_prefix"))
            needs = self._add("extract", text, status=self._tail(text, ""), needs=(needs,), labels=self._labels(run))
            self._add("shell", "sleep 5")
        if says(config["linear"].value):
            slots = run.slots
            words = (config["python"].value, config["linear"].value, slots["<batch>"], slots["<use_gpu>"], slots["<save>"])
            more = (slots["<epoch>"], self._pair("linear1", taken), slots["<autocast>"], self._pair("linear2"), "")
            text = " ".join((*words, *more))
            self._add("linear", text, status=self._tail(text, ""), needs=(needs,), labels=self._labels(run))
            self.linear = self._pair("linear2")
            self._add("shell", "sleep 5")
        return needs

    def _export(self, run: _Run, export: str, needs: str) -> None:
        profile, config, slots = self.profile, self.config, run.slots
        slots["<export>"] = export
        slots["<save_infer>"] = self._pair("save_infer", run.save)
        slots["<save_infer as written>"] = self._pair("save_infer")
        slots["<export1>"] = self._pair("export1")
        slots["<linear>"] = self.linear
        slots["<save_infer key>"] = config["save_infer"].key
        slots["<save path>"] = run.save
        slots["<save_infer static>"] = self._pair("save_infer", f"{run.save}/static")
        slots["<shape>"] = self._pair("shape")
        slots["<shape apart>"] = argument(config["shape"].key, config["shape"].value, " ")
        slots["<export config>"] = argument(config["xconfig"].key, for_mode(config["config"].value, self.mode))
        log = f"{run.base}_nodes_{run.nodes}_export.log"
        if profile.name in ("det", "yolo") and config["export2"].key == "export_onnx":
            template = (*profile.export[:4], "export_onnx=True", "<save_infer>")
            onnx_log = f"{run.base}_nodes_{run.nodes}_onnx_export.log"
            text = self._filled(template, slots) + f" >{onnx_log} 2>&1"
            status = self._tail(text, onnx_log)
            self._add("export", text, log=onnx_log, output="text", status=status, needs=(needs,), labels=self._labels(run))
        run.last = self._follow("export", run, profile.export, log, needs)
        self._export_env(run.devices)
        data = {"train_img": config["train_img"].value, "i_img": config["i_img"].value, "none": ""}[profile.data]
        log_dir = self.log
        if profile.infer_cwd:
            self.enter.append(profile.infer_cwd)
            if profile.name == "passl":
                log_dir = f"../{self.log}"
        self._matrix(self._model_dir(run.save), log_dir, data, run.quantised, run.devices.text, run)
        if profile.infer_cwd:
            self.enter.append("..")
        if profile.env_removed == "inference":
            self.env[CVD] = None

    def _model_dir(self, save: str) -> str:
        sub = self.config["infer_dir"].value
        rule = self.profile.model_dir
        if rule == "as-written":
            save, rule = self.config["save_infer"].value, "sub-unless-empty"
        if rule == "plain":
            return f"../{save}" if self.profile.name == "passl" else save
        if rule == "model":
            return f"{save}/{self.config.model}"
        if rule == "video":
            return save
        if rule == "sub-unless-empty":
            return f"{save}/{sub}" if says(sub) and sub != "##" else save
        if rule == "static-deploy":
            return f"{save}/static/{sub}"
        if rule == "static":
            save += "/static"
        return save if sub in ("null", "##") else f"{save}/{sub}"

    # -- inference ------------------------------------------------------------------------------------------------------------------------

    def _matrix(self, model: str, log_dir: str, data: str, quantised: str, gpu: str, run: _Run | None, needs: str = "") -> None:
        """Add the inference commands of one exported model."""
        profile, config = self.profile, self.config
        lists = {
            "mkldnn": items(config["i_mkldnn"].value),
            "threads": items(config["i_threads"].value),
            "batch": items(config["i_batch"].value),
            "prec": items(config["i_prec"].value),
            "trt": items(config["i_trt"].value),
        }
        for device in items(config["i_gpu"].value):
            if device not in ("False", "cpu", "True", "gpu"):
                self.left_out.append(f"inference on '{device}': only CPU and GPU are known")
                continue
            on_cpu = device in ("False", "cpu")
            loops = profile.cpu_loops if on_cpu else profile.gpu_loops
            for values in product(*(lists[name] for name in loops)):
                chosen = dict.fromkeys(lists, "") | dict(zip(loops, values, strict=True))
                reason = skip_reason(profile.cpu_skip if on_cpu else profile.gpu_skip, chosen, quantised)
                if reason:
                    words = ", ".join(f"{name} {value}" for name, value in chosen.items() if name in loops)
                    self.left_out.append(f"{'CPU' if on_cpu else 'GPU'} inference with {words}: {reason}")
                    continue
                self._infer(on_cpu, device, chosen, model, log_dir, data, gpu, run, needs)

    def _infer(
        self, on_cpu: bool, device: str, chosen: Mapping[str, str], model: str, log_dir: str, data: str, gpu: str, run: _Run | None, needs: str
    ) -> None:
        profile, config = self.profile, self.config
        pattern = profile.cpu_log if on_cpu else profile.gpu_log
        log = f"{log_dir}/{pattern.format(gpu=gpu, device=device, **chosen)}"
        model_argument = f"{model}/deploy.yaml" if profile.model_dir in ("deploy", "static-deploy") else model
        free = self._pair("i1")
        if profile.name == "video":
            model_argument = f"{model}/{config['i_model'].value}"
            free = self._pair("i1", f"{model}/{config['i1'].value}")
        results = f"{log_dir}/{profile.cpu_results.format(**chosen)}" if profile.cpu_results else ""
        bench = self._pair("i_bench")
        if profile.name in ("gan", "3d"):
            bench = " "  # the scripts never set it
        slots = {
            "<python>": config["python"].value,
            "<script>": config["inference"].value,
            "<gpu!>": f"{config['i_gpu'].key}={device}",
            "<gpu>": self._pair("i_gpu", device),
            "<mkldnn!>": f"{config['i_mkldnn'].key}={chosen['mkldnn']}",
            "<mkldnn>": self._pair("i_mkldnn", chosen["mkldnn"]),
            "<threads>": self._pair("i_threads", chosen["threads"]),
            "<model>": self._pair("i_model", model_argument),
            "<batch>": self._pair("i_batch", chosen["batch"]),
            "<data>": self._pair("i_img", data),
            "<bench>": bench,
            "<prec>": self._pair("i_prec", chosen["prec"]),
            "<trt>": self._pair("i_trt", chosen["trt"]),
            "<p0>": " ",
            "<p1>": free,
            "<p1r>": self._pair("i1", results),
            "<p2>": self._pair("i2"),
            "<config>": run.slots["<config>"] if run else "",
        }
        text = self._filled(profile.cpu if on_cpu else profile.gpu, slots)
        output = "tee"
        if not profile.infer_tee:
            output, text = "text", f"{text} > {log} 2>&1 "
        labels = self._labels(run) if run else {}
        labels |= {"device": "cpu" if on_cpu else "gpu", "precision": chosen["prec"] or "fp32", "batch": chosen["batch"]}
        names = ("mkldnn", "threads") if on_cpu else ("trt",)
        labels |= {name: chosen[name] for name in names if chosen[name]}
        before = run.last if run else needs
        self._add("infer", text, log=log, output=output, status=self._tail(text, log), needs=(before,) if before else (), labels=labels)

    # -- inference modes ------------------------------------------------------------------------------------------------------------------

    def _whole_infer(self) -> None:
        if self.gpu_id and self.profile.whole not in ("clas",):
            self.env[CVD] = self.gpu_id
        {
            "standard": self._whole_standard,
            "detection": self._whole_detection,
            "tutorial": self._whole_tutorial,
            "clas": self._whole_clas,
            "rs": self._whole_rs,
            "panoptic": self._whole_rs,
            "passl": self._whole_passl,
            "none": lambda: None,
        }[self.profile.whole]()

    def _whole_standard(self) -> None:
        profile, config = self.profile, self.config
        for index, model in enumerate(items(config["infer_model"].value)):
            export, needs, folder = item(config["infer_export"].value, index), "", model
            if says(export):
                folder = f"{model}_klquant" if self.kl and profile.whole_dir == "model" else model
                if profile.whole_dir == "parent":
                    folder = dirname(model.rstrip("/")) or ("/" if model.startswith("/") else ".")
                words = (config["python"].value, export, self._pair("weight", model), self._pair("save_infer", folder))
                log = f"{self.log}_export_{index}.log" if profile.whole_log else ""
                text = " ".join(words) + (f" > {log} 2>&1 " if log else "")
                status = self._tail(text, log)
                needs = self._add("export", text, log=log, output="text" if log else "inherited", status=status, labels={"model": model})
            quantised = "True" if self.kl else item(config["infer_quant"].value, index)
            if profile.name in ("gan", "3d"):
                quantised = ""
            self._matrix(folder, self.log, config["i_img"].value, quantised, profile.whole_gpu, None, needs)

    def _whole_detection(self) -> None:
        config = self.config
        exports = {"norm": "norm_export", "pact": "pact_export", "fpgm": "fpgm_export", "distill": "distill_export", "kl_quant": "infer_dir"}
        executed = 0
        for kind in items(config["infer_export"].value):
            if kind == "null" or (kind == "kl_quant") != (self.mode == "klquant_whole_infer"):
                continue
            if kind not in exports:
                self.failure = f"unknown inference mode '{kind}' in line 38: known are {', '.join(exports)}"
                return
            words = (config["python"].value, config[exports[kind]].value, self._pair("weight"), argument("filename", config.model))
            text = " ".join((*words, self._pair("save_infer"), ""))
            needs = self._add("export", text, status=self._tail(text, ""), labels={"model": kind})
            folder = f"{config['save_infer'].value}/{config.model}"
            quantised = item(config["infer_quant"].value, executed)
            self._matrix(folder, self.log, config["i_img"].value, quantised, self.profile.whole_gpu, None, needs)
            executed += 1

    def _whole_tutorial(self) -> None:
        config, needs = self.config, ""
        if says(config["infer_export"].value):
            words = (config["python"].value, config["infer_export"].value, self._pair("weight", config["infer_model"].value))
            log = f"{self.log}/export_0.log" if self.profile.redirect else ""
            text = " ".join((*words, self._pair("save_infer"))) + (f" > {log} 2>&1 " if log else "")
            needs = self._add("export", text, log=log, output="text" if log else "inherited", status=self._tail(text, log))
        self._matrix(config["save_infer"].value, self.log, config["i_img"].value, "", "0", None, needs)

    def _whole_clas(self) -> None:
        config = self.config
        command, model = config["export1"].value, config["infer_model"].value
        if not says(command) or command == "False":
            return
        log = f"{self.log}/export.log"
        text = f"{config['python'].value} {command} > {log} 2>&1"
        needs = self._add("quantise", text, log=log, output="text", status=self._tail(text, log))
        self.enter += [f"{model}/quant_post_static_model", "../../deploy"]
        self._matrix(f"../{model}/quant_post_static_model", self.log, config["i_img"].value, "True", "0", None, needs)
        self.enter.append("..")

    def _whole_passl(self) -> None:
        config = self.config
        model, flag, needs = config["infer_model"].value, item(config["infer_export"].value, 0), ""
        if says(flag) and flag != "False":
            folder = model.replace("../", "", 1)
            self._add("shell", f"rm -rf {folder}")
            words = (config["python"].value, config["norm_export"].value, f"-o Global.pretrained_model={config.model}_pretrained")
            needs = self._add("export", " ".join((*words, f"-o Global.save_inference_dir={folder}")))
        if self.mode != "whole_infer":
            return
        self.enter.append("deploy")
        for each in items(model):
            self._matrix(each, f"../{self.log}", config["i_img"].value, "", "0", None, needs)
        self.enter.append("..")

    def _whole_rs(self) -> None:
        profile, config = self.profile, self.config
        if config["infer_model"].value == "null":
            self.failure = "no inference model is named in the configuration"
            return
        for index, model in enumerate(items(config["infer_model"].value)):
            export, needs, folder = item(config["infer_export"].value, index), "", model
            if says(export):
                folder = f"{model}/static"
                if profile.whole == "panoptic":  # the script uses variables of the training branch, which are empty here
                    shape = argument(config["shape"].key, config["shape"].value, " ")
                    weight = self._pair("weight", f"/{self.train_model}/model.pdparams")
                    xconfig = argument(config["xconfig"].key, for_mode(config["config"].value, self.mode))
                    words = (config["python"].value, "", xconfig, weight, self._pair("save_infer", ""), shape)
                else:
                    words = (config["python"].value, export, self._pair("weight", model), self._pair("save_infer", folder), self._pair("shape"))
                text = " ".join(words)
                needs = self._add("export", text, status=self._tail(text, ""), labels={"model": model})
            quantised = item(config["infer_quant"].value, index)
            self._matrix(folder, self.log, config["i_img"].value, quantised, "0", None, needs)

    # -- PaddleOCR's supplementary script -------------------------------------------------------------------------------------------------

    def _supplementary(self) -> None:
        config = self.config
        if self.mode not in ("lite_train_lite_infer", "whole_train_whole_infer"):
            return
        for devices in self._device_sets():
            lists = [items(config[name].value) for name in ("autocast", "list1", "list2", "list3")]
            for autocast, *others in product(*lists):
                slots = self._training_slots(devices, autocast, config["norm"].value, "", "")
                for name, value in zip(("list1", "list2", "list3"), others, strict=True):
                    slots[f"<{name}>"] = self._pair(name, value)
                plain, hosts = len(devices.text) <= 2, len(devices.ips) > self.profile.hosts_above
                template = self.profile.plain if plain else self.profile.hosts if hosts else self.profile.launch
                text = self._filled(template, slots)
                self.env[CVD] = None
                labels = {"devices": devices.text, "trainer": "norm_train", "autocast": autocast}
                self._add("train", text, status=self._tail(text, ""), labels=labels)


def _names(profile: Profile) -> Mapping[str, int]:
    from mezzo.tipc._profiles import LAYOUTS

    return LAYOUTS[profile.layout]
