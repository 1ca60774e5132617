"""Weights files from strangers: arrays are read, nothing else is, and nothing that a file names is ever called."""

import collections
import contextlib
import os
import pickle
import pickletools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.checkpoint import WeightsError, read_pdparams
from mezzo.checkpoint._paddle_pickles import read_arrays
from mezzo.files import UnsafePickle, encode


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "uint8", "bool", ">f4"])
def test_arrays_come_back_bit_for_bit(protocol: int, dtype: str) -> None:
    values = {
        "a": np.arange(24).reshape(2, 3, 4).astype(dtype),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3).astype(dtype)),
        "empty": np.zeros((0, 3), dtype),
        "scalar": np.array(3, dtype),
    }
    read = read_arrays(pickle.dumps(collections.OrderedDict(values), protocol=protocol))
    for name, value in values.items():
        np.testing.assert_array_equal(read[name], value)
        assert read[name].dtype == value.dtype.newbyteorder("=")
        assert read[name].flags.writeable


@pytest.mark.parametrize(
    "evil",
    [
        lambda flag: Calls(os.system, f"touch {flag}"),
        lambda flag: {"w": Calls(os.system, f"touch {flag}")},
        lambda flag: {"w": Calls(eval, f"open({str(flag)!r}, 'w')")},
        lambda flag: {"w": [Calls(getattr, "text", "upper"), 1]},
        lambda flag: {"w": Calls(collections.OrderedDict, Calls(os.system, f"touch {flag}"))},
        lambda flag: {"w": Calls(np.ndarray, Calls(os.system, f"touch {flag}"))},
        lambda flag: {Calls(os.system, f"touch {flag}"): 1},
        lambda flag: {"w": np.array([Calls(os.system, f"touch {flag}")], dtype=object)},
        lambda flag: {"w": Calls(np.load, str(flag))},
        lambda flag: {"w": Calls(bytes, 10**12)},
        lambda flag: {"w": Calls(pickle.loads, pickle.dumps(Calls(os.system, f"touch {flag}")))},
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_file_that_calls_something_is_refused_and_nothing_is_called(evil: Any, protocol: int, tmp_path: Path) -> None:
    flag = tmp_path / "called"
    path = tmp_path / "evil.pdparams"
    path.write_bytes(pickle.dumps(evil(flag), protocol=protocol))
    with pytest.raises(UnsafePickle, match=r"evil\.pdparams: "):
        read_pdparams(path)
    assert not flag.exists()


HUGE_SHAPE = b"cnumpy\nndarray\n\x8a\x06\0\0\0\0\0\x01\x85C\x01b\x87Rs."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps({"w": Calls(np.ndarray, (10**12,))}), "without its numbers"),
        # numpy's own reconstruction would allocate this shape.
        (b"\x80\x02}X\x01\0\0\0wcnumpy.core.multiarray\n_reconstruct\n" + HUGE_SHAPE, "without its numbers"),
        # Memory for two thousand million memo entries, as the unpickler in C would take it.
        (b"\x80\x02}r\xff\xff\xff\x7f.", None),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.", None),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "not a readable pickle"),
        (b"", "not a readable pickle"),
        (b"PK\x03\x04 a zip\n", "more than arrays and plain containers"),
        (pickle.dumps([1]), "holds a list; must be a dictionary of arrays"),
        (pickle.dumps({1: 2}), "key of type int"),
        (b"\x80\x02}X\x01\x00\x00\x00wU\x01xQs.", "more than arrays and plain containers"),
    ],
)  # fmt: skip
def test_what_is_no_dictionary_of_arrays_is_refused(data: bytes, message: str | None) -> None:
    if message is None:
        assert read_arrays(data) == {}
        return
    with pytest.raises(UnsafePickle, match=message):
        read_arrays(data)


def doubled_tuples(depth: int) -> bytes:
    """A tuple of 2 ** depth leaves in a few bytes: each level holds the one below twice."""
    return b"N" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(depth))


@pytest.mark.parametrize(
    "data",
    [
        b"}N" + b"\x85" * 1_000_000 + b"Ns.",  # a deep tuple as a key: its hash would overflow the stack
        b"}" + doubled_tuples(60) + b"Ns.",  # this hash would not end
        b"\x80\x05\x96" + (4 << 30).to_bytes(8, "little") + b".",  # 4 GB announced
        b"}X\x01\0\0\0w" + doubled_tuples(60) + b"s.",  # a value that is endless to look at
        b"}X\x01\0\0\0wcnumpy\ndtype\n" + doubled_tuples(60) + b"\x85Rs.",
        b"}X\x01\0\0\0wc_codecs\nencode\n}X\x0c\0\0\0__defaults__N\x85sb.",  # a state for a function
        b"}X\x01\0\0\0wccollections\nOrderedDict\n]" + doubled_tuples(60) + b"a\x85Rs.",
        b"\x80\x04\x8f(K\x01\x90.",  # a set
    ],
)
def test_small_files_cannot_take_all_time_or_memory(data: bytes) -> None:
    start = time.process_time()
    with pytest.raises(UnsafePickle):
        read_arrays(data)
    assert time.process_time() - start < 5
    assert encode.__defaults__ == ("latin1",)


def test_huge_shapes_are_not_multiplied_and_one_array_is_made_once() -> None:
    start = time.process_time()
    with pytest.raises(UnsafePickle, match="invalid shape"):
        read_arrays(forged(shape=(2**2000,) * 20000))
    assert time.process_time() - start < 5
    shared = np.zeros(1000, np.float32)
    read = read_arrays(pickle.dumps({str(i): shared for i in range(100)}))
    assert len({id(array) for array in read.values()}) == 1
    with pytest.raises(UnsafePickle, match="more than 1000000 entries"):
        read_arrays(pickle.dumps({"w": [[0] * 1001] * 1001}))


def forged(**changes: Any) -> bytes:
    """A pickled array whose state was tampered with."""
    state = {"shape": (2,), "dtype": np.dtype("f4"), "data": b"\0" * 8} | changes

    class Forged:
        def __reduce__(self) -> tuple[Any, ...]:
            reconstruct = np.zeros(1).__reduce__()[0]
            return reconstruct, (np.ndarray, (0,), b"b"), (1, state["shape"], state["dtype"], False, state["data"])

    return pickle.dumps({"w": Forged()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (10**9,)}, "shape .1000000000,. with 8 bytes"),
        ({"shape": (-2,)}, "invalid shape"),
        ({"shape": (2.0,)}, "invalid shape"),
        ({"shape": [2]}, "invalid shape"),
        ({"data": ["x", "y"]}, "an array of objects"),
        ({"dtype": np.dtype("O")}, "of dtype 'O8'"),
        ({"dtype": np.dtype("U2")}, "weights are numbers"),
        ({"dtype": np.dtype("M8[s]")}, "weights are numbers"),
        ({"dtype": np.dtype([("a", "f4")])}, "weights are numbers"),
        ({"dtype": "f4"}, "an array of objects"),
    ],
)
def test_forged_arrays_are_refused(changes: dict[str, Any], message: str) -> None:
    assert read_arrays(forged())["w"].shape == (2,)
    with pytest.raises(UnsafePickle, match=message):
        read_arrays(forged(**changes))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(UnsafePickle):
        assert isinstance(read_arrays(b"\x80\x04" + data), dict)


@given(st.lists(st.sampled_from(list(pickletools.opcodes)), max_size=12), st.binary(max_size=40))
def test_any_operations_are_read_or_refused(operations: list[Any], tail: bytes) -> None:
    data = b"".join(op.code.encode("latin1") + tail[: i % 5] for i, op in enumerate(operations))
    with contextlib.suppress(UnsafePickle):
        assert isinstance(read_arrays(data + tail + b"."), dict)


def test_nesting_and_strangers_inside_plain_containers() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    with pytest.raises(UnsafePickle, match="nested more than 8 deep"):
        read_arrays(pickle.dumps({"w": deep}))
    with pytest.raises(UnsafePickle, match="more than arrays"):
        read_arrays(pickle.dumps({"w": {1}}, protocol=4))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(WeightsError, match=r"no/such\.pdparams: no such file"):
        read_pdparams("no/such.pdparams")


def test_arrays_over_one_buffer_count_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 MB that 400 arrays share would be 8 GB."""

    class Forged:
        def __reduce__(self) -> tuple[Any, ...]:
            reconstruct = np.zeros(1).__reduce__()[0]
            return reconstruct, (np.ndarray, (0,), b"b"), (1, (1 << 20,), np.dtype("u1"), False, shared)

    shared = bytes(1 << 20)
    path = tmp_path / "a.pdparams"
    path.write_bytes(pickle.dumps({str(i): Forged() for i in range(300)}, protocol=4))
    assert path.stat().st_size < 2 << 20
    with pytest.raises(UnsafePickle, match=r"a\.pdparams: unpacks to 314572800 bytes.*MEZZO_MAX_UNPACKED=300M"):
        read_pdparams(path)
    monkeypatch.setenv("MEZZO_MAX_UNPACKED", "300M")
    assert len(read_pdparams(path)) == 300


def test_one_array_under_many_names_counts_each_time() -> None:
    """The pieces of a sliced array may all be one array: joined, they are as large as there are names."""
    array = np.zeros(1 << 20, np.uint8)
    with pytest.raises(UnsafePickle, match="MEZZO_MAX_UNPACKED"):
        read_arrays(pickle.dumps({str(i): array for i in range(300)}))


def test_texts_that_are_encoded_again_and_again_are_counted() -> None:
    text = b"}X\x01\0\0\0w(c_codecs\nencode\nq\x01X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
    text += b"q\x02X\x06\0\0\0latin1q\x03\x86q\x04R" + b"h\x01h\x04R" * 300 + b"ls."
    with pytest.raises(UnsafePickle, match="encoded to more bytes"):
        read_arrays(text)
