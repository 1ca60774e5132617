"""Prepare a certification: put data, images and weights in place, and write smaller recipes for a machine without GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath
from typing import Any

import yaml

from mezzo.files import (
    Bounds,
    is_regular,
    one_line,
    open_regular,
    read_bytes,
    report_write_errors,
    write_file,
    write_text,
)
from mezzo.tipc._config import LITE_CPU, LITE_MODES, parse_config, read_config
from mezzo.tipc._data_folder import DataSource, PreparationLog, fill_data_folder, path_inside
from mezzo.tipc._datasets import CLASSIFICATION, first_image
from mezzo.tipc._inputs import DataInput, find_data, find_images, find_recipes
from mezzo.tipc._plan import Plan
from mezzo.tipc._planner import make_plan
from mezzo.tipc._recognise import choose_profile
from mezzo.tipc._shell import option_values
from mezzo.tipc._weights import fetch_weights, place_published_weights
from mezzo.vision.data import IMAGE_SUFFIXES, TRAIN, DataError, has_split
from mezzo.vision.lite import LITE_MARKER as GENERATED
from mezzo.vision.recipes import load_recipe

LITE_SIZE = (128, 64)
"""Width and height of the crops in `lite_cpu.yml`."""

LITE_MARK = "# Made by `mezzo tipc prepare`"
"""The first words of a recipe that `prepare` has made, and may overwrite."""

_INFER_MODES = ("whole_infer", "klquant_whole_infer")
_DEFAULTS = ("lite_data", "ILSVRC2012")  # other folders that train.py looks in by itself


@dataclass(frozen=True, slots=True)
class PreparedFiles:
    """What `prepare` has made, and its notices."""

    folders: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    notices: tuple[str, ...] = ()


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
    report: Callable[[str], None] = lambda line: None,
    bounds: Bounds | None = None,
) -> PreparedFiles:
    """Put data, images, weights and recipes in place for a certification; existing files are kept.

    Small generated data are enough for all modes except those that train on the whole set. Nothing is written outside
    the repository, whatever paths a text names.

    Args:
        config_path: The TIPC text; relative to `root`, or absolute.
        mode: The mode of the run, such as lite_train_lite_infer.
        root: The repository: commands run there, and paths in texts are relative to it.
        has_gpu: Without a GPU, lite modes get `lite_cpu.yml` beside the recipe that the text names.
        profile: The name of a profile; None: by the repository or the text.
        data: A folder with the real set. Its entries are linked and not changed.
        url: An archive (tar or zip) of the real set.
        sha256: The archive's checksum; a URL needs it.
        report: Called with a line for each action and each notice.
        bounds: How large an archive may be.

    Raises:
        DataError: No command names data; or the set is missing, is another one or would lie outside the repository.
        FileError: The archive is refused.
        RunError: Something cannot be fetched or written.
        ConfigError: The text is wrong.
        RecipeError: A recipe is wrong.
    """
    source = DataSource(data=data, url=url, sha256=sha256)
    text = read_config(root / config_path)
    chosen, _ = choose_profile(profile, text, root)
    plan, config = make_plan(text, mode, chosen, str(root)), parse_config(text, chosen)
    log = PreparationLog(report)
    recipes = _lite_recipes(find_recipes(plan)) if not has_gpu and mode in LITE_MODES else {}
    for file in recipes:  # before anything is made
        _check_overwritable(root, file)
    inputs = find_data(plan, config, root)
    if not inputs:
        raise DataError(
            f"{config_path}: no command of mode {mode} names data (--config FILE.yml or --data-path DIR): "
            "put them in place yourself"
        )
    for each in inputs:
        fill_data_folder(each, mode, root, source, log, bounds or Bounds())
        if not each.is_passed:
            _link_default(root, each.folder, log)
    for name in find_images(plan, config):
        _put_image(root, name, inputs, log)
    for file, recipe in recipes.items():
        _write_lite_recipe(root, recipe, file, log)
    if mode in _INFER_MODES:
        _place_weights(root, plan, log)
    else:
        fetch_weights(plan, root, log.notice)
    return PreparedFiles(tuple(log.folders), tuple(log.files), tuple(log.notices))


def _link_default(root: Path, folder: str, log: PreparationLog) -> None:
    """Link `./data`, where `train.py` looks first, to a folder that no command names."""
    default, target = root / "data", root / folder
    if default.resolve() == target.resolve():
        return
    if default.is_symlink() and (default / GENERATED).is_file():  # a link that `prepare` made to another generated set
        with report_write_errors(default):
            default.unlink()
    if os.path.lexists(default):
        if default.is_dir() and has_split(default, TRAIN):
            log.notice(f"./data holds training images: commands without --data-path use them, not {folder}")
        elif normpath(folder) not in _DEFAULTS:
            raise DataError(
                f"./data is in the way of a link to {folder}: move it, or add --data-path={folder} to the text"
            )
        return
    path_inside(root, folder)
    with report_write_errors(default):
        default.symlink_to(os.path.relpath(target, root))
    log.notice(f"./data leads to {folder}: the text's commands have no --data-path, and train.py looks there")


def _put_image(root: Path, name: str, inputs: list[DataInput], log: PreparationLog) -> None:
    """Copy an image of a classifier's data to the path that inference reads, unless it exists."""
    if (root / name).exists():
        return
    sets = [each for each in inputs if each.dataset is not None and each.dataset.kind == CLASSIFICATION]
    if not sets or Path(name).suffix.lower() not in IMAGE_SUFFIXES:
        log.notice(f"{name}: named for inference, and not there: put it in place")
        return
    target = path_inside(root, name)
    write_file(target, read_bytes(first_image(root / sets[0].folder)))
    log.files.append(target)
    log.notice(f"{name}: an image of {sets[0].folder}, since there was none")


def _lite_recipes(recipes: list[str]) -> dict[Path, Path]:
    """Return the path of a smaller recipe for each recipe; the second one of a folder has its own name."""
    files: dict[Path, Path] = {}
    for name in map(Path, recipes):
        file = name.with_name(LITE_CPU)
        if file in files:
            file = name.with_name(f"{Path(LITE_CPU).stem}_{name.stem}.yml")
        files[file] = name
    return files


def _check_overwritable(root: Path, file: Path) -> None:
    """Raise DataError unless a file is inside the root, and is missing or was made by this command."""
    path = path_inside(root, str(file))
    if os.path.lexists(path) and not (is_regular(path) and _starts_with(path, LITE_MARK)):
        raise DataError(
            f"{file}: was not made by this command, and is not overwritten (its first line does not begin with "
            f"'{LITE_MARK}'); move it away"
        )


def _starts_with(path: Path, words: str) -> bool:
    with open_regular(path, raising=DataError) as file:
        return file.read(len(words)) == words.encode()


def _write_lite_recipe(root: Path, name: Path, file: Path, log: PreparationLog) -> None:
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
    _check_overwritable(root, file)
    write_text(root / file, head + body)
    log.files.append(root / file)
    log.notice(
        f"no GPU here: {file} builds on {name.name} with crops of {width}x{height}, so that a run takes minutes; "
        "speed and quality are not those of the documented recipe"
    )


def _with_lite_size(transform: dict[str, Any]) -> dict[str, Any]:
    return {key: list(LITE_SIZE) if key in ("crop_size", "target_size") else transform[key] for key in transform}


def _place_weights(root: Path, plan: Plan, log: PreparationLog) -> None:
    """Put published weights in place for a run without training, if they can be fetched."""
    exports = [step for step in plan.steps if step.kind == "export" and not step.needs]
    for name in dict.fromkeys(v for step in exports for v in option_values(step.bare, "--model-path", "--pretrained")):
        if (root / name).exists():
            continue
        if not place_published_weights(plan.model, path_inside(root, name), log.notice):
            log.notice(
                f"{name}: no such weights; this mode does not train, so put published weights there, "
                "or best_model/model.pdparams of your own training"
            )
