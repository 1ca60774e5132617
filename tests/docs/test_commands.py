"""Commands on the pages and in the READMEs work as pasted: cheap ones in every run of the tests, the others among the slow.

Every command is in one of three tables: `CHEAP`, `SLOW`, which is run in small form (`SMALL`), or `CANNOT`, with the reason.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, blocks, commands, name_of, pages

from mezzo.cli import main

MOBILENET = "test_tipc/configs/mobilenet_v3_small/train_amp_infer_python.txt"
HUMANSEG = "test_tipc/configs/pphumanseg_lite/pphumanseg_lite_mini_supervisely.yml"
AS_BEFORE = "--precision fp16 --amp_level O2 --do_eval --save_interval 4 --seed 100 --batch_size 2"
LITE = "lite_train_lite_infer"

#: Commands that are not run, and why.
CANNOT = {
    r"pip install .*": "would change what the tests run in",
    r"git clone .*": "needs the network",
    r"cd mezzo": "the checkout is the folder that the tests run in",
    r"make demo": "certifies two networks: the same as the commands of test_tipc, which are run",
    r"mezzo tipc matrix .* --on (ray|slurm).*": "needs a cluster: `make test-ray` and `make test-slurm` run it",
    r"make test-torch .*": "fetches a torch, and runs this suite",
    r"torchrun --nnodes=2 .*": "needs two machines",
    r"docker .*": "needs a Docker daemon; tests/test_release.py checks the Dockerfile",
    r"rattler-build .*": "needs conda's channels; tests/test_release.py checks the recipe",
}

#: Commands that take no time; they run in this process.
CHEAP = (
    r"mezzo check.*",
    r"mezzo models.*",
    r"mezzo tipc (lint|plan) .*",
    r"mezzo tipc matrix .* --on k8s --dry-run",
    r"mezzo .* --help",
)

#: Commands that take seconds or minutes; they run as a reader runs them, page by page.
SLOW = (
    r"mezzo (build|compare.*|bisect .*|doctor .*|prepare .*|bench .*)",
    r"mezzo train --recipe .*",
    r"mezzo tipc (prepare|run|report|compare) .*",
    r"mezzo tipc matrix (?!.*--on ).*",
    r"mezzo tipc history( .*)?",
    r"bash test_tipc/\w+\.sh .*",
    r"python train\.py .*",
    r"python tools/(val|export|export_model)\.py .*",
    r"python deploy/(python|inference_python)/infer\.py .*",
    r"python examples/[\w/]+\.py.*",
    r"torchrun --nproc_per_node=2 .*",
)

#: What is made smaller, or named: (pattern, replacement, why).
SMALL = (
    (r"--config \.\.\.", f"--config {HUMANSEG}", "the page leaves it to the reader"),
    (r"\bCONFIG\b(\.\.\.)?", MOBILENET, "the page leaves it to the reader"),
    (r"\bMODE\b", LITE, "the page leaves it to the reader"),
    (r"--network NET\b", "--network mobilenet_v3_small", "the page leaves it to the reader"),
    (r"\bDIR\.\.\.", "test_tipc/output", "the page leaves it to the reader"),
    (r"--iters 200\b", "--iters 4", "steps"),
    (r"--save_interval 500\b", "--save_interval 4", "steps"),
    (r"--batch_size [48]\b", "--batch_size 2", "images"),
    (r"--resume(_model| auto)\b", rf"{AS_BEFORE} --iters 6 --resume\1", "... are the options of the resumed run"),
    (r"(torchrun .* train\.py --config .*)$", r"\1 --iters 2", "steps"),
    (r"--epochs=5\b", "--epochs=1 --image-size=32 --resize-size=32 --workers=0", "pixels, and processes"),
    (r"--precision fp16,int8\b", "--precision fp16,int8 --min-agreement 0.5", "a network after four steps is not sure"),
    (r"^mezzo compare\b", "mezzo compare --device cpu --size 64 --batch-size 16 --steps 2", "a network"),
    (r"--size 64 --batch-size 16 (--steps 2 --model)", r"\1", "an own network has its own size"),
    (r"^mezzo bisect\b", "mezzo bisect --device cpu --steps 1", "steps"),
    (r"^(mezzo doctor .*)--batch-size 256\b", r"\1--batch-size 2 --image-size 32", "images"),
    (r"^mezzo doctor\b", "mezzo doctor --device cpu --steps 1", "steps"),
    (r"^mezzo bench step\b", "mezzo bench step --device cpu --size 32 --batch-size 8 --steps 1", "a network"),
    (
        r"^mezzo bench static (.*) --warm-caches 8$",
        r"mezzo bench static \1 --warm-caches 2 --device cpu --image-size 64 --batch-size 2 --steps 1 --check-steps 1 "
        "--recipes stock-eager-contiguous",
        "images, and processes",
    ),
    (r"^(mezzo bench infer .*)$", r"\1 --rounds 1 --runs 2", "runs"),
    (r"^(mezzo tipc run .*)$", r"\1 --resume", "a command of docs/paddle.md has run it"),
    (r"^(mezzo tipc matrix (?!.*--on ).*)$", r"\1 --resume", "a command of docs/paddle.md has run it"),
)

TABLES = {"CHEAP": CHEAP, "SLOW": SLOW, "CANNOT": CANNOT}

#: Pages whose commands use what those of another page made.
NEEDS = {
    "docs/export.md": "docs/training.md",
    "docs/certification.md": "docs/paddle.md",
    "docs/history.md": "docs/certification.md",
}


def is_in(table: Any, command: str) -> bool:
    return any(re.fullmatch(pattern, command) for pattern in table)


def small(command: str) -> str:
    """Return a command as it is run here.

    >>> small("python train.py --config ... --iters 200")
    'python train.py --config test_tipc/configs/pphumanseg_lite/pphumanseg_lite_mini_supervisely.yml --iters 4'
    """
    for pattern, replacement, _ in SMALL:
        command = re.sub(pattern, replacement, command)
    return " ".join(command.split())


def commands_of(page: Path, cheap: bool) -> list[str]:
    """Return the cheap or the slow commands of a page, as they are run."""
    return [small(command) for command in commands(page) if is_in(CHEAP if cheap else SLOW, command)]


CHEAP_COMMANDS = sorted({command for page in pages() for command in commands_of(page, cheap=True)})
SLOW_PAGES = [page for page in pages() if commands_of(page, cheap=False)]


class Workshop:
    """A folder with what a checkout has for commands to use; each command is run once.

    Args:
        folder: Where to make it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: set[str] = set()
        for name in ("train.py", "tools", "deploy", "examples", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        made = shutil.ignore_patterns("data", "output", "lite_cpu.yml")  # what commands write there
        shutil.copytree(ROOT / "test_tipc", folder / "test_tipc", ignore=made)

    def run(self, command: str) -> None:
        """Run a command as a reader's shell would, and see that it ends well."""
        if command in self._done:
            return
        env = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "MEZZO_PYTHON": sys.executable,
            "PYTHONWARNINGS": "default",
        }
        ended = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=env, capture_output=True, text=True, timeout=1200, check=False
        )
        said = f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        assert ended.returncode == 0, f"{command}\nended with {ended.returncode}:\n{said}"
        assert "Traceback (most recent call last)" not in ended.stderr, f"{command}\n{said}"
        self._done.add(command)

    def run_page(self, page: Path) -> None:
        """Run the slow commands of a page, after those that they build on."""
        if name_of(page) in NEEDS:
            self.run_page(ROOT / NEEDS[name_of(page)])
        for block in blocks(page):
            if block.title is not None:
                (self.folder / block.title).write_text(block.code, encoding="utf-8")
        for command in commands_of(page, cheap=False):
            self.run(command)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize("command", CHEAP_COMMANDS)
def test_a_cheap_command_works(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(command)
    assert program == "mezzo"
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW_PAGES, ids=name_of)
def test_commands_of_a_page_work_in_small_form(page: Path, workshop: Workshop) -> None:
    workshop.run_page(page)


def test_every_command_is_in_one_table() -> None:
    for page in pages():
        for command in commands(page):
            tables = [name for name, table in TABLES.items() if is_in(table, command)]
            assert len(tables) == 1, f"{name_of(page)}: {command}: in {tables}, must be in one of {', '.join(TABLES)}"


def test_what_a_page_leaves_to_its_reader_is_filled_in() -> None:
    for command in (command for page in pages() for cheap in (True, False) for command in commands_of(page, cheap)):
        left = re.search(r"\.\.\.|\b[A-Z]{3,}\b", command)
        assert left is None, f"{command}: what is {left and left[0]}?"


def test_tables_speak_of_commands_that_are_there() -> None:
    everything = [command for page in pages() for command in commands(page)]
    for pattern in (*CANNOT, *SLOW):
        assert any(re.fullmatch(pattern, command) for command in everything), pattern
    for name in (*NEEDS, *NEEDS.values()):
        assert (ROOT / name).exists(), name


def test_a_command_is_joined_and_loses_its_comment() -> None:
    readme = commands(ROOT / "README.md")
    assert "mezzo check" in readme
    assert not any("\\" in command or "#" in command for command in readme)
