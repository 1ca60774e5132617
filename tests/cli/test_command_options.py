"""Options of all commands: spellings, help, completion, errors; and the commands that dataclasses become."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer

from mezzo._options import Option, Subset, check_options, parse_settings
from mezzo.cli import app, run
from mezzo.vision.recipes import RecipeOptions
from mezzo.vision.train import OptionError, RunOptions


def find_commands(group, words=()):
    """Yield the words of every command below a group."""
    for name, command in getattr(group, "commands", {}).items():
        yield (*words, name)
        yield from find_commands(command, (*words, name))


COMMANDS = [(), *find_commands(typer.main.get_command(app))]


def complete(monkeypatch, capsys, line: str) -> list[str]:
    """Return what the shell offers for the last word of a command line."""
    words = f"mezzo {line}"
    monkeypatch.setenv("_MEZZO_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit):
        run([])
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tra", ["train"]),
        ("bench ", ["step", "static", "llm", "infer"]),
        ("train --amp-l", ["--amp-level", "--amp-lists"]),
        ("train --amp-level O", ["O0", "OD", "O1", "O2", "O3"]),
        ("train --do-eval --model mobilenet_v3_s", ["mobilenet_v3_small"]),
        ("infer --engine onn", ["onnxruntime"]),
        ("export --output-op s", ["softmax"]),
        ("models pp_humanseg_l", ["pp_humanseg_lite"]),
        ("prepare city", ["cityscapes"]),
    ],
)
def test_the_shell_completes_commands_options_and_choices(monkeypatch, capsys, line, offered):
    assert complete(monkeypatch, capsys, line) == offered


def test_completion_can_be_installed():
    # By variable: --show-completion asks which shell started it, and make starts its commands by sh.
    environment = {**os.environ, "_MEZZO_COMPLETE": "source_bash"}
    command = [sys.executable, "-m", "mezzo"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "_MEZZO_COMPLETE=complete_bash" in done.stdout


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_a_screen_of_80_columns(monkeypatch, capsys, words):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    if words != ("tipc",):
        assert not [line for line in lines if re.search(r"\w\.\.\.$", line)], "a sentence is cut"


def test_help_and_completion_load_no_torch():
    code = "import sys; from mezzo.cli import run; run(['train', '--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'torch'" not in done.stdout.splitlines()[-1]


@dataclass(frozen=True, kw_only=True)
class Options:
    save_dir: Annotated[Path, Option("Folder.", "--save-dir", "--output-dir")] = Path("output")
    use_gpu: Annotated[bool | None, Option("Use the GPU.")] = None
    benchmark: Annotated[bool, Option("Print the report.")] = False
    opts: Annotated[tuple[str, ...], Option("Changes.")] = ()
    shape: Annotated[tuple[int, int], Option("Height and width.")] = (1, 2)
    fp8: Annotated[dict[str, object] | None, Option("Settings.", parse=parse_settings)] = None
    level: Annotated[str, Option("Level.", choices=("O1", "O2"))] = "O1"
    steps: Annotated[int, Option("Steps.", at_least=1)] = 3
    hidden: int = 7

    def __post_init__(self) -> None:
        check_options(self)


@pytest.fixture
def parse(capsys):
    """A command with options from a dataclass; returns them, or the error line."""
    from mezzo.cli import add_command

    seen = []

    def command(options: Annotated[Options, Subset(steps=5)], name: Annotated[str, Option("Name.")] = "x") -> int:
        """Do something."""
        seen.append((options, name))
        return 0

    one = typer.Typer(add_completion=False)
    one.callback()(lambda: None)
    add_command(one, command)

    def call(line: str) -> Options:
        one(args=["command", *line.split()], standalone_mode=False)
        return seen[-1][0]

    return call


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--save-dir a", {"save_dir": Path("a")}),
        ("--save_dir=a", {"save_dir": Path("a")}),
        ("--output_dir a", {"save_dir": Path("a")}),
        ("--benchmark", {"benchmark": True}),
        ("--benchmark True --use_gpu False", {"benchmark": True, "use_gpu": False}),
        ("--benchmark=no --use-gpu=1", {"use_gpu": True}),
        ("--benchmark --use-gpu", {"benchmark": True, "use_gpu": True}),
        ("--opts a=1 b_c=2 --steps 4", {"opts": ("a=1", "b_c=2"), "steps": 4}),
        ("--opts=a=1 b=2 --opts c=3", {"opts": ("a=1", "b=2", "c=3")}),
        ("--shape 3 -1", {"shape": (3, -1)}),
        ("--fp8 emulate,min_size=0", {"fp8": {"emulate": True, "min_size": 0}}),
        ("--level O2 --name y", {"level": "O2"}),
    ],
)
def test_documented_spellings_become_fields(parse, line, expected):
    assert parse(line) == Options(**{"steps": 5, **expected})


@pytest.mark.parametrize(("line", "word"), [("--steps 0", "steps=0"), ("--level O3", "unknown level 'O3'")])
def test_a_value_outside_its_limits_is_refused(parse, line, word):
    with pytest.raises(OptionError, match=re.escape(word)):
        parse(line)


@pytest.mark.parametrize(
    ("text", "settings"),
    [("emulate", {"emulate": True}), ("emulate=False, min-size=-1", {"emulate": False, "min_size": -1}), ("", {})],
)
def test_settings_are_read_from_one_option(text, settings):
    assert parse_settings(text) == settings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--save_dirs", "x"], ["--save-dirs", "--save-dir"]),
        (["train", "--amp_levels", "O1"], ["--amp-level"]),
        (["train", "--amp-level", "O9"], ["'O9'", "O0, OD, O1, O2, O3"]),
        (["train", "--do-eval=maybe"], ["'maybe'", "True or False"]),
        (["train", "x"], ["x"]),
        (["infer", "--config", "x", "--batch-size", "0"], ["batch_size=0", "at least 1"]),
        (["check", "--dtype", "bfloat"], ["--dtype 'bfloat'", "'bfloat16'"]),
        (["bench", "infer"], ["model"]),
    ],
)
def test_bad_options_are_one_line_with_the_nearest_name_and_2(capsys, arguments, words):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert not [word for word in words if word.lower() not in captured.err.lower()], captured.err


def test_the_command_line_and_the_dataclasses_have_the_same_defaults(monkeypatch):
    seen = []
    monkeypatch.setattr("mezzo.vision.train.train", lambda recipe, options: seen.append(options))
    monkeypatch.setattr("mezzo.vision.train.make_recipe", lambda options: seen.append(options))
    assert run(["train", "--config", "a.yml"]) == 0
    assert seen == [RecipeOptions(config=Path("a.yml")), RunOptions()]
