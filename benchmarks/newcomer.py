"""Time the code of docs/tutorial.md, section by section, in fresh processes and empty folders.

python benchmarks/newcomer.py --repeats 5
"""

import argparse
import contextlib
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"


def sections() -> dict[str, str]:
    """Return the Python of each section, in the order of the page."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    code = {
        title: "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {title: text for title, text in code.items() if text}


def run_once() -> dict[str, float]:
    """Run the page in this process; return the seconds of each section."""
    names: dict[str, object] = {"__name__": "__main__"}
    seconds = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for title, code in sections().items():
            begun = time.perf_counter()
            exec(code, names)  # noqa: S102  # our own text
            seconds[title] = time.perf_counter() - begun
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", action="store_true", help="run in this process and folder, print JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(run_once()))
        return
    runs = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            command = [sys.executable, __file__, "--once"]
            text = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
            runs.append({**json.loads(text), "all of it": time.perf_counter() - begun})
    print("| section | seconds |\n|---|---|")
    for title in runs[0]:
        times = [run[title] for run in runs]
        print(f"| {title} | {statistics.median(times):.1f} ({min(times):.1f}..{max(times):.1f}) |")


if __name__ == "__main__":
    main()
