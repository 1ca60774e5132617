"""Every test has a cache of its own and a server on this machine; attempts follow each other without a pause."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer

from mezzo.fetch import _download


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEZZO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MEZZO_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(_download, "PAUSES_S", (0, 0, 0))
    monkeypatch.setattr(_download, "TIMEOUT_S", 3.0)
    return tmp_path / "home"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer().running() as running:
        yield running
