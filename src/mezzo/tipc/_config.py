"""A configuration text as named fields."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mezzo.errors import MezzoError
from mezzo.files import FileError, read_bytes
from mezzo.tipc._layouts import LAYOUTS
from mezzo.tipc._profile import Profile
from mezzo.tipc._text import after_first_colon, kept_lines, key_of, second_piece

LITE_MODES = ("lite_train_lite_infer", "lite_train_whole_infer")
MODES = (*LITE_MODES, "whole_train_whole_infer", "whole_infer", "klquant_whole_infer", "benchmark_train")
_TO_STATIC = re.compile(r"\bto_static_train_benchmark_params\b")
MAX_BYTES = 1 << 20
LITE_CPU = "lite_cpu.yml"
"""The smaller recipe that `prepare` writes beside a recipe on a machine without GPU."""


class ConfigError(MezzoError):
    """A configuration, mode or profile that cannot be used."""


@dataclass(frozen=True)
class Line:
    """The key and the value of a line; both empty if the file has no such line."""

    key: str = ""
    value: str = ""


@dataclass(frozen=True)
class Config:
    """The fields of a configuration text."""

    lines: tuple[str, ...]  # as the shell counts them: without empty lines, from 0
    fields: Mapping[str, Line]
    to_static: Line
    extra: Mapping[str, str]  # the pairs of a last line such as `a:b;c:d`

    def __getitem__(self, name: str) -> Line:
        """Return a field; it is empty if the layout has no such line."""
        return self.fields.get(name, Line())

    @property
    def model(self) -> str:
        """The name of the model."""
        return self["model_name"].value


def read_config(path: Path) -> str:
    """Return the text of a configuration file; raises ConfigError."""
    try:
        data = read_bytes(path, limit=MAX_BYTES)
    except FileError as error:
        raise ConfigError(f"cannot read configuration: {error}") from None
    if b"\0" in data:
        raise ConfigError(f"configuration '{path}' has a NUL byte: it is not a text")
    return data.decode("utf-8", "replace")


def parse_config(text: str, profile: Profile, layout: str | None = None, lines_read: int | None = None) -> Config:
    """Read the fields of a text by the layout of a profile, or by another layout; never raises."""
    lines = kept_lines(text, profile.lines_read if lines_read is None else lines_read)
    value_of = after_first_colon if profile.first_colon else second_piece
    places = LAYOUTS[layout or profile.layout]
    fields = {
        name: Line(key_of(lines[place]), value_of(lines[place])) for name, place in places.items() if place < len(lines)
    }
    if profile.task_before_model and "model_name" in fields:
        task, _, model = lines[1].partition(":")[2].partition(":")
        fields["task"], fields["model_name"] = Line("task", task), Line("model_name", model.split(":")[0])
    for name in ("epoch", "batch"):  # these lists follow the usual rule in all profiles
        if name in fields:
            fields[name] = Line(fields[name].key, second_piece(lines[places[name]]))
    physical = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    after = next((number for number, line in enumerate(physical, 1) if _TO_STATIC.search(line)), 0)
    to_static = Line(key_of(lines[after]), value_of(lines[after])) if after < len(lines) else Line()
    extra = dict(piece.split(":")[:2] for piece in lines[-1].split(";") if ":" in piece) if lines else {}
    return Config(lines, fields, to_static, extra)
