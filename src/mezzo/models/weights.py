"""Weights in and out: Paddle's `.pdparams`, safetensors, torch files."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mezzo._errors import MezzoError
from mezzo.models._pickles import read_arrays
from mezzo.models._registry import model_info

#: Entries of a `.pdparams` file that are no weights.
_NAMES, _SLICES = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
_TO_PADDLE = {"running_mean": "_mean", "running_var": "_variance"}
_TO_TORCH = {paddle: ours for ours, paddle in _TO_PADDLE.items()}


class WeightsError(MezzoError):
    """Weights do not fit, or cannot be read."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of each entry; all names are Paddle's."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    """In the model, not in the file."""
    unexpected: tuple[str, ...] = ()
    """In the file, not in the model."""
    mismatched: tuple[str, ...] = ()
    """In both, of another shape: 'name (shape in the file, shape in the model)'."""
    heads: tuple[str, ...] = field(default=())
    """Mismatched ones that depend on the number of classes: left as they were."""

    def __str__(self) -> str:
        """Say it in a line."""
        parts = [f"{len(self.loaded)} entries loaded"]
        if self.heads:
            parts.append(
                f"{len(self.heads)} of the heads left as they were (another number of classes): {_some(self.heads)}"
            )
        for what in ("missing", "unexpected", "mismatched"):
            names = getattr(self, what)
            if names:
                parts.append(f"{len(names)} {what}: {_some(names)}")
        return "; ".join(parts)


def _some(names: tuple[str, ...], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def paddle_state(model: nn.Module) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights of a model under Paddle's names and in its layout, float32."""
    linear = _linear_weights(model)
    state = {}
    for key, value in model.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            array = value.detach().cpu().float().numpy()
            state[_rename(key, _TO_PADDLE)] = np.ascontiguousarray(array.T if key in linear else array)
    return state


def load_paddle_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> LoadReport:
    """Load arrays under Paddle's names into a model; return what became of each.

    Heads for another number of classes stay as they are. The weights of a backbone alone, without the prefix that it has
    in the model, are recognised; the rest of the model then stays as it is.

    Args:
        model: From `create_model`, or any whose parts are named like Paddle's.
        state: Arrays by name.
        strict: Missing, unexpected and mis-shaped entries are an error, and nothing is loaded.

    Raises:
        WeightsError: Entries do not fit (`strict`), or none of them does.
    """
    own = model.state_dict()
    linear = _linear_weights(model)
    wanted = {_rename(k, _TO_PADDLE): k for k in own if not k.endswith("num_batches_tracked")}
    state, is_backbone = _with_prefix(state, wanted)
    heads = _head_keys(model)
    values: dict[str, Tensor] = {}
    mismatched: list[str] = []
    left: list[str] = []
    for name, array in state.items():
        if name not in wanted:
            continue
        key = wanted[name]
        value = torch.from_numpy(np.array(array))
        value = value.t() if key in linear and value.dim() == 2 else value
        if value.shape == own[key].shape:
            values[key] = value
        else:
            there = tuple(own[key].t().shape if key in linear else own[key].shape)
            line = f"{name} ({tuple(np.shape(array))}, {there})"
            (left if name.startswith(heads) else mismatched).append(line)
    missing = () if is_backbone else tuple(name for name in wanted if name not in state)
    unexpected = tuple(name for name in state if name not in wanted)
    loaded = tuple(name for name, key in wanted.items() if key in values)
    report = LoadReport(loaded, missing, () if is_backbone else unexpected, tuple(mismatched), tuple(left))
    if not loaded or (strict and (report.missing or report.unexpected or mismatched)):
        raise WeightsError(f"the weights do not fit the model: {report}")
    model.load_state_dict(values, strict=False)
    return report


def _with_prefix(state: Mapping[str, Any], wanted: Mapping[str, str]) -> tuple[dict[str, Any], bool]:
    if any(name in wanted for name in state):
        return dict(state), False
    prefixed = {f"backbone.{name}": value for name, value in state.items()}
    if any(name in wanted for name in prefixed):
        return prefixed, True
    return dict(state), False


def _head_keys(model: nn.Module) -> tuple[str, ...]:
    name = getattr(model, "model_name", None)
    return model_info(name).head_keys if isinstance(name, str) else ()


def _rename(key: str, leaves: Mapping[str, str]) -> str:
    path, _, leaf = key.rpartition(".")
    return f"{path}.{leaves[leaf]}" if leaf in leaves and path else key


def _linear_weights(model: nn.Module) -> set[str]:
    """Return the keys whose matrix Paddle stores transposed."""
    return {
        f"{name}.weight" if name else "weight" for name, part in model.named_modules() if isinstance(part, nn.Linear)
    }


def read_pdparams(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a `.pdparams` file by name.

    Raises:
        WeightsError: There is no such file.
        UnsafePickle: It holds more than arrays. Nothing that it names was called.
    """
    entries = read_arrays(_bytes_of(path))
    entries.pop(_NAMES, None)
    sliced = entries.pop(_SLICES, None)
    if isinstance(sliced, dict):
        for name, how in sliced.items():
            parts = [np.ravel(entries.pop(part)) for part in how["slices"]]
            entries[name] = np.concatenate(parts).reshape([int(n) for n in how["OriginShape"]])
    others = [name for name, value in entries.items() if not isinstance(value, np.ndarray)]
    if others:
        raise WeightsError(f"{path}: {_some(tuple(others))}: no array; is this a .pdparams file?")
    return entries


def load_pdparams(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
    """Load a `.pdparams` file into a model; see `load_paddle_state` and `read_pdparams`."""
    return load_paddle_state(model, read_pdparams(path), strict=strict)


def save_pdparams(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the weights of a model (float32; masters of a decorated one) as a `.pdparams` file, whole or not at all."""
    _write_pdparams(paddle_state(model), Path(path))


def _write_pdparams(state: Mapping[str, np.ndarray[Any, Any]], path: Path) -> None:
    content = {**state, _NAMES: {name: name for name in state}}
    _write(path, lambda file: pickle.dump(content, file, protocol=4))


def _write(path: Path, fill: Callable[[Any], object]) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _bytes_of(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error


# Between formats

_FORMATS = (".pdparams", ".safetensors", ".pt", ".pth")


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> int:
    """Rewrite a weights file in the format of the target's name; return the number of entries.

    Names and layouts change with it: `.pdparams` has Paddle's, the others have torch's.

    Raises:
        WeightsError: A format is unknown or a file cannot be read or written.
    """
    state = _read_torch_state(Path(source))
    path = Path(target)
    if not path.parent.is_dir():
        raise WeightsError(f"{target}: there is no folder {str(path.parent)!r}")
    suffix = _format_of(path)
    if suffix == ".pdparams":
        arrays = {_rename(k, _TO_PADDLE): _transposed(k, v.cpu().float().numpy()) for k, v in state.items()}
        _write_pdparams({k: np.ascontiguousarray(v) for k, v in arrays.items()}, path)
    elif suffix == ".safetensors":
        save = _safetensors().save
        _write(path, lambda file: file.write(save({key: value.contiguous() for key, value in state.items()})))
    else:
        _write(path, lambda file: torch.save(state, file))
    return len(state)


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
    """Load a `.pdparams`, `.safetensors`, `.pt` or `.pth` file into a model; see `load_paddle_state`."""
    if _format_of(Path(path)) == ".pdparams":
        return load_pdparams(model, path, strict=strict)
    state = _read_torch_state(Path(path))
    linear = _linear_weights(model)
    arrays = {_rename(k, _TO_PADDLE): v.cpu().numpy() for k, v in state.items()}
    return load_paddle_state(model, {k: v.T if k in linear else v for k, v in arrays.items()}, strict=strict)


def _transposed(key: str, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Paddle's linear weights are [in, out]; without the model, every matrix called weight is one."""
    return array.T if array.ndim == 2 and key.endswith("weight") else array


def _read_torch_state(path: Path) -> dict[str, Tensor]:
    """Return the entries of a weights file under torch's names and in its layout."""
    suffix = _format_of(path)
    if suffix == ".pdparams":
        arrays = read_pdparams(path)
        return {_rename(k, _TO_TORCH): torch.from_numpy(_transposed(k, v).copy()) for k, v in arrays.items()}
    data = _bytes_of(path)
    loaded = _safetensors().load(data) if suffix == ".safetensors" else _read_torch_file(path)
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise WeightsError(f"{path}: must hold a state dict, names and tensors")
    return {key: value for key, value in loaded.items() if not key.endswith("num_batches_tracked")}


def _read_torch_file(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file fails in as many ways as there are
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(f"{path}: is no file of weights alone: {reason}") from error


def _format_of(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in _FORMATS:
        raise WeightsError(f"{path}: unknown kind of weights {suffix!r}; known are {', '.join(_FORMATS)}")
    return suffix


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise WeightsError("safetensors files need the package safetensors: pip install 'mezzo[vision]'") from error
    return safetensors.torch
