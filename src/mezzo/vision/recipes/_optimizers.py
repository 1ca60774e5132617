"""Optimizers of a recipe, with parameter groups that have their own learning rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from mezzo._arguments import check_flag, check_number
from mezzo.files import SourceMark, YamlNode, short_repr
from mezzo.vision.recipes._check import attempt, check_arguments, check_block, find_type
from mezzo.vision.recipes._errors import FaultLog, unknown_key

Kind = Literal["sgd", "adam", "adamw", "rmsprop"]
_NORM_CLIP = "ClipGradByGlobalNorm"
_OTHER_CLIPS = ("ClipGradByNorm", "ClipGradByValue")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Learning rate and decay of the parameters whose names contain a text."""

    name: str
    lr_mult: float = 1.0
    weight_decay_mult: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name={short_repr(self.name)}: must be a part of the names of parameters, as 'backbone'")
        check_number("lr_mult", self.lr_mult, at_least=0)
        check_number("weight_decay_mult", self.weight_decay_mult, at_least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRecipe:
    """Creates an optimizer; arguments that its kind does not use are ignored."""

    kind: Kind
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.9
    """Of sgd and rmsprop."""
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    """Of adam and adamw."""
    eps: float = 1e-8
    parts: tuple[ParameterGroup, ...] = ()
    """A parameter belongs to the first group whose name it contains; others have the plain rate."""
    clip_norm: float | None = None
    """Maximum norm of all gradients together; the training applies it."""

    def __post_init__(self) -> None:
        check_number("weight_decay", self.weight_decay, at_least=0)
        if not 0 <= check_number("momentum", self.momentum) < 1:
            raise ValueError(f"momentum={short_repr(self.momentum)}: must be a number of at least 0 and below 1")
        for name, beta in zip(("beta1", "beta2"), self.betas, strict=True):
            if not 0 <= check_number(name, beta) < 1:
                raise ValueError(f"{name}={short_repr(beta)}: must be a number of at least 0 and below 1")
        check_number("epsilon", self.eps, above=0)
        if check_flag("use_nesterov", self.nesterov) and not self.momentum:
            raise ValueError("use_nesterov=True: needs a momentum above 0")
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, above=0)

    def create(self, model: nn.Module, **options: Any) -> Optimizer:
        """Return an optimizer of all trained parameters; each group carries its `lr_mult`.

        Args:
            model: The network.
            options: More arguments of the optimizer's class, such as `fused`.

        Raises:
            ValueError: A part fits no parameter.
        """
        return _MAKERS[self.kind](self, list(self.groups(model)), **options)

    def groups(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """Yield the groups of parameters that `create` gives the optimizer."""
        members: dict[ParameterGroup | None, list[nn.Parameter]] = {part: [] for part in (*self.parts, None)}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                members[next((part for part in self.parts if part.name in name), None)].append(parameter)
        for part, parameters in members.items():
            if part is not None and not parameters:
                raise ValueError(f"no parameter for the part {part.name!r}: none has that in its name")
            if parameters:
                rate, decay = (1.0, 1.0) if part is None else (part.lr_mult, part.weight_decay_mult)
                group = {"lr": self.lr * rate, "lr_mult": rate, "weight_decay": self.weight_decay * decay}
                yield {"params": parameters, **group}


def _sgd(recipe: OptimizerRecipe, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, **options)


def _adam(recipe: OptimizerRecipe, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    return torch.optim.Adam(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, **options)


def _adamw(recipe: OptimizerRecipe, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, **options)


def _rmsprop(recipe: OptimizerRecipe, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    # The values of the MobileNetV3 paper, as in torchvision.
    return torch.optim.RMSprop(groups, lr=recipe.lr, momentum=recipe.momentum, alpha=0.9, eps=0.0316, **options)


_MAKERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "rmsprop": _rmsprop,
}


def _from_sgd(momentum: Any = 0.9, weight_decay: Any = 0.0, use_nesterov: Any = False) -> dict[str, Any]:
    return {"kind": "sgd", "momentum": momentum, "weight_decay": weight_decay, "nesterov": use_nesterov}


def _from_adam(beta1: Any = 0.9, beta2: Any = 0.999, epsilon: Any = 1e-8, weight_decay: Any = 0.0) -> dict[str, Any]:
    return {"kind": "adam", "betas": (beta1, beta2), "eps": epsilon, "weight_decay": weight_decay}


def _from_adamw(beta1: Any = 0.9, beta2: Any = 0.999, epsilon: Any = 1e-8, weight_decay: Any = 0.01) -> dict[str, Any]:
    return {"kind": "adamw", "betas": (beta1, beta2), "eps": epsilon, "weight_decay": weight_decay}


#: Types of PaddleSeg in lower case; `momentum` is SGD with momentum.
KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "sgd": _from_sgd,
    "momentum": _from_sgd,
    "adam": _from_adam,
    "adamw": _from_adamw,
}
_ELSEWHERE = ("custom_cfg", "backbone_lr_mult", "grad_clip_cfg")


def read_optimizer(tree: YamlNode, lr: float, faults: FaultLog) -> OptimizerRecipe | None:
    """Return the optimizer of the `optimizer` block of a configuration, or None after adding faults."""
    node = tree.block["optimizer"]
    name = node.get("type")
    lower = node.with_entries({"type": YamlNode(name.lower(), node.mark_of("type"))}) if isinstance(name, str) else node
    translate = find_type(lower, "optimizer", KINDS, faults)
    before = len(faults)
    parts, clip_norm = _read_parts(node, faults), _read_clip(node, faults)
    if translate is None or not check_arguments(node.without(*_ELSEWHERE), translate, faults) or len(faults) > before:
        return None
    arguments = translate(**node.without("type", *_ELSEWHERE).plain())
    return attempt(node, faults, OptimizerRecipe, lr=lr, parts=parts, clip_norm=clip_norm, **arguments)


def _read_parts(node: YamlNode, faults: FaultLog) -> tuple[ParameterGroup, ...]:
    parts: list[ParameterGroup] = []
    listed = node.block.get("custom_cfg", YamlNode([], node.mark))
    if not isinstance(listed.value, list):
        faults.add(listed.mark, "custom_cfg: must be a list of blocks, as [{name: backbone, lr_mult: 0.1}]")
    for item in listed.items:
        if check_block(item, "custom_cfg", ("name", "lr_mult", "weight_decay_mult"), ("name",), faults):
            group = attempt(item, faults, ParameterGroup, **item.plain())
            parts += [group] if group else []
    if "backbone_lr_mult" in node.block:
        own = node.block["backbone_lr_mult"]
        group = attempt(own, faults, ParameterGroup, name="backbone", lr_mult=own.plain())
        parts += [group] if group else []
    return tuple(parts)


def _read_clip(node: YamlNode, faults: FaultLog) -> float | None:
    if node.get("grad_clip_cfg") is None:
        return None
    clip = node.block["grad_clip_cfg"]
    if not check_block(clip, "grad_clip_cfg", ("name", "clip_norm"), ("name", "clip_norm"), faults):
        return None
    name = clip.get("name")
    if name in _OTHER_CLIPS:
        text = f"grad_clip_cfg: {name} is not supported; {_NORM_CLIP} clips by the norm of all gradients"
        faults.add(clip.mark_of("name"), text)
    elif name != _NORM_CLIP:
        faults.add(clip.mark_of("name"), unknown_key("grad_clip_cfg", str(name), (_NORM_CLIP,)))
    return attempt(clip, faults, check_number, "clip_norm", clip.get("clip_norm"), above=0)


def check_parts(recipe: OptimizerRecipe, model: nn.Module, mark: SourceMark, faults: FaultLog) -> None:
    """Add faults for groups that match no parameter of a network."""
    try:
        list(recipe.groups(model))
    except ValueError as error:
        faults.add(mark, f"optimizer: {error}")
