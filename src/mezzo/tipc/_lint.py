"""What is odd about a configuration text: found before anything is run, each finding with its line."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mezzo.tipc._config import MODES, parse_config
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
_FORMS = {"clas-52": "standard-51"}


@dataclass(frozen=True)
class LintFinding:
    """One thing that is wrong, or not what its writer thinks."""

    line: int  # of the file, from 1; 0: the text as a whole
    serious: bool
    text: str

    def __str__(self) -> str:
        """Return it in one line."""
        where = f"line {self.line}: " if self.line else ""
        return f"{'error' if self.serious else 'warning'}: {where}{self.text}"


def lint(
    text: str, mode: str, profile: Profile, plan: Plan, root: Path | None = None, gpus: int = 0
) -> list[LintFinding]:
    """Return the findings of a text in a mode, by line.

    Args:
        text: The configuration.
        mode: Of the plan.
        profile: Of the plan.
        plan: What the script would do.
        root: Where commands would run: what they call and read is looked for. None: only the text is looked at.
        gpus: How many the machine has.
    """
    findings = [*_about_text(text, profile), *_about_fields(text, mode, profile), *_about_plan(plan)]
    if root is not None:
        findings += [LintFinding(0, is_error, line) for is_error, line in find_missing(plan, text, root, gpus)]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.line)


def _numbered(text: str, profile: Profile) -> list[tuple[int, str]]:
    """Return the lines that count, each with its number in the file."""
    physical = enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), 1)
    return [(number, line) for number, line in list(physical)[: profile.lines_read] if line]


def _about_text(text: str, profile: Profile) -> Iterator[LintFinding]:
    if "\r" in text:
        yield LintFinding(
            0,
            False,
            "CR at the ends of lines: the shell scripts keep it in every value and find no interpreter; left out here",
        )
    if text.startswith("\ufeff"):
        yield LintFinding(1, False, "the text begins with a byte order mark; left out here")
    physical = text.replace("\r\n", "\n").split("\n")
    lines = _numbered(text, profile)
    last = max(LAYOUTS[profile.layout].values())
    used = lines[: last + 1]
    for number, line in enumerate(physical[: used[-1][0] if used else 0], 1):
        if not line:
            yield LintFinding(number, False, "an empty line does not count: all lines below move up by one")
        elif line.startswith("#") and line.strip("#").strip():
            yield LintFinding(number, False, "there are no comments: this line takes the place of a field")
    dialect = dialect_of(text)
    form = _FORMS.get(dialect, dialect)
    if form != profile.layout:
        what = "its headers stand at none of the known places" if dialect == "unknown" else f"it looks like {dialect}"
        yield LintFinding(
            0, True, f"the text does not have the form of profile '{profile.name}' ({profile.layout}): {what}"
        )
    elif len(lines) < _LENGTHS.get(form, 0):
        yield LintFinding(
            0, False, f"{len(lines)} lines that count, the form has {_LENGTHS[form]}: the missing fields are empty"
        )
    if profile.lines_read is not None and len(physical) > profile.lines_read and len(lines) <= last:
        yield LintFinding(
            0,
            True,
            f"only the first {profile.lines_read} lines of the file are read, empty ones among them: the end is lost",
        )


def _about_fields(text: str, mode: str, profile: Profile) -> Iterator[LintFinding]:
    lines, config = _numbered(text, profile), parse_config(text, profile)
    places = {name: lines[place] for name, place in LAYOUTS[profile.layout].items() if place < len(lines)}
    for name, (number, line) in places.items():
        value = config[name].value
        if name in _EXACT and value != value.strip():
            yield LintFinding(
                number, name in ("model_name", "python"), f"blanks around the value {value!r}: they are part of it"
            )
        if not profile.first_colon and line.count(":") > 1 and name != "model_name":
            yield LintFinding(number, False, f"only what stands before the second colon is read: {value!r}")
        if ":" not in line and name not in ("save", "save_infer") and not line.startswith(("=", "#")):
            yield LintFinding(number, False, f"no colon: the whole line {line!r} is a key without value")
    for name, what in (("epoch", "epochs or iterations"), ("batch", "batch size")):
        rule = profile.epochs if name == "epoch" else profile.batch
        if rule == "by mode" and name in places and config[name].key != "null" and "train" in mode:
            if not for_mode(config[name].value, mode):
                yield LintFinding(
                    places[name][0],
                    False,
                    f"no {what} for mode {mode}: the script's own default is used, often a full run",
                )
        elif rule == "ignored":
            yield LintFinding(
                places[name][0] if name in places else 0,
                False,
                f"this repository's script ignores the {what} of the text",
            )
    if mode not in MODES:
        yield LintFinding(0, True, f"unknown mode '{mode}'; known are {', '.join(MODES)}")
    unused = {"data": "`prepare` puts the data there and lets ./data lead to it, where train.py looks"}
    if profile.use_gpu == "never":
        unused["use_gpu"] = "the device is chosen by the command, or by what the machine has"
    for name, then in unused.items():
        if config[name].value not in ("", "null"):
            line = f"the script passes {config[name].key} to no command: {then}"
            yield LintFinding(places[name][0], False, line)
    if not profile.data and "i_img" in places and config["i_img"].value not in ("", "null"):
        yield LintFinding(places["i_img"][0], False, "the image is passed in whole_infer only, not after training")
    if "gpu_list" in places:
        yield from _about_devices(places["gpu_list"][0], config["gpu_list"].value, profile)
    if "i_savelog" in places and config["i_savelog"].value not in ("", "null"):
        yield LintFinding(places["i_savelog"][0], False, "this value is never passed on")


def _about_devices(number: int, value: str, profile: Profile) -> Iterator[LintFinding]:
    for text in items(value):
        looks_like_hosts = ";" in text
        taken_for_hosts = len(text) > 15
        if looks_like_hosts != taken_for_hosts:
            yield LintFinding(
                number,
                True,
                f"'{text}' is taken for {'hosts' if taken_for_hosts else 'cards'} because of its length alone",
            )
        elif looks_like_hosts and len(text.split(";")[0]) <= profile.hosts_above:
            yield LintFinding(
                number, False, f"the addresses of '{text}' are too short for this script: it is run on one host"
            )


def _about_plan(plan: Plan) -> Iterator[LintFinding]:
    if plan.failure:
        yield LintFinding(0, True, plan.failure)
    elif not any(step.kind != "shell" for step in plan.steps):
        yield LintFinding(0, True, f"nothing is planned in mode {plan.mode}")
    for step in plan.steps:
        if found := find_shell_syntax(step.bare):
            yield LintFinding(
                0, True, f"the command of {step.name} has an unquoted {found[0]!r}: {step.bare.strip()[:120]}"
            )
    for combination in plan.left_out:
        yield LintFinding(0, False, f"left out: {combination}")
