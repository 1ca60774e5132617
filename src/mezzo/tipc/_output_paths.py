"""Where a run may write: values of a text become parts of paths, and none may lead out of the output folder."""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import join, normpath

from mezzo.tipc._config import ConfigError
from mezzo.tipc._plan import Plan, directory_of
from mezzo.tipc._profiles import PROFILES

_FOLDER_NAME = re.compile(r"\w(?:[\w+-]|\.(?!\.))*")


def check_folder_names(plan: Plan) -> None:
    """Raise ConfigError if the model or the mode of a plan cannot be the name of a folder.

    The path of a name such as `a/../b` stays inside the output folder, but may be the path of another run.
    """
    for what, name in (("model_name", plan.model), ("mode", plan.mode)):
        if name and not _FOLDER_NAME.fullmatch(name):
            raise ConfigError(
                f"{what} {name!r}: it becomes the name of a folder, so it must have only letters, digits and . _ + -, "
                "begin with a letter, digit or _, and not contain '..'"
            )


def check_output_paths(plan: Plan, root: Path) -> None:
    """Raise ConfigError if a file that a plan writes lies outside the output folder of its profile.

    Links are not followed: `test_tipc/output` may be a link to another disk.
    """
    output = _output_folder(plan, root)
    for what, place in _written_paths(plan):
        path = normpath(join(str(root), place))
        if path != output and not path.startswith(f"{output}/"):
            raise ConfigError(
                f"{what}: {place!r} lies outside {output}, where the logs of a run belong; "
                "check model_name, trainer and the mode for '..' and '/'"
            )


def _output_folder(plan: Plan, root: Path) -> str:
    """Return the part of the profile's folder of logs that does not depend on the text."""
    fixed = re.split(r"\{(?!root\})", PROFILES[plan.profile].log_dir)[0]
    return normpath(join(str(root), fixed.format(root=root)))


def _written_paths(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "folder of logs", plan.log_dir
    yield "status file", plan.status_file
    for index, step in enumerate(plan.steps):
        folder = "" if plan.adapted else next(iter(directory_of(plan.steps, index)), "")
        for place in (step.log, step.copied_to, *step.known_as):
            if place:
                yield step.name, join(folder, place)
        if step.kind == "train" and step.checkpoint:
            yield f"weights of {step.name}", join(folder, step.checkpoint)
