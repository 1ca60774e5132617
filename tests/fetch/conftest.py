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
    return tmp_path / "home"


class Patience:
    """How long a download waits for a server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def set_pauses(self, *pauses_s: float) -> None:
        """Wait so long between one attempt and the next."""
        self._monkeypatch.setattr(_download, "PAUSES_S", pauses_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for an answer."""
        self._monkeypatch.setattr(_download, "TIMEOUT_S", timeout_s)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    patience = Patience(monkeypatch)
    patience.set_pauses(0, 0, 0)
    patience.set_timeout(3.0)
    return patience


@pytest.fixture
def server() -> Iterator[FileServer]:
    with FileServer().running() as running:
        yield running
