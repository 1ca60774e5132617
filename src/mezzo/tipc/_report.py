"""Reports of runs: JUnit XML for CI servers and a page for people."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mezzo.files import write_text
from mezzo.tipc._junit import junit_xml
from mezzo.tipc._page import write_page
from mezzo.tipc._run_folder import RecordedRun, find_runs, load_run

PAGE = "report.html"  # and report.xml beside it


def write_reports(directory: Path | str) -> tuple[Path, Path]:
    """Write `report.xml` and `report.html` into a run's directory, and return their paths.

    Raises:
        ValueError: The run cannot be read; see `load_run`.
        RunError: A report cannot be written.
    """
    directory = Path(directory)
    return _write([load_run(directory)], directory / PAGE)


def merge_reports(directories: Iterable[Path | str], out: Path | str) -> tuple[Path, Path]:
    """Write one JUnit file and one page about all runs in and below directories, and return their paths.

    Args:
        directories: Runs, or folders above them.
        out: A folder for `report.xml` and `report.html`, or the page itself, a name that ends in `.html`.

    Raises:
        ValueError: There is no run, or one cannot be read.
        RunError: A report cannot be written.
    """
    runs = [load_run(directory) for directory in find_runs(directories)]
    out = Path(out)
    return _write(runs, out if out.suffix == ".html" else out / PAGE)


def _write(runs: Sequence[RecordedRun], page: Path) -> tuple[Path, Path]:
    junit = page.with_suffix(".xml")
    write_text(junit, junit_xml(runs))
    write_page(runs, page)
    return junit, page
