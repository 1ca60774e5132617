"""What a certification needs before it runs: data in its place, and on a machine without GPU a smaller recipe."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mezzo._files import explained, write_file, write_text
from mezzo.config import load_recipe
from mezzo.data import DataError
from mezzo.data import prepare as generate
from mezzo.data._lite import MARKER as GENERATED
from mezzo.fetch import Bounds, check_request, download, unpack
from mezzo.tipc._config import LITE_CPU
from mezzo.tipc._datasets import DataSet, first_image
from mezzo.tipc._wanted import WantedData, data_of, image_of, images_of, recipes_of
from mezzo.tipc._weights import fetch_weights, published

LITE_SIZE = (128, 64)
"""Width and height of its crops."""

TAKEN = ".mezzo-source.json"
"""Says that a folder was made here from a real set, and which."""

WHOLE_TRAIN, LITE_TRAIN = "whole_train", "lite_"
_INFER_MODES = ("whole_infer", "klquant_whole_infer")
_WEIGHTS = re.compile(r"^(?:infer_model|train_model):(.+)$", re.MULTILINE)
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
    model_name: str,
    has_gpu: bool,
    data: Path | None = None,
    url: str | None = None,
    sha256: str | None = None,
    report: Report = lambda line: None,
    bounds: Bounds | None = None,
) -> Prepared:
    """Put data and recipes in place for a run of a certification; what is there already stays.

    Small generated data serve every mode but those that train on the whole set, which need the real one.

    Args:
        config_path: The TIPC text; relative to `root`, or absolute.
        mode: Of the run, as lite_train_lite_infer.
        root: The repository: where commands run, and what paths in texts are relative to.
        model_name: As the text says; published weights are found by it.
        has_gpu: Without, and in a lite mode, `lite_cpu.yml` is written beside the recipe that the text names.
        data: Folder of the real set. Its entries are linked, nothing in it is changed.
        url: An archive (tar or zip) of the real set, instead.
        sha256: The archive's checksum; a URL needs it.
        report: Is told what is done, and each notice.
        bounds: How large an archive may be.

    Raises:
        DataError: No command names data, the set is missing or is another one.
        FetchError: The archive is refused.
        RunError: Something cannot be fetched or written.
        ConfigError: The recipe that `lite_cpu.yml` builds on is wrong.
    """
    source = Source(data=data, url=url, sha256=sha256)
    text = _read(root / config_path)
    made = _Made(report)
    wanted = data_of(text, root)
    if not wanted:
        raise DataError(
            f"{config_path}: no command in it names data (--config FILE.yml or --data-path DIR): nothing to prepare"
        )
    for each in wanted:
        _place(each, root, source, made, bounds or Bounds()).fill(mode)
        if not each.is_passed:
            _link_default(root, each.folder, made)
    if (image := image_of(text)) is not None:
        _put_image(root, image, wanted[0].folder, made)
    for name in images_of(text):
        if not (root / name).exists():
            made.notice(f"{name}: named for inference, and not there: put it in place")
    recipes = recipes_of(text)
    if not has_gpu and mode.startswith(LITE_TRAIN):
        for name in recipes:
            _write_lite_cpu(root, Path(name), made)
    if mode in _INFER_MODES:
        _look_for_weights(root, text, model_name, made)
    else:
        fetch_weights(recipes, root, lite=mode.startswith(LITE_TRAIN), say=made.notice)
    return made.result()


def _place(wanted: WantedData, root: Path, source: Source, made: _Made, bounds: Bounds) -> _Place:
    """Return the place of data; raises DataError for data that is neither there nor known here."""
    if wanted.dataset is not None:
        return _Place(wanted, wanted.dataset, root, source, made, bounds)
    if source or (missing := wanted.lacks(root)) is not None:
        missing = "" if source else f"{missing} is missing, and "
        raise DataError(
            f"{wanted.folder} ({wanted.source}): {missing}data of its type are not made here; put them in place"
        )
    return _Place(wanted, _AS_IT_IS, root, source, made, bounds)


def _link_default(root: Path, folder: str, made: _Made) -> None:
    """Let `./data` lead to a folder that no command passes on: it is where `train.py` looks first."""
    default, target = root / "data", root / folder
    if os.path.lexists(default):
        if default.resolve() != target.resolve():
            made.notice(f"./data is there already: commands without --data-path may take it instead of {folder}")
        return
    with explained(default):
        default.symlink_to(os.path.relpath(target, root))
    made.notice(f"./data leads to {folder}: the text's commands have no --data-path, and train.py looks there")


def _put_image(root: Path, image: str, folder: str, made: _Made) -> None:
    """Put an image of the data where inference looks for its image, unless there is one."""
    target = root / image
    if target.exists():
        return
    write_file(target, first_image(root / folder).read_bytes())
    made.files.append(target)
    made.notice(f"{image}: an image of {folder}, since there was none")


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
        with explained(self._folder.parent):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._folder.with_name(f".{self._folder.name}.lock")):
                shutil.rmtree(self._unfinished, ignore_errors=True)  # of a run that was killed
                try:
                    self._fill(mode)
                finally:
                    shutil.rmtree(self._unfinished, ignore_errors=True)

    def _fill(self, mode: str) -> None:
        is_generated = (self._folder / GENERATED).is_file()
        taken = _read_marker(self._folder / TAKEN)
        is_whole = self._folder.is_dir() and self._wanted.lacks(self._root) is None
        self._refuse_foreign(is_generated or taken is not None, is_whole)
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

    def _refuse_foreign(self, is_ours: bool, is_whole: bool) -> None:
        """Raise if the folder holds what was not made here and cannot be used, or would have to go."""
        if is_ours or not os.path.lexists(self._folder):
            return
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            return
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


def _write_lite_cpu(root: Path, name: Path, made: _Made) -> None:
    """Write the recipe that builds on a documented one with small crops."""
    resolved = load_recipe(root / name).resolved
    smaller: dict[str, Any] = {"_base_": name.name}
    for split in ("train_dataset", "val_dataset"):
        transforms = resolved.get(split, {}).get("transforms", [])
        changed = [_with_lite_size(transform) for transform in transforms]
        if changed != transforms:
            smaller[split] = {"transforms": changed}
    file = name.with_name(LITE_CPU)
    width, height = LITE_SIZE
    head = f"# Made by `mezzo tipc prepare` on a machine without GPU: {name.name} with images of {width}x{height}.\n"
    body = yaml.safe_dump(smaller, sort_keys=False, default_flow_style=None)
    write_text(root / file, head + body)
    made.files.append(root / file)
    made.notice(
        f"no GPU here: {file} builds on {name.name} with crops of {width}x{height}, so that a run takes minutes; "
        "speed and quality are not those of the documented recipe"
    )


def _with_lite_size(transform: dict[str, Any]) -> dict[str, Any]:
    return {key: list(LITE_SIZE) if key in ("crop_size", "target_size") else transform[key] for key in transform}


def _look_for_weights(root: Path, text: str, model_name: str, made: _Made) -> None:
    """Put the weights that a run without training needs in place: published ones, if they can be fetched."""
    for value in _WEIGHTS.findall(text):
        for name in value.strip().split("|"):
            if name != "null" and not (root / name).exists() and not published(model_name, root / name, made.notice):
                made.notice(
                    f"{name}: no such weights; this mode does not train, so put published weights there, "
                    "or best_model/model.pdparams of your own training"
                )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {getattr(error, 'strerror', None) or error}") from error


def _read_marker(path: Path) -> Any:
    """Return what a marker says, None if there is none; one that cannot be read says nothing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds a lock, and hold it; the system lets it go when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
