"""Only regular files are opened, and no more of them is read than is expected."""

import os
import socket
from pathlib import Path

import pytest

from mezzo.files import (
    FileError,
    check_regular,
    is_regular,
    open_regular,
    read_bytes,
    read_json,
    read_text,
    read_yaml,
)
from mezzo.vision.data import DataError

READERS = (open_regular, read_bytes, read_text, read_json, read_yaml)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_is_refused_at_once(pipe, read):
    with pytest.raises(FileError, match=r"pipe: is a named pipe, not a file"):
        read(pipe)


@pytest.mark.parametrize("read", READERS)
def test_a_device_is_refused_although_it_never_ends(read):
    with pytest.raises(FileError, match="/dev/zero: is a device"):
        read("/dev/zero")


def test_folders_and_sockets_are_named(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(FileError, match="is a socket"):
            read_bytes(tmp_path / "s")
    with pytest.raises(FileError, match="is a folder"):
        read_bytes(tmp_path)


def test_a_link_to_a_pipe_is_refused_and_one_to_a_file_is_followed(tmp_path, pipe):
    (tmp_path / "bad").symlink_to(pipe)
    (tmp_path / "file").write_text("x")
    (tmp_path / "good").symlink_to(tmp_path / "file")
    assert read_text(tmp_path / "good") == "x"
    with pytest.raises(FileError, match="bad: is a named pipe"):
        read_text(tmp_path / "bad")
    assert is_regular(tmp_path / "good")
    assert not is_regular(tmp_path / "bad")
    assert not is_regular(tmp_path / "absent")
    assert not is_regular("a\0b")


def test_a_sparse_file_is_refused_by_its_size_before_it_is_read(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(FileError, match="sparse: larger than"):
        read_bytes(tmp_path / "sparse")


def test_the_limit_is_the_largest_size_that_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", limit=5) == b"12345"
    with pytest.raises(FileError, match="larger than 4 bytes"):
        read_bytes(tmp_path / "file", limit=4)


def test_a_file_that_claims_no_size_is_read_to_its_end():
    assert read_bytes("/proc/self/status").endswith(b"\n")


def test_errors_have_the_class_of_the_caller(tmp_path):
    with pytest.raises(DataError, match="absent: no such file"):
        read_bytes(tmp_path / "absent", raising=DataError)
    with pytest.raises(DataError, match="cannot be read"):
        read_bytes("a\0b", raising=DataError)


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfone\ntw\xffo")
    with pytest.raises(FileError, match="file:2: not UTF-8"):
        read_text(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfone")
    assert read_text(tmp_path / "file") == "one"


def test_a_file_can_be_checked_without_being_opened(tmp_path, pipe):
    (tmp_path / "file").write_text("x")
    check_regular(tmp_path / "file")
    with pytest.raises(DataError, match="pipe: is a named pipe"):
        check_regular(pipe, raising=DataError)
    with pytest.raises(FileError, match="absent: no such file"):
        check_regular(tmp_path / "absent")


def test_a_pipe_that_takes_the_place_of_a_file_after_the_check_does_not_block(pipe, monkeypatch):
    monkeypatch.setattr("mezzo.files._read.check_regular", lambda path, raising: None)
    with pytest.raises(FileError, match="is a named pipe"):
        read_bytes(pipe)


def test_a_file_that_grew_or_shrank_since_its_size_was_asked_for_is_read_to_its_end(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"12345")
    for size in (1, 4, 6, 100):
        monkeypatch.setattr("mezzo.files._read._open", lambda path, raising, s=size: (os.open(path, os.O_RDONLY), s))
        assert read_bytes(tmp_path / "file") == b"12345"


@pytest.mark.parametrize("read", READERS)
def test_a_name_with_escapes_is_shown_without_them(tmp_path, read):
    with pytest.raises(FileError, match="redname: no such file") as caught:
        read(tmp_path / "\x1b[31mred\x1b[0mname")
    assert str(caught.value).isprintable()
    (tmp_path / "a\nb").write_bytes(b"\xff{")
    if read is not read_bytes and read is not open_regular:
        with pytest.raises(FileError, match="/a b"):
            read(tmp_path / "a\nb")
