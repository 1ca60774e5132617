"""Refuse a source distribution with files that do not belong in it: `python tools/check_sdist.py dist/mezzo-*.tar.gz`.

A file belongs in it if git tracks it and it is neither large nor a measurement. `make release-check` calls this.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MADE_BY_THE_BUILD = {"PKG-INFO", ".gitignore"}
LARGEST = 512 * 1024
"""In bytes: the sources have no larger file."""


def faults(archive: Path, tracked: set[str]) -> list[str]:
    """Return one line for each member of an archive that does not belong in it."""
    found = []
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            name = member.name.partition("/")[2]
            if not member.isfile():
                found.append(f"{name}: not a regular file")
            elif name not in tracked | MADE_BY_THE_BUILD:
                found.append(f"{name}: git does not track it")
            elif name.startswith("benchmarks/"):
                found.append(f"{name}: measurements stay in the repository")
            elif member.size > LARGEST:
                found.append(f"{name}: {member.size} bytes, more than {LARGEST}")
    return found


def main(archive: str) -> None:
    """Print the number of files, or exit with the faults."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    if found := faults(Path(archive), set(listed.stdout.split("\0"))):
        sys.exit("\n".join([f"{archive}: {len(found)} files do not belong in it", *found]))
    with tarfile.open(archive) as opened:
        print(f"{archive}: {len(opened.getnames())} files, all tracked")


if __name__ == "__main__":
    main(*sys.argv[1:])
