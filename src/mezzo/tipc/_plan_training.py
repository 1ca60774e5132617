"""The training commands: for each device set, precision and trainer of the text."""

from collections.abc import Iterator

from mezzo.tipc._config import Line
from mezzo.tipc._layouts import LAYOUTS
from mezzo.tipc._plan_builder import DeviceSet, TrainingRun
from mezzo.tipc._plan_inference import InferencePlanner
from mezzo.tipc._profile import OutputRule, Template, TrainerRule
from mezzo.tipc._text import argument, for_mode, item, items, key_of, matches, same, second_piece

_NO_TRAINING = "this repository's script trains nothing on several cards; what follows runs without weights"


class TrainingPlanner(InferencePlanner):
    """The part of the planner that trains."""

    def device_sets(self) -> Iterator[DeviceSet]:
        profile = self.profile
        env: str | None
        for index, text in enumerate(items(self.config["gpu_list"].value)):
            ips, env = "", None
            if text == "-1":
                pass
            elif len(text) <= 1:
                env = text
            elif len(text) <= 15:
                env = text if profile.several_env == "all" else _first(text)
            else:
                parts = items(text, ";")
                ips = parts[0] if parts else ""
                text = parts[1] if len(parts) > 1 else ""
                env = _first(text) if profile.hosts_env == "first" else None
            yield DeviceSet(index, text, ips, env)

    def trainings(self) -> Iterator[TrainingRun]:
        """Yield the trainings of the text, those left out that its script does not run."""
        has_autocast = "autocast" in LAYOUTS[self.profile.layout]
        casts = items(self.config["autocast"].value) if has_autocast else [""]
        for devices in self.device_sets():
            if "devices" in self.profile.env_set and devices.is_one_card:
                self.export_env(devices)
            for autocast in casts:
                for trainer in items(self.config["trainer"].value):
                    cast = autocast if has_autocast else str(trainer == "amp_train")
                    run = self._training(devices, cast, trainer)
                    if run is not None:
                        yield run

    def _training(self, devices: DeviceSet, autocast: str, trainer: str) -> TrainingRun | None:
        profile, config = self.profile, self.config
        rule = self._trainer_rule(trainer)
        if rule is None:
            return None
        value, norm = self._trainer_line(rule).value, config["norm"].value
        script = rule.script.format(value=value, norm=norm)
        if script == "null":
            return None
        if not self.is_benchmark and not self.is_whole_training:
            script += profile.short_training
        nodes, is_several = devices.num_hosts(profile.hosts_above), len(devices.ips) > profile.hosts_above
        if profile.counts_launched_hosts and not devices.is_launched:
            nodes, is_several = 1, False
        log_name = profile.log_name.format(trainer=trainer, gpus=devices.cards, autocast=autocast)
        in_name = f"_nodes_{nodes}"
        save_name = profile.save_name.format(log_name=log_name, nodes=in_name, hosts=in_name if is_several else "")
        save = f"{self.log_dir}/{save_name}"
        slots = self.training_slots(devices, autocast, script, save, value if rule.passes_value else "")
        if profile.carry and nodes <= 1 and trainer in (config["pact"].key, config["fpgm"].key):
            slots["<pretrain>"] = self.carried
        if self.is_whole_training:
            slots.update(profile.whole_training_slots)
        base, export = f"{self.log_dir}/{log_name}", config[rule.export].value
        return TrainingRun(devices, trainer, autocast, nodes, save, base, export, str(rule.is_quantised), slots)

    def _trainer_line(self, rule: TrainerRule) -> Line:
        return self.config.to_static if rule.line == "to_static" else self.config[rule.line]

    def _trainer_rule(self, trainer: str) -> TrainerRule | None:
        """Return what a trainer of the list means; None: it is not run."""
        for rule in self.profile.trainers:
            key = self._trainer_line(rule).key
            is_it = matches(trainer, key) if rule.test == "pattern" else same(trainer, key, rule.test == "quoted")
            if is_it:
                return rule
        return None if self.profile.skips_unknown_trainers else TrainerRule("norm")

    def training_slots(
        self, devices: DeviceSet, autocast: str, script: str, save: str, to_static: str
    ) -> dict[str, str]:
        profile, config = self.profile, self.config
        key = config["autocast"].key
        return {
            "<python>": config["python"].value,
            "<run>": script,
            "<use_gpu>": self._use_gpu(devices),
            "<save>": self.pair("save", save),
            "<epoch>": self.pair("epoch", self.epochs()),
            "<pretrain>": self.pair("pretrain"),
            "<autocast>": argument(profile.benchmark_keys.get(key, key) if self.is_benchmark else key, autocast),
            "<batch>": self.pair("batch", self.batch()),
            "<param1>": self.pair("param1"),
            "<param2>": self.pair("train_img"),
            "<config>": self.pair("config", for_mode(config["config"].value, self.mode)),
            "<filename>": argument("filename", config.model),
            "<shuffle>": "TrainReader.shuffle=False" if self.is_benchmark else " ",
            "<ce>": "--enable_ce=True" if self.is_benchmark else " ",
            "<amp>": self._amp(autocast),
            "<amp_level>": profile.amp_level.get(autocast, " "),
            "<to_static>": to_static,
            "<checkpoints>": self.pair("checkpoints"),
            "<unset>": " ",
            "{gpu}": devices.cards,
            "{ips}": devices.ips,
            "{count}": str(len(items(devices.cards, ",")) or 1),
            "{nodes}": str(devices.num_hosts(profile.hosts_above)),
            "{master}": _first(devices.ips),
        }

    def _use_gpu(self, devices: DeviceSet) -> str:
        rule = self.profile.use_gpu
        if rule == "never":
            return " "
        if rule == "item":
            return self.pair("use_gpu", item(self.config["use_gpu"].value, devices.index))
        return self.pair("use_gpu", "False" if rule == "whole-or-false" and devices.cards == "-1" else None)

    def _amp(self, autocast: str) -> str:
        profile = self.profile
        amp = profile.amp.get(autocast, profile.amp_otherwise)
        if self.is_benchmark:
            amp = profile.benchmark_amp.get(autocast, amp)
        if autocast in profile.amp:
            amp += next((words for part, words in profile.amp_of_models.items() if part in self.config.model), "")
        return amp

    def training_template(self, devices: DeviceSet) -> Template:
        train = self.profile.train
        if not devices.is_launched:
            return train.plain
        return train.hosts if len(devices.ips) > self.profile.hosts_above else train.launch

    def train(self, run: TrainingRun) -> None:
        """Add the training with the commands that the script runs around it."""
        profile, devices = self.profile, run.devices
        template = self.training_template(devices)
        if not template:
            self.left_out.append(f"training on {devices.cards}: {_NO_TRAINING}")
            return
        text = self.fill(template, run.slots) + self._arguments_of_last_line()
        for command in profile.before_training:
            if "{" in command:
                self.add("shell", command.format(save=run.save))
        self.remove_env("before training")
        if "training" in profile.env_set and not devices.is_launched:
            self.export_env(devices)
        self.env.update(profile.extra_env)
        self.pause()
        run.train_step = self._add_training(run, text)
        self.pause()

    def _add_training(self, run: TrainingRun, text: str) -> str:
        profile = self.profile
        rule = profile.output
        if run.devices.is_launched and profile.launched_output is not None:
            rule = profile.launched_output
        log, shown, redirect = self.output_paths(rule, run, f"{run.log_base}_nodes_{run.nodes}.log")
        sub = self.checkpoint_sub()
        judged = profile.judged_by.format(save=run.save, logs=self.log_dir, sub=sub.rstrip("/"))
        fallback = profile.checkpoint_fallback.format(epoch=self.epochs())
        benchmark_limit = profile.benchmark_time_limit if self.is_benchmark else None
        name = self.add(
            "train",
            text,
            redirect,
            log=log,
            output=rule.how,
            shown=shown,
            judged_by=judged,
            copied_to=shown if judged else "",
            time_limit=benchmark_limit or profile.time_limit,
            checkpoint=f"{run.save}/{sub}{self.train_model}",
            fallback=fallback,
            labels=run.labels,
        )
        if fallback and self.fallback_from == name:
            self.train_model = fallback
        return name

    def output_paths(self, rule: OutputRule, run: TrainingRun, usual: str) -> tuple[str, str, str]:
        """Return the log of a command, the log that its status line shows, and its redirection."""
        log, shown = (text.format(log=usual, save=run.save, logs=self.log_dir) for text in (rule.log, rule.status))
        return log, shown, rule.redirect.format(log=log)

    def _arguments_of_last_line(self) -> str:
        extra, rule = self.config.extra, self.profile.last_line
        if rule == "one pair":  # read like any other line
            last = self.config.lines[-1] if self.config.lines else ""
            extra = {"log_iters": second_piece(last)} if key_of(last) == "log_iters" else {}
        elif rule != "in benchmarks" or not self.is_benchmark:
            return ""
        return "".join(f" --{name} {extra[name]}" for name in ("log_iters", "repeats") if extra.get(name))


def _first(values: str) -> str:
    """Return the first of values with commas between them."""
    return item(values.replace(",", "|"), 0)
