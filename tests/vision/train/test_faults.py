"""A worker that is killed, a disk that is full, a folder that is removed: one line each."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import person_config, train, train_in_process

from mezzo.errors import RunError
from mezzo.model.callbacks import EventWriter
from mezzo.precision import Precision
from mezzo.vision.data import translate_worker_errors
from mezzo.vision.train import ScalarLog, ScalarLogError, read_scalars


@pytest.mark.parametrize(
    ("text", "pid"),
    [
        ("DataLoader worker (pid 123) is killed by signal: Killed. ", "123"),
        ("DataLoader worker (pid(s) 123, 45) exited unexpectedly", "123, 45"),
        ("DataLoader worker (pid 9) exited unexpectedly with exit code 1. Details are lost", "9"),
    ],
)
def test_the_death_of_a_worker_is_one_line(text: str, pid: str) -> None:
    with pytest.raises(RunError, match=rf"\(pid {pid}\).*--workers.*--resume auto"), translate_worker_errors():
        raise RuntimeError(text)
    with pytest.raises(RuntimeError, match="other"), translate_worker_errors():
        raise RuntimeError("other")


@pytest.mark.slow
def test_a_killed_worker_ends_the_training_in_one_line(persons: Path, tmp_path: Path) -> None:
    config = person_config(tmp_path, persons, iters=100000)
    killing = tmp_path / "killing.py"
    killing.write_text(
        "import os, signal, sys\n"
        "from mezzo.cli import run\nfrom mezzo.precision import Precision\nfrom mezzo.vision.data import Loader\n"
        "loaders, steps, start, step = [], [], Loader.start, Precision.train_step\n"
        "def remember(self):\n    start(self)\n    loaders.append(self)\n"
        "def kill(*arguments, **options):\n"
        "    steps.append(1)\n"
        "    if len(steps) == 3:\n        os.kill(loaders[0]._loader._iterator._workers[0].pid, signal.SIGKILL)\n"
        "    return step(*arguments, **options)\n"
        "Loader.start, Precision.train_step = remember, kill\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    options = [
        "train",
        "--config",
        str(config),
        "--device",
        "cpu",
        "--workers",
        "2",
        "--save_dir",
        str(tmp_path / "out"),
    ]
    done = subprocess.run([sys.executable, str(killing), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "a process that reads data (pid" in done.stderr


def test_tensorboard_in_a_removed_folder_is_one_notice_and_the_log_goes_on(tmp_path: Path) -> None:
    notices: list[str] = []
    with ScalarLog(tmp_path, notice=notices.append) as log:
        log.add(1, loss=1.0)
        assert log._events is not None
        shutil.rmtree(tmp_path / "tensorboard")
        for step in range(2, 60):
            log.add(step, loss=1.0)
            if step == 30:
                flush(log._events)
    assert len(notices) <= 1  # a removed file can still be written to, unless TensorBoard opens it anew
    assert len(read_scalars(log.path)) == 59


def flush(events: EventWriter) -> None:
    if events._writer is not None:
        events._try(events._writer.flush)


def test_tensorboard_on_a_full_disk_is_one_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self: object, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    notices: list[str] = []
    with ScalarLog(tmp_path, notice=notices.append) as log:
        log.add(1, loss=1.0)
        monkeypatch.setattr(RecordWriter, "write", full)
        for step in range(2, 300):
            log.add(step, loss=1.0)
    assert len(notices) == 1
    assert "No space left on device" in notices[0]
    assert "continues without it" in notices[0]
    assert len(read_scalars(log.path)) == 299


def test_tensorboard_that_cannot_begin_is_one_notice(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file in the way")
    notices: list[str] = []
    with ScalarLog(tmp_path, notice=notices.append) as log:
        log.add(1, loss=1.0)
    assert len(notices) == 1


def test_a_log_that_was_removed_is_one_line(tmp_path: Path) -> None:
    with ScalarLog(tmp_path / "run", with_tensorboard=False) as log:
        log.add(1, loss=1.0)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunError, match=r"scalars\.jsonl: was removed"):
            log.add(2, loss=1.0)
        assert log.is_empty


def test_a_removed_folder_ends_a_training_in_one_line(
    persons: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Precision.train_step

    def removing(*arguments, **options):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        return step(*arguments, **options)

    monkeypatch.setattr(Precision, "train_step", removing)
    assert train("--config", person_config(tmp_path, persons, iters=2), "--save_dir", tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "scalars.jsonl: was removed" in err


@pytest.mark.slow
@pytest.mark.parametrize("limit", [100, 400_000])
def test_a_full_disk_is_one_line_and_1(limit: int, persons: Path, tmp_path: Path) -> None:
    """A limit of the size of files stands for the disk: writing fails in the middle of a file."""

    def shrink() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    config = person_config(tmp_path, persons, iters=2)
    done = train_in_process("--config", config, "--save_dir", tmp_path / "out", preexec_fn=shrink)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "File too large" in done.stderr


def test_the_numbers_of_a_full_disk_leave_a_log_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ScalarLog(tmp_path, with_tensorboard=False)
    log.add(1, loss=1.0)

    class Full:
        closed = False

        def __init__(self, file):
            self._file = file

        def write(self, data):
            if len(data) < 8:
                raise OSError(28, "No space left on device")
            return self._file.write(data[: len(data) // 2])

        def __getattr__(self, name):
            return getattr(self._file, name)

    monkeypatch.setattr(log, "_file", Full(log._file))
    with pytest.raises(RunError, match="No space left"):
        log.add(2, loss=1.0)
    log.close()
    assert [point["step"] for point in read_scalars(log.path)] == [1]
    with ScalarLog(tmp_path, with_tensorboard=False, resume_at=2) as log:
        log.add(2, loss=3.0)
    assert [point["loss"] for point in read_scalars(log.path)] == [1.0, 3.0]


@pytest.mark.parametrize("line", ["[" * 200_000, '{"step": 1, "loss": 1' + "0" * 400 + "}", '{"step": 1, "loss": NaN}'])
def test_a_hostile_line_of_a_log_is_one_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "scalars.jsonl").write_text(line + "\n")
    with pytest.raises(ScalarLogError, match=r"scalars\.jsonl:1: "):
        read_scalars(tmp_path / "scalars.jsonl")


def test_a_pipe_in_the_place_of_a_log_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "scalars.jsonl")
    with pytest.raises(ScalarLogError, match="named pipe"):
        read_scalars(tmp_path / "scalars.jsonl")
