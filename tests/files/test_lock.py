"""One process works in a folder; a second one is refused, and a dead one does not block it."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from mezzo.files import LOCK, FolderInUse, folder_lock, locked

HOLD = (
    "import sys, time; from pathlib import Path; from mezzo.files import folder_lock\n"
    "with folder_lock(Path(sys.argv[1]), purpose='a training', advice='wait'):\n"
    "    print('held', flush=True); time.sleep(60)\n"
)


def take(folder, **options):
    return folder_lock(folder, purpose="a training", advice="choose another --save_dir", **options)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("force", [False, True])
def test_a_living_owner_is_named_and_never_overruled(tmp_path, holder, force):
    expected = rf"a training \(process {holder.pid} on {socket.gethostname()}, since .*choose another --save_dir"
    with pytest.raises(FolderInUse, match=expected), take(tmp_path, force=force):
        pass


def test_a_killed_owner_does_not_block(tmp_path, holder):
    holder.kill()
    holder.wait()
    with take(tmp_path) as notice:
        assert str(holder.pid) in str(notice)
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()  # a released lock is gone
    with take(tmp_path) as notice:
        assert notice is None


def write_owner(folder, age_s):
    owner = {"purpose": "a training", "pid": 1, "host": "elsewhere\x1b[31m", "since": "then"}
    (folder / LOCK).write_text(json.dumps(owner))
    os.utime(folder / LOCK, (time.time() - age_s,) * 2)


def test_another_host_is_believed_for_five_minutes_or_until_force(tmp_path):
    write_owner(tmp_path, 100)
    with pytest.raises(FolderInUse, match=r"process 1 on elsewhere, since then.*add --force"):
        take(tmp_path, force_by="--force").__enter__()
    with pytest.raises(FolderInUse) as caught:  # where there is no such option, none is named
        take(tmp_path).__enter__()
    assert "--force" not in str(caught.value)
    with take(tmp_path, force=True) as notice:
        assert "elsewhere" in str(notice)
    write_owner(tmp_path, 400)
    with take(tmp_path) as notice:
        assert "no sign of life for 400 s" in str(notice)
    write_owner(tmp_path, -10_000)  # a host whose clock is wrong
    with take(tmp_path) as notice:
        assert "taken over" in str(notice)


def test_the_owner_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr("mezzo.files._lock.SIGN_OF_LIFE_S", 0.02)
    with take(tmp_path):
        os.utime(tmp_path / LOCK, (1, 1))
        end = time.monotonic() + 5
        while (tmp_path / LOCK).stat().st_mtime < 1000 and time.monotonic() < end:
            time.sleep(0.01)
        assert (tmp_path / LOCK).stat().st_mtime > time.time() - 60


@pytest.mark.parametrize("content", ["", "nonsense", "[" * 9000, "[1]", "{}"])
def test_a_lock_that_says_nothing_is_free_unless_it_is_held(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with take(tmp_path) as notice:
        assert notice is None
        with pytest.raises(FolderInUse, match=str(os.getpid())), take(tmp_path):
            pass


def make_link(folder):
    (folder / "victim").write_text("mine")
    (folder / LOCK).symlink_to(folder / "victim")


@pytest.mark.parametrize("make", [make_link, lambda f: os.mkfifo(f / LOCK), lambda f: (f / LOCK).mkdir()])
def test_a_lock_that_is_a_link_a_pipe_or_a_folder_is_named_and_not_written_through(tmp_path, make):
    make(tmp_path)
    with pytest.raises(FolderInUse, match=r"\.mezzo\.lock: is not a lock that mezzo wrote"), take(tmp_path):
        pass
    assert not (tmp_path / "victim").exists() or (tmp_path / "victim").read_text() == "mine"


FORK = (
    "import os, sys, time; from pathlib import Path; from mezzo.files import folder_lock\n"
    "with folder_lock(Path(sys.argv[1]), purpose='a training', advice='wait'):\n"
    "    if os.fork() == 0:\n"
    "        print('child', os.getpid(), flush=True); time.sleep(60); os._exit(0)\n"
    "    time.sleep(60)\n"
)


def test_a_worker_that_outlives_its_killed_parent_does_not_keep_the_folder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    try:
        with pytest.raises(FolderInUse, match=str(process.pid)), take(tmp_path):
            pass
        process.kill()
        process.wait()
        with take(tmp_path) as notice:
            assert str(process.pid) in str(notice)
    finally:
        os.kill(child, 9)
        process.stdout.close()


def test_a_forked_child_that_leaves_the_region_does_not_release_the_lock(tmp_path):
    with take(tmp_path):
        content = (tmp_path / LOCK).read_text()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with take(tmp_path / "own"):
                    raise KeyError
            except KeyError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert (tmp_path / LOCK).read_text() == content
        with pytest.raises(FolderInUse), take(tmp_path):
            pass


RACE = (
    "import sys; from pathlib import Path; from mezzo.files import FolderInUse, folder_lock\n"
    "done = 0\n"
    "while done < 150:\n"
    "    try:\n"
    "        with folder_lock(Path(sys.argv[1]) / 'run', purpose='a', advice='b'):\n"
    "            with open(sys.argv[1] + '/alone', 'x'): pass\n"
    "            Path(sys.argv[1], 'alone').unlink()\n"
    "            done += 1\n"
    "    except FolderInUse:\n"
    "        pass\n"
)


def test_only_one_of_many_holds_the_lock_while_others_make_and_remove_it(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path)]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert not (tmp_path / "run" / LOCK).exists()


def test_an_empty_folder_that_was_made_for_the_lock_is_removed_and_a_used_one_stays(tmp_path):
    with take(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with take(tmp_path / "new"):
        (tmp_path / "new" / "result").touch()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["result"]
    (tmp_path / "old").mkdir()
    with take(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()


def test_lock_waits_for_the_other(tmp_path):
    held: list[str] = []

    def second() -> None:
        with locked(tmp_path / "lock"):
            held.append("second")

    thread = threading.Thread(target=second)
    with locked(tmp_path / "lock"):
        thread.start()
        time.sleep(0.05)
        held.append("first")
    thread.join()
    assert held == ["first", "second"]
