"""The backend of captured graphs, for tests that need one, or a machine without a C++ compiler."""

from typing import Any

import pytest

from mezzo.static import _graph


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """From now on every capture uses this backend, whichever is asked for."""
    monkeypatch.setattr(_graph, "_usable", lambda _: backend)


def skip_without_compiler() -> None:
    """Skip the test where Inductor cannot compile."""
    if (reason := _graph.missing_compiler()) is not None:
        pytest.skip(f"no C++ compiler: {reason}")


def find_missing_compiler() -> str | None:
    """Look for the compiler anew; return why Inductor cannot work, None if it can."""
    _graph.missing_compiler.cache_clear()
    try:
        return _graph.missing_compiler()
    finally:
        _graph.missing_compiler.cache_clear()


def remove_compiler(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """From now on Inductor cannot work, and the next capture says so."""
    monkeypatch.setattr(_graph, "missing_compiler", lambda: reason)
    _graph._notice_missing_compiler.cache_clear()


def make_compilation_fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """From now on compiling a captured graph raises the error."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(_graph, "_aot", fail)
