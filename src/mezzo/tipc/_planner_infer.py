"""The inference commands: the matrix of one exported model, and the modes that only infer."""

from collections.abc import Callable, Mapping
from itertools import product
from posixpath import dirname
from typing import Any

from mezzo.tipc._plan import CVD
from mezzo.tipc._planner_base import Builder, Training
from mezzo.tipc._skips import skip_reason
from mezzo.tipc._text import argument, for_mode, item, items, says


class InferencePlanner(Builder):
    """The part of the planner that infers."""

    def matrix(
        self, model: str, log_dir: str, data: str, quantised: str, gpu: str, run: Training | None, needs: str = ""
    ) -> None:
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
        self,
        on_cpu: bool,
        device: str,
        chosen: Mapping[str, str],
        model: str,
        log_dir: str,
        data: str,
        gpu: str,
        run: Training | None,
        needs: str,
    ) -> None:
        profile, config = self.profile, self.config
        pattern = profile.cpu_log if on_cpu else profile.gpu_log
        log = f"{log_dir}/{pattern.format(gpu=gpu, device=device, **chosen)}"
        known = (profile.cpu_known if on_cpu else profile.gpu_known).format(**chosen)
        known_as = tuple(f"{folder}/{known}" for folder in (log_dir, dirname(log_dir)) if known)
        model_argument = f"{model}/deploy.yaml" if profile.model_dir in ("deploy", "static-deploy") else model
        free = self.pair("i1")
        if profile.name == "video":
            model_argument = f"{model}/{config['i_model'].value}"
            free = self.pair("i1", f"{model}/{config['i1'].value}")
        results = f"{log_dir}/{profile.cpu_results.format(**chosen)}" if profile.cpu_results else ""
        bench = self.pair("i_bench")
        if profile.name in ("gan", "3d"):
            bench = " "  # the scripts never set it
        slots = {
            "<python>": config["python"].value,
            "<script>": config["inference"].value,
            "<gpu!>": f"{config['i_gpu'].key}={device}",
            "<gpu>": self.pair("i_gpu", device),
            "<mkldnn!>": f"{config['i_mkldnn'].key}={chosen['mkldnn']}",
            "<mkldnn>": self.pair("i_mkldnn", chosen["mkldnn"]),
            "<threads>": self.pair("i_threads", chosen["threads"]),
            "<model>": self.pair("i_model", model_argument),
            "<batch>": self.pair("i_batch", chosen["batch"]),
            "<data>": self.pair("i_img", data),
            "<bench>": bench,
            "<prec>": self.pair("i_prec", chosen["prec"]),
            "<trt>": self.pair("i_trt", chosen["trt"]),
            "<p0>": " ",
            "<p1>": free,
            "<p1r>": self.pair("i1", results),
            "<p2>": self.pair("i2"),
            "<config>": run.slots["<config>"] if run else "",
        }
        text = self.filled(profile.cpu if on_cpu else profile.gpu, slots)
        output, redirect = ("tee", "") if profile.infer_tee else ("text", f" > {log} 2>&1 ")
        labels = self.labels(run) if run else {}
        labels |= {
            "device": "cpu" if on_cpu else "gpu",
            "precision": chosen["prec"] or "fp32",
            "batch": chosen["batch"],
        }
        names = ("mkldnn", "threads") if on_cpu else ("trt",)
        labels |= {name: chosen[name] for name in names if chosen[name]}
        before = run.last if run else needs
        needed = (before,) if before else ()
        more: dict[str, Any] = {"log": log, "known_as": known_as, "output": output, "shown": log}
        self.add("infer", text, redirect, **more, needs=needed, labels=labels)

    def whole_infer(self) -> None:
        if self.gpu_id and self.profile.whole not in ("clas",):
            self.env[CVD] = self.gpu_id
        branches: dict[str, Callable[[], None]] = {
            "standard": self._whole_standard,
            "detection": self._whole_detection,
            "tutorial": self._whole_tutorial,
            "clas": self._whole_clas,
            "rs": self._whole_rs,
            "panoptic": self._whole_rs,
            "passl": self._whole_passl,
        }
        branches[self.profile.whole]()

    def _whole_standard(self) -> None:
        profile, config = self.profile, self.config
        for index, model in enumerate(items(config["infer_model"].value)):
            export, needs, folder = item(config["infer_export"].value, index), "", model
            if says(export):
                folder = f"{model}_klquant" if self.kl and profile.whole_dir == "model" else model
                if profile.whole_dir == "parent":
                    folder = dirname(model.rstrip("/")) or ("/" if model.startswith("/") else ".")
                words = (config["python"].value, export, self.pair("weight", model), self.pair("save_infer", folder))
                log = f"{self.log}_export_{index}.log" if profile.whole_log else ""
                redirect, output = (f" > {log} 2>&1 ", "text") if log else ("", "inherited")
                labels = {"model": model}
                needs = self.add("export", " ".join(words), redirect, log=log, output=output, shown=log, labels=labels)
            quantised = "True" if self.kl else item(config["infer_quant"].value, index)
            gpu = profile.whole_gpu
            if profile.name in ("gan", "3d"):
                quantised = ""
            elif not quantised and gpu:
                quantised, gpu = gpu, ""  # an empty word is no argument of the script's function: the next one moves up
            self.matrix(folder, self.log, config["i_img"].value, quantised, gpu, None, needs)

    def _whole_detection(self) -> None:
        config = self.config
        exports = {
            "norm": "norm_export",
            "pact": "pact_export",
            "fpgm": "fpgm_export",
            "distill": "distill_export",
            "kl_quant": "infer_dir",
        }
        executed = 0
        for kind in items(config["infer_export"].value):
            if kind == "null" or (kind == "kl_quant") != (self.mode == "klquant_whole_infer"):
                continue
            if kind not in exports:
                self.failure = f"unknown inference mode '{kind}' in line 38: known are {', '.join(exports)}"
                return
            words = (
                config["python"].value,
                config[exports[kind]].value,
                self.pair("weight"),
                argument("filename", config.model),
            )
            text = " ".join((*words, self.pair("save_infer"), ""))
            needs = self.add("export", text, shown="", labels={"model": kind})
            folder = f"{config['save_infer'].value}/{config.model}"
            quantised = item(config["infer_quant"].value, executed)
            self.matrix(folder, self.log, config["i_img"].value, quantised, self.profile.whole_gpu, None, needs)
            executed += 1

    def _whole_tutorial(self) -> None:
        config, needs = self.config, ""
        if says(config["infer_export"].value):
            words = (
                config["python"].value,
                config["infer_export"].value,
                self.pair("weight", config["infer_model"].value),
            )
            log = f"{self.log}/export_0.log" if self.profile.redirect else ""
            redirect, output = (f" > {log} 2>&1 ", "text") if log else ("", "inherited")
            needs = self.add(
                "export", " ".join((*words, self.pair("save_infer"))), redirect, log=log, output=output, shown=log
            )
        self.matrix(config["save_infer"].value, self.log, config["i_img"].value, "", "0", None, needs)

    def _whole_clas(self) -> None:
        config = self.config
        command, model = config["export1"].value, config["infer_model"].value
        if not says(command) or command == "False":
            return
        log = f"{self.log}/export.log"
        text = f"{config['python'].value} {command}"
        needs = self.add("quantise", text, f" > {log} 2>&1", log=log, output="text", shown=log)
        self.enter.append(f"{model}/quant_post_static_model")
        self.add("shell", "ln -s model.pdmodel inference.pdmodel")
        self.add("shell", "ln -s model.pdiparams inference.pdiparams")
        self.enter.append("../../deploy")
        self.matrix(f"../{model}/quant_post_static_model", self.log, config["i_img"].value, "True", "0", None, needs)
        self.enter.append("..")

    def _whole_passl(self) -> None:
        config = self.config
        model, flag, needs = config["infer_model"].value, item(config["infer_export"].value, 0), ""
        if says(flag) and flag != "False":
            folder = model.replace("../", "", 1)
            self.add("shell", f"rm -rf {folder}")
            words = (
                config["python"].value,
                config["norm_export"].value,
                f"-o Global.pretrained_model={config.model}_pretrained",
            )
            needs = self.add("export", " ".join((*words, f"-o Global.save_inference_dir={folder}")))
        self.enter.append("deploy")
        for each in items(model):
            self.matrix(each, f"../{self.log}", config["i_img"].value, "", "0", None, needs)
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
                words = [config["python"].value, export, self.pair("weight", model), self.pair("save_infer", folder)]
                words.append(self.pair("shape"))
                if profile.whole == "panoptic":  # the script uses variables of the training branch, empty here
                    xconfig = argument(config["xconfig"].key, for_mode(config["config"].value, self.mode))
                    weight = self.pair("weight", f"/{self.train_model}/model.pdparams")
                    shape = argument(config["shape"].key, config["shape"].value, " ")
                    words = [config["python"].value, "", xconfig, weight, " ", shape]
                text = " ".join(words)
                needs = self.add("export", text, shown="", labels={"model": model})
            quantised = item(config["infer_quant"].value, index)
            self.matrix(folder, self.log, config["i_img"].value, quantised, "0", None, needs)
