"""A server on this machine that serves bytes, and fails as servers and connections fail."""

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Served:
    """A file, and how the server behaves when it is asked for."""

    data: bytes
    etag: str | None = '"one"'
    last_modified: str | None = None
    has_ranges: bool = True
    cuts: list[int | None] = field(default_factory=list)
    """For each request in turn, after how many bytes the connection breaks; None and later ones: not at all."""
    statuses: list[int | None] = field(default_factory=list)
    """For each request in turn, the status instead of an answer."""
    content_range: str | None = None
    ignores_if_range: bool = False
    location: str | None = None
    is_chunked: bool = False
    has_length: bool = True


@dataclass
class Request:
    """What came, and how much of the body was sent."""

    path: str
    headers: dict[str, str]
    sent: int = 0


class FileServer:
    """Serves `files` by path; `requests` are those that came."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.requests: list[Request] = []
        self.url = ""

    def serve(self, path: str, data: bytes, **how) -> str:
        """Add a file; return its URL."""
        self.files[path] = Served(data, **how)
        return self.url + path

    @property
    def sent(self) -> list[int]:
        return [request.sent for request in self.requests]

    @contextmanager
    def running(self) -> Iterator["FileServer"]:
        handler = type("Handler", (_Handler,), {"owner": self})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}"
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            yield self
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FileServer

    def do_GET(self) -> None:
        request = Request(self.path, dict(self.headers))
        self.owner.requests.append(request)
        served = self.owner.files.get(self.path)
        if served is None:
            return self.send_error(404)
        if served.location is not None:
            self.send_response(302)
            self.send_header("Location", served.location)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        status = served.statuses.pop(0) if served.statuses else None
        if status is not None:
            return self.send_error(status)
        self._send(served, request)

    def _send(self, served: Served, request: Request) -> None:
        start = self._start(served)
        body = served.data[start:]
        cut = served.cuts.pop(0) if served.cuts else None
        self.send_response(206 if start else 200)
        if start:
            whole = f"bytes {start}-{len(served.data) - 1}/{len(served.data)}"
            self.send_header("Content-Range", served.content_range or whole)
        for name, value in (("ETag", served.etag), ("Last-Modified", served.last_modified)):
            if value is not None:
                self.send_header(name, value)
        if served.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif served.has_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        request.sent = len(body[:cut])
        if served.is_chunked:
            end = b"" if cut is not None else b"\r\n0\r\n\r\n"
            self.wfile.write(f"{len(body):x}\r\n".encode() + body[:cut] + end)
        else:
            self.wfile.write(body[:cut])

    def _start(self, served: Served) -> int:
        """Return where the answer begins: not at 0 only if the client has the same version."""
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        is_same = self.headers.get("If-Range") in (served.etag, served.last_modified) or served.ignores_if_range
        return int(found[1]) if found and served.has_ranges and is_same else 0

    def log_message(self, *args: object) -> None:
        pass
