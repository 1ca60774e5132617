"""Parameters, gradients and rules of the tests of the Triton tier, on a GPU or in Triton's interpreter."""

import os
from typing import Any

import numpy as np
import torch
from formulas import Rule
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from mezzo.optim import attach_master, master_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

# Triton's interpreter cuts float32 to bfloat16 where hardware rounds.
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
SIZES = (1, 5, 1000, 4096, 4097, 5001) if INTERPRETED else (1, 5, 1000, 4096, 8192, 20001, 300_007)
RULES = {
    "sgd": Rule("SGD", 0.037),
    "sgd momentum": Rule("SGD", 0.037, momentum=0.9),
    "sgd all": Rule("SGD", 0.037, momentum=0.9, nesterov=True, weight_decay=0.013),
    "sgd maximize": Rule("SGD", 0.037, momentum=0.8, weight_decay=0.013, maximize=True),
    "adam": Rule("Adam", 0.011, weight_decay=0.013),
    "adamw": Rule("AdamW", 0.011, weight_decay=0.013),
    "adamw low betas": Rule("AdamW", 0.011, betas=(0.3, 0.9), eps=1e-3, maximize=True),
}


def make_optimizer(rule: Rule, params: list[Any]) -> Optimizer:
    if rule.kind == "SGD":
        return SGD(
            params,
            lr=rule.lr,
            momentum=rule.momentum,
            nesterov=rule.nesterov,
            weight_decay=rule.weight_decay,
            maximize=rule.maximize,
        )
    kind = Adam if rule.kind == "Adam" else AdamW
    return kind(
        params, lr=rule.lr, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay, maximize=rule.maximize
    )


def parameter(values: Tensor, half: torch.dtype | None = torch.float16, compact: bool = False) -> nn.Parameter:
    values = values.to(DEVICE)
    if half is None:
        return nn.Parameter(values)
    param = nn.Parameter(values.to(half))
    attach_master(param, values, compact=compact)
    return param


def parameters(half: torch.dtype = torch.float16, seed: int = 0, compact: bool = False) -> list[nn.Parameter]:
    """Half ones of all sizes, and one float32 one, as O2 leaves a norm."""
    torch.manual_seed(seed)
    return [parameter(torch.randn(n), half, compact) for n in SIZES] + [parameter(torch.randn(77), None)]


def set_grads(params: list[nn.Parameter], seed: int, scale: float = 1024.0) -> None:
    torch.manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(param.shape) * scale).to(param.dtype).to(DEVICE)


def exact(param: Tensor) -> np.ndarray:
    master = master_of(param)
    return (param.detach() if master is None else master).cpu().numpy()


def scale_of(value: float = 1024.0) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def run_steps(optimizer: Optimizer, params: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        set_grads(params, seed, 1.0)
        optimizer.step()
