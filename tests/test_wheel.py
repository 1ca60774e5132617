"""A wheel, installed outside of the repository, can do what the repository can."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the tracked files: what is ignored must not be in it."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(folder / "tree")]
    done = subprocess.run(command, capture_output=True, text=True)
    if "hatchling" in done.stderr and done.returncode:
        pytest.skip("hatchling cannot be fetched here")
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install the wheel into an environment that also sees the packages of this one, without mezzo's sources."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(own)
    shared = folder / "shared"  # links, so that files of editable installs (.pth) are not read
    shared.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("mezzo", "_mezzo", "__editable__")) and path.suffix != ".pth":
            (shared / path.name).symlink_to(path)
    (own / "shared.pth").write_text(f"{shared}\n")
    script = folder / "bin" / "mezzo"
    script.write_text(f"#!{folder}/bin/python\nfrom mezzo.cli import main\nmain()\n")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def mezzo(command: str, tmp_path: Path):
    """Return a function that runs the installed command in an empty folder and returns its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*arguments: str) -> str:
        done = subprocess.run([command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def test_the_wheel_holds_sources_recipes_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert all(name.startswith("mezzo/") for name in names)
    inside = {name.removeprefix("mezzo/vision/tree/") for name in names if name.startswith("mezzo/vision/tree/")}
    tracked = subprocess.run(
        ["git", "ls-files", "test_tipc/configs", "deploy"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert set(tracked) <= inside
    assert len(inside) == len(tracked) + 3 + 4  # the scripts of test_tipc and of tools
    assert "mezzo/report/page_base.css" in names


def test_the_installed_command_runs_outside_of_the_repository(mezzo, command: str, tmp_path: Path) -> None:
    where = subprocess.run(
        [command.replace("bin/mezzo", "bin/python"), "-c", "import mezzo; print(mezzo.__file__)"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(ROOT) not in where.stdout
    assert "AMP in float16" in mezzo("check")
    assert "float32" in mezzo("compare", "--device", "cpu", "--steps", "1")


def test_a_recipe_is_trained_by_its_name(mezzo, tmp_path: Path) -> None:
    mezzo("prepare", "mini_supervisely", "test_tipc/data/mini_supervisely")
    small = ("--iters", "2", "--batch-size", "2", "--device", "cpu", "--workers", "0", "--save-dir", "out")
    assert "[TRAIN]" in mezzo("train", "--recipe", "pp_humanseg_lite", *small)
    assert list(tmp_path.glob("out/*"))


def test_a_certification_by_name_runs_in_an_empty_folder(mezzo, tmp_path: Path) -> None:
    name = "pp_humanseg_lite/train_infer_python"
    assert "tools/train.py --config test_tipc/configs/pphumanseg_lite/" in mezzo("tipc", "plan", name)
    assert list(tmp_path.iterdir()) == []
    mezzo("tipc", "prepare", name)
    mezzo("tipc", "run", name)
    assert list(tmp_path.glob("test_tipc/output/**/report.html"))
