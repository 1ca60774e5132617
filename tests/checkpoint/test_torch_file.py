"""Files of torch.save from strangers: tensors are read, sizes are added up first, nothing that a file names is called."""

import io
import os
import pickle
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.checkpoint import read_torch_file
from mezzo.files import UnsafePickle


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_and_containers_come_back_as_torch_reads_them(is_zip: bool) -> None:
    base = torch.randn(4, 6)
    content = {
        "a": base, "view": base.t()[1:3], "step": base[:, ::2], "row": base[0].expand(3, 6), "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(3), "bool": torch.tensor([True, False]), "bf16": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64), "parameter": nn.Parameter(torch.ones(2)),
        "plain": [1, 2.5, None, "x", (True, b"bytes")], "ordered": OrderedDict(x=torch.ones(1)),
    }  # fmt: skip
    if is_zip:  # the old format has no such numbers
        content |= {"u16": torch.tensor([1, 2], dtype=torch.uint16), "f8": torch.ones(4).to(torch.float8_e4m3fn)}
    data = saved(content, _use_new_zipfile_serialization=is_zip)
    mine, torchs = read_torch_file(data), torch.load(io.BytesIO(data), weights_only=True)
    assert list(mine) == list(torchs)
    for name, value in torchs.items():
        if isinstance(value, Tensor):
            found = mine[name]
            assert (found.dtype, found.shape, found.stride()) == (value.dtype, value.shape, value.stride())
            assert found.flatten().tolist() == value.flatten().tolist()
    assert mine["plain"] == torchs["plain"]
    assert mine["a"].data_ptr() == mine["view"].data_ptr() - mine["view"].storage_offset() * 4
    mine["a"].add_(1)  # may be written to


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_state_dict_of_a_module_is_read(is_zip: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    read = read_torch_file(saved(module.state_dict(), _use_new_zipfile_serialization=is_zip))
    assert all(torch.equal(read[name], value) for name, value in module.state_dict().items())


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def repacked(data: bytes, change: Callable[[bytes], bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for info in old.infolist():
            part = old.read(info)
            new.writestr(info.filename, change(part) if info.filename.endswith("data.pkl") else part)
    return buffer.getvalue()


def with_pickle(pickled: bytes) -> bytes:
    return repacked(saved({}), lambda _: pickled)


DOUBLED = b"N" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(60))


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (repacked(saved({"a": torch.zeros(1 << 20)}), lambda part: part, zipfile.ZIP_DEFLATED), "compressed"),
        (saved({"a": torch.zeros(1).expand(10**12)}), "MEZZO_MAX_UNPACKED=3814698M"),
        (saved({str(i): torch.zeros(1).expand(10**6) for i in range(100)}), "MEZZO_MAX_UNPACKED"),
        (saved({"a": torch.zeros(1).expand(10**12)}, _use_new_zipfile_serialization=False), "MEZZO_MAX_UNPACKED"),
        (saved({"a": Calls(bytearray, 10**11)}), "bytearray"),
        (saved({"a": Calls(os.system, "true")}), "system"),
        (saved(nn.Linear(2, 2)), "Linear"),
        (saved({"a": torch.zeros(2, 2).to_sparse()}), "sparse"),
        (saved({"a": torch.zeros(2, device="meta")}), "meta"),
        (saved({"a": torch.zeros(2, dtype=torch.cfloat).conj()}), r"conjugated tensor; call resolve_conj\(\)"),
        (saved({"a": torch.zeros(2, dtype=torch.cfloat).conj().imag}), r"negated tensor; call resolve_neg\(\)"),
        (repacked(saved({"a": torch.zeros(4)}), lambda p: p.replace(b"K\x04\x85", b"K\x09\x85")), "tensor of shape"),
        (repacked(saved({"a": torch.zeros(4)}), lambda p: p.replace(b"K\x04tq", b"K\x09tq")), "declares"),
        (with_pickle(b"\x80\x02}" + DOUBLED + b"Ns."), "keys must be text"),
        (with_pickle(b"\x80\x02}X\x01\0\0\0w" + DOUBLED + b"s."), "deep|entries"),
        (with_pickle(b"\x80\x02}X\x01\0\0\0wX\x01\0\0\0xQs."), "an invalid storage"),
        (b"PK\x03\x04", "not a readable pickle"),
        (b"rubbish", "not a readable pickle"),
        (b"", "not a readable pickle"),
    ],
)  # fmt: skip
def test_everything_else_is_one_line_in_a_moment(data: bytes, word: str) -> None:
    start = time.process_time()
    with pytest.raises(UnsafePickle, match=word) as error:
        read_torch_file(data)
    assert "\n" not in str(error.value)
    assert time.process_time() - start < 2


def test_texts_that_are_encoded_again_and_again_are_counted() -> None:
    pickled = b"\x80\x02}X\x01\0\0\0w(c_codecs\nencode\nq\x01X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
    pickled += b"q\x02X\x06\0\0\0latin1q\x03\x86q\x04R" + b"h\x01h\x04R" * 400 + b"ls."
    with pytest.raises(UnsafePickle, match="encoded to more bytes"):
        read_torch_file(with_pickle(pickled))


def test_nothing_is_left_out_of_a_protocol_4_file() -> None:
    data = saved({"a": torch.ones(3), "b": b"x"}, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    assert read_torch_file(data)["a"].tolist() == [1, 1, 1]


def as_dtypes(names: list[str], length: int) -> bytes:
    """Return a file whose tensors are one storage, each of another dtype."""

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    pickled = b"\x80\x02}("
    for name in names:
        pickled += text(name) + b"ctorch._utils\n_rebuild_tensor_v3\n((" + text("storage")
        pickled += b"ctorch.storage\nUntypedStorage\n" + text("0") + text("cpu") + b"J" + length.to_bytes(4, "little")
        pickled += b"tQK\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)R" + f"ctorch\n{name}\n".encode() + b"tR"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a/data.pkl", pickled + b"u.")
        archive.writestr("a/data/0", bytes(range(256)) * (length // 256))
    return buffer.getvalue()


def test_a_storage_is_copied_once_for_all_dtypes() -> None:
    names = ["float32", "float16", "int64", "uint8", "bfloat16", "int16"]
    read = read_torch_file(as_dtypes(names, 512))
    assert [value.dtype for value in read.values()] == [getattr(torch, name) for name in names]
    assert len({value.data_ptr() for value in read.values()}) == 1
    assert read["int16"].tolist() == [256]
