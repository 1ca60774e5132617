"""Downloads: what comes is complete or refused, and a broken connection costs only what was not yet there."""

import hashlib
import json
import os
import re
import socket

import pytest

from mezzo.errors import RunError
from mezzo.fetch import FetchError, Unreachable, download, fetch, place_of
from mezzo.files import Bounds

DATA = bytes(range(256)) * 4000


def part_of(url):
    return place_of(url).with_name(place_of(url).name + ".part")


def leave_part(url, data, /, **state):
    """Leave what a download that was killed leaves."""
    part_of(url).parent.mkdir(parents=True, exist_ok=True)
    part_of(url).write_bytes(data)
    if state:
        part_of(url).with_name(part_of(url).name + ".json").write_text(json.dumps(state))


def names_beside(url):
    return sorted(path.name for path in place_of(url).parent.iterdir())


def test_file_is_fetched_once_and_recorded(server):
    url = server.serve("/a/b.tar.gz", DATA, last_modified="Mon, 01 Jan 2024 00:00:00 GMT")
    path = fetch(url)
    assert path == place_of(url)
    assert path.read_bytes() == DATA
    record = json.loads(path.with_name("b.tar.gz.json").read_text())
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record.pop("when"))
    assert record == {
        "url": url,
        "size": len(DATA),
        "sha256": hashlib.sha256(DATA).hexdigest(),
        "etag": '"one"',
        "last_modified": "Mon, 01 Jan 2024 00:00:00 GMT",
    }
    assert names_beside(url) == [".b.tar.gz.lock", "b.tar.gz", "b.tar.gz.json"]
    assert fetch(url) == path
    assert server.sent == [len(DATA)]
    assert "Range" not in server.requests[0].headers
    assert server.requests[0].headers["User-Agent"].startswith("mezzo/")


@pytest.mark.parametrize("how", [{}, {"has_length": False}, {"is_chunked": True}])
def test_progress_rises_to_the_size_and_knows_the_total_if_the_server_does(server, how):
    url = server.serve("/a.pt", DATA, **how)
    seen = []
    assert fetch(url, progress=lambda *now: seen.append(now)).read_bytes() == DATA
    done = [now[0] for now in seen]
    assert done[0] == 0
    assert done[-1] == len(DATA)
    assert done == sorted(done)
    assert {now[1] for now in seen} == {None if how else len(DATA)}
    fetch(url, progress=lambda *now: pytest.fail("it is there"))


VERSIONS = [{}, {"etag": None, "last_modified": "Mon, 01 Jan 2024 00:00:00 GMT"}]


@pytest.mark.parametrize("version", VERSIONS, ids=["etag", "date"])
def test_broken_connection_is_resumed_where_it_broke(server, version):
    url = server.serve("/a.pt", DATA, cuts=[300_000, 200_000], **version)
    seen = []
    assert fetch(url, progress=lambda *now: seen.append(now)).read_bytes() == DATA
    assert server.sent == [300_000, 200_000, len(DATA) - 500_000]
    first, second, third = (request.headers for request in server.requests)
    assert "Range" not in first
    assert (second["Range"], third["Range"]) == ("bytes=300000-", "bytes=500000-")
    assert second["If-Range"] == (version.get("last_modified") or '"one"')
    assert [now[0] for now in seen] == sorted(now[0] for now in seen)
    assert {now[1] for now in seen} == {len(DATA)}
    assert names_beside(url) == [".a.pt.lock", "a.pt", "a.pt.json"]


def test_chunked_answer_that_breaks_is_resumed(server):
    url = server.serve("/a.pt", DATA, cuts=[300_000], is_chunked=True)
    assert fetch(url).read_bytes() == DATA
    assert server.requests[1].headers["Range"] == "bytes=300000-"


def test_failed_fetch_keeps_its_part_for_the_next_one(server):
    url = server.serve("/a.pt", DATA, cuts=[100_000] * 4)
    expected = f"{url}: cannot be fetched: the connection broke after 400000 of {len(DATA)} bytes; "
    expected += f"fetch the file by other means and put it at {place_of(url)}"
    with pytest.raises(RunError, match=f"^{re.escape(expected)}$") as error:
        fetch(url)
    assert error.value.exit_code == 1
    assert not place_of(url).exists()
    assert fetch(url).read_bytes() == DATA
    assert sum(server.sent) == len(DATA)


NEW = DATA[::-1]


def test_other_version_starts_anew(server):
    url = server.serve("/a.pt", NEW, etag='"two"')
    leave_part(url, DATA[:5000], url=url, validator='"one"')
    assert fetch(url).read_bytes() == NEW
    assert server.requests[0].headers["If-Range"] == '"one"'
    assert server.sent == [len(NEW)]


def test_version_that_changes_between_two_attempts_starts_anew(server):
    url = server.serve("/a.pt", DATA, cuts=[5000])

    def replace(done, total):
        if done >= 5000:
            server.files["/a.pt"].data, server.files["/a.pt"].etag = NEW, '"two"'

    assert fetch(url, progress=replace).read_bytes() == NEW
    assert server.sent == [5000, len(NEW)]


def test_server_that_sends_the_rest_of_another_version_is_not_believed(server):
    url = server.serve("/a.pt", NEW, etag='"two"', ignores_if_range=True)
    leave_part(url, DATA[:5000], url=url, validator='"one"')
    assert fetch(url).read_bytes() == NEW
    assert server.sent == [len(NEW) - 5000, len(NEW)]


def test_server_without_ranges_starts_anew(server):
    url = server.serve("/a.pt", DATA, cuts=[300_000], has_ranges=False)
    assert fetch(url).read_bytes() == DATA
    assert server.sent == [300_000, len(DATA)]


@pytest.mark.parametrize("version", [{"etag": None}, {"etag": 'W/"weak"'}], ids=["none", "weak"])
def test_server_that_names_no_exact_version_starts_anew(server, version):
    url = server.serve("/a.pt", DATA, cuts=[300_000], **version)
    assert fetch(url).read_bytes() == DATA
    assert "Range" not in server.requests[1].headers
    assert server.sent == [300_000, len(DATA)]


@pytest.mark.parametrize("state", [{}, {"url": "https://other", "validator": '"one"'}, {"url": None}, {"validator": 3}])
def test_part_of_unknown_origin_is_not_used(server, state):
    url = server.serve("/a.pt", DATA)
    leave_part(url, b"x" * 5000, **state)
    assert fetch(url).read_bytes() == DATA
    assert "Range" not in server.requests[0].headers


def test_range_that_is_refused_starts_anew_once(server):
    url = server.serve("/a.pt", DATA, statuses=[416])
    leave_part(url, DATA + b"more", url=url, validator='"one"')
    assert fetch(url).read_bytes() == DATA
    assert server.sent == [0, len(DATA)]
    other = server.serve("/b.pt", DATA, statuses=[416] * 9)
    with pytest.raises(RunError, match="the server answered 416"):
        fetch(other)
    assert len(server.requests) == 3


@pytest.mark.parametrize("content_range", ["bytes 4000-9999/10000", "bytes */5", "5000-", "bytes 0-1023999/1024000"])
def test_answer_with_another_range_starts_anew(server, content_range):
    url = server.serve("/a.pt", DATA, content_range=content_range)
    leave_part(url, DATA[:5000], url=url, validator='"one"')
    assert fetch(url).read_bytes() == DATA
    assert server.sent == [len(DATA) - 5000, len(DATA)]


def test_range_with_a_total_below_what_is_there_is_an_error(server):
    url = server.serve("/a.pt", DATA, content_range="bytes 5000-5001/3")
    leave_part(url, DATA[:5000], url=url, validator='"one"')
    with pytest.raises(RunError, match="broke after 5000 of 3 bytes"):
        fetch(url)


def test_missing_file_is_not_asked_for_again(server):
    with pytest.raises(RunError, match="cannot be fetched: the server answered 404 Not Found; fetch the file"):
        fetch(server.url + "/none.pt")
    assert len(server.requests) == 1


def test_server_that_is_busy_is_asked_again(server, patience, monkeypatch):
    pauses = []
    patience.set_pauses(1, 2, 4)
    monkeypatch.setattr("time.sleep", pauses.append)
    url = server.serve("/a.pt", DATA, statuses=[503, 429])
    assert fetch(url).read_bytes() == DATA
    assert pauses == [1, 2]
    with pytest.raises(RunError, match="the server answered 503 Service Unavailable"):
        fetch(server.serve("/b.pt", DATA, statuses=[503] * 9))
    assert pauses == [1, 2, 1, 2, 4]


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/a", "data:,x", "/loop"])
def test_redirect_to_anything_but_another_http_url_is_refused(server, target):
    url = server.serve("/loop", b"", location=target)
    with pytest.raises(RunError, match="redirects in a circle, or to what is neither http: nor https:"):
        fetch(url)
    assert not place_of(url).exists()


def test_redirect_to_http_is_followed_and_resumed(server):
    server.serve("/real.pt", DATA, cuts=[300_000])
    url = server.serve("/a.pt", b"", location=f"{server.url}/real.pt")
    assert fetch(url).read_bytes() == DATA
    assert [request.path for request in server.requests] == ["/a.pt", "/real.pt"] * 2
    assert server.requests[3].headers["Range"] == "bytes=300000-"


@pytest.mark.parametrize("how", [{}, {"has_length": False}])
def test_file_over_the_bound_is_refused_and_nothing_stays(server, how):
    url = server.serve("/a.pt", DATA, **how)
    with pytest.raises(FetchError, match="larger than 1000 bytes; fetch it yourself and pass --data DIR"):
        fetch(url, bounds=Bounds(archive_bytes=1000))
    assert names_beside(url) == [".a.pt.lock"]


def test_server_that_is_not_there_is_one_line():
    with pytest.raises(Unreachable, match=r"^http://127\.0\.0\.1:1/x: cannot be fetched: Connection refused; .*$"):
        fetch("http://127.0.0.1:1/x")


def test_server_that_does_not_answer_is_given_up(patience):
    patience.set_timeout(0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable, match="timed out"):
        fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/x")


def test_url_that_http_cannot_express_is_one_line(server):
    with pytest.raises(Unreachable, match="cannot be fetched: ") as error:
        fetch(server.url + "/a b.pt")
    assert "\n" not in str(error.value)
    assert server.requests == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_cache_that_cannot_be_written_is_named(home, server):
    home.mkdir()
    home.chmod(0o500)
    with pytest.raises(RunError, match="cannot be written: Permission denied"):
        fetch(server.serve("/a.pt", DATA))


def test_file_where_a_folder_belongs_is_named(home, server):
    home.write_text("a file")
    with pytest.raises(RunError, match=r"home.*: cannot be written: (Not a directory|File exists)"):
        fetch(server.serve("/a.pt", DATA))


def test_full_disk_is_named_and_not_taken_for_a_broken_connection(server, monkeypatch):
    flush = os.fsync

    def full(number):
        if os.fstat(number).st_size == len(DATA):  # the notes beside the part still fit
            raise OSError(28, "No space left on device")
        flush(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"a\.pt\.part: cannot be written: No space left on device"):
        fetch(server.serve("/a.pt", DATA))
    assert len(server.requests) == 1


def test_download_with_a_checksum_is_resumed_too_and_leaves_only_its_target(server, tmp_path):
    url = server.serve("/a.zip", DATA, cuts=[300_000])
    (tmp_path / "to").mkdir()
    download(url, hashlib.sha256(DATA).hexdigest().upper(), tmp_path / "to/a", Bounds())
    assert (tmp_path / "to/a").read_bytes() == DATA
    with pytest.raises(FetchError, match="it was not opened"):
        download(url, "0" * 64, tmp_path / "to/b", Bounds())
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["a"]
    assert sum(server.sent) == 2 * len(DATA)


def test_download_with_a_checksum_obeys_the_offline_switch(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MEZZO_OFFLINE", "1")
    with pytest.raises(RunError, match="MEZZO_OFFLINE is set"):
        download(server.serve("/a", DATA), "0" * 64, tmp_path / "a", Bounds())
    assert server.requests == []
    (tmp_path / "local").write_bytes(DATA)
    download((tmp_path / "local").as_uri(), hashlib.sha256(DATA).hexdigest(), tmp_path / "b", Bounds())
    assert (tmp_path / "b").read_bytes() == DATA


def test_a_pipe_or_device_behind_a_file_url_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, word in ((tmp_path / "pipe", "named pipe"), ("/dev/zero", "device")):
        with pytest.raises(FetchError, match=word):
            download(f"file://{path}", "0" * 64, tmp_path / "a", Bounds())


@pytest.mark.parametrize("state", ["[" * 200_000, '{"url": 1' + "0" * 400 + "}", "3"])
def test_a_damaged_note_about_a_part_counts_as_none(server, state):
    url = server.serve("/a.pt", DATA)
    place = place_of(url)
    place.parent.mkdir(parents=True)
    place.with_name("a.pt.part").write_bytes(b"x" * 10)
    place.with_name("a.pt.part.json").write_text(state)
    assert fetch(url).read_bytes() == DATA
