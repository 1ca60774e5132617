"""The inference commands: all combinations for one exported model, and the modes that only infer."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from posixpath import dirname

from mezzo.tipc._plan import CVD
from mezzo.tipc._plan_builder import PlanBuilder, TrainingRun
from mezzo.tipc._skip_rules import skip_reason
from mezzo.tipc._text import argument, for_mode, is_set, item, items

_CPU, _GPU = ("False", "cpu"), ("True", "gpu")
_EXPORT_KINDS = {
    "norm": "norm_export",
    "pact": "pact_export",
    "fpgm": "fpgm_export",
    "distill": "distill_export",
    "kl_quant": "infer_dir",
}


@dataclass(frozen=True)
class _ExportedModel:
    """What all inference commands of one model share."""

    folder: str
    log_dir: str
    data: str
    gpu: str  # as the names of logs show it
    needs: str  # the step that exports it
    run: TrainingRun | None


class InferencePlanner(PlanBuilder):
    """The part of the planner that infers."""

    def infer_all(
        self, folder: str, log_dir: str, data: str, quantised: str, gpu: str, run: TrainingRun | None, needs: str = ""
    ) -> None:
        """Add the inference commands of one exported model."""
        profile, config = self.profile, self.config
        model = _ExportedModel(folder, log_dir, data, gpu, run.export_step if run else needs, run)
        lists = {name: items(config[f"i_{name}"].value) for name in ("mkldnn", "threads", "batch", "prec", "trt")}
        for device in items(config["i_gpu"].value):
            if device not in (*_CPU, *_GPU):
                self.left_out.append(f"inference on '{device}': only CPU and GPU are known")
                continue
            on_cpu = device in _CPU
            loops = profile.cpu_loops if on_cpu else profile.gpu_loops
            for values in product(*(lists[name] for name in loops)):
                chosen = dict.fromkeys(lists, "") | dict(zip(loops, values, strict=True))
                reason = skip_reason(profile.cpu_skip if on_cpu else profile.gpu_skip, chosen, quantised)
                if reason:
                    words = ", ".join(f"{name} {value}" for name, value in chosen.items() if name in loops)
                    self.left_out.append(f"{'CPU' if on_cpu else 'GPU'} inference with {words}: {reason}")
                else:
                    self._infer(model, device, chosen)

    def _infer(self, model: _ExportedModel, device: str, chosen: dict[str, str]) -> None:
        profile = self.profile
        on_cpu = device in _CPU
        log_name, known, template = (
            (profile.cpu_log, profile.cpu_known, profile.cpu)
            if on_cpu
            else (profile.gpu_log, profile.gpu_known, profile.gpu)
        )
        log = f"{model.log_dir}/{log_name.format(gpu=model.gpu, device=device, **chosen)}"
        known_as = [f"{folder}/{known.format(**chosen)}" for folder in (model.log_dir, dirname(model.log_dir)) if known]
        names = ("mkldnn", "threads") if on_cpu else ("trt",)
        labels = {
            **(model.run.labels if model.run else {}),
            "device": "cpu" if on_cpu else "gpu",
            "precision": chosen["prec"] or "fp32",
            "batch": chosen["batch"],
            **{name: chosen[name] for name in names if chosen[name]},
        }
        self.add(
            "infer",
            self.fill(template, self._infer_slots(model, device, chosen)),
            "" if profile.infer_tee else f" > {log} 2>&1 ",
            log=log,
            known_as=tuple(known_as),
            output="tee" if profile.infer_tee else "text",
            shown=log,
            needs=(model.needs,) if model.needs else (),
            labels=labels,
        )

    def _infer_slots(self, model: _ExportedModel, device: str, chosen: dict[str, str]) -> dict[str, str]:
        profile, config = self.profile, self.config
        results = f"{model.log_dir}/{profile.cpu_results.format(**chosen)}" if profile.cpu_results else ""
        file = profile.model_file.format(i_model=config["i_model"].value)
        in_folder = f"{model.folder}/{config['i1'].value}" if "{i_model}" in profile.model_file else None
        return {
            "<python>": config["python"].value,
            "<script>": config["inference"].value,
            "<gpu!>": f"{config['i_gpu'].key}={device}",
            "<gpu>": self.pair("i_gpu", device),
            "<mkldnn!>": f"{config['i_mkldnn'].key}={chosen['mkldnn']}",
            "<mkldnn>": self.pair("i_mkldnn", chosen["mkldnn"]),
            "<threads>": self.pair("i_threads", chosen["threads"]),
            "<model>": self.pair("i_model", f"{model.folder}/{file}" if profile.model_file else model.folder),
            "<batch>": self.pair("i_batch", chosen["batch"]),
            "<data>": self.pair("i_img", model.data),
            "<bench>": self.pair("i_bench") if profile.passes_benchmark else " ",
            "<prec>": self.pair("i_prec", chosen["prec"]),
            "<trt>": self.pair("i_trt", chosen["trt"]),
            "<p0>": " ",
            "<p1>": self.pair("i1", in_folder),
            "<p1r>": self.pair("i1", results),
            "<p2>": self.pair("i2"),
            "<config>": model.run.slots["<config>"] if model.run else "",
        }

    def export_slots(self, script: str, folder: str) -> dict[str, str]:
        """Return the slots of an export that writes to a folder."""
        config = self.config
        return {
            "<python>": config["python"].value,
            "<export>": script,
            "<export1>": self.pair("export1"),
            "<export config>": argument(config["xconfig"].key, for_mode(config["config"].value, self.mode)),
            "<linear>": self.linear,
            "<save path>": folder,
            "<save_infer>": self.pair("save_infer", folder),
            "<save_infer as written>": self.pair("save_infer"),
            "<save_infer key>": config["save_infer"].key,
            "<save_infer static>": self.pair("save_infer", f"{folder}/static"),
            "<shape>": self.pair("shape"),
            "<shape apart>": argument(config["shape"].key, config["shape"].value, " "),
            "<filename>": argument("filename", config.model),
            "<unset>": " ",
        }

    def whole_infer(self) -> None:
        """Add the steps of a mode that only infers."""
        if self.gpu_id and self.profile.whole_sets_env:
            self.env[CVD] = self.gpu_id
        strategies: dict[str, Callable[[], None]] = {
            "models": self._infer_models,
            "kinds of export": self._infer_kinds_of_export,
            "one model": self._infer_one_model,
            "quantised model": self._infer_quantised_model,
            "deploy folder": self._infer_in_deploy_folder,
        }
        strategies[self.profile.whole]()

    def _infer_models(self) -> None:
        """Add the steps of each model in the text's list: an export, if it names one, and inference."""
        profile, config = self.profile, self.config
        if profile.whole_needs_model and config["infer_model"].value == "null":
            self.failure = "no inference model is named in the configuration"
            return
        for index, model in enumerate(items(config["infer_model"].value)):
            script, needs, folder = item(config["infer_export"].value, index), "", model
            if is_set(script):
                parent = dirname(model.rstrip("/")) or ("/" if model.startswith("/") else ".")
                klquant = "_klquant" if self.is_kl else ""
                folder = profile.whole_dir.format(model=model, parent=parent, klquant=klquant)
                needs = self._add_whole_export(script, model, folder, index, {"model": model})
            quantised, gpu = self._quantised_and_gpu(index)
            self.infer_all(folder, self.log_dir, config["i_img"].value, quantised, gpu, None, needs)

    def _quantised_and_gpu(self, index: int) -> tuple[str, str]:
        """Return the arguments of the script's function: whether a model is quantised, and the card."""
        rule, gpu = self.profile.whole_quantised, self.profile.whole_gpu
        if rule == "never":
            return "", gpu
        quantised = "True" if self.is_kl else item(self.config["infer_quant"].value, index)
        return (gpu, "") if rule == "word" and not quantised and gpu else (quantised, gpu)

    def _add_whole_export(self, script: str, model: str, folder: str, index: int, labels: dict[str, str]) -> str:
        log = self.profile.whole_log.format(logs=self.log_dir, index=index)
        slots = self.export_slots(script, folder) | {
            "<weight>": self.pair("weight", model),
            "<weight pdparams>": self.pair("weight", f"/{self.train_model}/model.pdparams"),
        }
        redirect, output = (f" > {log} 2>&1 ", "text") if log else ("", "inherited")
        text = self.fill(self.profile.whole_export, slots)
        return self.add("export", text, redirect, log=log, output=output, shown=log, labels=labels)

    def _infer_kinds_of_export(self) -> None:
        config, num_done = self.config, 0
        for kind in items(config["infer_export"].value):
            if kind == "null" or (kind == "kl_quant") != (self.mode == "klquant_whole_infer"):
                continue
            if kind not in _EXPORT_KINDS:
                self.failure = f"unknown inference mode '{kind}' in line 38; must be one of {', '.join(_EXPORT_KINDS)}"
                return
            folder = config["save_infer"].value
            script, labels = config[_EXPORT_KINDS[kind]].value, {"model": kind}
            needs = self._add_whole_export(script, config["weight"].value, folder, num_done, labels)
            quantised = item(config["infer_quant"].value, num_done)
            folder, data = f"{folder}/{config.model}", config["i_img"].value
            self.infer_all(folder, self.log_dir, data, quantised, self.profile.whole_gpu, None, needs)
            num_done += 1

    def _infer_one_model(self) -> None:
        config, needs = self.config, ""
        script, folder = config["infer_export"].value, config["save_infer"].value
        if is_set(script):
            needs = self._add_whole_export(script, config["infer_model"].value, folder, 0, {})
        self.infer_all(folder, self.log_dir, config["i_img"].value, "", "0", None, needs)

    def _infer_quantised_model(self) -> None:
        config = self.config
        command, model = config["export1"].value, config["infer_model"].value
        if not is_set(command) or command == "False":
            return
        log = f"{self.log_dir}/export.log"
        text = f"{config['python'].value} {command}"
        needs = self.add("quantise", text, f" > {log} 2>&1", log=log, output="text", shown=log)
        self.folder_changes.append(f"{model}/quant_post_static_model")
        self.add("shell", "ln -s model.pdmodel inference.pdmodel")
        self.add("shell", "ln -s model.pdiparams inference.pdiparams")
        self.folder_changes.append("../../deploy")
        folder, data = f"../{model}/quant_post_static_model", config["i_img"].value
        self.infer_all(folder, self.log_dir, data, "True", "0", None, needs)
        self.folder_changes.append("..")

    def _infer_in_deploy_folder(self) -> None:
        config = self.config
        model, flag, needs = config["infer_model"].value, item(config["infer_export"].value, 0), ""
        if is_set(flag) and flag != "False":
            folder = model.replace("../", "", 1)
            self.add("shell", f"rm -rf {folder}")
            words = (config["python"].value, config["norm_export"].value)
            weights = f"-o Global.pretrained_model={config.model}_pretrained"
            needs = self.add("export", " ".join((*words, weights, f"-o Global.save_inference_dir={folder}")))
        self.folder_changes.append("deploy")
        for each in items(model):
            self.infer_all(each, self.from_infer_folder(self.log_dir), config["i_img"].value, "", "0", None, needs)
        self.folder_changes.append("..")
