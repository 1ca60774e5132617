"""Archives of data sets: hostile, damaged and too large ones are refused."""

import io
import re
import shutil
import stat
import tarfile
from pathlib import Path

import pytest

from archives import special, tar_of, zip_of
from mezzo.files import Bounds, FileError, unpack


def unpack_bytes(folder: Path, data: bytes, bounds: Bounds | None = None) -> Path:
    """Unpack an archive into an empty folder and return the folder."""
    (folder / "archive").write_bytes(data)
    (folder / "out").mkdir()
    unpack(folder / "archive", folder / "out", bounds or Bounds())
    return folder / "out"


HOSTILE = {
    "dots": (tar_of({"a/../../evil": b"x"}), "'a/../../evil' leads out by '..'"),
    "dots in zip": (zip_of({"../evil": b"x"}), "'../evil' leads out by '..'"),
    "absolute": (tar_of({"/tmp/evil": b"x"}), "'/tmp/evil' is an absolute path"),
    "absolute in zip": (zip_of({"/tmp/evil": b"x"}), "'/tmp/evil' is an absolute path"),
    "link out": (tar_of({}, special("val.txt", tarfile.SYMTYPE, "/etc/passwd")), "'val.txt' is a link"),
    "link in": (tar_of({"a": b""}, special("b", tarfile.SYMTYPE, "a")), "'b' is a link"),
    "hard link out": (tar_of({}, special("val.txt", tarfile.LNKTYPE, "../../x")), "'val.txt' is a link"),
    "link in zip": (zip_of({"val.txt": b"/etc/passwd"}, **{"val.txt": stat.S_IFLNK | 0o777}), "'val.txt' is a link"),
    "device": (tar_of({}, special("null", tarfile.CHRTYPE)), "'null' is a device or a pipe"),
    "pipe": (tar_of({}, special("pipe", tarfile.FIFOTYPE)), "'pipe' is a device or a pipe"),
    "device in zip": (zip_of({"null": b""}, null=stat.S_IFCHR | 0o666), "'null' is a device or a pipe"),
}


@pytest.mark.parametrize(("archive", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_entry_is_refused(tmp_path, archive, message):
    with pytest.raises(FileError, match=re.escape(message)):
        unpack_bytes(tmp_path, archive)
    assert not list(tmp_path.rglob("evil"))
    assert not Path("/tmp/evil").exists()


@pytest.mark.parametrize("pack", [zip_of, tar_of])
def test_a_bomb_is_stopped_at_the_bound(tmp_path, pack):
    bomb = pack({"zeros": bytes(4_000_000)})
    assert len(bomb) < 50_000
    with pytest.raises(FileError, match="1000000 bytes"):
        unpack_bytes(tmp_path, bomb, Bounds(unpacked_bytes=1_000_000))


def test_an_archive_that_does_not_fit_on_the_disk_is_stopped(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(FileError, match="10 bytes"):
        unpack_bytes(tmp_path, zip_of({"a.txt": b"x" * 100}))


def test_too_many_files_are_stopped(tmp_path):
    with pytest.raises(FileError, match="5 files"):
        unpack_bytes(tmp_path, tar_of({str(number): b"" for number in range(6)}), Bounds(files=5))


def encrypted_zip() -> bytes:
    """Return a zip file whose entry says that it is encrypted."""
    data = bytearray(zip_of({"val.txt": b"x"}))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def corrupt_zip() -> bytes:
    data = bytearray(zip_of({"val.txt": bytes(range(256)) * 64}))
    data[60] ^= 255
    return bytes(data)


def twice_the_same() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("train.txt"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("archive", "fault"),
    [
        (b"no archive", "neither a tar file"),
        (b"", "neither a tar file"),
        (tar_of({"x": b"y" * 99_999}, kind="w")[:50_000], "damaged"),
        (encrypted_zip(), "encrypted"),
        (corrupt_zip(), "damaged"),
        (tar_of({"a": b"", "a/b": b""}), "cannot be unpacked"),
        (tar_of({"n" * 300: b""}), "File name too long"),
        (twice_the_same(), "File exists"),
    ],
    ids="text empty cut encrypted corrupt file-and-folder long-name twice".split(),  # a gzip holds the time
)
def test_what_is_no_archive_is_named(tmp_path, archive, fault):
    with pytest.raises(FileError, match=f"archive: .*{fault}"):
        unpack_bytes(tmp_path, archive)
