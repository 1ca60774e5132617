"""Programs and weights: `.pt2`, `.pdparams`, `.pt`, `.safetensors`, archives of them, and recorded runs."""

from __future__ import annotations

import functools
import io
import json
import pickle
import random
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzzing import Target
from mutate import NUMBERS, TEXTS, mutate_bytes, mutate_tree
from operator_programs import hostile, programs

from mezzo.checkpoint import read_pdparams, read_torch_state
from mezzo.errors import MezzoError
from mezzo.export import load_program
from mezzo.files import FileError
from mezzo.proof import load_run

_PROGRAM = Path(__file__).parent / "seeds" / "program.pt2"
_EXPRESSIONS = (
    "9**9**9", "Pow(Integer(9), Pow(Integer(9), Integer(9)))", "((9**8)**8)**8", "1 << 999999999", "'a' * 99999999",
    "Symbol('s0') * 2", "-" * 5000 + "1", "(" * 100 + "1" + ")" * 100, "L['x'].size() * 999999999", "1" + "0" * 4000,
    "Mul(" + "Integer(9), " * 500 + "Integer(9))", "Max()", "Mod(Integer(1), Integer(0))", "1/0", "oo", "Add()",
    "int_oo - int_oo",     "FloorDiv(Symbol('s0'), Integer(0))", "s77", "Symbol('s77', integer=False)", 
    "Float('1e999')", "Where(1, 2)", "ToFloat(oo)",
)  # fmt: skip


@functools.cache
def _aten_names() -> list[str]:
    schemas = torch._C._jit_get_all_schemas()
    found = {f"{s.name[6:]}.{s.overload_name or 'default'}" for s in schemas if s.name.startswith("aten::")}
    return sorted(found)


@functools.cache
def _parts() -> dict[str, bytes]:
    with zipfile.ZipFile(_PROGRAM) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def _zip(rng: random.Random, parts: dict[str, bytes], folder: Path, name: str) -> Path:
    """Write a zip file; sometimes compressed, damaged, with a part twice or without one."""
    path = folder / name
    odd = rng.random()
    method = zipfile.ZIP_DEFLATED if odd < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for each, data in parts.items():
            if odd < 0.9 or rng.random() < 0.9:
                archive.writestr(each, data)
        if 0.05 < odd < 0.1:
            again = rng.choice(list(parts))
            archive.filelist.append(archive.getinfo(again))  # listed twice
        if 0.1 < odd < 0.15:
            archive.writestr(rng.choice(TEXTS).encode("utf-8", "replace").decode().replace("\0", "") or "x", b"x")
    if 0.15 < odd < 0.3:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    return path


def make_pt2(rng: random.Random, folder: Path) -> Path:
    parts = dict(_parts())
    name = rng.choice(
        [each for each in parts if each.endswith(".json")] + [each for each in parts if "model.json" in each] * 6
    )
    tree = json.loads(parts[name])
    kind = rng.randrange(5)
    if "nodes" in str(tree.get("graph_module", ""))[:2_000_000] and kind == 0:
        rng.choice(tree["graph_module"]["graph"]["nodes"])["target"] = f"torch.ops.aten.{rng.choice(_aten_names())}"
    elif "graph_module" in tree and kind == 1:
        _put(rng, tree, "expr_str", rng.choice(_EXPRESSIONS))
        tree["guards_code"] = [rng.choice(_EXPRESSIONS)] if rng.random() < 0.3 else tree["guards_code"]
    elif kind == 2:
        for _ in range(rng.choice((1, 3))):
            _put(rng, tree, rng.choice(("as_int", "as_float", "dtype", "layout")), rng.choice(NUMBERS))
    else:
        tree = mutate_tree(rng, tree)
    parts[name] = json.dumps(tree).encode()
    return _zip(rng, parts, folder, "a.pt2")


def make_pt2_run(rng: random.Random, folder: Path) -> Path:
    """Change constants and tensors of nodes: whatever is loaded is run."""
    if rng.random() < 0.7:
        return _stored(hostile(rng), folder / "a.pt2")
    parts = dict(_parts())
    name = next(each for each in parts if each.endswith("models/model.json"))
    tree = json.loads(parts[name])
    nodes = tree["graph_module"]["graph"]["nodes"]
    tensors = list(tree["graph_module"]["graph"]["tensor_values"])
    for _ in range(rng.choice((1, 1, 2))):
        argument = rng.choice(rng.choice(nodes)["inputs"])["arg"]
        if "as_tensor" in argument:
            argument["as_tensor"]["name"] = rng.choice(tensors)
        elif "as_int" in argument:
            argument["as_int"] = rng.choice((0, -1, 1, 2, 7, 2**20, 2**31, 2**40, -(2**40), 2**62))
        elif "as_ints" in argument:
            argument["as_ints"] = [rng.choice((0, -1, 1, 2, 100, 2**20, 2**31, 2**40)) for _ in argument["as_ints"]]
        elif "as_float" in argument:
            argument["as_float"] = rng.choice((0.0, -1.0, 1e9, 1e-9, 1e300))
    parts[name] = json.dumps(tree).encode()
    if rng.random() < 0.3:
        weights = rng.choice([each for each in parts if "/weight_" in each or "/tensor_" in each])
        parts[weights] = bytes(rng.randrange(256) for _ in range(len(parts[weights])))
    return _stored(parts, folder / "a.pt2")


def _stored(parts: dict[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in parts.items():
            archive.writestr(each, data)
    return path


def run_pt2(path: Path) -> None:
    program = load_program(path)
    devices = {str(node.kwargs.get("device", "cpu")).split(":")[0] for node in program.graph.nodes}
    assert devices <= {"cpu", "cuda", "None"}, f"{devices}: shows memory that is not its own"  # which no crash tells
    try:
        with torch.inference_mode():
            program.module()(torch.zeros(2, 3, 8, 8))
    except MezzoError:
        raise
    except Exception as error:  # what torch refuses is refused
        raise FileError(" ".join(str(error).split())[:100]) from error


def _put(rng: random.Random, tree: Any, key: str, value: object) -> None:
    spots, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            spots += [node] if key in node else []
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    if spots:
        rng.choice(spots)[key] = value


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _pickled(rng: random.Random) -> bytes:
    shared = np.zeros(rng.choice((1, 1000, 5_000_000)), np.float32)
    views = {f"w{i}": np.frombuffer(shared.data, np.float32) for i in range(3)}
    content: dict[str, Any] = {
        "a": np.ones((2, 3), np.float32),
        "b": np.zeros((0, 4), np.int64),
        **({"s": shared, **dict.fromkeys(map(str, range(rng.choice((1, 100)))), shared)} if rng.random() < 0.3 else {}),
        **(views if rng.random() < 0.1 else {}),
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (6,), "slices": ["a"]}},
        "StructuredToParameterName@@": {"a": "a"},
    }
    if rng.random() < 0.2:
        text = "x" * rng.choice((10, 1_000_000))
        content["e"] = [Calls(__import__("_codecs").encode, text, "latin1") for _ in range(rng.choice((1, 500)))]
    if rng.random() < 0.1:
        content["evil"] = Calls(eval, "1")
    return pickle.dumps(content, protocol=rng.choice((2, 3, 4, 5)))


def make_pdparams(rng: random.Random, folder: Path) -> Path:
    data = _pickled(rng)
    path = folder / "a.pdparams"
    path.write_bytes(data if rng.random() < 0.2 else mutate_bytes(rng, data))
    return path


def _saved(rng: random.Random) -> bytes:
    base = torch.ones(rng.choice((1, 6, 1000)))
    size = rng.choice((3, 10**6, 10**9, 10**12))
    content: dict[str, Any] = {
        "a": torch.ones(2, 3),
        "p": torch.nn.Parameter(base),
        "view": base[::2],
        "empty": torch.zeros(0, 3),
        **({"wide": torch.ones(1).expand(size)} if rng.random() < 0.3 else {}),
        **(
            {"half": torch.ones(2).to(rng.choice((torch.bfloat16, torch.float8_e4m3fn, torch.uint16)))}
            if rng.random() < 0.3
            else {}
        ),
    }
    if rng.random() < 0.1:
        odd = rng.choice(
            (torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(2, dtype=torch.cfloat).conj())
        )
        content["odd"] = odd
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=rng.random() < 0.7)
    return buffer.getvalue()


def make_pt(rng: random.Random, folder: Path) -> Path:
    data = _saved(rng)
    kind = rng.randrange(4)
    path = folder / "a.pt"
    if kind == 0 or data[:2] != b"PK":
        path.write_bytes(data if rng.random() < 0.2 else mutate_bytes(rng, data))
        return path
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    name = "archive/data.pkl" if kind < 3 else rng.choice(list(parts))
    parts[name] = mutate_bytes(rng, parts[name])
    return _zip(rng, parts, folder, "a.pt")


def make_safetensors(rng: random.Random, folder: Path) -> Path:
    header: Any = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
    }
    kind = rng.randrange(4)
    if kind == 0:
        header |= {
            f"z{i}": {"dtype": "F32", "shape": [0], "data_offsets": [32, 32]} for i in range(rng.choice((10, 20_000)))
        }
    elif kind == 1:
        header["a"][rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(
            (
                "F8_E4M3",
                "C64",
                "U16",
                [2**62, 2**62],
                [0, 2**62],
                [-1, 6],
                [0, 2**63],
                [24, 0],
                [0, 8],
                [[]],
                None,
                "x" * 1000,
            )
        )
    elif kind == 2:
        header = mutate_tree(rng, header)
    text = json.dumps(header).encode()
    length = len(text) if rng.random() < 0.9 else rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1))
    data = struct.pack("<Q", length) + text + bytes(32)
    path = folder / "a.safetensors"
    path.write_bytes(mutate_bytes(rng, data) if kind == 3 else data)
    return path


def make_archive(rng: random.Random, folder: Path) -> Path:
    parts = {"model.pdparams": pickle.dumps({"w": np.ones(3, np.float32)}), "readme": b"x", "d/": b""}
    if rng.random() < 0.5:
        parts[rng.choice((*TEXTS, "model.pt", "../model.pdparams", "model.pdparams/"))] = bytes(
            rng.choice((0, 1, 2_000_000))
        )
    if rng.random() < 0.5:
        path = folder / "a.zip"
        with zipfile.ZipFile(
            path, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
        ) as archive:
            for name, data in parts.items():
                info = zipfile.ZipInfo("x")
                info.filename = name.encode("utf-8", "replace").decode()
                info.external_attr = rng.choice((0, 0o100644 << 16, 0o120777 << 16))
                archive.writestr(info, data)
    else:
        kind = rng.choice(("", "gz", "bz2", "xz"))
        path = folder / f"a.tar{'.' + kind if kind else ''}"
        with tarfile.open(path, f"w:{kind}") as archive:
            for name, data in parts.items():
                info = tarfile.TarInfo(name.encode("utf-8", "replace").decode().replace("\0", ""))
                info.size = len(data)
                info.type = rng.choice((tarfile.REGTYPE,) * 5 + (tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE))
                archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    if rng.random() < 0.5:
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
    return path


def make_run(rng: random.Random, folder: Path) -> Path:
    payload = {
        "format": "mezzo accuracy run", "version": 1, "name": "x", "loss": 1.0, "loss_scale": 1.0, "max_elements": 10,
        "modules": {"a": "Linear"}, "parameters": [], "records": [[[2], "float32", 0, 0, 1.0]], "values": torch.ones(2),
        "calls": [{"path": "a", "kind": "Linear", "occurrence": 1, "rounding": "float32", "inputs": [0], "outputs": [],
                   "inner": []}],
    }  # fmt: skip
    values = payload.pop("values") if rng.random() < 0.9 else torch.ones(1).expand(10**12)
    content = mutate_tree(rng, payload) if rng.random() < 0.7 else payload
    if isinstance(content, dict):
        content["values"] = values
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
    except RecursionError:  # nested too deep for the pickler
        buffer = io.BytesIO(pickle.dumps(payload))
    path = folder / "a.run"
    path.write_bytes(mutate_bytes(rng, buffer.getvalue()) if rng.random() < 0.4 else buffer.getvalue())
    return path


def read_run(path: Path) -> None:
    try:
        load_run(path)
    except ValueError as error:  # what it promises
        raise FileError(str(error)) from error


programs()  # before there are children: each would make them again
load_program(_PROGRAM)  # torch imports what it needs for it once, before there are limits

TARGETS = [
    Target("pt2", make_pt2, load_program, seconds=10),
    Target("pt2-run", make_pt2_run, run_pt2, seconds=20, megabytes=2048),
    Target("pdparams", make_pdparams, read_pdparams),
    Target("pt", make_pt, read_torch_state),
    Target("safetensors", make_safetensors, read_torch_state),
    Target("weights-archive", make_archive, read_torch_state),
    Target("accuracy-run", make_run, read_run),
]
