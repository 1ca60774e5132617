"""Small programs, one for each operator whose constants or tensors have crashed torch, and constants that did."""

from __future__ import annotations

import functools
import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mezzo.export import quietly

_aten = torch.ops.aten
_SCALES = (1e-30, -1e-30, 1e-18, 1e30, 0.0, -2.0, 0.5, 2.0, 5000.0, 1e300, "NaN", "Infinity", "-Infinity")
_WHOLE = (0, -1, 1, 2, 3, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)
_DEVICES = ("meta", "cpu", "cuda", "mps", "xla", "privateuseone", "lazy", "mtia", "hpu")


class _Calls(nn.Module):
    """Calls a function with an image and a buffer of whole numbers or of floats."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], buffer: Tensor) -> None:
        super().__init__()
        self._function = function
        self.register_buffer("buffer", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self.buffer)


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x[:, 0])[0]
        return output


def _modules() -> dict[str, nn.Module]:
    whole, floats = torch.tensor([1, 2, 0, 3, 0]), torch.zeros(64, 64)
    least = -(2**31)
    calls: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
        "repeats": (lambda x, b: _aten.repeat_interleave.Tensor(b, output_size=6) + x.sum().long(), whole),
        "repeat": (lambda x, b: x.repeat_interleave(3, 1) + b.sum(), whole),
        "bicubic": (lambda x, b: _aten.upsample_bicubic2d.default(_bytes(x), [9, 9], False, 2.0, 2.0), whole),
        "nearest": (lambda x, b: _aten.upsample_nearest2d.default(_bytes(x)[:, :1], [9, 9], 2.0, 2.0), whole),
        "linear": (lambda x, b: _aten.upsample_bilinear2d.vec(x, None, False, [2.0, 2.0]), whole),
        "divide": (lambda x, b: torch.div((x * 0).int() + least, 3, rounding_mode="trunc"), whole),
        "floor": (lambda x, b: torch.div((x * 0).int() + least, 3, rounding_mode="floor") % 5, whole),
        "copy": (lambda x, b: _aten.mm(x.sum() + torch.zeros(64, 64), _aten._to_copy.default(b, device="cpu")), floats),
        "norm": (lambda x, b: _aten._weight_norm.default(b, b[:, :1], 0) + x.sum(), floats),
        "empty": (lambda x, b: torch.empty(2, 3, device="cpu").zero_() + x.sum() + b.new_empty(3).zero_(), floats),
    }
    return {name: _Calls(*each) for name, each in calls.items()} | {"lstm": _Lstm()}


def _bytes(x: Tensor) -> Tensor:
    return x.to(torch.uint8).contiguous(memory_format=torch.channels_last)


@functools.cache
def programs() -> dict[str, dict[str, bytes]]:
    """Return the parts of each program, by its name."""
    found = {}
    for name, module in _modules().items():
        buffer = io.BytesIO()
        with quietly(), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(module.eval(), (torch.zeros(2, 3, 8, 8),), strict=False), buffer)
        with zipfile.ZipFile(buffer) as archive:
            found[name] = {info.filename: archive.read(info) for info in archive.infolist()}
    return found


def hostile(rng: random.Random) -> dict[str, bytes]:
    """Return the parts of a program with constants, devices, tensors and sizes that have crashed torch."""
    parts = dict(programs()[rng.choice(sorted(programs()))])
    name = next(each for each in parts if each.endswith("models/model.json"))
    tree = json.loads(parts[name])
    arguments = [entry for node in tree["graph_module"]["graph"]["nodes"] for entry in node["inputs"]]
    for entry in rng.sample(arguments, min(len(arguments), rng.choice((1, 1, 2, 4)))):
        _spoil(rng, entry)
    parts[name] = json.dumps(tree).encode()
    for each in parts:
        if ("/weight_" in each or "/tensor_" in each) and rng.random() < 0.3:
            count = len(parts[each]) // 8
            numbers = [rng.choice([n for n in _WHOLE if -(2**63) <= n < 2**63]) for _ in range(count)]
            if rng.random() < 0.5:  # a sum that begins again at 0
                numbers = ([2**62] * 4 + [6] * count)[:count]
            parts[each] = struct.pack(f"<{count}q", *numbers) + parts[each][8 * count :]
        elif each.endswith("_config.json") and rng.random() < 0.2:
            parts[each] = _with_other_sizes(rng, parts[each])
    return parts


def _spoil(rng: random.Random, entry: Any) -> None:
    argument = entry["arg"]
    if "scale" in entry["name"]:
        many = "as_floats" in argument or entry["name"] == "scale_factors"
        entry["arg"] = {"as_floats": rng.choices(_SCALES, k=2)} if many else {"as_float": rng.choice(_SCALES)}
    elif "as_device" in argument or entry["name"] == "device":
        kind = rng.choice(_DEVICES)
        entry["arg"] = {"as_string": kind} if rng.random() < 0.2 else {"as_device": {"type": kind, "index": None}}
    elif "as_int" in argument:
        argument["as_int"] = rng.choice(_WHOLE)
    elif "as_ints" in argument:
        argument["as_ints"] = rng.choices(_WHOLE, k=len(argument["as_ints"]))
    elif "as_float" in argument:
        argument["as_float"] = rng.choice(_SCALES)
    elif "as_bool" in argument:
        argument["as_bool"] = not argument["as_bool"]
    elif "as_scalar_type" in argument:
        argument["as_scalar_type"] = rng.randrange(30)


def _with_other_sizes(rng: random.Random, data: bytes) -> bytes:
    """Give a tensor fewer rows than the program says, or another dtype."""
    tree = json.loads(data)
    if tree["config"]:
        meta = rng.choice(list(tree["config"].values()))["tensor_meta"]
        if rng.random() < 0.3:
            meta["dtype"] = rng.choice((5, 6, 7, 8, 13))
        elif meta["sizes"]:
            rng.choice(meta["sizes"])["as_int"] = rng.choice((0, 1, 2))
    return json.dumps(tree).encode()
