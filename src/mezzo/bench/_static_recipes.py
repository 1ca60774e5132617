"""The ways to train that `mezzo bench static` compares, and their names on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mezzo.bench._frame import name_with_switches
from mezzo.errors import unknown_choice

BF16_WEIGHTS = "bf16 weights"
_WORDS = {BF16_WEIGHTS: "bf16-", "O3": "o3-"}
"""Levels that are named on a command line."""


@dataclass(frozen=True, slots=True)
class StaticRecipe:
    """One way to train."""

    by: str
    """stock, torchao or mezzo."""
    level: str
    """stock: float32, autocast or bf16 weights; torchao: float8; mezzo: FP32, O1, O2, O2 guard, O3."""
    compile_mode: str | None = None
    """stock: the mode of torch.compile; None: not compiled."""
    keeps_grads: bool = False
    """Gradients are set to zero between steps, not freed, as in old training loops."""
    channels_last: bool = False
    compact: bool = False
    """mezzo: compact masters."""
    is_eager: bool = False
    """mezzo: operator by operator, not in graph mode."""
    compiles_loss: bool = False
    """stock: torch.compile gets network and loss as one function; False: only the network."""
    fp8: str = ""
    """O3: `delayed` for delayed scaling, `row` for a scale per row; empty: the default recipe."""
    half_state: bool = False
    """mezzo: the optimizer's state in bfloat16."""
    saves_memory: bool = False
    """mezzo in graph mode: cheap results are computed again in the backward pass."""

    @property
    def name(self) -> str:
        """The name in the table."""
        compiled = f", torch.compile {self.compile_mode}" if self.compile_mode else ""
        graph = " graph" if self.by == "mezzo" and not self.is_eager else ""
        switches = {
            f"{self.fp8} scales": bool(self.fp8),
            "channels-last": self.channels_last,
            "compact masters": self.compact,
            "bfloat16 state": self.half_state,
            "saving memory": self.saves_memory,
            "grads kept": self.keeps_grads,
        }
        return name_with_switches(f"{self.by} {self.level}{graph}{compiled}", switches)

    @property
    def choices(self) -> tuple[str, ...]:
        """The names on a command line that choose this recipe, the widest first.

        >>> StaticRecipe("stock", "autocast", "default", channels_last=True).choices
        ('stock', 'stock-compile', 'stock-compile-channels-last')
        """
        how = {None: "eager", "default": "compile"}.get(self.compile_mode, self.compile_mode)
        if self.by == "mezzo":
            how = "eager" if self.is_eager else "graph"
        layout = "channels-last" if self.channels_last else "contiguous"
        way = f"{_WORDS.get(self.level, '')}{how}"
        words = self.by, f"{self.by}-{way}", f"{self.by}-{way}-{layout}"
        flags = {"compact": self.compact, "state": self.half_state, "saving": self.saves_memory}
        details = [*filter(None, [self.fp8]), *(word for word, is_on in flags.items() if is_on)]
        return (*words, f"{words[1]}-{'-'.join(details) or 'plain'}") if self.by == "mezzo" else words

    @property
    def has_masters(self) -> bool:
        """Whether float32 values of the weights are kept, which small updates need."""
        return self.level != BF16_WEIGHTS


def _every_way(layouts: Sequence[bool]) -> tuple[StaticRecipe, ...]:
    """Return stock torch, eager and compiled, and mezzo's O2, eager and in graph mode, in each layout."""
    stock: list[dict[str, Any]] = [
        {"compile_mode": mode, "compiles_loss": mode is not None} for mode in (None, "default", "reduce-overhead")
    ]
    return (
        *(StaticRecipe("stock", "autocast", channels_last=last, **how) for how, last in product(stock, layouts)),
        *(
            StaticRecipe("mezzo", "O2", channels_last=last, is_eager=eager)
            for eager in (True, False)
            for last in layouts
        ),
    )


STATIC_RECIPES: dict[str, tuple[StaticRecipe, ...]] = {
    "SimpleNet": (
        StaticRecipe("stock", "float32"),
        StaticRecipe("stock", "autocast"),
        *(StaticRecipe("stock", "autocast", mode) for mode in ("default", "reduce-overhead")),
        # with reduce-overhead torch refuses kept gradients: they lie in the memory of its graph
        StaticRecipe("stock", "autocast", "default", keeps_grads=True),
        *(StaticRecipe("mezzo", level) for level in ("FP32", "O1", "O2")),
        StaticRecipe("mezzo", "O2", compact=True),
        StaticRecipe("mezzo", "O2 guard"),
    ),
    "images": _every_way((False, True)),
    "tokens": _every_way((False,)),
    "llm": (
        StaticRecipe("stock", "autocast"),
        StaticRecipe("stock", "autocast", "default", compiles_loss=True),
        StaticRecipe("stock", BF16_WEIGHTS, "default", compiles_loss=True),
        StaticRecipe("torchao", "float8", "default", compiles_loss=True),
        StaticRecipe("mezzo", "O2", is_eager=True),
        StaticRecipe("mezzo", "O2"),
        StaticRecipe("mezzo", "O2", compact=True),
        StaticRecipe("mezzo", "O2", compact=True, half_state=True),
        StaticRecipe("mezzo", "O2", compact=True, saves_memory=True),
        StaticRecipe("mezzo", "O3"),
        StaticRecipe("mezzo", "O3", compact=True),
        StaticRecipe("mezzo", "O3", compact=True, fp8="delayed"),
        StaticRecipe("mezzo", "O3", compact=True, fp8="row"),
    ),
}
"""By the kind of a network."""


def choose_recipes(kind: str, model: str, wanted: Sequence[str] | None) -> tuple[StaticRecipe, ...]:
    """Return the recipes of a network that the words choose; None: all.

    Args:
        kind: A key of `STATIC_RECIPES`.
        model: The name of the network, for messages.
        wanted: Words such as stock-eager or mezzo-graph-channels-last; a word without a layout stands for all.

    Raises:
        ValueError: A word is unknown, or the network has no such recipe.
    """
    if wanted is None:
        return STATIC_RECIPES[kind]
    known = recipe_choices()
    for word in wanted:
        if word not in known:
            raise ValueError(unknown_choice("--recipes", word, known))
    found = tuple(each for each in STATIC_RECIPES[kind] if set(each.choices) & set(wanted))
    if not found:
        own = dict.fromkeys(word for each in STATIC_RECIPES[kind] for word in each.choices)
        raise ValueError(f"--recipes {','.join(wanted)}: {model} has none of them; allowed: {', '.join(own)}")
    return found


def recipe_choices() -> tuple[str, ...]:
    """Return every word that `choose_recipes` knows."""
    return tuple(dict.fromkeys(word for part in STATIC_RECIPES.values() for each in part for word in each.choices))
