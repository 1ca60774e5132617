"""Where a run may write: names from a text become parts of paths, and none of them may lead out of the output folder."""

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import join, normpath

from mezzo.tipc._config import ConfigError
from mezzo.tipc._mend import folder_of
from mezzo.tipc._plan import Plan
from mezzo.tipc._profiles import PROFILES

_NAME = re.compile(r"\w(?:[\w+-]|\.(?!\.))*")


def check_names(plan: Plan) -> None:
    """Raise ConfigError if the model or the mode of a plan cannot be the name of a folder.

    The literal path of such a name may stay inside of the output folder, as `a/../b` does, and yet be that of another run.
    """
    for what, name in (("model_name", plan.model), ("mode", plan.mode)):
        if name and not _NAME.fullmatch(name):
            raise ConfigError(
                f"{what} {name!r}: it names a folder of logs, so it must be letters, digits and . _ + - only, "
                "begin with a letter, digit or _, and have no '..'"
            )


def check_places(plan: Plan, root: Path) -> None:
    """Raise ConfigError if a file that a plan writes lies outside of the output folder of its profile.

    Links are not followed: `test_tipc/output` may lead to another disk.
    """
    output = _output(plan, root)
    for what, place in _written(plan):
        path = normpath(join(str(root), place))
        if path != output and not path.startswith(f"{output}/"):
            raise ConfigError(
                f"{what}: {place!r} lies outside of {output}, where the logs of a run belong; "
                "check model_name, trainer and the mode for '..' and '/'"
            )


def _output(plan: Plan, root: Path) -> str:
    """Return the folder that the profile's folder of logs lies in, whatever a text says."""
    fixed = re.split(r"\{(?!root\})", PROFILES[plan.profile].log_dir)[0]
    return normpath(join(str(root), fixed.format(root=root)))


def _written(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "folder of logs", plan.log_dir
    yield "status file", plan.status_file
    for index, step in enumerate(plan.steps):
        folder = "" if plan.mended else next(iter(folder_of(plan.steps, index)), "")
        for place in (step.log, step.copied_to, *step.known_as):
            if place:
                yield step.name, join("" if plan.mended else folder, place)
        if step.kind == "train" and step.checkpoint:
            yield f"weights of {step.name}", join(folder, step.checkpoint)
