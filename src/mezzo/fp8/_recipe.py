"""The recipe of FP8 products: formats, scaling, and which products are worth it."""

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
"""Each dimension of an FP8 product must be a multiple of it: Tensor Cores read operands in units of
16 bytes."""

_CHOICES = {
    "gradient": GRADIENT_FORMATS,
    "scaling": SCALINGS,
    "granularity": GRANULARITIES,
    "fast_accumulation": FAST_ACCUMULATION,
}
_LEAST = {"history": 1, "min_width": 0, "min_size": 0}
_MOST = {"history": 1 << 16}  # each layer has a tensor of this size


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Recipe:
    """Formats and scaling of the FP8 products of level O3.

    Weights and inputs are always e4m3: three bits of mantissa, values up to 448.

    >>> Fp8Recipe().why_half(rows=2048, inputs=8192, outputs=10)
    'its 10 outputs are not a multiple of 16'
    """

    gradient: str = "e5m2"
    """Format of gradients: `e5m2` (two bits of mantissa, values up to 57344) or `e4m3`."""
    scaling: str = "current"
    """`current`: the scale comes from the largest number of the tensor, which needs a pass of its
    own. `delayed`: it comes from the last calls, which saves that pass; larger numbers are clamped.
    Half weights remember the last calls: without `decorate` scaling is current."""
    granularity: str = "tensor"
    """One scale per `tensor`, or per `row`, which is more accurate and slower."""
    history: int = 16
    """Number of calls that a delayed scale uses."""
    min_width: int = 768
    """Least width of a layer, inputs * outputs / (inputs + outputs). A product saves time in
    proportion to rows * inputs * outputs; converting its operands costs rows * (inputs +
    outputs)."""
    min_size: int = 2**22
    """Least rows (samples, tokens) times width: launches cost the same for few rows. At both limits
    captured steps on an H200 broke even (benchmarks/fp8_h200_202611.md)."""
    fast_accumulation: str = "forward"
    """When Tensor Cores may accumulate with fewer bits: in the `forward` pass, `always` or
    `never`."""
    emulate: bool = False
    """Round operands to FP8 and multiply them in float32: the same numbers on any device, but not
    faster."""

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
                "Fp8Recipe: granularity='row' needs scaling='current'; delayed scaling has one scale per tensor"
            )

    def why_half(self, rows: int | None, inputs: int, outputs: int) -> str | None:
        """Return why a product of [rows, inputs] by [outputs, inputs] stays in half.

        None if it can be FP8.

        Args:
            rows: None if not known; then they are not checked.
            inputs: The dimension of the sum.
            outputs: Columns of the result.
        """
        sizes = {"inputs": inputs, "outputs": outputs} | ({} if rows is None else {"rows": rows})
        for name, size in sizes.items():
            if size % MULTIPLE or size == 0:
                return f"its {size} {name} are not a multiple of {MULTIPLE}"
        if inputs * outputs < self.min_width * (inputs + outputs):
            return f"{inputs} -> {outputs} is narrower than min_width {self.min_width} asks: converting would cost more"
        if rows is not None and rows < self.least_rows(inputs, outputs):
            product = f"{rows} rows of {inputs} -> {outputs}"
            return f"its {product} are fewer than min_size {self.min_size} asks: launching would cost more"
        return None

    def least_rows(self, inputs: int, outputs: int) -> int:
        """Return the least number of rows of an FP8 product with these sizes.

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
        """Return a recipe: the given one, one from a mapping of settings, or the default for None.

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
    """Return a recipe as one line of JSON: operators in a graph take strings."""
    return json.dumps(recipe.to_dict(), sort_keys=True)


@functools.cache
def recipe_from_text(text: str) -> Fp8Recipe:
    """Return the recipe of `recipe_to_text`; the text may come from a saved program.

    Raises:
        ValueError: It is not a recipe.
    """
    settings = parse_json(text)
    if not isinstance(settings, dict):
        raise ValueError(f"Fp8Recipe: {short_repr(text)}: must be an object of settings")
    return Fp8Recipe.of(settings)
