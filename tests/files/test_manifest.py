"""A manifest notices every flipped byte, cut file, lost file, added file and file of another folder."""

import json
import shutil
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mezzo.files import MANIFEST, FileError, check_manifest, write_manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.bin").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "c" / "deep").mkdir()
    (tmp_path / "c" / "deep" / "empty").touch()
    (tmp_path / "c" / "state.json").write_text('{"a": 1}')
    write_manifest(tmp_path / "c")
    return tmp_path / "c"


def test_an_unchanged_folder_passes_and_one_without_a_manifest_says_so(folder):
    assert check_manifest(folder)
    assert check_manifest(folder, ["model.bin"])
    (folder / MANIFEST).unlink()
    assert not check_manifest(folder)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([MANIFEST, "model.bin", "state.json"]), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_every_flipped_byte_is_noticed_and_the_file_named(folder, name, place, change):
    before = (folder / name).read_bytes()
    data = bytearray(before)
    data[int(place * len(data))] ^= change
    (folder / name).write_bytes(data)
    try:
        with pytest.raises(FileError, match=name):
            check_manifest(folder)
    finally:
        (folder / name).write_bytes(before)


def test_cut_lost_and_added_files_are_named(folder):
    (folder / "model.bin").write_bytes(b"")
    with pytest.raises(FileError, match=r"model\.bin: has 0 bytes, 1024"):
        check_manifest(folder)
    (folder / "model.bin").unlink()
    with pytest.raises(FileError, match=r"model\.bin: no such file"):
        check_manifest(folder)
    write_manifest(folder)
    (folder / "more").touch()
    with pytest.raises(FileError, match="more: is not in"):
        check_manifest(folder)
    assert check_manifest(folder, ["state.json"])
    with pytest.raises(FileError, match="more: is not in"):
        check_manifest(folder, ["more"])


def test_a_file_of_another_checkpoint_is_noticed(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "d")
    (tmp_path / "d" / "model.bin").write_bytes(bytes(1024))
    write_manifest(tmp_path / "d")
    shutil.copy(tmp_path / "d" / "model.bin", folder / "model.bin")
    with pytest.raises(FileError, match=r"model\.bin: is not the file that was written"):
        check_manifest(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 5000, '{"format": "mezzo.manifest", "version": 1, "files": [1]}']
)
def test_a_manifest_that_is_none_is_one_line(folder, text):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(FileError, match=MANIFEST):
        check_manifest(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "deep/../../secret", "."])
def test_a_name_that_leads_out_is_refused_before_the_file_is_opened(folder, name):
    (folder.parent / "secret").write_bytes(b"x" * 1234)
    write_text(folder, {name: [1234, "00000000"]})
    with pytest.raises(FileError, match="leads out of the folder") as caught:
        check_manifest(folder)
    assert "1234" not in str(caught.value)


def write_text(folder, files):
    """Write a manifest whose own checksum fits."""
    body = json.dumps({"format": "mezzo.manifest", "version": 1, "files": files}, indent=1)
    checksum = f'"crc32": "{zlib.crc32(body.encode()):08x}"'
    (folder / MANIFEST).write_text(f"{body[:-2]},\n {checksum}\n}}\n")
