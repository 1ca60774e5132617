"""From fields to steps: the commands a repository's script would run, in its order, without running anything."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from mezzo.tipc._layouts import LAYOUTS
from mezzo.tipc._plan import CVD, Plan
from mezzo.tipc._planner_base import Devices, Training
from mezzo.tipc._planner_infer import InferencePlanner
from mezzo.tipc._profiles import Profile
from mezzo.tipc._text import argument, for_mode, item, items, key_of, matches, same, says, second_piece


def make_plan(
    text: str, mode: str, profile: Profile, root: str = "$ROOT", gpu_id: str = "", fallback_from: str = ""
) -> Plan:
    """Plan a text in a mode.

    Args:
        text: The configuration.
        mode: lite_train_lite_infer and so on.
        profile: Whose commands.
        root: What the scripts that use absolute paths take for the working directory.
        gpu_id: Third argument of the scripts, of inference modes.
        fallback_from: Name of the training after which the expected weights were missing.

    """
    return Planner(text, mode, profile, root, gpu_id, fallback_from).plan()


class Planner(InferencePlanner):
    """The part of the planner that trains, evaluates and exports."""

    def plan(self) -> Plan:
        profile = self.profile
        for command in profile.before_training:
            if "{" not in command:
                self.add("shell", command)
        inference = self.mode == "whole_infer" or (self.mode == "klquant_whole_infer" and profile.kl != "train")
        if profile.name == "supplementary":
            self._supplementary()
        elif inference:
            self.whole_infer()
        else:
            for devices in self.device_sets():
                self._device_set(devices)
        for command in profile.afterwards.get("", ()) + profile.afterwards.get(self.config.model, ()):
            self.add("shell", command.format(python=self.config["python"].value))
        return Plan(
            self.config.model,
            self.mode,
            profile.name,
            self.log,
            f"{self.log}/{profile.status_file}",
            profile.banner,
            tuple(self.steps),
            tuple(dict.fromkeys(self.left_out)),
            failure=self.failure,
        )

    def device_sets(self) -> Iterator[Devices]:
        profile = self.profile
        env: str | None
        for index, text in enumerate(items(self.config["gpu_list"].value)):
            ips, env = "", None
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
                env = item(text.replace(",", "|"), 0) if profile.hosts_env == "first" else None
            yield Devices(index, text, ips, env, one=len(text) <= 1 and not ips)

    def _device_set(self, devices: Devices) -> None:
        profile = self.profile
        if profile.env_on_entry and devices.one:
            self.export_env(devices)
        casts = items(self.config["autocast"].value) if "autocast" in LAYOUTS[profile.layout] else [""]
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
            quotes_all = self.profile.name in ("det", "yolo")
            if name == "key2" and not quotes_all:
                hit = matches(trainer, line.key)
            else:
                hit = same(trainer, line.key, quoted=quotes_all or name not in ("pact", "key1", "amp19"))
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

    def _trainer(self, devices: Devices, autocast: str, trainer: str) -> None:
        profile, config = self.profile, self.config
        chosen = self._chosen(trainer)
        if chosen is None or chosen[0] == "null":
            return
        script, export, quantised, to_static = chosen
        whole_train = "whole_train" in self.mode
        if profile.name == "video" and self.mode != "benchmark_train" and not whole_train:
            script += " --max_iters=30"
        if "autocast" not in LAYOUTS[profile.layout]:
            autocast = "True" if trainer == "amp_train" else "False"
        nodes = devices.nodes(profile.hosts_above)
        several = len(devices.ips) > profile.hosts_above
        if profile.name in ("det", "yolo") and len(devices.text) <= 2:
            nodes, several = 1, False  # their scripts count hosts where they launch on them
        base = f"{self.log}/{trainer}_gpus_{devices.text}_autocast_{autocast}"
        if profile.save_suffix == "early":
            base = f"{self.log}/{trainer}_gpus_{devices.text}"
        save = (
            base
            + {
                "hosts": f"_nodes_{nodes}" if several else "",
                "early": f"_nodes_{nodes}" if several else "",
                "always": f"_nodes_{nodes}",
                "log": f"_nodes_{nodes}.log",
            }[profile.save_suffix]
        )
        slots = self.training_slots(devices, autocast, script, save, to_static)
        if profile.carry and nodes <= 1 and trainer in (config["pact"].key, config["fpgm"].key):
            slots["<pretrain>"] = self.carried if profile.carry == "norm" else ""
        if profile.name == "video" and whole_train:
            slots.update({"<epoch>": "", "<batch>": " ", "<param1>": " ", "<param2>": " "})
        run = Training(devices, trainer, autocast, nodes, save, base, quantised, slots)
        self._train(run)
        self._after_training(run, export)
        if profile.env_removed == "trainer":
            self.env[CVD] = None

    def training_slots(self, devices: Devices, autocast: str, script: str, save: str, to_static: str) -> dict[str, str]:
        profile, config = self.profile, self.config
        benchmark = self.mode == "benchmark_train"
        value: str | None = None  # the whole value
        if profile.use_gpu == "item":
            value = item(config["use_gpu"].value, devices.index)
        elif profile.use_gpu == "whole-or-false" and devices.text == "-1":
            value = "False"
        use_gpu = " " if profile.use_gpu == "never" else self.pair("use_gpu", value)
        key = config["autocast"].key
        amp = profile.amp.get(autocast, profile.amp_otherwise)
        if profile.name in ("seg", "mezzo") and benchmark:
            key = "--precision" if key == "Global.auto_cast" else key
            amp = "--amp_level=O2" if autocast == "fp16" else amp
        if (
            profile.name == "clas"
            and autocast in ("amp", "fp16")
            and any(
                word in config.model
                for word in ("CLIP_vit_base_patch16_224", "SwinTransformer_base_patch4_window7_224_ampo2_ultra")
            )
        ):
            amp += " -o Arch.use_fused_attn=True -o Arch.use_fused_linear=True"
        count = len(items(devices.text, ",")) or 1
        return {
            "<python>": config["python"].value,
            "<run>": script,
            "<use_gpu>": use_gpu,
            "<save>": self.pair("save", save),
            "<epoch>": self.pair("epoch", self.epoch()),
            "<pretrain>": self.pair("pretrain"),
            "<autocast>": argument(key, autocast),
            "<batch>": self.pair("batch", self.batch()),
            "<param1>": self.pair("param1"),
            "<param2>": self.pair("train_img"),
            "<config>": self.pair("config", for_mode(config["config"].value, self.mode)),
            "<filename>": argument("filename", config.model),
            "<shuffle>": "TrainReader.shuffle=False" if benchmark else " ",
            "<ce>": "--enable_ce=True" if benchmark else " ",
            "<amp>": amp,
            "<amp_level>": profile.amp_level.get(autocast, " "),
            "<to_static>": to_static,
            "<checkpoints>": self.pair("checkpoints"),
            "<unset>": " ",
            "{gpu}": devices.text,
            "{ips}": devices.ips,
            "{count}": str(count),
            "{nodes}": str(devices.nodes(profile.hosts_above)),
            "{master}": item(devices.ips.replace(",", "|"), 0),
        }

    def _template(self, devices: Devices) -> tuple[str, ...]:
        """Return the template of a training; an empty one runs nothing."""
        train = self.profile.train
        if len(devices.text) <= 2:
            return train.plain
        return train.hosts if len(devices.ips) > self.profile.hosts_above else train.launch

    def _train(self, run: Training) -> None:
        profile, devices = self.profile, run.devices
        plain = len(devices.text) <= 2
        template = self._template(devices)
        if not template:
            what = "this repository's script trains nothing on several cards; what follows runs without weights"
            self.left_out.append(f"training on {devices.text}: {what}")
            return
        text = self.filled(template, run.slots)
        text += self._extra_arguments()
        for command in profile.before_training:
            if "{" in command:
                self.add("shell", command.format(save=run.save))
        if profile.env_removed_before_training:
            self.env[CVD] = None
        if profile.env_before_plain and plain:
            self.export_env(devices)
        self.env.update(profile.extra_env)
        if profile.pauses:
            self.add("shell", "sleep 5")
        output, log, shown, redirect = "inherited", "", "", ""
        full = f"{run.base}_nodes_{run.nodes}.log"
        if profile.output == "tee":
            output, log, shown = "tee", full, full
        elif profile.output == "file":
            output, log, shown = "file", full, full
        elif profile.output == "text" and plain:
            output, log, shown = "text", full, full
            redirect = f" >{full} 2>&1"
        elif profile.output == "text":
            shown = full
        elif profile.output == "video":
            output, log, shown = "text", f"{self.log}/train.log", f"{run.save}.log"
            redirect = f" > {log} 2>&1"
        elif profile.output == "rec":
            output, log, shown = ("file", f"{run.save}.log", run.save) if plain else ("inherited", "", run.save)
        elif profile.judged_by:
            shown = f"{run.save}.log"
        checkpoint = f"{run.save}/{self.sub()}{self.train_model}"
        fallback = ""
        if profile.checkpoint_fallback:
            fallback = profile.checkpoint_fallback.format(epoch=self.epoch())
        judged = profile.judged_by.format(save=run.save, log=self.log, sub=self.sub().rstrip("/"))
        limit = profile.time_limit if profile.name == "det" or self.mode == "benchmark_train" else None
        run.train = self.add(
            "train",
            text,
            redirect,
            log=log,
            output=output,
            shown=shown,
            judged_by=judged,
            copied_to=shown if judged else "",
            time_limit=limit,
            checkpoint=checkpoint,
            fallback=fallback,
            labels=self.labels(run),
        )
        if profile.pauses:
            self.add("shell", "sleep 5")
        if fallback and self.fallback_from == run.train:
            self.train_model = fallback

    def _extra_arguments(self) -> str:
        """Return what the last line of the text adds to a training."""
        extra, rule = self.config.extra, self.profile.log_iters
        if rule == "always":  # one pair, read like any other line
            last = self.config.lines[-1] if self.config.lines else ""
            extra = {"log_iters": second_piece(last)} if key_of(last) == "log_iters" else {}
        elif rule != "benchmark" or self.mode != "benchmark_train":
            return ""
        return "".join(f" --{name} {extra[name]}" for name in ("log_iters", "repeats") if extra.get(name))

    def _after_training(self, run: Training, export: str) -> None:
        profile, config = self.profile, self.config
        path = f"{run.save}/{self.sub()}{self.train_model}"
        if profile.name == "video":
            path = f"{run.save}/{config.model.replace('PP-', 'pp', 1)}_epoch_00001.pdparams"
        slots = run.slots
        slots["<checkpoint>"] = self.pair("pretrain", path)
        slots["<checkpoint path>"] = path
        slots["<checkpoint pdparams>"] = self.pair("pretrain", f"{path}/model.pdparams")
        weight = self.pair("weight", path)
        if self.sub() == "RecModel/":
            weight = self.weight  # the script forgets to set it
        self.weight = slots["<weight>"] = weight
        slots["<weight pdparams>"] = self.pair("weight", f"{path}/model.pdparams")
        slots["<eval>"] = config["eval"].value
        slots["<eval1>"] = self.pair("eval1")
        if profile.carry == "norm" and run.trainer == config["norm"].key and run.nodes <= 1:
            self.carried = (
                slots["<checkpoint pdparams>"] if profile.name in ("rs", "panoptic") else slots["<checkpoint>"]
            )
        last = run.train
        if profile.name == "passl":
            last = self._extract(run, path)
        if says(config["eval"].value):
            if profile.env_before_eval:
                self.export_env(run.devices)
            if profile.name == "video":
                slots["<video eval>"] = self.pair("eval1", path)
                key = config["param1"].key if "whole_train" not in self.mode else ""
                if "lite_infer" in self.mode and key != "null":
                    slots["<video eval>"] += f" {key}={config['param1'].value}"
            self._follow("eval", run, profile.evaluation, f"{run.base}_nodes_{run.nodes}_eval.log", last)
            if profile.pauses:
                self.add("shell", "sleep 5")
        if says(export):
            self._export(run, export, last)

    def _follow(self, kind: str, run: Training, template: tuple[str, ...], log: str, needs: str) -> str:
        """Add an evaluation or an export."""
        profile = self.profile
        output = "text" if profile.redirect else profile.outside or "inherited"
        return self.add(
            kind,
            self.filled(template, run.slots),
            profile.redirect.format(log=log),
            log=log if output != "inherited" else "",
            output=output,
            shown=run.save if profile.name == "rec" else log,
            pattern=run.slots["<checkpoint path>"]
            if "<checkpoint path>" in template and "*" in run.slots["<checkpoint path>"]
            else "",
            needs=(needs,) if needs else (),
            labels=self.labels(run),
        )

    def _extract(self, run: Training, path: str) -> str:
        """PASSL's own steps between training and export: the weights of the backbone, then a linear classifier on them."""
        config, needs = self.config, run.train
        taken = f"{run.save}/{self.sub()}{config['extract2'].value}"
        if says(config["extract"].value):
            words = (
                config["python"].value,
                config["extract"].value,
                path,
                self.pair("extract1"),
                self.pair("extract2", taken),
            )
            text = " ".join((*words, "--remove_prefix"))
            needs = self.add("extract", text, shown="", needs=(needs,), labels=self.labels(run))
            self.add("shell", "sleep 5")
        if says(config["linear"].value):
            slots = run.slots
            words = (
                config["python"].value,
                config["linear"].value,
                slots["<batch>"],
                slots["<use_gpu>"],
                slots["<save>"],
            )
            more = (slots["<epoch>"], self.pair("linear1", taken), slots["<autocast>"], self.pair("linear2"), "")
            text = " ".join((*words, *more))
            self.add("linear", text, shown="", needs=(needs,), labels=self.labels(run))
            self.linear = self.pair("linear2")
            self.add("shell", "sleep 5")
        return needs

    def _export(self, run: Training, export: str, needs: str) -> None:
        profile, config, slots = self.profile, self.config, run.slots
        slots["<export>"] = export
        slots["<save_infer>"] = self.pair("save_infer", run.save)
        slots["<save_infer as written>"] = self.pair("save_infer")
        slots["<export1>"] = self.pair("export1")
        slots["<linear>"] = self.linear
        slots["<save_infer key>"] = config["save_infer"].key
        slots["<save path>"] = run.save
        slots["<save_infer static>"] = self.pair("save_infer", f"{run.save}/static")
        slots["<shape>"] = self.pair("shape")
        slots["<shape apart>"] = argument(config["shape"].key, config["shape"].value, " ")
        slots["<export config>"] = argument(config["xconfig"].key, for_mode(config["config"].value, self.mode))
        log = f"{run.base}_nodes_{run.nodes}_export.log"
        if profile.name in ("det", "yolo") and config["export2"].key == "export_onnx":
            template = (*profile.export[:4], "export_onnx=True", "<save_infer>")
            onnx_log = f"{run.base}_nodes_{run.nodes}_onnx_export.log"
            text, redirect = self.filled(template, slots), f" >{onnx_log} 2>&1"
            more: dict[str, Any] = {"needs": (needs,), "labels": self.labels(run)}
            self.add("export", text, redirect, log=onnx_log, output="text", shown=onnx_log, **more)
        run.last = self._follow("export", run, profile.export, log, needs)
        if profile.name in ("det", "yolo"):
            self.add("shell", f"cp {run.save}/{config.model}/* {run.save}/")
        self.export_env(run.devices)
        data = {"train_img": config["train_img"].value, "i_img": config["i_img"].value, "none": ""}[profile.data]
        log_dir = self.log
        if profile.infer_cwd:
            self.enter.append(profile.infer_cwd)
            if profile.name == "passl":
                log_dir = f"../{self.log}"
        self.matrix(self._model_dir(run.save), log_dir, data, run.quantised, run.devices.text, run)
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

    def _supplementary(self) -> None:
        config = self.config
        if self.mode not in ("lite_train_lite_infer", "whole_train_whole_infer"):
            return
        for devices in self.device_sets():
            lists = [items(config[name].value) for name in ("autocast", "list1", "list2", "list3")]
            for autocast, *others in product(*lists):
                slots = self.training_slots(devices, autocast, config["norm"].value, "", "")
                for name, value in zip(("list1", "list2", "list3"), others, strict=True):
                    slots[f"<{name}>"] = self.pair(name, value)
                text = self.filled(self._template(devices), slots)
                self.env[CVD] = None
                labels = {"devices": devices.text, "trainer": "norm_train", "autocast": autocast}
                self.add("train", text, shown="", labels=labels)
