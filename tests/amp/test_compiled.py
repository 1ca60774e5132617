"""The compiled tier of the kernels: the same decisions without Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mezzo.amp import _compiled
from mezzo.cli import run
from mezzo.errors import RunError

TESTS = Path(__file__).parent

USE = """
import torch
from mezzo import amp
from mezzo.amp import _kernel_table
from mezzo.amp._compiled import COMPILED
from mezzo.amp._kernel_table import KERNELS

calls = []
make = _kernel_table.make_kernel

def watched(overload, op, device_type):
    kernel = make(overload, op, device_type)
    return lambda *a, **k: (calls.append(overload.name()), kernel(*a, **k))[1]

_kernel_table.make_kernel = watched
f16, f32 = torch.float16, torch.float32
half, wide = torch.ones(3).half(), torch.ones(3)
gray = lambda: torch.lerp(wide, wide, wide)

def use(*functions):
    calls.clear()
    return [function().dtype for function in functions]

as_it_is = [lambda: torch.exp(half), lambda: half + half]
with_cast = [lambda: torch.exp(wide), lambda: half + wide]
with amp.auto_cast(level="O2", use_promote=False):
    if COMPILED.library is None:
        raise SystemExit("not compiled")
    assert use(*as_it_is) == [f16, f16] and calls == ["aten::exp", "aten::add.Tensor"], calls
    assert use(*as_it_is) == [f16, f16] and not calls, calls
    for _ in range(2):
        assert use(*with_cast) == [f16, f16] and calls == ["aten::exp", "aten::add.Tensor"], calls
    for _ in range(2):  # a result dtype of the caller's
        assert use(lambda: torch.softmax(wide, 0, torch.float64)) == [torch.float64] and calls, calls
    with amp.auto_cast(level="O1"):
        assert use(gray, lambda: torch.exp(half), lambda: torch.exp(wide)) == [f32, f32, f32]
        assert use(gray, lambda: torch.exp(wide)) == [f32, f32] and not calls, calls
    assert use(lambda: torch.exp(half)) == [f16] and not calls
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
assert torch.exp(half).dtype == f16
with torch.autocast("cpu", dtype=f16):  # torch's own rules
    assert (half + wide).dtype == f32
KERNELS.uninstall()
with amp.auto_cast(level="O1"):
    assert torch.exp(half).dtype == f32
print("done")
"""


def run_python(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    done = run_python(cache, "-m", "mezzo.cli", "build")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()
    return cache


@pytest.mark.slow
def test_calls_that_need_no_cast_do_not_reach_python_again(built: Path) -> None:
    done = run_python(built, "-c", USE)
    assert done.stdout == "done\n", done.stderr[-3000:]
    assert "Warning" not in done.stderr


@pytest.mark.slow
def test_a_process_can_be_kept_from_it(built: Path) -> None:
    done = run_python(built, "-c", USE, MEZZO_COMPILED="0")
    assert done.stderr == "not compiled\n"


@pytest.mark.slow
def test_the_check_command_says_so(built: Path, tmp_path: Path) -> None:
    assert '"kernels_compiled": true' in run_python(built, "-m", "mezzo.cli", "check", "--json").stdout
    assert "in Python ('mezzo build' compiles them)" in run_python(tmp_path, "-m", "mezzo.cli", "check").stdout


@pytest.mark.slow
def test_all_tests_of_amp_pass_with_compiled_kernels(built: Path) -> None:
    done = run_python(built, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS))
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_library_belongs_to_one_source_torch_and_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = _compiled.library_path()
    assert path.parent == tmp_path / "mezzo"
    other = tmp_path / "other.cpp"
    other.write_text("int x;")
    monkeypatch.setattr(_compiled, "_SOURCE", other)
    assert _compiled.library_path() != path
    assert _compiled.load_kernels() is None


def test_a_missing_tool_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "no-such-compiler" else "/bin/true")
    with pytest.raises(RunError, match=r"needs no-such-compiler, which is not installed; mezzo works without them"):
        _compiled.build_kernels()
    assert run(["build"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("mezzo: building the kernels needs no-such-compiler")


def test_a_library_that_cannot_be_loaded_is_one_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MEZZO_COMPILED", raising=False)
    path = _compiled.library_path()
    path.parent.mkdir()
    path.write_bytes(b"no library")
    with pytest.warns(UserWarning, match=r"the compiled kernels cannot be loaded .*: delete .* and run 'mezzo build'"):
        assert _compiled.load_kernels() is None


def test_a_cache_that_cannot_be_made_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("shutil.which", lambda tool: "/bin/true")
    with pytest.raises(RunError, match="cannot be made: Not a directory; set XDG_CACHE_HOME to another folder"):
        _compiled.build_kernels()


def test_a_failing_compiler_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_compiled, "_BUILD", "raise SystemExit('x.cpp:1: error: no good')")
    with pytest.raises(
        RunError, match=r"the compiler failed: x\.cpp:1: error: no good; mezzo works without the kernels"
    ):
        _compiled.build_kernels()
    assert list((tmp_path / "mezzo").iterdir()) == []
