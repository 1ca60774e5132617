"""Progress of a download on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mezzo.fetch._cache import recorded
from mezzo.fetch._download import Progress
from mezzo.fetch._place import place_of
from mezzo.files import plain, say


@contextmanager
def terminal_progress(url: str) -> Iterator[Progress]:
    """Yield a callback for `fetch`: a bar if stderr is a terminal, otherwise a line; the last line has the checksum.

    Nothing is printed if there is no download, because the file is in the cache or another process downloaded it.
    """
    from rich import progress as rich_progress
    from rich.console import Console

    place = place_of(url)
    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    bar = rich_progress.Progress(*columns, console=console, transient=True)
    is_begun = False

    def report(done: int, total: int | None) -> None:
        nonlocal is_begun
        if not is_begun:
            is_begun = True
            if console.is_terminal:
                bar.start()
                bar.add_task(plain(place.name), total=total, completed=done)
            else:
                size = "size unknown" if total is None else _in_words(total)
                say(f"fetching {url} ({size}) to {place}", err=True)
        elif console.is_terminal:
            bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()
    known = recorded(place) if is_begun else None
    if known is not None:
        say(f"fetched {place}, SHA-256 {known['sha256']}", err=True)


def _in_words(size: int) -> str:
    """Return a number of bytes with a unit.

    >>> _in_words(12_345_678), _in_words(999)
    ('12.3 MB', '999 bytes')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
