"""Each URL has one predictable place in the cache, and none outside of it."""

import re
from pathlib import Path

import pytest

from mezzo.errors import RunError
from mezzo.fetch import FetchError, fetch, is_offline, is_url, place_of


def test_place_follows_host_port_and_path(home):
    assert place_of("https://bj.bcebos.com/a/b.tar.gz") == home / "weights/bj.bcebos.com/a/b.tar.gz"
    assert place_of("HTTP://Host:8000/a/b.tar.gz#part") == home / "weights/host:8000/a/b.tar.gz"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MEZZO_HOME": "/a"}, "/a"),
        ({"MEZZO_HOME": "~/a"}, "/home/me/a"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/mezzo"),
        ({}, "/home/me/.cache/mezzo"),
    ],
)
def test_folder_of_the_cache_comes_from_the_environment(monkeypatch, variables, expected):
    for name in ("MEZZO_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert place_of("https://x/y.pt") == Path(expected, "weights/x/y.pt")


def test_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv("MEZZO_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(FetchError, match="set MEZZO_HOME"):
        place_of("https://x/y.pt")


ODD = [
    "https://host/../../../etc/passwd",
    "https://host/a/../b.pt",
    "https://host/a/./b.pt",
    "https://host//a//b.pt",
    "https://host/a/b.pt",
    "https://host/a/b.pt?x=1",
    "https://host/a/b.pt?x=2",
    "https://host/a/b.pt?x=../../..",
    "https://host/.ssh/authorized_keys",
    "https://host/a/.bashrc",
    "https://host/..\\..\\b.pt",
    "https://host/a/..",
    "https://../b.pt",
    "https://host/" + "n" * 3000 + ".tar.gz",
    "https://host/" + "n" * 3001 + ".tar.gz",
    "https://host/a b.pt",
    "https://host/a_b.pt",
    "https://host/b.pt.json",
    "https://host/b.pt.part",
    "https://höst/b.pt",
    "https://hüst/b.pt",
]


def test_odd_urls_stay_inside_and_share_no_file(home):
    places = [place_of(url) for url in ODD]
    assert len(set(places)) == len(ODD)
    for place in places:
        inside = place.relative_to(home / "weights").parts
        assert len(inside) > 1
        assert not any(part.startswith(".") or len(part) > 200 or "\0" in part for part in inside)
    assert {place.name[-7:] for place in places if "nnn" in place.name} == {".tar.gz"}
    assert not {place.name for place in places} & {"b.pt.json", "b.pt.part"}


def test_query_keeps_the_suffix_in_front_of_which_its_hash_stands():
    assert re.fullmatch(r"b-[0-9a-f]{12}\.tar\.gz", place_of("https://host/b.tar.gz?token=1").name)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/a", "must begin with https:, http:, file:"),
        ("https://host/b.pt\0", "cannot be printed"),
        ("https://host/\x1b[31mb.pt", "cannot be printed"),
        ("https:///a", "names no host"),
        ("https://[/a", "cannot be read as a URL"),
        ("https://host:port/a", "cannot be read as a URL"),
        ("https://host", "names a folder"),
        ("https://host/a/", "names a folder"),
        ("file://elsewhere/a", "of this machine"),
        ("file:a", "of this machine"),
        ("file:///no/such", "there is no such file"),
    ],
)
def test_url_without_a_file_is_refused(url, message):
    with pytest.raises(FetchError, match=message) as error:
        fetch(url)
    assert error.value.exit_code == 2


def test_password_in_a_url_is_not_repeated():
    with pytest.raises(FetchError, match="user name") as error:
        place_of("https://me:secret@host:x/a")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("text", ["http://a/b", "HTTPS://a/b", "file:///a", "File:/a"])
def test_urls_are_recognised(text):
    assert is_url(text)


@pytest.mark.parametrize("text", ["", "a/b.pt", "s3://a/b", "httpx://a", "C:/a", "./http://a", "https"])
def test_paths_and_other_schemes_are_no_urls(text):
    assert not is_url(text)


@pytest.mark.parametrize(
    ("value", "expected"), [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("", False), ("no", False)]
)
def test_offline_switch(monkeypatch, value, expected):
    monkeypatch.setenv("MEZZO_OFFLINE", value)
    assert is_offline() is expected


def test_offline_names_the_path_for_the_file_and_asks_no_server(monkeypatch, server):
    monkeypatch.setenv("MEZZO_OFFLINE", "1")
    url = server.serve("/a.pt", b"data")
    expected = f"{url}: MEZZO_OFFLINE is set and the file is not in the cache; put it at {place_of(url)}"
    with pytest.raises(RunError, match=re.escape(expected)):
        fetch(url)
    assert server.requests == []
    place_of(url).parent.mkdir(parents=True)
    place_of(url).write_bytes(b"by hand")
    assert fetch(url).read_bytes() == b"by hand"
