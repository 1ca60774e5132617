"""There is one way to read files: `mezzo.files`. What else opens or parses a file stands here with its reason."""

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mezzo.amp import read_lists
from mezzo.errors import MezzoError
from mezzo.export import read_deployed
from mezzo.proof import read_changes
from mezzo.vision.recipes import load_recipe

SOURCES = Path(__file__).parents[2] / "src" / "mezzo"
PARSERS = {"yaml.load", "yaml.safe_load", "yaml.full_load", "yaml.unsafe_load", "json.load", "json.loads"}
#: Files of the kernel: they are small, and nobody else writes them.
KERNEL = {
    "Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace')",
    "Path('/proc/cpuinfo').read_text()",
    "(_CPUFREQ / f'cpuinfo_{end}_freq').read_text()",
    "_STATM.read_text(encoding='ascii')",
    "(folder / 'environ').read_bytes()",
    "(folder / 'stat').read_bytes()",
    "_STAT.read_text()",
    "_PRESSURE.read_text()",
    "Path('/sys/module/nvidia/version').read_text()",
}
#: Name of the file and call: other calls that need not go through `mezzo.files`, with the reason.
ALLOWED = {
    ("_html.py", "files(package).joinpath(name).read_text('utf-8')"): "data of this package",
    ("_compiled.py", "_SOURCE.read_bytes()"): "a source file of this package",
    ("_compile.py", "path.read_bytes()"): "the source files of mezzo",
    ("_images.py", "Image.open(io.BytesIO(data), formats=formats)"): "bytes, not a file; formats are named",
    ("_int8.py", "made.read_bytes()"): "a file that the line before has written",
    ("_download.py", "opener.open(urllib.request.Request(url, headers=agent | headers), timeout=TIMEOUT_S)"): "a URL",
    ("parallel.py", "json.loads(store.get(key))"): "a message of another rank of the same run",
    ("_scalars.py", "path.read_bytes()"): "the run's own record, which read_bytes of mezzo.files has read just before",
}


def calls() -> Iterator[tuple[str, str, str]]:
    """Yield name of the file, its path with the line, and text of every call in the sources that reads or parses a file."""
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if not name.startswith("files/"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and reads(node):
                    yield path.name, f"{name}:{node.lineno}", ast.unparse(node)


def reads(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    if function in PARSERS or function.endswith((".read_text", ".read_bytes")):
        return True
    if function != "open" and not function.endswith(".open"):
        return False
    place = 1 if function in ("open", "io.open", "os.open") else 0
    modes = [*call.args[place : place + 1], *(word.value for word in call.keywords if word.arg == "mode")]
    mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else ""
    opens_data = not call.args and not call.keywords  # `recipe.train_data.open()` is no file
    return not opens_data and not (isinstance(mode, str) and set(mode) & set("wax"))


def test_files_are_read_by_one_package_only() -> None:
    found = list(calls())
    strays = [f"{place}: {text}" for name, place, text in found if text not in KERNEL and (name, text) not in ALLOWED]
    assert not strays, "read these through mezzo.files, or give a reason:\n" + "\n".join(strays)
    gone = ALLOWED.keys() - {(name, text) for name, _, text in found}
    assert not gone, f"not in the sources any more: {gone}"


def test_the_search_finds_every_way_to_read() -> None:
    reading = ("open('a')", "open('a', 'rb')", "p.open('r')", "p.open(mode='rb')", "p.read_text()", "json.loads(x)")
    writing = ("open('a', 'w')", "p.open('ab')", "p.open(mode='x')", "p.write_text('')", "data.open()")
    for text, expected in [*((each, True) for each in reading), *((each, False) for each in writing)]:
        call = ast.parse(text).body[0]
        assert isinstance(call, ast.Expr)
        assert isinstance(call.value, ast.Call)
        assert reads(call.value) is expected, text


def alias_bomb(start: str, join: str, deep: int = 30) -> str:
    lines = [f"a0: &a0 {start}"]
    lines += [f"a{n}: &a{n} " + join.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, deep)]
    return "\n".join(lines)


READERS: dict[str, Callable[[Path], object]] = {
    "deploy.yaml": read_deployed,
    "lists.yml": read_lists,
    "lists.json": read_lists,
    "changes.yaml": read_changes,
    "recipe.yml": load_recipe,
}
BOMBS = {
    "aliases": alias_bomb("[x]", "[{}]"),
    "merge keys": alias_bomb("{k: 1}", "{{<<: [{}]}}"),
    "an escape beyond Unicode": '"\\UFFFFFFFF"',
    "5,000 brackets": "[" * 5000,
    "200,000 brackets": "[" * 200_000 + "]" * 200_000,
    "200,000 braces": '{"a":' * 200_000,
    "a number of 400 digits": '{"custom_white_list": 1' + "0" * 400 + "}",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", READERS)
def test_a_bomb_is_one_line_that_names_the_file(tmp_path: Path, name: str, bomb: str) -> None:
    path = tmp_path / name
    path.write_text(BOMBS[bomb])
    with pytest.raises(MezzoError, match=name) as caught:
        READERS[name](path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_at_once_by_every_reader(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(MezzoError, match=f"{name}.*is a named pipe"):
        READERS[name](tmp_path / name)
