"""What known libraries write out by hand, replaced in place by one fused operator each.

transformers writes GELU and RMS norm as five to seven operators, each a pass over memory, and its
causal loss makes a float32 copy of the logits. A part is recognised by its class name and its
attributes, without an import of that library. It is replaced only if it gives the same numbers on a
trial input: a namesake that computes something else, such as Gemma's RMS norm (1 + weight), stays.
Linear layers with an odd number of outputs, such as vocabularies, are padded (`_aligned.py`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo._torch.functorch import innermost_transform
from mezzo.amp._aligned import AlignedLinear, align_in_place, is_odd
from mezzo.kernels import fused_cross_entropy

_CAUSAL_LOSS = "ForCausalLMLoss"
_CAUSAL_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_RTOL, _ATOL = 1e-5, 2e-6
"""float32 trials of two ways to write one formula: some units of rounding."""


@dataclass(frozen=True, slots=True)
class FusedPart:
    """One replaced part of a model."""

    name: str
    """The path of the module; for a loss, that of the model it belongs to."""
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name or '(model)'}: {self.before} -> {self.after}"


def fuse_parts(model: nn.Module, spared: Collection[nn.Module] = ()) -> list[FusedPart]:
    """Replace parts of a model by fused ones, in place; parameters and state_dict keys stay the same.

    Args:
        model: The model.
        spared: Modules that stay as they are, with everything inside them.

    Returns:
        What was replaced, in the order of the modules.
    """
    untouched = {id(part) for module in spared for part in module.modules()}
    made: dict[int, nn.Module | None] = {}
    parts = []
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in untouched:
            continue
        if _fuse_loss(module):
            parts.append(FusedPart(path, _CAUSAL_LOSS, causal_lm_loss.__name__))
        if is_odd(module):
            align_in_place(module)
            parts.append(FusedPart(path, nn.Linear.__name__, AlignedLinear.__name__))
        if not path:
            continue  # the model itself is held by the caller
        if id(module) not in made:
            made[id(module)] = _fused(module)
        fused = made[id(module)]
        if fused is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, fused)
            parts.append(FusedPart(path, type(module).__name__, repr(fused)))
    return parts


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss of predicting each next token, in float32, without a float32 copy of half logits.

    The arguments are those of transformers' causal loss. Other keywords are ignored there too.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("causal_lm_loss(): got neither labels nor shift_labels; give one of them")
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    rows = logits.reshape(-1, vocab_size)
    loss = _cross_entropy(rows, target, "mean" if num_items_in_batch is None else "sum", ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(logits.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _cross_entropy(rows: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    """Return the cross entropy in float32.

    torch computes it in compiled code, where Inductor fuses the cast, and inside of torch.func, which
    mezzo's operator does not support.
    """
    if torch.compiler.is_compiling() or innermost_transform() is not None:
        return F.cross_entropy(rows.float(), target, reduction=reduction, ignore_index=ignore_index)
    return fused_cross_entropy(rows, target, reduction, ignore_index)


def _fused(module: nn.Module) -> nn.Module | None:
    """Return the module that takes the place of another; None if it stays."""
    kind = type(module).__name__
    if any(True for _ in module.children()) or any(True for _ in module.buffers()) or not _takes_one_tensor(module):
        return None
    if kind.endswith("RMSNorm") or kind == "T5LayerNorm":
        return _fused_norm(module)
    return _fused_gelu(module) if "gelu" in kind.lower() else None


def _takes_one_tensor(module: nn.Module) -> bool:
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _fused_norm(module: nn.Module) -> nn.Module | None:
    names = [name for name, _ in module.named_parameters()]
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if isinstance(module, nn.RMSNorm) or names != ["weight"] or not isinstance(eps, float):
        return None
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or weight.is_meta:
        return None
    fused = nn.RMSNorm(len(weight), eps=eps, elementwise_affine=False)
    fused.elementwise_affine, fused.weight = True, weight
    generator = torch.Generator().manual_seed(0)
    x, trial_weight = torch.randn(4, len(weight), generator=generator), torch.rand(len(weight), generator=generator)
    trial = copy.deepcopy(module).float().cpu()
    with torch.no_grad():
        trial.get_parameter("weight").copy_(trial_weight)
    found = _tried(trial, x)
    is_same = found is not None and _are_near(found, F.rms_norm(x, (len(weight),), trial_weight, eps))
    return fused.train(module.training) if is_same else None


def _fused_gelu(module: nn.Module) -> nn.Module | None:
    if isinstance(module, nn.GELU) or any(True for _ in module.parameters()):
        return None
    x = torch.linspace(-6, 6, 1001)
    found = _tried(module, x)
    for approximate in ("none", "tanh"):
        expected = F.gelu(x, approximate=approximate)
        if found is not None and _are_near(found, expected):
            # the same bits: it is one operator already
            return None if torch.equal(found, expected) else nn.GELU(approximate).train(module.training)
    return None


def _tried(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the result of a trial; None if the module takes no such input, as a gated GELU does not."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = module(x)
    except Exception:  # noqa: BLE001  only its name was known: it may raise anything, and it stays
        return None
    return found if isinstance(found, Tensor) else None


def _fuse_loss(module: nn.Module) -> bool:
    """Replace the causal loss of a model; return whether that was done."""
    if not type(module).__name__.endswith(_CAUSAL_MODELS):
        return False
    given: Any = getattr(module, "loss_function", None)
    if getattr(given, "__name__", "") != _CAUSAL_LOSS:
        return False
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator)
    labels = torch.randint(11, (2, 5), generator=generator)
    labels[0, 3] = -100
    for items in (None, 3):
        options: dict[str, Any] = {"labels": labels, "vocab_size": 11, "num_items_in_batch": items}
        if not _are_near(given(logits=logits, **options), causal_lm_loss(logits, **options)):
            return False
    model: Any = module  # torch's stubs know tensors and modules as attributes only
    model.loss_function = causal_lm_loss
    return True


def _are_near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=_RTOL, atol=_ATOL)
