"""A policy: level, dtype and lists as data, and `decide`, the only function that decides the precision of a call."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from mezzo.amp._lists import LISTS_VERSION, default_black, default_inside, default_white
from mezzo.amp._names import check_disjoint, resolve_list, resolve_name
from mezzo.amp._ops import OPS, VARIANTS, WITHOUT_HALF_KERNEL
from mezzo.dtypes import HALF_DTYPES, dtype_name, parse_half_dtype, parse_level
from mezzo.fp8 import Fp8Recipe

CASTABLE = frozenset({torch.float32, *HALF_DTYPES})
"""Dtypes that a cast may start from. Other dtypes are never cast, and do not take part in a decision."""


class _DtypeAndReason(NamedTuple):
    dtype: torch.dtype | None
    """Dtype of floating results; None: nothing is cast (auto_cast is off, or no input can be cast)."""

    reason: str
    """The list or rule that decided."""


class Decision(_DtypeAndReason):
    """The decision for one call: the pair (dtype, reason), with the dtype of the arithmetic as an attribute.

    >>> dtype, reason = Policy.create("O2").decide("softmax", [torch.float16])
    """

    compute: torch.dtype | None
    """Dtype of the arithmetic. It differs from `dtype` for operators that are float32 inside and return half, and for
    white operators at OD."""

    def __new__(cls, dtype: torch.dtype | None, reason: str, compute: torch.dtype | None) -> Decision:
        """Make the pair, and set `compute`."""
        decision = super().__new__(cls, dtype, reason)
        decision.compute = compute
        return decision

    def __repr__(self) -> str:
        return f"Decision(dtype={self.dtype}, reason={self.reason!r}, compute={self.compute})"


Memo = dict[tuple[str, tuple[torch.dtype, ...]], Decision]

_CPU_COMPUTE = ("auto", "native", "float32")


@dataclass(frozen=True, slots=True)
class Policy:
    """Level, half dtype and lists of an `auto_cast` region; frozen, hashable, comparable.

    Build one with `Policy.create`, which takes the same lists as `auto_cast`.
    """

    level: str
    dtype: torch.dtype
    white: frozenset[str]
    black: frozenset[str]
    inside: frozenset[str]
    use_promote: bool = True
    cpu_compute: str = "auto"
    """Arithmetic of heavy operators on CPU tensors. 'native': half. 'float32': float32, with half inputs and outputs.
    'auto': native if a measurement finds half as fast as float32 on this CPU."""
    fp8: Fp8Recipe | None = None
    """O3: how matrix products are computed in FP8, and which ones; all others are as at O2."""

    _memo: Memo = field(default_factory=dict, init=False, repr=False, compare=False)
    _plans: dict[tuple[str, str], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings without the caches: another process installs its own kernels."""
        data = (
            self.level,
            self.dtype,
            self.white,
            self.black,
            self.inside,
            self.use_promote,
            self.cpu_compute,
            self.fp8,
        )
        return Policy, data

    @classmethod
    def create(
        cls,
        level: str = "O1",
        dtype: str | torch.dtype = "float16",
        custom_white_list: Iterable[str] | None = None,
        custom_black_list: Iterable[str] | None = None,
        use_promote: bool = True,
        cpu_compute: str = "auto",
        fp8: Fp8Recipe | Mapping[str, Any] | None = None,
    ) -> Policy:
        """Return the policy of a level and dtype, with custom lists merged into the default ones.

        Custom white names leave the black list, then custom black names leave the white list: if two different names
        overlap, black wins. At O0 the lists are checked and ignored. `fp8` is for O3 only.
        """
        level, half = parse_level(level), parse_half_dtype(dtype)
        if not isinstance(use_promote, (bool, int)):
            raise TypeError(f"use_promote={use_promote!r}: must be True or False, not {type(use_promote).__name__}")
        if cpu_compute not in _CPU_COMPUTE:
            raise ValueError(f"cpu_compute={cpu_compute!r}: must be one of {', '.join(_CPU_COMPUTE)}")
        to_white = resolve_list(custom_white_list, "custom_white_list")
        to_black = resolve_list(custom_black_list, "custom_black_list")
        check_disjoint(to_white, to_black)
        if level == "O0":
            to_white, to_black = {}, {}
        if fp8 is not None and level != "O3":
            raise ValueError(
                f"fp8 with level={level!r}: FP8 products belong to level O3; give level='O3', or leave fp8 out"
            )
        recipe = Fp8Recipe.of(fp8) if level == "O3" else None
        added_white = frozenset().union(*to_white.values())
        added_black = frozenset().union(*to_black.values())
        return _merge(level, half, added_white, added_black, bool(use_promote), cpu_compute, recipe)

    def decide(self, op: str, input_dtypes: Sequence[torch.dtype]) -> Decision:
        """Return the precision of a call of `op` on tensors of these dtypes, and the list or rule that decides.

        >>> Policy.create("O1").decide("linear", [torch.float32, torch.float32]).dtype
        torch.float16
        """
        key = (op, tuple(input_dtypes))
        decision = self._memo.get(key)
        if decision is None:
            decision = self._memo[key] = self._decide(_variant_of(op), key[1])
        return decision

    def _decide(self, variant: str, dtypes: tuple[torch.dtype, ...]) -> Decision:
        if VARIANTS[variant].weights != "decide":
            dtypes = dtypes[:1]
        castable = [dtype for dtype in dtypes if dtype in CASTABLE]
        if self.level == "O0":
            return Decision(None, "auto_cast is off", None)
        if not castable:
            return Decision(None, "no input that can be cast (float64, integers and bools are left alone)", None)
        if variant in WITHOUT_HALF_KERNEL:
            return _same(torch.float32, "no half kernel")
        if variant in self.white:
            result = torch.float32 if self.level == "OD" else self.dtype
            return Decision(result, f"{self._origin(variant)}white list", self.dtype)
        if variant in self.black:
            return _same(torch.float32, f"{self._origin(variant)}black list")
        gray, rule = self._gray(castable)
        if variant in self.inside:
            return Decision(gray, f"fp32 inside, {rule}", torch.float32)
        return _same(gray, f"gray: {rule}")

    def _gray(self, castable: Sequence[torch.dtype]) -> tuple[torch.dtype, str]:
        """Return the result dtype of a gray operator, which is one on neither list, and the rule."""
        if self.level == "OD":
            return torch.float32, "only white operators are half at OD"
        if self.level in ("O2", "O3") and not self.use_promote:
            return self.dtype, f"all but the black list is half at {self.level}"
        if torch.float32 in castable:
            return torch.float32, "promoted by a float32 input"
        return self.dtype, "no input is float32"

    def _origin(self, variant: str) -> str:
        """Return 'custom ' for a list entry that the default list does not have."""
        default = default_white(self.level, self.dtype) if variant in self.white else default_black(self.level)
        return "" if variant in default else "custom "

    def in_float32(self) -> Policy:
        """Return a policy under which every operator is float32, also on half inputs.

        >>> Policy.create("O2").in_float32().decide("linear", [torch.float16]).dtype
        torch.float32
        """
        black = self.white | self.black | self.inside
        return replace(
            self, level="OD", white=frozenset(), black=black, inside=frozenset(), use_promote=False, fp8=None
        )

    @property
    def digest(self) -> str:
        """A short hash, the same in every process, that names the policy in caches and reports."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain data, for JSON or YAML."""
        return {
            "lists_version": LISTS_VERSION,
            "level": self.level,
            "dtype": dtype_name(self.dtype),
            "use_promote": self.use_promote,
            "cpu_compute": self.cpu_compute,
            "white": sorted(self.white),
            "black": sorted(self.black),
            "fp32_inside": sorted(self.inside),
            **({} if self.fp8 is None else {"fp8": self.fp8.to_dict()}),
        }

    def diff(self, other: Policy) -> str:
        """Return the differences as lines: `- name` is only in this policy, `+ name` only in the other.

        >>> print(Policy.create("O1").diff(Policy.create("O1", custom_white_list=["tan"])))
        white: + tan
        black: - tan
        """
        lines = []
        mine, theirs = self.to_dict(), other.to_dict()
        for key in {**mine, **theirs}:
            if isinstance(mine.get(key), list):
                own, others = set(mine[key]), set(theirs[key])
                lines += [f"{key.removeprefix('fp32_')}: - {name}" for name in sorted(own - others)]
                lines += [f"{key.removeprefix('fp32_')}: + {name}" for name in sorted(others - own)]
            elif mine.get(key) != theirs.get(key):
                lines.append(f"{key}: {mine.get(key)} -> {theirs.get(key)}")
        return "\n".join(lines)


@functools.cache
def _merge(
    level: str,
    half: torch.dtype,
    to_white: frozenset[str],
    to_black: frozenset[str],
    use_promote: bool,
    cpu_compute: str,
    fp8: Fp8Recipe | None,
) -> Policy:
    """Return the policy with these additions: one object per combination, because it caches its decisions."""
    return Policy(
        level=level,
        dtype=half,
        white=(default_white(level, half) | to_white) - to_black,
        black=(default_black(level) - to_white) | to_black,
        inside=default_inside(level) - to_white - to_black,
        use_promote=use_promote,
        cpu_compute=cpu_compute,
        fp8=fp8,
    )


def _same(dtype: torch.dtype, reason: str) -> Decision:
    return Decision(dtype, reason, dtype)


def _variant_of(op: str) -> str:
    """Return the variant that an operator name means without the arguments of a call."""
    if op in VARIANTS:
        return op
    base = op.removeprefix("aten::")
    if base in OPS:
        return OPS[base].variants[0]
    variants = sorted(resolve_name(op))
    if not variants:
        raise ValueError(f"{op!r} has no torch operator, so a policy decides nothing for it")
    return variants[0]
