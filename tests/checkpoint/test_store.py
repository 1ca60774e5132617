"""Folders that are there whole or not at all; which one to resume from; which to delete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.checkpoint import CheckpointError, CheckpointStore
from mezzo.errors import RunError
from mezzo.files import check_manifest, write_file


def fill(text: str = "x"):
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text(text)

    return write


def text_of(folder: Path) -> str:
    return (folder / "sub" / "file").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_save_returns_the_folder_and_leaves_nothing_else(tmp_path):
    store = CheckpointStore(tmp_path / "runs" / "a")
    assert text_of(store.save("iter_1", fill("one"))) == "one"
    assert text_of(store.save("iter_1", fill("two"))) == "two"
    assert names(store.directory) == ["iter_1"]


def test_a_writer_that_raises_changes_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save("best_model", fill("good"))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save("best_model", broken)
    assert names(tmp_path) == ["best_model"]
    assert text_of(tmp_path / "best_model") == "good"


def test_latest_is_the_one_noted_else_the_highest_number_else_none(tmp_path):
    store = CheckpointStore(tmp_path / "none_yet")
    assert store.latest() is None
    assert store.resume_from(None) is None
    for n in (9, 10):
        store.save(f"iter_{n}", fill())
    assert store.latest() == store.directory / "iter_10"
    store.save_latest("iter_9")
    assert store.resume_from(None) == store.directory / "iter_9"
    assert (store.directory / "latest").read_text() == "iter_9\n"


def test_every_checkpoint_has_a_manifest_before_it_has_its_name(tmp_path):
    folder = CheckpointStore(tmp_path).save("iter_1", fill("one"))
    assert check_manifest(folder)
    (folder / "sub" / "file").write_text("two")
    with pytest.raises(CheckpointError, match=r"sub/file: is not the file that was written"):
        check_manifest(folder, raising=CheckpointError)


def test_candidates_begin_with_the_latest_then_older_then_later_ones(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.candidates() == ([], None)
    for number in (2, 10, 4, 6):
        store.save(f"iter_{number}", fill())

    def order():
        return [folder.name for folder in store.candidates()[0]]

    assert order() == ["iter_10", "iter_6", "iter_4", "iter_2"]
    store.save_latest("iter_4")
    assert order() == ["iter_4", "iter_2", "iter_10", "iter_6"]
    (tmp_path / "latest").write_text("iter_5")
    assert order() == ["iter_10", "iter_6", "iter_4", "iter_2"]
    assert "iter_5" in str(store.candidates()[1])


def test_resume_takes_a_folder_a_file_in_it_a_name_or_a_run(tmp_path):
    store, other = CheckpointStore(tmp_path / "a"), CheckpointStore(tmp_path / "b")
    store.save("iter_1", fill())
    other.save("iter_2", fill())
    other.save("best_model", fill())
    other.save_latest("iter_2")
    assert store.resume_from(other.directory / "best_model") == other.directory / "best_model"
    assert store.resume_from(other.directory / "iter_2" / "sub" / "file") == other.directory / "iter_2" / "sub"
    assert store.resume_from("iter_1") == store.directory / "iter_1"
    assert store.resume_from(str(other.directory)) == other.directory / "iter_2"
    assert store.resume_from(other.directory / "latest") == other.directory / "iter_2"


def test_what_cannot_be_resumed_is_named_with_what_can(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=r"iter_3: there is no such checkpoint; .* has none$"):
        store.resume_from("iter_3")
    store.save("iter_1", fill())
    store.save("best_model", fill())
    with pytest.raises(CheckpointError, match=r"no/where: there is no such checkpoint; .* has best_model, iter_1$"):
        store.resume_from("no/where")


def test_a_latest_that_names_nothing_is_an_error(tmp_path):
    store = CheckpointStore(tmp_path)
    (tmp_path / "latest").write_text("iter_7\n")
    with pytest.raises(CheckpointError, match="latest: names 'iter_7', which is not there; delete this file"):
        store.latest()
    for content in (b"../../etc", b"", b"\xff\xfe", b"a" * 10_000, b".tmp-iter_1-4"):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(CheckpointError, match="which is not the name of a checkpoint; delete this file"):
            store.latest()
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match=r"latest: is a folder, not a file; .*delete it"):
        store.latest()


@pytest.mark.parametrize("name", ["latest", "", ".hidden", "a/b", "..", "a b", "x" * 101])
def test_names_that_are_none_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="is not a name for a checkpoint; use letters, digits"):
        CheckpointStore(tmp_path).save(name, fill())


def test_files_in_the_way_and_missing_checkpoints_are_named(tmp_path):
    (tmp_path / "best_model").write_text("x")
    with pytest.raises(CheckpointError, match="best_model: is a file; move it away, a checkpoint is a folder"):
        CheckpointStore(tmp_path).save("best_model", fill())
    with pytest.raises(CheckpointError, match="iter_1: is not there; save it before it is called the latest"):
        CheckpointStore(tmp_path).save_latest("iter_1")
    with pytest.raises(ValueError, match=r"keep=-1: must be 0 \(keep all checkpoints\) or more"):
        CheckpointStore(tmp_path, keep=-1)
    with pytest.raises(RunError, match=r"iter_1: cannot be written: .*; check space and permissions, then try again"):
        CheckpointStore(tmp_path / "best_model" / "deeper").save("iter_1", fill())


@given(st.sets(st.integers(0, 30), max_size=8), st.integers(0, 4), st.data())
def test_prune_keeps_the_newest_the_latest_and_all_other_names(tmp_path_factory, numbers, keep, data):
    store = CheckpointStore(tmp_path_factory.mktemp("run"), keep=keep)
    for name in ("best_model", "iter_x", "final"):
        (store.directory / name).mkdir()
    (store.directory / "iter_99").write_text("a file is none of ours")
    for number in numbers:
        (store.directory / f"iter_{number}").mkdir()
    latest = data.draw(st.sampled_from(sorted(numbers)) | st.none() if numbers else st.none())
    if latest is not None:
        store.save_latest(f"iter_{latest}")
    newest = set(sorted(numbers)[-keep:] if keep else numbers) | ({latest} - {None})
    deleted = store.prune()
    assert store.iterations() == [f"iter_{n}" for n in sorted(newest)]
    assert sorted(deleted) == sorted(f"iter_{n}" for n in numbers - newest)
    assert {"best_model", "iter_x", "final", "iter_99"} <= set(names(store.directory))
    assert not [name for name in names(store.directory) if name.startswith(".")]


def test_clean_removes_what_dead_runs_left_and_leaves_the_living_alone(tmp_path):
    store, dead, living = CheckpointStore(tmp_path), dead_pid(), os.getppid()
    store.save("iter_1", fill("whole"))
    for name in (f".tmp-iter_2-{dead}", f".old-iter_1-{dead}", f".tmp-iter_3-{living}", f".tmp-iter_4-{os.getpid()}"):
        (tmp_path / name).mkdir()
    (tmp_path / f".tmp-latest-{dead}").write_text("half")
    (tmp_path / f".tmp-iter_5-{'9' * 30}").mkdir()
    (tmp_path / ".hidden").mkdir()
    store.clean()
    assert names(tmp_path) == [".hidden", f".tmp-iter_3-{living}", "iter_1"]
    assert text_of(tmp_path / "iter_1") == "whole"


@pytest.mark.parametrize("step", ["clean", "save"])
def test_a_checkpoint_that_was_moved_away_is_put_back(tmp_path, step):
    store = CheckpointStore(tmp_path)
    store.save("best_model", fill("old"))
    os.rename(tmp_path / "best_model", tmp_path / f".old-best_model-{os.getpid()}")
    assert text_of(store.resume_from("best_model")) == "old"
    if step == "clean":
        store.clean()
    else:
        with pytest.raises(ZeroDivisionError):
            store.save("best_model", lambda folder: 1 / 0)
    assert text_of(tmp_path / "best_model") == "old"
    assert names(tmp_path) == ["best_model"]


def test_a_link_in_the_place_of_a_checkpoint_is_replaced_and_its_aim_stays(tmp_path):
    (tmp_path / "aim").mkdir()
    (tmp_path / "best_model").symlink_to(tmp_path / "aim")
    CheckpointStore(tmp_path).save("best_model", fill("new"))
    assert names(tmp_path) == ["aim", "best_model"]
    assert text_of(tmp_path / "best_model") == "new"
    assert not (tmp_path / "best_model").is_symlink()


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file(path, b"one")
    mode = path.stat().st_mode & 0o777
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match=r"file: cannot be written: No space left on device; check space"):
        write_file(path, b"two")
    assert path.read_bytes() == b"one"
    assert names(tmp_path) == ["file"]
    mask = os.umask(0)
    os.umask(mask)
    assert mode == 0o666 & ~mask
