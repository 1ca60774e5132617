"""Find what is odd about a configuration text before anything is run; each finding has its line."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mezzo.tipc._config import MODES, Config, parse_config
from mezzo.tipc._layouts import LAYOUTS
from mezzo.tipc._missing import find_missing
from mezzo.tipc._plan import Plan
from mezzo.tipc._profile import Profile
from mezzo.tipc._recognise import dialect_of
from mezzo.tipc._shell import find_shell_syntax
from mezzo.tipc._text import for_mode, items

_EXACT = (
    "model_name",
    "python",
    "gpu_list",
    "train_model",
    "train_img",
    "infer_model",
    "i_img",
    "i_batch",
    "i_threads",
)
_LENGTHS = {"tutorial-32": 32, "standard-51": 51, "seg-52": 52, "rs-53": 53, "panoptic-55": 55, "passl": 56}
_SAME_LAYOUT = {"clas-52": "standard-51"}
Lines = dict[str, tuple[int, str]]
"""The number in the file, from 1, and the text of the line of each field."""


@dataclass(frozen=True)
class LintFinding:
    """Something that is wrong, or that its author may not expect."""

    line: int  # in the file, from 1; 0: the text as a whole
    serious: bool
    text: str

    def __str__(self) -> str:
        """Return it in one line."""
        where = f"line {self.line}: " if self.line else ""
        return f"{'error' if self.serious else 'warning'}: {where}{self.text}"


Findings = Iterator[LintFinding]


def lint(
    text: str, mode: str, profile: Profile, plan: Plan, root: Path | None = None, gpus: int = 0
) -> list[LintFinding]:
    """Return the findings about a text in a mode, sorted by line.

    Args:
        text: The configuration.
        mode: The mode of the plan.
        profile: The profile of the plan.
        plan: What the script would do.
        root: The directory of the commands, to look for scripts and files. None: only the text is checked.
        gpus: The number of GPUs of this machine.
    """
    numbered, config = _number_lines(text, profile), parse_config(text, profile)
    lines = {name: numbered[place] for name, place in LAYOUTS[profile.layout].items() if place < len(numbered)}
    findings = [
        *_check_characters(text, profile),
        *_check_form(text, profile),
        *_check_lines(lines, config, profile),
        *_check_mode(lines, config, mode, profile),
        *_check_unused(lines, config, profile),
        *_check_devices(lines, config, profile),
        *_check_plan(plan),
    ]
    if root is not None:
        findings += [LintFinding(0, is_error, line) for is_error, line in find_missing(plan, text, root, gpus)]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.line)


def _number_lines(text: str, profile: Profile) -> list[tuple[int, str]]:
    """Return the lines that count, each with its number in the file."""
    physical = enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), 1)
    return [(number, line) for number, line in list(physical)[: profile.lines_read] if line]


def _check_characters(text: str, profile: Profile) -> Findings:
    if "\r" in text:
        why = "the shell scripts keep it in every value and find no interpreter; ignored here"
        yield LintFinding(0, False, f"CR at the ends of lines: {why}")
    if text.startswith("\ufeff"):
        yield LintFinding(1, False, "the text begins with a byte order mark; ignored here")
    used = _number_lines(text, profile)[: max(LAYOUTS[profile.layout].values()) + 1]
    physical = text.replace("\r\n", "\n").split("\n")
    for number, line in enumerate(physical[: used[-1][0] if used else 0], 1):
        if not line:
            yield LintFinding(number, False, "an empty line does not count: all lines below move up by one")
        elif line.startswith("#") and line.strip("#").strip():
            yield LintFinding(number, False, "there are no comments: this line takes the place of a field")


def _check_form(text: str, profile: Profile) -> Findings:
    lines, dialect = _number_lines(text, profile), dialect_of(text)
    layout = _SAME_LAYOUT.get(dialect, dialect)
    if layout != profile.layout:
        what = "its headers stand at none of the known places" if dialect == "unknown" else f"it looks like {dialect}"
        where = f"of profile '{profile.name}' ({profile.layout})"
        yield LintFinding(0, True, f"the text does not have the form {where}: {what}")
    elif len(lines) < _LENGTHS.get(layout, 0):
        count = f"{len(lines)} lines that count, the form has {_LENGTHS[layout]}"
        yield LintFinding(0, False, f"{count}: the missing fields are empty")
    num_physical, last = text.count("\n") + 1, max(LAYOUTS[profile.layout].values())
    if profile.lines_read is not None and num_physical > profile.lines_read and len(lines) <= last:
        limit = f"only the first {profile.lines_read} lines of the file are read"
        yield LintFinding(0, True, f"{limit}, including empty ones: the end is lost")


def _check_lines(lines: Lines, config: Config, profile: Profile) -> Findings:
    for name, (number, line) in lines.items():
        value = config[name].value
        if name in _EXACT and value != value.strip():
            is_error = name in ("model_name", "python")
            yield LintFinding(number, is_error, f"blanks around the value {value!r}: they are part of it")
        if not profile.first_colon and line.count(":") > 1 and name != "model_name":
            yield LintFinding(number, False, f"only the part before the second colon is read: {value!r}")
        if ":" not in line and name not in ("save", "save_infer") and not line.startswith(("=", "#")):
            yield LintFinding(number, False, f"no colon: the whole line {line!r} is a key without value")


def _check_mode(lines: Lines, config: Config, mode: str, profile: Profile) -> Findings:
    if mode not in MODES:
        yield LintFinding(0, True, f"unknown mode '{mode}'; must be one of {', '.join(MODES)}")
    settings = (("epoch", "epochs or iterations", profile.epochs), ("batch", "batch size", profile.batch))
    for name, what, rule in settings:
        number = lines[name][0] if name in lines else 0
        is_used = name in lines and config[name].key != "null" and "train" in mode
        if rule == "by mode" and is_used and not for_mode(config[name].value, mode):
            why = "the script's own default is used, often a full run"
            yield LintFinding(number, False, f"no {what} for mode {mode}: {why}")
        elif rule == "ignored":
            yield LintFinding(number, False, f"this repository's script ignores the {what} of the text")


def _check_unused(lines: Lines, config: Config, profile: Profile) -> Findings:
    """Find values that no command gets."""
    unused = {
        "data": "`prepare` puts the data there and links ./data to it, where train.py looks",
        "i_savelog": "",
    }
    if profile.use_gpu == "never":
        unused["use_gpu"] = "the device is chosen by the command, or by what the machine has"
    if not profile.data:
        unused["i_img"] = "the image is passed in whole_infer only, not after training"
    for name, then in unused.items():
        if name in lines and config[name].value not in ("", "null"):
            line = f"the script passes {config[name].key} to no command{': ' if then else ''}{then}"
            yield LintFinding(lines[name][0], False, line)


def _check_devices(lines: Lines, config: Config, profile: Profile) -> Findings:
    for text in items(config["gpu_list"].value):
        number, looks_like_hosts, taken_for_hosts = lines["gpu_list"][0], ";" in text, len(text) > 15
        if looks_like_hosts != taken_for_hosts:
            what = "hosts" if taken_for_hosts else "cards"
            yield LintFinding(number, True, f"'{text}' is taken for {what} because of its length")
        elif looks_like_hosts and len(text.split(";")[0]) <= profile.hosts_above:
            why = "too short for this script: it is run on one host"
            yield LintFinding(number, False, f"the addresses of '{text}' are {why}")


def _check_plan(plan: Plan) -> Findings:
    if plan.failure:
        yield LintFinding(0, True, plan.failure)
    elif not any(step.kind != "shell" for step in plan.steps):
        yield LintFinding(0, True, f"nothing is planned in mode {plan.mode}")
    for step in plan.steps:
        if found := find_shell_syntax(step.bare):
            command = step.bare.strip()[:120]
            yield LintFinding(0, True, f"the command of {step.name} has an unquoted {found[0]!r}: {command}")
    for combination in plan.left_out:
        yield LintFinding(0, False, f"left out: {combination}")
