"""The release: version, changelog, citation, extras, container and conda recipe agree with pyproject.toml."""

import datetime
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION: str = PROJECT["version"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def package_name(requirement: str) -> str:
    """Return the package of a requirement, without extras, versions and markers: `a[b]>=1; c` is `a`."""
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return match[0]


def version_limits(requirements: list[str]) -> dict[str, str]:
    """Return the versions that each requirement allows, by package in lower case."""
    return {package_name(each).lower(): each[len(package_name(each)) :].strip() for each in requirements}


# Version


def releases() -> list[tuple[str, str]]:
    """Return the versions of the changelog with their dates, newest first."""
    return re.findall(r"^## (\d+\.\d+\.\d+) - (\S+)$", read("CHANGELOG.md"), flags=re.MULTILINE)


def test_the_newest_release_of_the_changelog_is_the_version_and_has_a_date() -> None:
    headings = re.findall(r"^## (.+)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert headings[0] == "Unreleased", "a heading for the next lines"
    assert len(releases()) == len(headings) - 1, "every other heading is a version and a date"
    assert releases()[0][0] == VERSION
    for _, date in releases():
        datetime.date.fromisoformat(date)


def test_the_changelog_has_the_sections_that_readers_know() -> None:
    sections = re.findall(r"^### (.+)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_is_of_this_version_and_its_date() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert (str(citation["version"]), str(citation["date-released"])) == releases()[0]
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    # What the format demands
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()


def test_nothing_else_of_the_sources_holds_the_version() -> None:
    holders = [path for path in (ROOT / "src").rglob("*.py") if f'"{VERSION}"' in path.read_text(encoding="utf-8")]
    assert holders == []


def test_all_addresses_of_the_project_are_in_one_place() -> None:
    home = PROJECT["urls"]["Homepage"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values())


# Extras


def rows_of_extras() -> dict[str, set[str]]:
    """Return the extras of docs/install.md with their packages."""
    table = read("docs/install.md").partition("<!-- table: extras -->\n")[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    rows = {extra.strip("`"): {name.strip() for name in packages.split(",")} for extra, packages, _ in cells}
    assert len(rows) == len(cells), "two rows of one extra"
    assert all(purpose for _, _, purpose in cells)
    return rows


def test_the_table_of_extras_is_that_of_the_project_with_every_package() -> None:
    declared = {
        extra: {package_name(each) for each in requirements}
        for extra, requirements in PROJECT["optional-dependencies"].items()
    }
    assert rows_of_extras() == declared


def test_the_library_needs_what_the_page_says() -> None:
    sentence = re.search(r"The library itself needs (.+?)\.", read("docs/install.md").replace("\n", " "))
    assert sentence
    named = {name.lower() for name in re.split(r", | and ", sentence[1])}
    assert named == set(version_limits(PROJECT["dependencies"]))


# Conda


def test_the_conda_recipe_has_the_version_and_the_dependencies_of_the_project() -> None:
    recipe = yaml.safe_load(read("conda/recipe/recipe.yaml"))
    assert recipe["context"]["version"] == VERSION
    run = version_limits(recipe["requirements"]["run"])
    wanted = version_limits(PROJECT["dependencies"])
    wanted["pytorch"] = wanted.pop("torch")
    assert run == {**wanted, "python": PROJECT["requires-python"]}
    (entry,) = recipe["build"]["python"]["entry_points"]
    assert entry == "mezzo = " + PROJECT["scripts"]["mezzo"]
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["homepage"] == PROJECT["urls"]["Homepage"]


# Container


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, each in one line."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", read("Dockerfile"), flags=re.MULTILINE))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def test_images_of_the_container_have_a_version() -> None:
    own, images = set(), []
    for word, rest in instructions():
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            own.add(name)
            images += [image] if image not in own and not image.startswith("base-${VARIANT}") else []
    assert {"base-cuda", "base-cpu"} <= own, "VARIANT is cuda or cpu"
    assert images
    assert all(re.fullmatch(r"[\w/]+:[\w.-]*\d[\w.-]*", image) for image in images), images


def test_the_container_runs_mezzo_as_a_user_without_root_rights() -> None:
    words = dict(instructions())  # the last of each
    assert int(words["USER"].partition(":")[0]) >= 1000
    assert (words["ENTRYPOINT"], words["CMD"]) == ('["mezzo"]', '["check"]')


def test_every_installation_of_the_container_is_pinned_and_leaves_no_cache() -> None:
    runs = [rest for word, rest in instructions() if word == "RUN"]
    installs = [run for run in runs if "pip install" in run]
    assert len(installs) == 2
    assert all("--constraint /tmp/constraints.txt" in run and "--no-cache-dir" in run for run in installs)
    assert all("rm -rf /var/lib/apt/lists" in run for run in runs if "apt-get install" in run)
    pinned = version_limits([line for line in read("constraints.txt").splitlines() if not line.startswith("#")])
    extras = re.search(r"mezzo\[([\w,]+)\]", installs[1])
    assert extras
    wanted = [*PROJECT["dependencies"], "hatchling"]
    wanted += [each for extra in extras[1].split(",") for each in PROJECT["optional-dependencies"][extra]]
    assert {package_name(each).lower() for each in wanted} <= pinned.keys()
    assert all(limit.startswith("==") for limit in pinned.values())


def test_the_container_gets_what_the_wheel_is_made_of_and_no_more() -> None:
    patterns = [line for line in read(".dockerignore").splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*"
    allowed = {line.removeprefix("!") for line in patterns if line.startswith("!")}
    settings = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    parts = {path.partition("/")[0] for path in settings["only-include"]}
    assert allowed == parts | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"}


# The source distribution


@pytest.fixture(scope="module")
def check_sdist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sdist", ROOT / "tools" / "check_sdist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_that_do_not_belong_in_a_source_distribution_are_named(check_sdist: ModuleType, tmp_path: Path) -> None:
    tracked = {"src/a.py", "benchmarks/b.md", "src/large.bin"}
    for name in (*tracked, ".venv/c.py", "PKG-INFO"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(600_000 if "large" in name else 1))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        for name in sorted((*tracked, ".venv/c.py", "PKG-INFO")):
            archive.add(tmp_path / name, f"mezzo-1/{name}")
    assert check_sdist.faults(tmp_path / "a.tar.gz", tracked) == [
        ".venv/c.py: git does not track it",
        "benchmarks/b.md: measurements stay in the repository",
        "src/large.bin: 600000 bytes, more than 524288",
    ]


def test_every_part_of_the_source_distribution_is_there() -> None:
    targets = tomllib.loads(read("pyproject.toml"))["tool"]["hatch"]["build"]["targets"]
    listed = targets["sdist"]["only-include"]
    assert [name for name in listed if not (ROOT / name).exists()] == []
    assert not {"benchmarks", "tests"} & set(listed)
    roots = {path.partition("/")[0] for path in targets["wheel"]["only-include"]}
    assert roots <= set(listed), "the wheel is built from the source distribution"


@pytest.mark.slow
def test_the_source_distribution_holds_tracked_files_only(check_sdist: ModuleType, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    if subprocess.run([*pip, "--target", str(tools), "build", "hatchling"], capture_output=True).returncode:
        pytest.skip("build and hatchling cannot be fetched here")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(tools)})
    (archive,) = tmp_path.glob("*.tar.gz")
    check_sdist.main(str(archive))
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"src/mezzo/__init__.py", "LICENSE", "CHANGELOG.md", "CITATION.cff", "PKG-INFO"} <= names
    assert not [name for name in names - {".gitignore"} if name.startswith(("tests/", "benchmarks/", "site/", "."))]
