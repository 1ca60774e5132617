"""Numbers of a tensor: how many values are NaN, inf or zero, their range, and how many float16 cannot hold.

Everything is computed on the tensor's device and read in one transfer, for any number of tensors.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mezzo._torch.autocast_state import no_autocast
from mezzo._torch.dispatcher import below_autograd
from mezzo._torch.modes import no_dispatch_modes, no_torch_function
from mezzo.dtypes import PRECISION_DTYPES, dtype_name
from mezzo.errors import RunError
from mezzo.files import say

if TYPE_CHECKING:
    from mezzo.record._findings import Finding

FLOAT16_MAX = 65504.0
# Where rounding to float16 changes its result; ties go to the even neighbour.
FLOAT16_INF_FROM = 65520.0
FLOAT16_ZERO_UNTIL = 2.0**-25
FLOAT16_NORMAL_FROM = 2.0**-14 - 2.0**-25

_COMPUTED_IN = (torch.float32, torch.float64)
_SHORT_NAMES = {name: word for word, name in PRECISION_DTYPES.items()} | {"float64": "fp64"}


class DebugMode(IntEnum):
    """What to look for, and what to do with it."""

    CHECK_NAN_INF_AND_ABORT = 0
    """The first NaN or inf raises an error."""
    CHECK_NAN_INF = 1
    """NaN and inf are reported, and the program continues."""
    CHECK_ALL_FOR_OVERFLOW = 2
    """Values that float16 cannot hold are reported too, in any dtype."""
    CHECK_ALL = 3
    """Every tensor is reported."""


class NonFiniteError(RunError, RuntimeError):
    """A tensor holds NaN or inf; `finding` describes the kernel that made it, None if only a tensor was checked."""

    def __init__(self, message: str, finding: "Finding | None" = None) -> None:
        super().__init__(message)
        self.finding = finding


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """Counts and range of a tensor. `max`, `min` and `mean` are of its finite values, NaN if it has none."""

    name: str
    dtype: str
    device: str
    shape: tuple[int, ...]
    num_nan: int
    num_positive_inf: int
    num_negative_inf: int
    num_zero: int
    num_subnormal: int
    """Values that are subnormal in float16: they keep fewer digits."""
    num_to_zero: int
    """Values other than zero that float16 rounds to zero."""
    max: float
    min: float
    mean: float

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def num_inf(self) -> int:
        """Number of infinities of either sign."""
        return self.num_positive_inf + self.num_negative_inf

    @property
    def is_finite(self) -> bool:
        """Whether there is neither NaN nor inf."""
        return self.num_nan == self.num_inf == 0

    @property
    def max_abs(self) -> float:
        """Largest magnitude of a finite value; NaN if there is none."""
        return max(abs(self.max), abs(self.min))

    @property
    def num_nonzero(self) -> int:
        """Number of finite values other than zero."""
        return self.numel - self.num_nan - self.num_inf - self.num_zero

    @property
    def subnormal_share(self) -> float:
        """Share of the non-zero values that are subnormal in float16."""
        return self.num_subnormal / self.num_nonzero if self.num_nonzero else 0.0

    @property
    def to_zero_share(self) -> float:
        """Share of the non-zero values that float16 rounds to zero."""
        return self.num_to_zero / self.num_nonzero if self.num_nonzero else 0.0

    @property
    def overflows_float16(self) -> bool:
        """Whether a finite value rounds to inf in float16."""
        return self.max_abs >= FLOAT16_INF_FROM

    def __str__(self) -> str:
        """Return name, dtype, shape and range in words."""
        parts = [f"{self.min:.4g} to {self.max:.4g}"] if not math.isnan(self.max) else []
        counts = {"nan": self.num_nan, "inf": self.num_positive_inf, "-inf": self.num_negative_inf}
        parts += [f"{count} {what}" for what, count in counts.items() if count]
        parts += [f"{self.num_zero} of {self.numel} are 0"] if self.num_zero else []
        return f"{self.name} {self.dtype}{list(self.shape)} {', '.join(parts) or 'empty'}"

    def precision_line(self, op: str, name: str | None = None) -> str:
        """Return the `[PRECISION]` line of a log.

        Args:
            op: Name of the operator.
            name: Another name for the tensor.
        """
        error = "" if self.is_finite else "[ERROR] "
        dtype = _SHORT_NAMES.get(self.dtype, self.dtype)
        tensor = self.name if name is None else name
        return (
            f"[PRECISION] {error}in [device={self.device}, op={op}, tensor={tensor}, dtype={dtype}], numel={self.numel}, "
            f"num_nan={self.num_nan}, num_inf={self.num_inf}, num_zero={self.num_zero}, "
            f"max={self.max:e}, min={self.min:e}, mean={self.mean:e}"
        )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, operators run without autograd, and no policy changes their precision."""
    with no_autocast(), below_autograd(), no_torch_function():
        yield


def measure(tensors: Sequence[tuple[str, Tensor]]) -> list[TensorNumbers]:
    """Return the numbers of named floating tensors; call it inside `undisturbed`."""
    if not tensors:
        return []
    vectors = [_vector(tensor) for _, tensor in tensors]
    read = torch.stack([vector.to(vectors[0].device, non_blocking=True) for vector in vectors]).tolist()
    return [_numbers(name, tensor, row) for (name, tensor), row in zip(tensors, read, strict=True)]


def _vector(tensor: Tensor) -> Tensor:
    """Return, on the device, the counts and then max, min and mean, in float64."""
    x = tensor if tensor.dtype in _COMPUTED_IN else tensor.float()
    if x.numel() == 0:
        return torch.tensor([0.0] * 6 + [math.nan] * 3, dtype=torch.float64, device=x.device)
    finite = x.isfinite()
    size = torch.where(finite, x, 0).abs_()
    num_finite, num_nonzero = finite.sum(), torch.count_nonzero(size)
    num_to_zero = x.numel() - (size > FLOAT16_ZERO_UNTIL).sum()  # includes zeros and non-finite values
    num_small = (size < FLOAT16_NORMAL_FROM).sum()
    parts = (
        x.isnan().sum(),
        (x == math.inf).sum(),
        (x == -math.inf).sum(),
        num_finite - num_nonzero,
        num_small - num_to_zero,
        num_to_zero - (x.numel() - num_nonzero),
        torch.where(finite, x, -math.inf).amax(),
        torch.where(finite, x, math.inf).amin(),
        torch.where(finite, x, 0).sum(dtype=torch.float64) / num_finite,
    )
    return torch.stack([part.double() for part in parts])


def _numbers(name: str, tensor: Tensor, row: Sequence[float]) -> TensorNumbers:
    nan, positive_inf, negative_inf, zero, subnormal, to_zero = (int(count) for count in row[:6])
    most, least, mean = row[6:] if math.isfinite(row[6]) else (math.nan,) * 3
    return TensorNumbers(
        name, dtype_name(tensor.dtype), str(tensor.device), tuple(tensor.shape),
        nan, positive_inf, negative_inf, zero, subnormal, to_zero, most, least, mean,
    )  # fmt: skip


def check_numerics(
    tensor: Tensor, op_type: str, var_name: str, debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT
) -> tuple[Tensor, Tensor]:
    """Count the NaN, inf and zero values of a tensor; return int64 [num_nan, num_inf, num_zero] and float32 [max, min, mean].

    Both results are on the tensor's device. Max, min and mean are of the finite values, NaN if there are none. A
    `[PRECISION]` line is printed for a tensor with NaN or inf, with CHECK_ALL_FOR_OVERFLOW also for one that float16
    cannot hold, with CHECK_ALL for any.

    Args:
        tensor: Floating, of any dtype and on any device.
        op_type: Operator that made it, for the line.
        var_name: Its name, for the line.
        debug_mode: CHECK_NAN_INF_AND_ABORT raises `NonFiniteError` if there is NaN or inf.

    >>> counts, values = check_numerics(torch.tensor([1.0, 0.0, 3.0]), "add", "y")
    >>> counts.tolist(), values.tolist()
    ([0, 0, 1], [3.0, 0.0, 1.3333333730697632])
    """
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
        came = f"a tensor of {dtype_name(tensor.dtype)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"check_numerics: {came}; only floating tensors hold NaN or inf: pass a floating tensor")
    mode = DebugMode(debug_mode)
    with no_dispatch_modes(), undisturbed():  # it is not recorded
        vector = _vector(tensor.detach())
        numbers = _numbers(var_name, tensor, vector.tolist())
        counts = torch.stack([vector[0], vector[1] + vector[2], vector[3]]).long()
        values = torch.where(vector[6:].isfinite(), vector[6:], math.nan).float()
    if is_reported(numbers, mode):
        say(numbers.precision_line(op_type))
    if mode is DebugMode.CHECK_NAN_INF_AND_ABORT and not numbers.is_finite:
        raise NonFiniteError(f"{op_type or 'a tensor'}: not finite: {numbers}")
    return counts, values


def is_reported(numbers: TensorNumbers, mode: DebugMode) -> bool:
    """Whether a tensor with such numbers is reported in a mode."""
    if mode is DebugMode.CHECK_ALL or not numbers.is_finite:
        return True
    return mode is DebugMode.CHECK_ALL_FOR_OVERFLOW and numbers.overflows_float16
