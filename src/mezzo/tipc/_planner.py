"""From a text to a plan: the commands that a repository's script would run, in its order, without running anything."""

from itertools import product

from mezzo.tipc._plan import Plan
from mezzo.tipc._plan_builder import TrainingRun
from mezzo.tipc._plan_training import TrainingPlanner
from mezzo.tipc._profile import Profile, Template
from mezzo.tipc._text import is_set, items


def make_plan(
    text: str, mode: str, profile: Profile, root: str = "$ROOT", gpu_id: str = "", fallback_from: str = ""
) -> Plan:
    """Plan a text in a mode.

    Args:
        text: The configuration.
        mode: lite_train_lite_infer and so on.
        profile: The rules of the repository's script.
        root: What the scripts that use absolute paths take for the working directory.
        gpu_id: Third argument of the scripts, the card of modes that only infer.
        fallback_from: Name of the training after which the expected weights were missing.

    """
    return Planner(text, mode, profile, root, gpu_id, fallback_from).plan()


class Planner(TrainingPlanner):
    """Puts the parts together: training, evaluation, export, inference."""

    def plan(self) -> Plan:
        profile = self.profile
        for command in profile.before_training:
            if "{" not in command:
                self.add("shell", command)
        only_infers = self.mode == "whole_infer" or (self.mode == "klquant_whole_infer" and profile.kl != "train")
        if profile.loops_over == "lists":
            self._train_lists()
        elif only_infers:
            self.whole_infer()
        else:
            for run in self.trainings():
                self.train(run)
                self._after_training(run)
                self.remove_env("after trainer")
        for command in profile.at_the_end.get("", ()) + profile.at_the_end.get(self.config.model, ()):
            self.add("shell", command.format(python=self.config["python"].value))
        return Plan(
            self.config.model,
            self.mode,
            profile.name,
            self.log_dir,
            f"{self.log_dir}/{profile.status_file}",
            profile.banner,
            tuple(self.steps),
            tuple(dict.fromkeys(self.left_out)),
            failure=self.failure,
        )

    def _after_training(self, run: TrainingRun) -> None:
        profile, config = self.profile, self.config
        self._name_weights(run)
        if profile.carry in run.slots and run.trainer == config["norm"].key and run.nodes <= 1:
            self.carried = run.slots[profile.carry]
        last = self._train_linear_classifier(run)
        if is_set(config["eval"].value):
            if "eval" in profile.env_set:
                self.export_env(run.devices)
            self._follow("eval", run, profile.evaluation, last)
            self.pause()
        if is_set(run.export_script):
            self._export(run, last)

    def _name_weights(self, run: TrainingRun) -> None:
        """Fill the slots of evaluation and export that name the weights of a training."""
        config, slots = self.config, run.slots
        path = self.profile.checkpoint.format(
            save=run.save,
            sub=self.checkpoint_sub(),
            train_model=self.train_model,
            pp_model=config.model.replace("PP-", "pp", 1),
        )
        slots["<checkpoint>"] = self.pair("pretrain", path)
        slots["<checkpoint path>"] = path
        slots["<checkpoint pdparams>"] = self.pair("pretrain", f"{path}/model.pdparams")
        if self.checkpoint_sub() not in self.profile.special_subs.values():  # there the script forgets to set it
            self.weight = self.pair("weight", path)
        slots["<weight>"] = self.weight
        slots["<weight pdparams>"] = self.pair("weight", f"{path}/model.pdparams")
        slots["<eval>"] = config["eval"].value
        slots["<eval1>"] = self.pair("eval1")
        slots["<eval1 checkpoint>"] = self.pair("eval1", path)
        key = "" if self.is_whole_training else config["param1"].key
        if "lite_infer" in self.mode and key != "null":
            slots["<eval1 checkpoint>"] += f" {key}={config['param1'].value}"

    def _follow(self, kind: str, run: TrainingRun, template: Template, needs: str) -> str:
        """Add an evaluation or an export."""
        rule, path = self.profile.follow_output, run.slots["<checkpoint path>"]
        log, shown, redirect = self.output_paths(rule, run, f"{run.log_base}_nodes_{run.nodes}_{kind}.log")
        return self.add(
            kind,
            self.fill(template, run.slots),
            redirect,
            log=log,
            output=rule.how,
            shown=shown,
            pattern=path if "<checkpoint path>" in template and "*" in path else "",
            needs=(needs,) if needs else (),
            labels=run.labels,
        )

    def _train_linear_classifier(self, run: TrainingRun) -> str:
        """Add PASSL's steps between training and export, where the text has them; return the step that exports need.

        They extract the weights of the backbone and train a linear classifier on them.
        """
        config, slots, needs = self.config, run.slots, run.train_step
        python = config["python"].value
        extracted = f"{run.save}/{self.checkpoint_sub()}{config['extract2'].value}"
        if is_set(config["extract"].value):
            words = (python, config["extract"].value, slots["<checkpoint path>"], self.pair("extract1"))
            text = " ".join((*words, self.pair("extract2", extracted), "--remove_prefix"))
            needs = self.add("extract", text, shown="", needs=(needs,), labels=run.labels)
            self.pause()
        if is_set(config["linear"].value):
            text = " ".join(
                (
                    python,
                    config["linear"].value,
                    slots["<batch>"],
                    slots["<use_gpu>"],
                    slots["<save>"],
                    slots["<epoch>"],
                    self.pair("linear1", extracted),
                    slots["<autocast>"],
                    self.pair("linear2"),
                    "",
                )
            )
            self.add("linear", text, shown="", needs=(needs,), labels=run.labels)
            self.linear = self.pair("linear2")
            self.pause()
        return needs

    def _export(self, run: TrainingRun, needs: str) -> None:
        profile, config, slots = self.profile, self.config, run.slots
        slots |= self.export_slots(run.export_script, run.save)
        if profile.onnx_export and config["export2"].key == "export_onnx":
            log = f"{run.log_base}_nodes_{run.nodes}_onnx_export.log"
            text, redirect = self.fill(profile.onnx_export, slots), f" >{log} 2>&1"
            self.add("export", text, redirect, log=log, output="text", shown=log, needs=(needs,), labels=run.labels)
        run.export_step = self._follow("export", run, profile.export, needs)
        for command in profile.after_export:
            self.add("shell", command.format(save=run.save, model=config.model))
        self.export_env(run.devices)
        if profile.infer_cwd:
            self.folder_changes.append(profile.infer_cwd)
        folder, data = self._model_folder(run.save), config[profile.data].value
        log_dir = self.from_infer_folder(self.log_dir)
        self.infer_all(folder, log_dir, data, run.quantised, run.devices.cards, run)
        if profile.infer_cwd:
            self.folder_changes.append("..")
        self.remove_env("after inference")

    def _model_folder(self, save: str) -> str:
        """Return the folder of an exported model as inference names it."""
        config, rule = self.config, self.profile.model_sub
        folder = self.profile.model_dir.format(
            save=self.from_infer_folder(save), model=config.model, save_infer=config["save_infer"].value
        )
        sub = config["infer_dir"].value
        is_added = {
            "always": True,
            "never": False,
            "unless null": sub not in ("null", "##"),
            "if set": is_set(sub) and sub != "##",
        }[rule]
        return f"{folder}/{sub}" if is_added else folder

    def _train_lists(self) -> None:
        """Add the trainings of a supplementary text: one for each combination of its lists."""
        config, names = self.config, ("list1", "list2", "list3")
        if self.mode not in ("lite_train_lite_infer", "whole_train_whole_infer"):
            return
        lists = [items(config[name].value) for name in ("autocast", *names)]
        for devices in self.device_sets():
            for autocast, *values in product(*lists):
                slots = self.training_slots(devices, autocast, config["norm"].value, "", "")
                slots |= {f"<{name}>": self.pair(name, value) for name, value in zip(names, values, strict=True)}
                text = self.fill(self.training_template(devices), slots)
                self.remove_env("before training")
                labels = {"devices": devices.cards, "trainer": "norm_train", "autocast": autocast}
                self.add("train", text, shown="", labels=labels)
