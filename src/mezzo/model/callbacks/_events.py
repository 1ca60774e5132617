"""Writer for TensorBoard whose errors do not end a training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mezzo.files import say


class EventWriter:
    """Writes scalars for TensorBoard. After the first failure, it reports that once and writes nothing more.

    Args:
        directory: Created if missing.
        purge_step: TensorBoard hides points of this step and later from earlier runs.
        notice: Called with the message.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, directory: Path, purge_step: int | None = None, notice: Callable[[str], object] = say) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory, self._notice = directory, notice
        self._writer: Any = None
        self._try(lambda: self._open(SummaryWriter, purge_step))

    def add(self, name: str, value: float, step: int) -> None:
        """Write a point."""
        if self._writer is not None:
            self._try(lambda: self._writer.add_scalar(name, value, step))

    def close(self) -> None:
        """Finish the file; may be called again."""
        if self._writer is not None:
            self._try(lambda: self._writer.close())
            self._writer = None

    def _open(self, make: Any, purge_step: int | None) -> None:
        _silence_thread()
        self._writer = make(str(self._directory), purge_step=purge_step)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: its file was closed after a failure
            self._writer = None
            reason = getattr(error, "strerror", None) or error
            self._notice(
                f"{self._directory}: TensorBoard cannot write ({reason}); the training continues without it, its results are "
                "in the printed lines"
            )


def _silence_thread() -> None:
    """Hide the traceback of the thread of TensorBoard: the next point raises the same error."""
    before = threading.excepthook
    if getattr(before, "is_of_mezzo", False):
        return

    def hook(arguments: Any) -> None:
        kind = type(arguments.thread).__name__
        if kind != "_AsyncWriterThread" or not isinstance(arguments.exc_value, OSError):
            before(arguments)

    hook.is_of_mezzo = True  # type: ignore[attr-defined]
    threading.excepthook = hook
