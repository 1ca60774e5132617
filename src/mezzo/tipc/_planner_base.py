"""What all branches of the planner share: the fields, the state a shell script keeps, and the list of steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mezzo.tipc._config import parse
from mezzo.tipc._plan import CVD, Step
from mezzo.tipc._profiles import Profile
from mezzo.tipc._text import argument, for_mode, items


@dataclass(frozen=True)
class Devices:
    """One entry of the list of device sets, as the scripts take it apart."""

    index: int
    text: str  # after the hosts were taken off
    ips: str
    env: str | None  # value for CUDA_VISIBLE_DEVICES
    one: bool

    def nodes(self, above: int) -> int:
        return len(items(self.ips, ",")) if len(self.ips) > above else 1


@dataclass
class Training:
    """What one training knows: the values of its slots."""

    devices: Devices
    trainer: str
    autocast: str
    nodes: int
    save: str
    base: str
    quantised: str
    slots: dict[str, str]
    train: str = ""  # name of the training step
    last: str = ""  # name of the export


class Builder:
    """Steps in the making."""

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
        self.train_model = self._checkpoint_name()
        self.linear = ""  # PASSL: an argument that exports repeat once a linear classifier was trained

    def _checkpoint_name(self) -> str:
        line = self.config["train_model"]
        return for_mode(line.value, self.mode) if self.profile.train_model == "mode" else line.value

    def epoch(self) -> str:
        line, rule = self.config["epoch"], self.profile.epoch
        if rule == "clas":
            return "1" if self.mode == "benchmark_train" or self.config["use_gpu"].value == "npu" else "2"
        value = line.value if rule == "plain" else for_mode(line.value, self.mode)
        return value or ("2" if self.profile.name == "passl" else "")

    def batch(self) -> str:
        line = self.config["batch"]
        return line.value if self.profile.batch == "plain" else for_mode(line.value, self.mode)

    def pair(self, name: str, value: str | None = None) -> str:
        line = self.config[name]
        return argument(line.key, line.value if value is None else value)

    def add(self, kind: str, text: str, redirect: str = "", **more: Any) -> str:
        count = self.counts[kind] = self.counts.get(kind, 0) + 1
        name = f"{kind}-{count}"
        full = text + redirect
        if "shown" in more:
            more["status"] = self.profile.tail.format(model=self.config.model, cmd=full, log=more.pop("shown"))
        self.steps.append(Step(name, kind, full, text, dict(self.env), tuple(self.enter), **more))
        self.enter.clear()
        return name

    def export_env(self, devices: Devices) -> None:
        if devices.env is not None:
            self.env[CVD] = devices.env

    def filled(self, template: tuple[str, ...], slots: Mapping[str, str]) -> str:
        def fill(slot: str) -> str:
            if slot in slots:
                return slots[slot]
            for name in ("{gpu}", "{ips}", "{count}", "{nodes}", "{master}", "<to_static>", "<param1>"):
                if name in slot:
                    slot = slot.replace(name, slots.get(name, ""))
            return slot

        return " ".join(fill(slot) for slot in template)

    def labels(self, run: Training) -> dict[str, str]:
        return {"devices": run.devices.text, "nodes": str(run.nodes), "trainer": run.trainer, "autocast": run.autocast}

    def sub(self) -> str:
        rule, model = self.profile.checkpoint_sub, self.config.model
        if rule == "clas" and ("GeneralRecognition" in model or "MetaBIN_ResNet50" in model):
            return "RecModel/"
        return f"{model}/" if rule else ""
