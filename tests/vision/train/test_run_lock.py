"""Two trainings in one folder: the second is refused before it touches anything."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import SCRIPT, losses_of, person_config, train
from test_distributed_run import launch

from mezzo.files import LOCK, FolderInUse, folder_lock
from mezzo.model.callbacks import ModelCheckpoint
from model_loops import make_data, make_model


@pytest.fixture
def held(tmp_path: Path):
    with folder_lock(tmp_path / "out", purpose="a training", advice="wait"):
        yield tmp_path / "out"


def test_a_second_training_is_refused_before_it_reads_or_writes(
    held: Path, persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (held / "iter_5").mkdir()
    (held / "latest").write_text("iter_5")
    config = person_config(tmp_path, persons, iters=1)
    config.write_text(config.read_text().replace("train.txt", "missing.txt"))  # the data are not looked at
    for more in ([], ["--force"], ["--resume", "auto"]):
        assert train("--config", config, "--save_dir", held, *more) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert f"process {os.getpid()} on {socket.gethostname()}" in captured.err
        assert "--save_dir" in captured.err
    assert sorted(path.name for path in held.iterdir()) == [LOCK, "iter_5", "latest"]


def test_a_lock_of_another_host_needs_force_and_is_told(
    persons: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK).write_text('{"purpose": "a training", "pid": 7, "host": "elsewhere", "since": "then"}')
    options = ["--config", person_config(tmp_path, persons, iters=1), "--save_dir", tmp_path / "out"]
    assert train(*options) == 2
    assert "process 7 on elsewhere" in capsys.readouterr().err
    assert train(*options, "--force") == 0
    assert "the lock of a training (process 7 on elsewhere" in capsys.readouterr().out
    assert not (tmp_path / "out" / LOCK).exists()
    assert train(*options) == 0  # the results of the first go to previous_1
    assert (tmp_path / "out" / "previous_1" / "iter_1").is_dir()


def test_fit_holds_the_lock_of_its_folders(held: Path, tmp_path: Path) -> None:
    model = make_model()
    for options in ({"save_dir": held}, {"callbacks": ModelCheckpoint(save_dir=held)}):
        with pytest.raises(FolderInUse, match=str(os.getpid())):
            model.fit(make_data(), batch_size=4, verbose=0, **options)
    assert [path.name for path in held.iterdir()] == [LOCK]

    class Looks(ModelCheckpoint):
        def on_epoch_end(self, epoch, logs):
            super().on_epoch_end(epoch, logs)
            with pytest.raises(FolderInUse), folder_lock(tmp_path / "own", purpose="x", advice="y"):
                pass

    model.fit(
        make_data(), batch_size=4, verbose=0, callbacks=Looks(save_dir=tmp_path / "own"), save_dir=tmp_path / "own"
    )
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["0", "final"]


@pytest.mark.slow
def test_two_processes_the_second_is_refused_and_the_first_undisturbed(persons: Path, tmp_path: Path) -> None:
    config, out = person_config(tmp_path, persons, iters=30), tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "--config", str(config), "--device", "cpu", "--workers", "1"]
    command += ["--save_interval", "5", "--log_iters", "1", "--keep_checkpoint_max", "9"]
    first = subprocess.Popen([*command, "--save_dir", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (out / "scalars.jsonl").exists():
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGSTOP)  # it must not end before the second comes
    try:
        second = subprocess.run([*command, "--save_dir", str(out)], capture_output=True, text=True, timeout=120)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert f"process {first.pid} on {socket.gethostname()}" in second.stderr
    errors = first.communicate(timeout=240)[1]
    assert first.returncode == 0, errors
    subprocess.run([*command, "--save_dir", str(tmp_path / "alone")], check=True, stdout=subprocess.DEVNULL)
    assert losses_of(out) == losses_of(tmp_path / "alone")
    assert not list(out.glob("previous_*"))
    assert not (out / LOCK).exists()


@pytest.mark.slow
def test_all_ranks_end_when_the_first_is_refused(held: Path, persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=4)
    started = time.monotonic()
    done = launch(2, SCRIPT, "--config", config, "--device", "cpu", "--workers", 0, "--save_dir", held, timeout=90)
    assert done.returncode != 0
    assert f"process {os.getpid()} on" in done.stderr
    assert time.monotonic() - started < 60


ALONE = """
import os, sys
from mezzo.cli import run
os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
os.environ["MASTER_PORT"] = sys.argv[2]
sys.exit(run(["train", "--device", "cpu", "--workers", "0", *sys.argv[3:]]))
"""


@pytest.mark.slow
def test_all_ranks_end_also_without_a_launcher(held: Path, persons: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--config", str(person_config(tmp_path, persons, iters=4)), "--save_dir", str(held)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ALONE, str(rank), str(port), *options], stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=90)[1] for process in processes]
    assert processes[0].returncode == 2, errors
    assert processes[1].returncode in (1, 2), errors  # 1: the store ended with the first process
    assert "Traceback" not in "".join(errors)
