"""A state comes back as it was, and damaged files are refused in one line."""

import contextlib
import hashlib
import json
import math
import os
import struct
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mezzo.checkpoint import CheckpointError, read_state, verify, write_state
from mezzo.files import write_manifest

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn, torch.int32, torch.int16]


@st.composite
def tensors(draw):
    """Any bits of any dtype, in 0 to 3 dimensions, some empty, some views with odd strides."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = torch.empty(0, dtype=dtype).element_size() * math.prod(shape)
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    raw = torch.tensor(list(data), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


leaves = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text(max_size=5) | tensors()
leaves |= st.text(st.characters(categories=["Cs"]), max_size=2)
keys = st.text(max_size=3) | st.integers() | st.sampled_from(["a.b", "a", "b", "__metadata__", "dict", "tensor"])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=10,
)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def frozen(tree):
    """The tree with every tensor and float as its bits, so that == compares bit for bit and type for type."""
    if isinstance(tree, torch.Tensor):
        return "tensor", str(tree.dtype), tuple(tree.shape), bits(tree)
    if isinstance(tree, float):
        return "float", struct.pack("d", tree)
    if isinstance(tree, dict):
        return "dict", [(type(key), key, frozen(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [frozen(item) for item in tree]
    return type(tree), tree


@settings(max_examples=60)
@given(st.dictionaries(keys, trees, max_size=4))
def test_any_state_comes_back_bit_for_bit(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("state")
    write_state(folder, state)
    assert frozen(read_state(folder)) == frozen(state)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "state.json", "state.safetensors"]


def test_tensors_that_share_storage_or_are_laid_out_otherwise_keep_their_values(tmp_path):
    base = torch.arange(48.0)
    images = base.reshape(1, 4, 3, 4).contiguous(memory_format=torch.channels_last)
    state = {"all": base, "part": base[3:7], "again": base, "images": images, "row": base.expand(2, 48)}
    state |= {"conjugate": torch.tensor([1 + 2j]).conj(), "weight": nn.Parameter(torch.ones(2))}
    write_state(tmp_path, state)
    back = read_state(tmp_path)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
        assert back[name].is_contiguous()
    back["all"].zero_()
    assert torch.equal(back["again"], base)


def test_an_optimizer_goes_on_from_its_state(tmp_path):
    def trained(resume: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        losses = []
        for step in range(6):
            if resume and step == 3:
                write_state(tmp_path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
                state = read_state(tmp_path)
                assert list(state["optimizer"]["state"]) == [0, 1]
                model = nn.Linear(4, 3)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                old, schedule = schedule, torch.optim.lr_scheduler.StepLR(optimizer, 2)
                schedule.load_state_dict(old.state_dict())
            loss = model(torch.ones(2, 4)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    assert trained(resume=True) == trained(resume=False)


def test_generator_states_and_kinds_of_dict_are_held(tmp_path):
    state = {"torch": torch.get_rng_state(), "ordered": OrderedDict(b=1, a=torch.Size([2, 3])), "flag": True, "one": 1}
    write_state(tmp_path, state)
    back = read_state(tmp_path)
    assert torch.equal(back["torch"], state["torch"])
    assert back["ordered"] == {"b": 1, "a": (2, 3)}
    assert list(back["ordered"]) == ["b", "a"]
    assert (back["flag"], type(back["one"])) == (True, int)


def refusal(state) -> str:
    with pytest.raises(CheckpointError) as error:
        write_state(Path("nowhere"), state)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_held_is_named_with_its_path():
    assert refusal({"a": [1, {2: object()}]}).startswith("state: a.1.2 is a object, which a checkpoint cannot hold;")
    assert "state: a is a dtype, which a checkpoint cannot hold; allowed are tensors" in refusal({"a": torch.float32})
    assert "state: n is a int, which" in refusal({"n": 1 << 5000})
    assert refusal({"a": {1.5: 0}}) == "state: a has the key 1.5; keys are strings or whole numbers"
    assert refusal({"a": {True: 0}}) == "state: a has the key True; keys are strings or whole numbers"
    assert refusal([1]) == "state: is a list; give a dict"
    assert "m is a Tensor (torch.strided, torch.float32, on meta); a ch" in refusal(
        {"m": torch.empty(1, device="meta")}
    )
    assert "s is a Tensor (torch.sparse_coo, " in refusal({"s": torch.eye(2).to_sparse()})
    endless: dict = {}
    endless["again"] = endless
    assert refusal(endless) == "state: nested deeper than 100 levels at again.again.again.again..."


def test_a_dtype_that_no_file_can_hold_is_named():
    strange = torch.empty(2, dtype=torch.bits8)
    assert refusal({"x": strange}) == "state: x is of torch.bits8, which a checkpoint cannot hold; convert it first"


def test_a_missing_library_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(
        CheckpointError, match=r"^checkpoints need the package safetensors: pip install 'mezzo\[vision\]'$"
    ):
        write_state(tmp_path, {"a": 1})


@pytest.fixture
def folder(tmp_path):
    write_state(tmp_path, {"lr": 0.1, "weight": torch.arange(6.0), "half": torch.ones(2).to(torch.float8_e5m2)})
    return tmp_path


def damage(folder: Path, **changes) -> None:
    """Change entries of state.json; the manifest is made to fit."""
    path = folder / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    write_manifest(folder)


def make_old(folder: Path) -> Path:
    """Make a state one of version 1: no manifest, and a hash in state.json."""
    digest = hashlib.sha256((folder / "state.safetensors").read_bytes()).hexdigest()
    damage(folder, version=1, sha256=digest)
    (folder / "manifest.json").unlink()
    return folder


def complaint(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_state(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(folder))
    return str(error.value).removeprefix(f"{folder}/")


DAMAGED = "; the checkpoint is damaged; resume from another one"


def test_missing_files_are_named(folder):
    (folder / "state.safetensors").unlink()
    assert complaint(folder) == "state.safetensors: no such file"
    assert complaint(folder / "no") == "state.json: no such file; give the folder of a checkpoint"


def test_tensors_of_another_moment_are_refused(folder):
    content = bytearray((folder / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "state.safetensors").write_bytes(content)
    expected = "state.safetensors: is not the file that was written (CRC-32); the checkpoint is damaged"
    assert complaint(folder) == expected


def test_a_state_without_its_manifest_is_refused(folder):
    (folder / "manifest.json").unlink()
    assert complaint(folder) == "manifest.json: no such file, so damage could not be noticed" + DAMAGED
    with pytest.raises(CheckpointError, match=r"manifest\.json: no such file"):
        verify(folder)


def test_an_old_state_without_a_manifest_is_read_and_said_to_be_unchecked(folder):
    assert verify(folder) is None
    before = frozen(read_state(folder))
    make_old(folder)
    assert frozen(read_state(folder)) == before
    assert "without manifest.json" in str(verify(folder))
    content = bytearray((folder / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "state.safetensors").write_bytes(content)
    assert complaint(folder) == "state.safetensors: is not the file that state.json was written with" + DAMAGED
    with pytest.raises(CheckpointError, match=r"state\.safetensors"):
        verify(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_json_is_refused(folder, content):
    (folder / "state.json").write_bytes(content)
    write_manifest(folder)
    assert complaint(folder).startswith("state.json: n") or "too large" in complaint(folder)
    assert complaint(folder).endswith(DAMAGED)


def test_a_pipe_in_the_place_of_a_file_does_not_block(folder):
    (folder / "state.json").unlink()
    os.mkfifo(folder / "state.json")
    assert "named pipe" in complaint(folder)
    (folder / "manifest.json").unlink()
    assert "named pipe" in complaint(folder)


def test_files_of_others_and_of_later_versions_are_refused(folder):
    for version in (7, True, "2", 1.0, None):
        damage(folder, version=version)
        assert f"has version {version!r}; this mezzo reads 1 to 2" in complaint(folder)
    (folder / "state.json").write_text('{"format": "mezzo.state", "version": 2}')
    write_manifest(folder)
    assert complaint(folder) == "state.json: has no foreign, tree" + DAMAGED
    (folder / "state.json").write_text('["format"]')
    write_manifest(folder)
    assert complaint(folder) == "state.json: not a state written by mezzo; give the folder of a checkpoint"


def nested(levels: int):
    node: object = []
    for _ in range(levels):
        node = [node]
    return node


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"tensor": "nobody"}, "the tensor 'nobody' is not in state.safetensors, or is used twice"),
        (
            [{"tensor": "weight"}, {"tensor": "weight"}],
            "the tensor 'weight' is not in state.safetensors, or is used twice",
        ),
        ({"a": 1, "b": 2}, "an object has 2 keys, not one"),
        ({"module": "os.system"}, "an object of the unknown kind 'module'"),
        ({"tensor": 3}, "an object of the unknown kind 'tensor'"),
        ({"float": "zz" * 8}, "an object of the unknown kind 'float'"),
        ({"float": "7ff0 0000 0000 0"}, "an object of the unknown kind 'float'"),  # 16 characters, fewer bytes
        ({"dict": [1]}, "a dict has an entry that is not a key with a value"),
        ({"dict": [[True, 1]]}, "a dict has an entry that is not a key with a value"),
        ({"dict": [["a", 1], ["a", 2]]}, "a dict has the key 'a' twice"),
        (nested(150), "nested deeper than 100 levels"),
        ([1], "holds a list, not a dict"),
    ],
)
def test_structures_that_stand_for_nothing_are_refused(folder, tree, expected):
    damage(folder, tree=tree)
    assert complaint(folder) == f"state.json: {expected}{DAMAGED}"


@pytest.mark.parametrize(
    "foreign",
    [3, {"weight": ["system", [6]]}, {"no": ["complex64", [6]]}, {"half": ["complex128", [2]]}, {"half": [1]}],
)
def test_dtypes_that_do_not_fit_are_refused(folder, foreign):
    damage(folder, foreign=foreign)
    assert complaint(folder).startswith("state.safetensors: cannot be read: ")


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"\xff" * 8 + b"{}", b"\x02" + b"\x00" * 7 + b"[]"])
def test_a_file_that_is_no_safetensors_is_refused_also_if_its_hash_fits(folder, content):
    (folder / "state.safetensors").write_bytes(content)
    write_manifest(folder)
    assert complaint(folder).startswith("state.safetensors: cannot be read: ")
    assert complaint(folder).endswith(DAMAGED)


@given(st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_damaged_bytes_never_raise_anything_else(tmp_path_factory, where, byte, cut):
    folder = tmp_path_factory.mktemp("state")
    write_state(folder, {"a": 1.5, "b": [torch.ones(2)], "c": {1: math.inf}})
    path = folder / "state.json"
    content = bytearray(path.read_bytes())
    where %= len(content)
    content[where] = byte
    path.write_bytes(content[:where] if cut else content)
    write_manifest(folder)
    with contextlib.suppress(CheckpointError):  # or none: a changed digit is another number
        read_state(folder)
