"""How much a file may unpack to, and how to raise it."""

import io
import zipfile
from pathlib import Path

import pytest

from mezzo.files import MAX_UNPACKED, WEIGHTS, Bounds, FileError, stored_parts, too_large, unpack, unpacked_limit


@pytest.mark.parametrize(
    ("text", "limit"), [("", 256 << 20), ("1", 256 << 20), ("1G", 1 << 30), ("2000m", 2000 << 20), (" 3g ", 3 << 30)]
)
def test_the_environment_raises_the_limit(text: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_UNPACKED, text)
    assert unpacked_limit(1000) == limit


@pytest.mark.parametrize("text", ["x", "-1", "1T", "1.5G", "9" * 30])
def test_a_limit_that_is_no_size_is_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_UNPACKED, text)
    with pytest.raises(FileError, match="MEZZO_MAX_UNPACKED"):
        unpacked_limit(1000)


def test_it_raises_the_limit_of_archives_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"x")
    before = WEIGHTS.room_for(tmp_path / "a")
    monkeypatch.setenv(MAX_UNPACKED, "9G")
    assert (before, WEIGHTS.room_for(tmp_path / "a")) == (256 << 20, 9 << 30)


def test_the_message_names_a_limit_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    size = (300 << 20) + 1
    monkeypatch.setenv(MAX_UNPACKED, too_large(size, 1).rpartition("=")[2])
    assert unpacked_limit(0) >= size


def test_a_zip_entry_without_a_name_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        info = zipfile.ZipInfo("x")
        info.filename = "\0x"  # zipfile reads this as no name
        archive.writestr(info, b"x")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileError, match="has no name"):
        unpack(tmp_path / "a.zip", tmp_path / "out", Bounds())


def test_parts_that_torch_would_not_write_are_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(1000))
        with pytest.raises(ValueError, match="compressed"):
            stored_parts(archive, 10**6)
