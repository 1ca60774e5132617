"""The old status lines, exactly: `Run successfully with command - ...`, in the file and colour of the scripts."""

from pathlib import Path

from mezzo.files import explained, plain
from mezzo.tipc._plan import Plan, Step
from mezzo.tipc._text import echoed


def status_line(step: Step, passed: bool) -> str:
    """Return the line of a step; steps without one have no status."""
    word = "successfully" if passed else "failed"
    return f"\x1b[33m Run {word} with command{echoed(step.status or '')}\x1b[0m"


def print_status(line: str) -> None:
    """Print a status line in the scripts' colour; other control characters come from a text, and are left out."""
    print(f"\x1b[33m{plain(line)}\x1b[0m", flush=True)


def banner(plan: Plan) -> str:
    """Return the line that begins a run in some repositories."""
    dashes = "-" * 24
    return f"{dashes} {plan.mode} {dashes}"


def append_line(path: Path, line: str) -> None:
    """Append a line; raises RunError if the system refuses."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(line + "\n")
