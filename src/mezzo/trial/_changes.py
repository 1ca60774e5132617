"""Changes that only make a model faster: layout, padded channels, a white list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from mezzo._torch.layers import convolve
from mezzo.amp import is_excluded, resolve_list
from mezzo.errors import MezzoError
from mezzo.files import read_yaml, short_repr, write_text

_KEYS = ("channels_last", "pad_channels", "custom_white_list")


class ChangesError(MezzoError):
    """A file of changes is not valid, or does not fit the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Changes that `mezzo doctor --apply` writes and `apply_changes` applies."""

    channels_last: bool = False
    """Store four-dimensional weights channels-last; the outputs of convolutions follow."""
    pad_channels: tuple[tuple[str, int, int], ...] = ()
    """Layers that compute with zero-padded channels or features: path, inputs, outputs.

    The padding is cut off again.
    """
    custom_white_list: tuple[str, ...] = ()
    """Additional operators that compute in half."""

    @property
    def are_none(self) -> bool:
        """Whether there are no changes."""
        return self == NO_CHANGES

    def write(self, path: Path | str) -> None:
        """Write the changes as YAML, atomically."""
        write_text(Path(path), self.to_yaml())

    def to_yaml(self) -> str:
        """Return the YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the file, without defaults."""
        data: dict[str, Any] = {}
        if self.channels_last:
            data["channels_last"] = True
        if self.pad_channels:
            data["pad_channels"] = {path: {"in": inputs, "out": outputs} for path, inputs, outputs in self.pad_channels}
        if self.custom_white_list:
            data["custom_white_list"] = list(self.custom_white_list)
        return data


NO_CHANGES = Changes()


def read_changes(path: Path | str) -> Changes:
    """Read a file of changes.

    Raises:
        ChangesError: The file cannot be read or is not valid.
    """
    path = Path(path)
    data = read_yaml(path, raising=ChangesError)
    data = {} if data is None else data
    if not isinstance(data, dict) or not data.keys() <= set(_KEYS):
        found = short_repr(sorted(data)) if isinstance(data, dict) else type(data).__name__
        raise ChangesError(f"{path}: has {found}; allowed keys: {', '.join(_KEYS)}")
    return Changes(
        channels_last=_read_flag(path, data.get("channels_last", False)),
        pad_channels=_read_padding(path, data.get("pad_channels", {})),
        custom_white_list=_read_names(path, data.get("custom_white_list", [])),
    )


def _read_flag(path: Path, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ChangesError(f"{path}: channels_last is {short_repr(value)}; must be true or false")
    return value


def _read_names(path: Path, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ChangesError(f"{path}: custom_white_list must be a list of operator names")
    try:
        resolve_list(value, "custom_white_list")
    except ValueError as error:
        raise ChangesError(f"{path}: {error}") from error
    return tuple(value)


def _read_padding(path: Path, value: Any) -> tuple[tuple[str, int, int], ...]:
    if not isinstance(value, Mapping):
        raise ChangesError(f"{path}: pad_channels must map a layer to its channels, such as stem: {{in: 4, out: 64}}")
    rows = []
    for layer, sizes in value.items():
        is_whole = isinstance(sizes, Mapping) and sizes.keys() == {"in", "out"}
        if not is_whole or not all(type(size) is int and size > 0 for size in sizes.values()):
            raise ChangesError(
                f"{path}: pad_channels of {short_repr(layer)} is {short_repr(sizes)}; must be such as {{in: 4, out: 64}}"
            )
        rows.append((str(layer), sizes["in"], sizes["out"]))
    return tuple(rows)


def apply_changes(model: nn.Module, changes: Changes | Path | str) -> dict[str, list[str]]:
    """Change a model in place, and return the lists for `auto_cast`.

    Parameters, their names and checkpoints stay the same; results differ only by rounding. Call it
    before `decorate` and before any wrapper.

    Args:
        model: The model that `advise` examined.
        changes: The changes or their file.

    Raises:
        ChangesError: The model lacks a layer, or a layer cannot be padded. The model is unchanged.

    >>> net = nn.Sequential(nn.Conv2d(3, 61, 3))
    >>> apply_changes(net, Changes(channels_last=True, pad_channels=(("0", 4, 64),)))
    {}
    >>> net(torch.zeros(1, 3, 8, 8)).shape
    torch.Size([1, 61, 6, 6])
    """
    if not isinstance(changes, Changes):
        changes = read_changes(changes)
    layers = [
        (_find_layer(model, path, inputs, outputs), inputs, outputs) for path, inputs, outputs in changes.pad_channels
    ]
    if changes.channels_last:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    for layer, inputs, outputs in layers:
        pad_layer(layer, inputs, outputs)
    return {"custom_white_list": list(changes.custom_white_list)} if changes.custom_white_list else {}


def _find_layer(model: nn.Module, path: str, inputs: int, outputs: int) -> nn.Module:
    try:
        layer = model.get_submodule(path)
    except AttributeError as error:
        raise ChangesError(f"pad_channels: the model has no layer {path!r}") from error
    if not can_be_padded(layer):
        raise ChangesError(
            f"pad_channels: {path!r} is a {type(layer).__name__}; must be a linear layer or a convolution without groups, "
            "with padding_mode='zeros' and torch's own forward"
        )
    has = channels_of(layer)
    if inputs < has[0] or outputs < has[1]:
        raise ChangesError(
            f"pad_channels: {path!r} has {has[0]} inputs and {has[1]} outputs, cannot become {inputs}, {outputs}"
        )
    return layer


def can_be_padded(layer: nn.Module) -> bool:
    """Return whether a layer can be padded: torch's own forward, no groups, zero padding."""
    has_own_forward = "forward" in layer.__dict__ and not is_excluded(layer)
    if has_own_forward or type(layer) not in _PADDED | dict.fromkeys(_PADDED.values()):
        return False
    is_plain = getattr(layer, "groups", 1) == 1 and getattr(layer, "padding_mode", "zeros") == "zeros"
    return isinstance(layer, nn.Linear) or is_plain


def channels_of(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output channels or features."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1], weight.shape[0]


def pad_layer(layer: nn.Module, inputs: int, outputs: int) -> None:
    """Make a layer compute with zero-padded inputs and outputs.

    Its parameters and its result stay the same.

    The layer gets a subclass of its own class, so copies, pickles and replicas are padded too.
    """
    layer.__class__ = _PADDED.get(type(layer), type(layer))
    layer.__dict__["padded_to"] = (inputs, outputs)


def _padded(layer: Any, x: Tensor) -> Tensor:
    inputs, outputs = layer.padded_to
    weight, bias = layer.weight, layer.bias
    has_in, has_out = weight.shape[1], weight.shape[0]
    spatial = weight.dim() - 2
    channel_pad = [0] * (2 * spatial) + [0, inputs - has_in]
    x = pad(x, channel_pad) if inputs > has_in else x
    weight = pad(weight, [*channel_pad, 0, outputs - has_out])
    bias = None if bias is None else pad(bias, [0, outputs - has_out])
    if isinstance(layer, nn.Linear):
        return linear(x, weight, bias)[..., :has_out]
    return convolve(layer, x, weight, bias).narrow(-1 - spatial, 0, has_out)


class PaddedLinear(nn.Linear):
    """A linear layer that computes with padded features."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the result of the layer without padding."""
        return _padded(self, input)


class PaddedConv1d(nn.Conv1d):
    """A convolution that computes with padded channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the result of the layer without padding."""
        return _padded(self, input)


class PaddedConv2d(nn.Conv2d):
    """A convolution that computes with padded channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the result of the layer without padding."""
        return _padded(self, input)


class PaddedConv3d(nn.Conv3d):
    """A convolution that computes with padded channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the result of the layer without padding."""
        return _padded(self, input)


_PADDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: PaddedLinear,
    nn.Conv1d: PaddedConv1d,
    nn.Conv2d: PaddedConv2d,
    nn.Conv3d: PaddedConv3d,
}
