"""SGD and Adam written as single float32 operations of numpy, each of which rounds once: what the kernels must equal."""

import math
from dataclasses import dataclass, field

import numpy as np

f32 = np.float32


@dataclass
class Rule:
    """Options under torch's names."""

    kind: str
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass
class Weight:
    """A float32 weight and its optimizer state."""

    value: np.ndarray
    first: np.ndarray = field(init=False)
    second: np.ndarray = field(init=False)
    steps: int = 0

    def __post_init__(self) -> None:
        self.first, self.second = np.zeros_like(self.value), np.zeros_like(self.value)

    def step(self, grad: np.ndarray, rule: Rule) -> None:
        grad = -grad if rule.maximize else grad
        self.steps += 1
        if rule.kind == "SGD":
            self._sgd(grad, rule)
        else:
            self._adam(grad, rule)
        assert self.value.dtype == self.first.dtype == self.second.dtype == np.float32

    def _sgd(self, grad: np.ndarray, rule: Rule) -> None:
        if rule.weight_decay:
            grad = grad + self.value * f32(rule.weight_decay)
        if rule.momentum:
            self.first = self.first * f32(rule.momentum) + grad * f32(1 - rule.dampening)
            grad = grad + self.first * f32(rule.momentum) if rule.nesterov else self.first
        self.value = self.value - grad * f32(rule.lr)

    def _adam(self, grad: np.ndarray, rule: Rule) -> None:
        beta1, beta2 = rule.betas
        if rule.weight_decay and rule.kind == "AdamW":
            self.value = self.value * f32(1 - rule.lr * rule.weight_decay)
        elif rule.weight_decay:
            grad = grad + self.value * f32(rule.weight_decay)
        new = f32(1 - beta1)
        away = grad - self.first
        self.first = self.first + away * new if new < 0.5 else grad - away * (f32(1) - new)
        self.second = self.second * f32(beta2) + grad * grad * f32(1 - beta2)
        rate = f32(rule.lr / (1 - beta1**self.steps))
        spread = f32(math.sqrt(1 - beta2**self.steps))
        self.value = self.value - self.first * rate / (np.sqrt(self.second) / spread + f32(rule.eps))


def ulps_between(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest distance of two float32 arrays, in units of the last place of the larger number."""
    size = np.maximum(np.abs(a), np.abs(b))
    return float(np.max(np.abs(a.astype(np.float64) - b) / np.spacing(size), initial=0.0))
