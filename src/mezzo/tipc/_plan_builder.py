"""What all parts of the planner share: the fields of the text, the variables of the shell script, the list of steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mezzo.tipc._config import parse_config
from mezzo.tipc._plan import CVD, PlanStep
from mezzo.tipc._profile import Profile, Template
from mezzo.tipc._text import argument, for_mode, items


@dataclass(frozen=True)
class DeviceSet:
    """One entry of the list of device sets, as the scripts take it apart."""

    index: int
    cards: str  # as `0,1`; `-1` for the CPU
    ips: str
    env: str | None  # value for CUDA_VISIBLE_DEVICES

    @property
    def is_one_card(self) -> bool:
        return len(self.cards) <= 1 and not self.ips

    @property
    def is_launched(self) -> bool:
        """Whether the script uses a launcher: it goes by the length of the text."""
        return len(self.cards) > 2

    def num_hosts(self, above: int) -> int:
        return len(items(self.ips, ",")) if len(self.ips) > above else 1


@dataclass
class TrainingRun:
    """One training and what follows it: the values of its slots and the names of its steps."""

    devices: DeviceSet
    trainer: str
    autocast: str
    nodes: int
    save: str
    log_base: str  # what the paths of its logs begin with
    export_script: str
    quantised: str
    slots: dict[str, str]
    train_step: str = ""
    export_step: str = ""

    @property
    def labels(self) -> dict[str, str]:
        return {
            "devices": self.devices.cards,
            "nodes": str(self.nodes),
            "trainer": self.trainer,
            "autocast": self.autocast,
        }


class PlanBuilder:
    """The steps so far, and the variables that a shell script would keep."""

    def __init__(self, text: str, mode: str, profile: Profile, root: str, gpu_id: str, fallback_from: str) -> None:
        self.mode, self.profile, self.gpu_id, self.fallback_from = mode, profile, gpu_id, fallback_from
        self.is_benchmark = mode == "benchmark_train"
        self.is_whole_training = "whole_train" in mode
        self.is_kl = mode == "klquant_whole_infer" and profile.kl == "layout"
        self.config = parse_config(text, profile, "kl-20", 17) if self.is_kl else parse_config(text, profile)
        if mode == "klquant_whole_infer" and profile.kl == "nothing":
            self.config = parse_config("", profile)
        self.log_dir = profile.log_dir.format(
            root=root, model=self.config.model, mode=mode, task=self.config["task"].value
        )
        self.steps: list[PlanStep] = []
        self.left_out: list[str] = []
        self.failure = ""
        self.env: dict[str, str | None] = {}
        self.folder_changes: list[str] = []  # `cd` commands before the next step
        self.counts: dict[str, int] = {}
        self.carried = ""  # weights of the last plain training
        self.weight = ""  # argument of the last export: one case of PaddleClas uses an old one
        self.linear = ""  # PASSL: an argument that exports repeat once a linear classifier was trained
        line = self.config["train_model"].value
        self.train_model = for_mode(line, mode) if profile.train_model == "by mode" else line

    def epochs(self) -> str:
        line, rule = self.config["epoch"].value, self.profile.epochs
        if rule == "ignored":
            return "1" if self.is_benchmark or self.config["use_gpu"].value == "npu" else "2"
        return (line if rule == "as written" else for_mode(line, self.mode)) or self.profile.default_epochs

    def batch(self) -> str:
        line = self.config["batch"].value
        return line if self.profile.batch == "as written" else for_mode(line, self.mode)

    def pair(self, name: str, value: str | None = None) -> str:
        """Return a line as an argument, `key=value`."""
        line = self.config[name]
        return argument(line.key, line.value if value is None else value)

    def add(self, kind: str, text: str, redirect: str = "", **more: Any) -> str:
        """Add a step and return its name; `shown` is the log that its status line names."""
        count = self.counts[kind] = self.counts.get(kind, 0) + 1
        name = f"{kind}-{count}"
        full = text + redirect
        if "shown" in more:
            more["status"] = self.profile.status.format(model=self.config.model, cmd=full, log=more.pop("shown"))
        self.steps.append(PlanStep(name, kind, full, text, dict(self.env), tuple(self.folder_changes), **more))
        self.folder_changes.clear()
        return name

    def export_env(self, devices: DeviceSet) -> None:
        if devices.env is not None:
            self.env[CVD] = devices.env

    def remove_env(self, when: str) -> None:
        if when in self.profile.env_removed:
            self.env[CVD] = None

    def pause(self) -> None:
        if self.profile.pauses:
            self.add("shell", "sleep 5")

    def fill(self, template: Template, slots: Mapping[str, str]) -> str:
        """Return the command of a template."""

        def value(slot: str) -> str:
            if slot in slots:
                return slots[slot]
            for name in ("{gpu}", "{ips}", "{count}", "{nodes}", "{master}", "<to_static>", "<param1>"):
                if name in slot:
                    slot = slot.replace(name, slots.get(name, ""))
            return slot

        return " ".join(value(slot) for slot in template)

    def checkpoint_sub(self) -> str:
        model = self.config.model
        special = (sub for part, sub in self.profile.special_subs.items() if part in model)
        return next(special, self.profile.checkpoint_sub.format(model=model))

    def from_infer_folder(self, path: str) -> str:
        """Return a path below the folder of logs as seen from where inference runs."""
        is_relative = not self.profile.log_dir.startswith("{root}")
        return f"../{path}" if self.profile.infer_cwd and is_relative else path
