"""How FP8 products are made: formats, scaling, which products are worth it. A recipe is data, as a policy is."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mezzo.errors import unknown_choice
from mezzo.files import parse_json, short_repr

GRADIENT_FORMATS = ("e5m2", "e4m3")
SCALINGS = ("current", "delayed")
GRANULARITIES = ("tensor", "row")
FAST_ACCUMULATION = ("forward", "always", "never")

MULTIPLE = 16
"""What each dimension of an FP8 product must be a multiple of: 16 bytes are the least a Tensor Core's operand is read in."""

_CHOICES = {
    "gradient": GRADIENT_FORMATS,
    "scaling": SCALINGS,
    "granularity": GRANULARITIES,
    "fast_accumulation": FAST_ACCUMULATION,
}
_LEAST = {"history": 1, "min_width": 0, "min_size": 0}
_MOST = {"history": 1 << 16}  # it is the size of a tensor per layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Recipe:
    """Formats and scaling of the FP8 products of level O3.

    Weights and inputs are e4m3: three bits of mantissa, up to 448.

    >>> Fp8Recipe().why_half(rows=2048, inputs=8192, outputs=10)
    'its 10 outputs are no multiple of 16'
    """

    gradient: str = "e5m2"
    """Format of gradients: `e5m2` (two bits of mantissa, up to 57344) or `e4m3`."""
    scaling: str = "current"
    """`current`: by the largest number of the tensor, in a pass of its own. `delayed`: by those of the last calls, one pass
    less; what is larger than all of them is cut off. The last calls are remembered beside a half weight: without `decorate`
    scaling is current."""
    granularity: str = "tensor"
    """One scale a `tensor`, or one a `row`: nearer to the numbers, and slower."""
    history: int = 16
    """Calls that a delayed scale looks back."""
    min_width: int = 768
    """Width, inputs * outputs / (inputs + outputs), of the narrowest layer that is worth it: the product saves time with all
    three sizes, while converting its operands costs rows * (inputs + outputs)."""
    min_size: int = 2**22
    """Rows (samples, tokens) times width from which a product is worth it: launches cost the same however few rows there are.
    Both numbers are where captured steps on an H200 broke even (benchmarks/fp8_h200_202611.md)."""
    fast_accumulation: str = "forward"
    """Where Tensor Cores may add with fewer bits: products of the `forward`, `always` or `never`."""
    emulate: bool = False
    """Round operands to FP8 and multiply them in float32: the same numbers, at no gain of time, on any device."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"Fp8Recipe: {unknown_choice(name, str(value), allowed)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Fp8Recipe: {name}={short_repr(value)}: must be a whole number, {least} or more")
            if value > _MOST.get(name, value):
                raise ValueError(f"Fp8Recipe: {name}={short_repr(value)}: must be at most {_MOST[name]}")
        if not isinstance(self.emulate, bool):
            raise ValueError(f"Fp8Recipe: emulate={self.emulate!r}: must be True or False")
        if self.granularity == "row" and self.scaling == "delayed":
            raise ValueError(
                "Fp8Recipe: delayed scaling is for one scale a tensor; with granularity 'row' use 'current'"
            )

    def why_half(self, rows: int | None, inputs: int, outputs: int) -> str | None:
        """Return why a product of [rows, inputs] by [outputs, inputs] stays in half; None: it can be FP8.

        Args:
            rows: None: not known, and not asked about.
            inputs: The dimension that is summed over.
            outputs: Columns of the result.
        """
        sizes = {"inputs": inputs, "outputs": outputs} | ({} if rows is None else {"rows": rows})
        for name, size in sizes.items():
            if size % MULTIPLE or size == 0:
                return f"its {size} {name} are no multiple of {MULTIPLE}"
        if inputs * outputs < self.min_width * (inputs + outputs):
            return f"{inputs} -> {outputs} is narrower than min_width {self.min_width} asks: converting would cost more"
        if rows is not None and rows < self.least_rows(inputs, outputs):
            product = f"{rows} rows of {inputs} -> {outputs}"
            return f"its {product} are fewer than min_size {self.min_size} asks: launching would cost more"
        return None

    def least_rows(self, inputs: int, outputs: int) -> int:
        """Return the fewest rows of which a product is FP8, where its other sizes allow it.

        >>> Fp8Recipe().least_rows(8192, 8192)
        1024
        """
        rows = -(-self.min_size * (inputs + outputs) // (inputs * outputs))
        return max(-(-rows // MULTIPLE), 1) * MULTIPLE

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data."""
        return asdict(self)

    @classmethod
    def of(cls, value: Fp8Recipe | Mapping[str, Any] | None) -> Fp8Recipe:
        """Return a recipe as it is, one made from a mapping of its settings, or the default one.

        >>> Fp8Recipe.of({"gradient": "e4m3"}).gradient
        'e4m3'
        """
        if isinstance(value, Fp8Recipe):
            return value
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise TypeError(f"fp8={value!r}: must be an Fp8Recipe, or a mapping of its settings")
        names = [field.name for field in fields(cls)]
        for key in value:
            if key not in names:
                raise ValueError(f"fp8: {unknown_choice('setting', str(key), names)}")
        return cls(**value)


@functools.cache
def recipe_to_text(recipe: Fp8Recipe) -> str:
    """Return a recipe in one line, as an operator of a graph takes it."""
    return json.dumps(recipe.to_dict(), sort_keys=True)


@functools.cache
def recipe_from_text(text: str) -> Fp8Recipe:
    """Return the recipe of `recipe_to_text`; the text may come from a saved program.

    Raises:
        ValueError: It is no recipe.
    """
    settings = parse_json(text)
    if not isinstance(settings, dict):
        raise ValueError(f"Fp8Recipe: {short_repr(text)}: must be an object of settings")
    return Fp8Recipe.of(settings)
