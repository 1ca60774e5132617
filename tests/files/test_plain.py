"""Nothing that a foreign file names reaches a terminal as a command of that terminal."""

import ast
import io
import sys
from pathlib import Path

import pytest

from mezzo.errors import MezzoError, RunError
from mezzo.files import one_line, plain, say
from mezzo.vision.recipes import RecipeError

SOURCE = Path(__file__).parents[2] / "src" / "mezzo"
HOSTILE = "\x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\name\x9b31m\r\u202egnp.exe\x00\x08"

#: Every other print, with its reason. New ones go through `mezzo.files.say`.
ALLOWED = {
    "files/_plain.py": ["print"],  # `say` itself
    # the yellow line of the scripts, and the output of a command, byte for byte as the shell shows it
    "tipc/_script_run.py": ["print", "stdout.buffer.write"],
    "tipc/_progress.py": ["console.print"],  # rich.Text of a plain line: no markup
    "vision/train/_reporter.py": ["_console.print"],  # a plain line above the bar, by a console without markup
    "cli/_check.py": ["console.print"],  # a table of plain rich.Text
}
_WRITERS = ("print", "print_exception", "print_exc")


def printed_in(code: str) -> list[str]:
    """Return how a source prints: `print`, `typer.echo` (called or handed on), `x.print`, `sys.stdout.write`."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and node.id == "print":
            found.append("print")
        if not isinstance(node, ast.Attribute):
            continue
        words = ast.unparse(node).split(".")
        is_echo = node.attr in ("echo", "secho") and words[0] in ("typer", "click")
        if (
            is_echo
            or node.attr in _WRITERS
            or (node.attr in ("write", "writelines") and {"stdout", "stderr"} & set(words))
        ):
            found.append(".".join(words[1:]) if words[0] in ("self", "sys", "typer") else ".".join(words))
    return found


def test_everything_is_printed_by_say() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
    prints = {name: found for name, text in sources.items() if (found := printed_in(text))}
    assert prints == ALLOWED, "print through mezzo.files.say, or add the file to ALLOWED with a reason"


@pytest.mark.parametrize(
    "code",
    [
        "print(1)",
        "typer.echo(x)",
        "run(typer.echo)",
        "console.print(x)",
        "sys.stderr.write(x)",
        "sys.stdout.buffer.write(x)",
    ],
)
def test_the_scan_finds_every_way_to_print(code: str) -> None:
    assert printed_in(code)
    assert not printed_in('"""print(1) in a docstring"""\nsay(print_table)')


def test_say_prints_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say("class", HOSTILE)
    say(HOSTILE, err=True)
    captured = capsys.readouterr()
    assert captured.out == "class name31m\ngnp.exe\n"
    assert all(line.isprintable() for line in (captured.out + captured.err).split("\n"))


def test_say_on_a_terminal_in_ascii_shows_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    say("Katze \u732b \udcff")
    stream.seek(0)
    assert stream.read() == "Katze \\u732b \n"


@pytest.mark.parametrize("error", [MezzoError, RunError])
def test_messages_of_errors_are_printable(error: type[MezzoError]) -> None:
    message = str(error(f"{HOSTILE}: no such file\u200b\xa0\t\ud800\U000e0001"))
    assert message.startswith("name31m\ngnp.exe: no such file")
    assert all(line.isprintable() for line in message.split("\n"))


def test_an_error_with_several_faults_keeps_its_lines() -> None:
    assert str(RecipeError(["a.yml:1: \x1b[31mbad", "a.yml:2: worse"])) == "a.yml:1: bad\na.yml:2: worse"


def test_a_name_with_newlines_is_one_line() -> None:
    assert one_line("a\r\nimage_name: b\x1b[1m") == "a image_name: b"
    assert one_line(Path("Straße/猫 [bold]x[/bold].png")) == "Straße/猫 [bold]x[/bold].png"


@pytest.mark.parametrize("mark", ["\u061c", "\u200e", "\u202e", "\u2028", "\u2067", "\ufeff"])
def test_marks_that_turn_or_end_a_line_are_left_out(mark: str) -> None:
    assert plain(f"a{mark}b") == "ab"
