"""The status file of the scripts and its lines: `Run successfully with command - ...`."""

from pathlib import Path

from mezzo.files import explained, plain


def print_status(line: str) -> None:
    """Print a status line in the scripts' colour; control characters of the text are left out."""
    print(f"\x1b[33m{plain(line)}\x1b[0m", flush=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which is made if needed; raises RunError if that fails."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(line + "\n")
