"""A plan: the steps of a repository's script as data, which prints as JSON and reads back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from mezzo.files import parse_json
from mezzo.tipc._json_fields import make_from_fields
from mezzo.tipc._shell import words
from mezzo.tipc._text import echoed, evaluated

CVD = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class PlanStep:
    """One command of a plan."""

    name: str
    kind: str  # train, eval, export, infer, quantise, extract, linear, shell
    text: str  # as the script composes it, with all its blanks and redirections
    bare: str = ""  # without the redirection at its end
    env: Mapping[str, str | None] = field(default_factory=dict)  # variables that it sets; None: that it removes
    enter: tuple[str, ...] = ()  # changes of directory before it, from the directory of the step before
    log: str = ""  # the file with its output; empty: the output goes to the terminal only
    known_as: tuple[str, ...] = ()  # other paths where the documents look for that file
    output: str = "inherited"  # inherited | tee | file | text (the redirection is part of the text)
    status: str | None = None  # what follows 'Run successfully with command'; None: no line
    judged_by: str = ""  # pattern of the file whose copying the script takes for success; empty: the exit status
    copied_to: str = ""  # where it is copied to
    time_limit: float | None = None
    checkpoint: str = ""  # the weights that later steps expect after a training
    fallback: str = ""  # the weights that they take if that file is missing
    pattern: str = ""  # a path in the text whose wildcards the script expands when it composes the command
    needs: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()  # what was changed, and why
    skip: str = ""  # why it is not run

    @property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments, as the shell would pass them."""
        return words(evaluated(self.bare))

    def status_line(self, passed: bool) -> str:
        """Return the line that the scripts write after the step, with their colour."""
        word = "successfully" if passed else "failed"
        return f"\x1b[33m Run {word} with command{echoed(self.status or '')}\x1b[0m"

    def with_text(self, old: str, new: str, once: bool = False) -> "PlanStep":
        """Return the step with `old` replaced in its command and in its status line."""
        count = 1 if once else -1
        text = self.text.replace(old, new, count)
        status = self.status
        if status is not None:
            status = status.replace(self.text, text, 1) if once else status.replace(old, new)
        return replace(self, text=text, bare=self.bare.replace(old, new, count), status=status)

    def with_arguments(self, arguments: str) -> "PlanStep":
        """Return the step with arguments added to its command, before a redirection."""
        bare = f"{self.bare.rstrip()} {arguments}"
        return replace(self.with_text(self.bare, bare, once=True), bare=bare)

    def with_notice(self, notice: str) -> "PlanStep":
        """Return the step with one more notice."""
        return replace(self, notices=(*self.notices, notice))


@dataclass(frozen=True)
class Plan:
    """The steps of one configuration in one mode."""

    model: str
    mode: str
    profile: str
    log_dir: str
    status_file: str
    banner: bool
    steps: tuple[PlanStep, ...]
    left_out: tuple[str, ...] = ()  # combinations that the script skips, with the reason
    missing: tuple[str, ...] = ()  # scripts, files, data and devices that the commands need and that are not here
    failure: str = ""  # the script ends here with status 1 and this message
    adapted: bool = False  # steps do not depend on earlier ones for their directory and environment

    @property
    def banner_line(self) -> str:
        """The line that begins a run in some repositories."""
        dashes = "-" * 24
        return f"{dashes} {self.mode} {dashes}"

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
        return make_from_fields(Plan, values, "plan", allow_unknown=False)


def directory_of(steps: Sequence[PlanStep], index: int) -> tuple[str, ...]:
    """Return the directory of a step as one change from the root; the changes of a script follow one another."""
    path: list[str] = []
    for step in steps[: index + 1]:
        for change in step.enter:
            if change.startswith("/"):
                path = [""]
            for part in change.split("/"):
                if part == ".." and path and path[-1] != "..":
                    path.pop()
                elif part not in ("", "."):
                    path.append(part)
    return ("/".join(path),) if any(path) else ()
