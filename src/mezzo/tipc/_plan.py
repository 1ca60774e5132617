"""What a plan is: steps in the order of a repository's script, as data that prints as JSON and reads back."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from mezzo.files import parse_json, short_repr

CVD = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Step:
    """One command of a plan."""

    name: str
    kind: str  # train, eval, export, infer, quantise, extract, linear, shell
    text: str  # as the script composes it, with all its blanks and redirections
    bare: str = ""  # without the redirection at its end
    env: Mapping[str, str | None] = field(default_factory=dict)  # what the script sets; None: what it removes
    enter: tuple[str, ...] = ()  # changes of directory before it, one after the other, from where the last step was
    log: str = ""  # the file that holds its output, empty where it goes to the terminal only
    known_as: tuple[str, ...] = ()  # where the documents look for that file
    output: str = "inherited"  # inherited | tee | file | text (the redirection is part of the text)
    status: str | None = None  # what follows 'Run successfully with command'; None: no line
    judged_by: str = ""  # pattern of the file whose copying the script takes for success; empty: the exit status
    copied_to: str = ""  # where it is copied to
    time_limit: float | None = None
    checkpoint: str = ""  # after training: the weights that later steps expect
    fallback: str = ""  # and what they take where that file is missing
    pattern: str = ""  # a path in the text whose wildcards the script expands when it composes the command
    needs: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()  # what was changed, and why
    skip: str = ""  # why it is not to be run

    def reworded(self, old: str, new: str, once: bool = False) -> "Step":
        """Return the step with `old` replaced in its command and in its status line."""
        count = 1 if once else -1
        text = self.text.replace(old, new, count)
        status = self.status
        if status is not None:
            status = status.replace(self.text, text, 1) if once else status.replace(old, new)
        return replace(self, text=text, bare=self.bare.replace(old, new, count), status=status)

    def longer(self, words: str) -> "Step":
        """Return the step with words added to its command, before a redirection."""
        bare = self.bare.rstrip() + words
        return replace(self.reworded(self.bare, bare, once=True), bare=bare)


@dataclass(frozen=True)
class Plan:
    """The steps of one configuration in one mode."""

    model: str
    mode: str
    profile: str
    log_dir: str
    status_file: str
    banner: bool
    steps: tuple[Step, ...]
    left_out: tuple[str, ...] = ()  # combinations that the matrix skips, with the rule
    lacks: tuple[str, ...] = ()  # what the commands need and is not here
    failure: str = ""  # the script ends here with status 1 and this message
    mended: bool = False  # every step stands for itself: its folder from the root, its whole environment

    def as_json(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan back; raises ValueError that names what is wrong."""
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {str(error).removeprefix('not JSON: ')}") from None
        plan: Plan = _made(Plan, values, ("left_out", "lacks"), "plan")
        steps = values["steps"]
        if not isinstance(steps, list):
            raise ValueError("'steps' is no list")
        return replace(
            plan, steps=tuple(_made(Step, step, ("enter", "known_as", "needs", "notices"), "step") for step in steps)
        )


def _made(kind: Any, values: Any, tuples: tuple[str, ...], what: str) -> Any:
    names = {each.name for each in fields(kind)}
    if not isinstance(values, dict) or not set(values) <= names:
        unknown = sorted(set(values) - names) if isinstance(values, dict) else [type(values).__name__]
        raise ValueError(f"a {what} has no {', '.join(unknown)[:200]}")
    for each in fields(kind):
        value = values.get(each.name, "")
        if each.type is str and not isinstance(value, str):
            raise ValueError(f"'{each.name}' is {short_repr(value)}, not a text")
    for name in (name for name in tuples if name in values):
        if not isinstance(values[name], list) or not all(isinstance(item, str) for item in values[name]):
            raise ValueError(f"'{name}' is not a list of texts")
    kept = {name: tuple(value) if name in tuples else value for name, value in values.items()}
    try:
        return kind(**kept)
    except TypeError as error:
        raise ValueError(f"incomplete {what}: {error}") from None
