"""Which checkpoint a run goes on from: damage is named, and `--resume auto` takes the newest whole one."""

import shutil
from pathlib import Path

import pytest
from small_runs import losses_of, person_config, train

from mezzo.checkpoint import CheckpointError, CheckpointStore
from mezzo.vision.train import find_checkpoint, put_aside


@pytest.fixture(scope="module")
def whole(persons: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    folder = tmp_path_factory.mktemp("whole")
    options: list[object] = [
        "--config",
        person_config(folder, persons, iters=3),
        "--save_interval",
        1,
        "--log_iters",
        1,
    ]
    assert train(*options, "--save_dir", folder / "out") == 0
    return folder / "out", options


@pytest.fixture
def out(whole: tuple[Path, list[object]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole[0], tmp_path / "out"))


def flip(path: Path, place: int = -2) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_auto_leaves_out_what_is_damaged_and_goes_on_bit_for_bit(
    whole: tuple[Path, list[object]], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(out / "iter_3" / "model.safetensors")
    (out / "iter_2" / "state.json").unlink()
    assert train(*whole[1], "--save_dir", out, "--resume", "auto") == 0
    text = capsys.readouterr().out
    assert "iter_3/model.safetensors: is not the file that was written" in text
    assert "iter_2/state.json: no such file" in text
    assert "from iteration 1" in text
    assert losses_of(out) == losses_of(whole[0])
    name = "iter_3/state.safetensors"
    assert (out / name).read_bytes() == (whole[0] / name).read_bytes()
    assert not list(out.glob("previous_*"))


def test_auto_begins_anew_where_there_is_nothing_and_says_so(
    whole: tuple[Path, list[object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*whole[1], "--iters", 1, "--save_dir", tmp_path / "new", "--resume", "auto") == 0
    assert "has no checkpoint; a new run begins" in capsys.readouterr().out
    assert (tmp_path / "new" / "iter_1").is_dir()


def test_auto_with_only_damaged_ones_is_an_error_that_names_them(
    whole: tuple[Path, list[object]], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2, 3):
        flip(out / f"iter_{number}" / "model.pdparams")
    assert train(*whole[1], "--save_dir", out, "--resume", "auto") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert all(f"iter_{number}/model.pdparams" in err for number in (1, 2, 3))
    assert (out / "iter_3").is_dir()


@pytest.mark.parametrize("given", [".", "iter_3"])
def test_a_damaged_checkpoint_that_was_asked_for_is_an_error_with_a_way_on(
    given: str, whole: tuple[Path, list[object]], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(out / "iter_3" / "model.safetensors", 400)
    assert train(*whole[1], "--save_dir", out, "--resume", out / given) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "iter_3/model.safetensors" in err
    assert f"the newest undamaged one is {out}/iter_2" in err
    assert "--resume auto" in err


def test_weights_of_another_iteration_are_noticed(out: Path) -> None:
    shutil.copy(out / "iter_2" / "model.safetensors", out / "iter_3" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"iter_3/model\.safetensors"):
        find_checkpoint(CheckpointStore(out), out)


def test_a_useless_latest_file_is_told_and_the_newest_is_taken(out: Path) -> None:
    (out / "latest").write_text("iter_99")
    folder, notices = find_checkpoint(CheckpointStore(out), "auto")
    assert folder == out / "iter_3"
    assert "iter_99" in notices[0]


def test_a_checkpoint_called_auto_is_reached_by_its_path(out: Path) -> None:
    (out / "iter_3").rename(out / "auto")
    assert find_checkpoint(CheckpointStore(out), Path("auto"))[0] == out / "auto"


@pytest.mark.parametrize(
    "name", ["previous_1_backup", "previous_", "previous_²", "previous_" + "9" * 200, "previous_x"]
)
def test_folders_with_names_like_ours_do_not_block_a_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "previous_2").mkdir()
    (tmp_path / "latest").touch()
    (tmp_path / ".mezzo.lock").touch()
    assert put_aside(tmp_path) == tmp_path / "previous_3"
    assert (tmp_path / ".mezzo.lock").exists()
    assert (tmp_path / name).is_dir()
