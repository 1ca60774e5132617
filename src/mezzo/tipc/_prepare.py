"""What a certification needs before it runs: data in its place, and on a machine without GPU a smaller recipe."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath
from typing import Any

import yaml

from mezzo.fetch import check_request, download
from mezzo.files import (
    Bounds,
    FileError,
    MiB,
    explained,
    is_regular,
    locked,
    one_line,
    open_regular,
    read_bytes,
    read_json,
    unpack,
    write_file,
    write_text,
)
from mezzo.tipc._config import LITE_CPU, LITE_MODES, parse_config, read_config
from mezzo.tipc._datasets import CLASSIFICATION, DataSet, first_image
from mezzo.tipc._plan import Plan
from mezzo.tipc._planner import make_plan
from mezzo.tipc._recognise import choose_profile
from mezzo.tipc._shell import option_values
from mezzo.tipc._wanted import WantedData, all_recipes, data_of, images_of
from mezzo.tipc._weights import fetch_weights, published
from mezzo.vision.data import IMAGE_SUFFIXES, TRAIN, DataError, has_split
from mezzo.vision.data import LITE_MARKER as GENERATED
from mezzo.vision.data import prepare as generate
from mezzo.vision.recipes import load_recipe

LITE_SIZE = (128, 64)
"""Width and height of its crops."""

TAKEN = ".mezzo-source.json"
"""Says that a folder was made here from a real set, and which."""

LITE_MARK = "# Made by `mezzo tipc prepare`"
"""The first words of a recipe that was made here, and may be made anew."""

WHOLE_TRAIN = "whole_train"
_INFER_MODES = ("whole_infer", "klquant_whole_infer")
_DEFAULTS = ("lite_data", "ILSVRC2012")  # other places where train.py looks by itself
_HOW = "pass --data DIR with the set, or --url URL --sha256 SUM of an archive of it"

_AS_IT_IS = DataSet(name="a set that is not made here", kind="", generator="", forms=((),))

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made, and what to know about it."""

    folders: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a real set comes from: a folder, or an archive behind a URL with its checksum."""

    data: Path | None = None
    url: str | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.data is not None and self.url is not None:
            raise DataError("both --data and --url: give one of them")
        if self.url is None and self.sha256 is not None:
            raise DataError("--sha256 without --url: it is the checksum of an archive that is fetched")
        if self.data is not None and not self.data.is_dir():
            raise DataError(f"--data {self.data}: no such folder")
        if self.url is not None:
            check_request(self.url, self.sha256)

    def __bool__(self) -> bool:
        return self.data is not None or self.url is not None

    def described(self) -> dict[str, str]:
        """Return it as the marker of a folder keeps it."""
        if self.data is not None:
            return {"data": str(self.data.resolve())}
        return {"url": str(self.url), "sha256": str(self.sha256).lower()}


def prepare(
    config_path: Path,
    mode: str,
    *,
    root: Path,
    has_gpu: bool,
    profile: str | None = None,
    data: Path | None = None,
    url: str | None = None,
    sha256: str | None = None,
    report: Report = lambda line: None,
    bounds: Bounds | None = None,
) -> Prepared:
    """Put data, images, weights and recipes in place for a run of a certification; what is there already stays.

    Small generated data serve every mode except those that train on the whole set, which need the real one. Nothing
    is written outside of the repository, whatever a text names.

    Args:
        config_path: The TIPC text; relative to `root`, or absolute.
        mode: Of the run, as lite_train_lite_infer.
        root: The repository: where commands run, and what paths in texts are relative to.
        has_gpu: Without, and in a lite mode, `lite_cpu.yml` is written beside the recipe that the text names.
        profile: Whose commands; None: told by the repository or the text.
        data: Folder of the real set. Its entries are linked, nothing in it is changed.
        url: An archive (tar or zip) of the real set, instead.
        sha256: The archive's checksum; a URL needs it.
        report: Is told what is done, and each notice.
        bounds: How large an archive may be.

    Raises:
        DataError: No command names data, the set is missing or is another one, or would lie outside of the repository.
        FileError: The archive is refused.
        RunError: Something cannot be fetched or written.
        ConfigError: The text or a recipe is wrong.
    """
    source = Source(data=data, url=url, sha256=sha256)
    text = read_config(root / config_path)
    chosen, _ = choose_profile(profile, text, root)
    plan, config = make_plan(text, mode, chosen, str(root)), parse_config(text, chosen)
    made = _Made(report)
    recipes = _lite_recipes(all_recipes(plan)) if not has_gpu and mode in LITE_MODES else {}
    for file in recipes:  # before anything is made
        _check_ours(root, file)
    wanted = data_of(plan, config, root)
    if not wanted:
        raise DataError(
            f"{config_path}: no command of mode {mode} names data (--config FILE.yml or --data-path DIR): "
            "put them in place yourself"
        )
    for each in wanted:
        _place(each, root, source, made, bounds or Bounds()).fill(mode)
        if not each.is_passed:
            _link_default(root, each.folder, made)
    for name in images_of(plan, config):
        _put_image(root, name, wanted, made)
    for file, recipe in recipes.items():
        _write_lite_cpu(root, recipe, file, made)
    if mode in _INFER_MODES:
        _look_for_weights(root, plan, made)
    else:
        fetch_weights(plan, root, made.notice)
    return made.result()


def inside(root: Path, name: str) -> Path:
    """Return a path that may be written; links are followed.

    Raises:
        DataError: It leads out of the repository.
    """
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{name}: lies outside of {root}, where nothing is written; put it in place yourself")
    return path


def _place(wanted: WantedData, root: Path, source: Source, made: _Made, bounds: Bounds) -> _Place:
    """Return the place of data; raises DataError for data that is neither there nor known here."""
    if wanted.dataset is not None:
        return _Place(wanted, wanted.dataset, root, source, made, bounds)
    missing = wanted.lacks(root)
    if source or missing is not None:
        why = f"{missing} is missing, and " if missing is not None else ""
        raise DataError(
            f"{wanted.folder} ({wanted.source}): {why}data of its type are not made here; put them in place"
        )
    return _Place(wanted, _AS_IT_IS, root, source, made, bounds)


def _link_default(root: Path, folder: str, made: _Made) -> None:
    """Let `./data` lead to a folder that no command passes on: it is where `train.py` looks first."""
    default, target = root / "data", root / folder
    if default.resolve() == target.resolve():
        return
    if default.is_symlink() and (default / GENERATED).is_file():  # a link of ours, to another drawn set
        with explained(default):
            default.unlink()
    if os.path.lexists(default):
        if default.is_dir() and has_split(default, TRAIN):
            made.notice(f"./data holds training images: commands without --data-path use them, not {folder}")
        elif normpath(folder) not in _DEFAULTS:
            raise DataError(
                f"./data is in the way of a link to {folder}: move it, or add --data-path={folder} to the text"
            )
        return
    inside(root, folder)
    with explained(default):
        default.symlink_to(os.path.relpath(target, root))
    made.notice(f"./data leads to {folder}: the text's commands have no --data-path, and train.py looks there")


def _put_image(root: Path, name: str, wanted: list[WantedData], made: _Made) -> None:
    """Put an image of a classifier's data where inference looks for one, unless it is there."""
    if (root / name).exists():
        return
    sets = [each for each in wanted if each.dataset is not None and each.dataset.kind == CLASSIFICATION]
    if not sets or Path(name).suffix.lower() not in IMAGE_SUFFIXES:
        made.notice(f"{name}: named for inference, and not there: put it in place")
        return
    target = inside(root, name)
    write_file(target, read_bytes(first_image(root / sets[0].folder)))
    made.files.append(target)
    made.notice(f"{name}: an image of {sets[0].folder}, since there was none")


class _Made:
    """Collects what a preparation makes and says."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.folders: list[Path] = []
        self.files: list[Path] = []
        self._notices: list[str] = []

    def notice(self, line: str) -> None:
        self._notices.append(line)
        self.report(line)

    def result(self) -> Prepared:
        return Prepared(tuple(self.folders), tuple(self.files), tuple(self._notices))


class _Place:
    """The folder of a data set: looks at what is there, and fills it whole or not at all."""

    def __init__(
        self, wanted: WantedData, dataset: DataSet, root: Path, source: Source, made: _Made, bounds: Bounds
    ) -> None:
        self._wanted, self._dataset, self._source, self._made, self._bounds = wanted, dataset, source, made, bounds
        self._root, self._folder, self._shown = root, root / wanted.folder, wanted.folder
        self._unfinished = self._folder.with_name(f".{self._folder.name}.unfinished")

    def fill(self, mode: str) -> None:
        """Make the set unless it is there; one process at a time."""
        if self._is_foreign() and not self._source and self._wanted.lacks(self._root) is None:
            self._made.notice(f"{self._shown}: the set that is there is used")  # its folder may be read-only
            return
        if inside(self._root, self._shown).resolve() == self._root.resolve():
            raise DataError(f"{self._shown} ({self._wanted.source}): is the repository itself; name a folder in it")
        with explained(self._folder.parent):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._folder.with_name(f".{self._folder.name}.lock")):
                shutil.rmtree(self._unfinished, ignore_errors=True)  # of a run that was killed
                try:
                    self._fill(mode)
                finally:
                    shutil.rmtree(self._unfinished, ignore_errors=True)

    def _is_foreign(self) -> bool:
        """Whether something is there that this command did not make."""
        is_empty = self._folder.is_dir() and not any(self._folder.iterdir())
        is_ours = (self._folder / GENERATED).is_file() or _read_marker(self._folder / TAKEN) is not None
        return os.path.lexists(self._folder) and not is_empty and not is_ours

    def _fill(self, mode: str) -> None:
        is_generated = (self._folder / GENERATED).is_file()
        taken = _read_marker(self._folder / TAKEN)
        is_whole = self._folder.is_dir() and self._wanted.lacks(self._root) is None
        if self._is_foreign():
            self._refuse(is_whole)
        if self._source:
            if taken != self._source.described() or not is_whole:
                self._take()
        elif mode.startswith(WHOLE_TRAIN) and (is_generated or not is_whole):
            there = "generated data" if is_generated else "no such set"
            raise DataError(
                f"{mode} needs the whole of {self._dataset.name}, in {self._shown} there is {there}; {_HOW}"
            )
        elif not is_whole:
            self._generate()
            is_generated = True
        if self._source:
            self._made.notice(f"{self._shown}: {self._dataset.name} of {self._source.data or self._source.url}")
        elif is_generated:
            self._made.notice(
                f"{self._shown}: generated data in the form of {self._dataset.name}: good to see that everything runs, "
                f"not how well it learns; for the real set {_HOW}"
            )
        else:
            self._made.notice(f"{self._shown}: the set that is there is used")

    def _refuse(self, is_whole: bool) -> None:
        """Raise if what is there cannot be used, or would have to go."""
        if not is_whole:
            missing = self._wanted.lacks(self._root)
            raise DataError(
                f"{self._shown}: was not made by this command, and is no {self._dataset.name}: no {missing}; move it away"
            )
        if self._source and not (self._source.data and self._source.data.resolve() == self._folder.resolve()):
            raise DataError(f"{self._shown}: holds a set that was not made by this command; move it away")

    def _generate(self) -> None:
        self._made.report(f"{self._shown}: drawing data in the form of {self._dataset.name}")
        fresh = generate(self._dataset.generator, self._unfinished / "set", **self._dataset.options)
        if (missing := self._wanted.lacks(self._root, fresh)) is not None:
            raise DataError(
                f"{missing}: named by {self._wanted.source}, not there, and not a file of the data that can be drawn; "
                "put the set in place yourself"
            )
        self._put(fresh)

    def _take(self) -> None:
        """Put the real set in place: links to its entries, or what its archive holds."""
        data = self._source.data
        if data is not None and data.resolve() == self._folder.resolve():
            return  # it lies where it belongs
        fresh = self._linked(data) if data is not None else self._fetched()
        self._dataset.complete(fresh)
        write_text(fresh / TAKEN, json.dumps(self._source.described(), indent=1) + "\n")
        self._put(fresh)

    def _linked(self, data: Path) -> Path:
        if missing := self._wanted.lacks(self._root, data):
            raise DataError(f"--data {data}: does not look like {self._dataset.name}: no {missing}; {self._needs()}")
        fresh = self._unfinished / "set"
        fresh.mkdir(parents=True)
        for entry in data.resolve().iterdir():
            if not entry.name.startswith("."):  # markers of other commands are not part of the set
                (fresh / entry.name).symlink_to(entry)
        return fresh

    def _fetched(self) -> Path:
        url, archive = str(self._source.url), self._unfinished / "archive"
        fresh = self._unfinished / "unpacked"
        fresh.mkdir(parents=True)
        self._made.report(f"{self._shown}: fetching {url}")
        download(url, str(self._source.sha256), archive, self._bounds)
        self._made.report(f"{self._shown}: the checksum is right, unpacking")
        unpack(archive, fresh, self._bounds)
        inner = [fresh, *sorted(path for depth in ("*/", "*/*/") for path in fresh.glob(depth))]
        found = next((path for path in inner if self._wanted.lacks(self._root, path) is None), None)
        if found is None:
            missing = self._wanted.lacks(self._root, fresh)
            raise DataError(f"{url}: does not look like {self._dataset.name}: no {missing} in it; {self._needs()}")
        return found

    def _needs(self) -> str:
        needed = ", ".join(self._wanted.lists) or self._dataset.needs()
        return f"{self._wanted.source} needs {needed}"

    def _put(self, fresh: Path) -> None:
        """Rename a finished set to its place; what was there is one of ours, or an empty folder."""
        if os.path.lexists(self._folder):
            self._folder.rename(self._unfinished / "old")
        fresh.rename(self._folder)
        self._made.folders.append(self._folder)


def _lite_recipes(recipes: list[str]) -> dict[Path, Path]:
    """Return a recipe with small crops for each documented one; the second of a folder has its own name."""
    files: dict[Path, Path] = {}
    for name in map(Path, recipes):
        file = name.with_name(LITE_CPU)
        if file in files:
            file = name.with_name(f"{Path(LITE_CPU).stem}_{name.stem}.yml")
        files[file] = name
    return files


def _check_ours(root: Path, file: Path) -> None:
    """Raise DataError unless a file may be written: inside of the root, and not there or made by this command."""
    path = inside(root, str(file))
    if os.path.lexists(path) and not (is_regular(path) and _starts_with(path, LITE_MARK)):
        raise DataError(
            f"{file}: was not made by this command, and is not overwritten (its first line does not begin with "
            f"'{LITE_MARK}'); move it away"
        )


def _starts_with(path: Path, words: str) -> bool:
    with open_regular(path, raising=DataError) as file:
        return file.read(len(words)) == words.encode()


def _write_lite_cpu(root: Path, name: Path, file: Path, made: _Made) -> None:
    resolved = load_recipe(root / name).resolved
    smaller: dict[str, Any] = {"_base_": name.name}
    for split in ("train_dataset", "val_dataset"):
        transforms = resolved.get(split, {}).get("transforms", [])
        changed = [_with_lite_size(transform) for transform in transforms]
        if changed != transforms:
            smaller[split] = {"transforms": changed}
    width, height = LITE_SIZE
    head = f"{LITE_MARK} on a machine without GPU: {one_line(name.name)} with images of {width}x{height}.\n"
    body = yaml.safe_dump(smaller, sort_keys=False, default_flow_style=None)
    _check_ours(root, file)
    write_text(root / file, head + body)
    made.files.append(root / file)
    made.notice(
        f"no GPU here: {file} builds on {name.name} with crops of {width}x{height}, so that a run takes minutes; "
        "speed and quality are not those of the documented recipe"
    )


def _with_lite_size(transform: dict[str, Any]) -> dict[str, Any]:
    return {key: list(LITE_SIZE) if key in ("crop_size", "target_size") else transform[key] for key in transform}


def _look_for_weights(root: Path, plan: Plan, made: _Made) -> None:
    """Put the weights that a run without training needs in place: published ones, if they can be fetched."""
    exports = [step for step in plan.steps if step.kind == "export" and not step.needs]
    for name in dict.fromkeys(v for step in exports for v in option_values(step.bare, "--model-path", "--pretrained")):
        if (root / name).exists():
            continue
        if not published(plan.model, inside(root, name), made.notice):
            made.notice(
                f"{name}: no such weights; this mode does not train, so put published weights there, "
                "or best_model/model.pdparams of your own training"
            )


def _read_marker(path: Path) -> Any:
    """Return what a marker says; None if there is none that can be read: then the folder is not ours."""
    try:
        return read_json(path, limit=MiB)
    except FileError:
        return None
