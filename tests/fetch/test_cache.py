"""The cache: what is there is used only if it is what was recorded, and processes share one download."""

import errno
import hashlib
import json
import os
import subprocess
import sys

import pytest

from mezzo.fetch import FetchError, cached, fetch, place_of, terminal_progress

DATA = b"weights" * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()


def put_by_hand(url, data=DATA):
    place_of(url).parent.mkdir(parents=True, exist_ok=True)
    place_of(url).write_bytes(data)


def record_of(url):
    return place_of(url).with_name(place_of(url).name + ".json")


def test_nothing_is_cached_at_first(home):
    assert cached("https://host/a.pt") is None
    assert not home.exists()


def test_file_put_there_by_hand_is_used_and_recorded(server):
    url = server.serve("/a.pt", b"another")
    put_by_hand(url)
    assert fetch(url) == cached(url) == place_of(url)
    assert server.requests == []
    record = json.loads(record_of(url).read_text())
    assert (record["url"], record["size"], record["sha256"]) == (url, len(DATA), SHA256)


@pytest.mark.parametrize("data", [DATA[:-1], DATA[:-1] + b"x"], ids=["shorter", "another byte"])
@pytest.mark.parametrize("is_by_hand", [True, False])
def test_file_that_changed_is_refused_until_it_is_deleted(server, data, is_by_hand):
    url = server.serve("/a.pt", DATA)
    if is_by_hand:
        put_by_hand(url)
    fetch(url)
    put_by_hand(url, data)
    for use in (fetch, cached):
        with pytest.raises(FetchError, match=r"a\.pt: has changed: .*; delete it and .*a\.pt\.json to fetch"):
            use(url)
    place_of(url).unlink()
    assert fetch(url).read_bytes() == DATA


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"size": "many", "sha256": ""}', "[" * 200_000, '{"size": 1' + "0" * 400]
)
def test_damaged_record_is_named(server, text):
    url = server.serve("/a.pt", DATA)
    put_by_hand(url)
    record_of(url).write_text(text)
    with pytest.raises(FetchError, match=r"a\.pt\.json: .*; delete it and .*a\.pt to fetch"):
        fetch(url)


def test_cache_that_cannot_be_written_serves_what_it_holds(server, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EROFS, "Read-only file system")

    url = server.serve("/a.pt", DATA)
    put_by_hand(url)
    monkeypatch.setattr(os, "replace", refuse)
    assert fetch(url) == place_of(url)
    assert not record_of(url).exists()


def test_local_file_is_used_where_it_is(home, tmp_path):
    path = tmp_path / "my weights.pt"
    path.write_bytes(DATA)
    assert fetch(path.as_uri()) == path
    path.write_bytes(b"changed, and that is the user's right")
    assert cached(path.as_uri()) == path
    assert not home.exists()


def test_two_processes_download_once(server):
    url = server.serve("/a.pt", bytes(3_000_000), cuts=[1_000_000])
    code = (
        "import sys; from mezzo.fetch import fetch\n"
        "print('ready', flush=True); sys.stdin.readline(); print(fetch(sys.argv[1]).stat().st_size)"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in both] == ["3000000\n"] * 2
    assert [process.returncode for process in both] == [0, 0]
    assert sum(server.sent) == 3_000_000


def test_package_loads_neither_torch_nor_rich():
    code = "import sys, mezzo.fetch; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


# What a person sees


def test_lines_without_a_terminal_give_size_path_and_checksum(server, capsys):
    url = server.serve("/a.pt", DATA)
    with terminal_progress(url) as progress:
        fetch(url, progress=progress)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        f"fetching {url} (7.0 kB) to {place_of(url)}",
        f"fetched {place_of(url)}, SHA-256 {SHA256}",
    ]
    with terminal_progress(url) as progress:
        fetch(url, progress=progress)
    assert capsys.readouterr().err == ""


def test_unknown_size_is_said_and_a_failure_has_no_last_line(server, capsys):
    url = server.serve("/a.pt", DATA, has_length=False)

    def fail() -> None:
        with terminal_progress(url) as progress:
            progress(0, None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert capsys.readouterr().err == f"fetching {url} (size unknown) to {place_of(url)}\n"


def test_bar_on_a_terminal_shows_name_bytes_and_speed(server, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    url = server.serve("/a[b]c.pt", DATA)
    with terminal_progress(url) as progress:
        fetch(url, progress=progress)
        progress(len(DATA), len(DATA))
    shown = capsys.readouterr().err
    assert place_of(url).name in shown
    assert "7.0/7.0 kB" in shown
    assert SHA256 in shown
