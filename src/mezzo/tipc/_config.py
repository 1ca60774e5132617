"""A configuration text as named fields, by the places of a profile; and which dialect and profile a text is of."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mezzo.errors import MezzoError, unknown_choice
from mezzo.files import FileError, open_regular, read_bytes
from mezzo.tipc._layouts import LAYOUTS
from mezzo.tipc._profiles import PROFILES, Profile
from mezzo.tipc._text import after_first_colon, kept_lines, key_of, second_piece

LITE_MODES = ("lite_train_lite_infer", "lite_train_whole_infer")
MODES = (*LITE_MODES, "whole_train_whole_infer", "whole_infer", "klquant_whole_infer", "benchmark_train")
_TO_STATIC = re.compile(r"\bto_static_train_benchmark_params\b")
_MOST_BYTES = 1 << 20
LITE_CPU = "lite_cpu.yml"
"""The small variant of a recipe that `prepare` writes beside it on a machine without GPU."""


class ConfigError(MezzoError):
    """A configuration, mode or profile that cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Line:
    """One line: its key and its value; both empty where the file has no such line."""

    key: str = ""
    value: str = ""


@dataclass(frozen=True)
class Config:
    """The fields of a configuration text."""

    lines: tuple[str, ...]  # as counted by the shell: empty ones dropped, header is number 0
    fields: Mapping[str, Line]
    to_static: Line
    extra: Mapping[str, str]  # `a:b;c:d` of the last line

    def __getitem__(self, name: str) -> Line:
        """Return a field, an empty one where the layout has no such line."""
        return self.fields.get(name, Line())

    @property
    def model(self) -> str:
        """Return the model's name."""
        return self["model_name"].value


def read_config(path: Path) -> str:
    """Return the text of a configuration file; raises ConfigError."""
    try:
        data = read_bytes(path, limit=_MOST_BYTES)
    except FileError as error:
        raise ConfigError(f"cannot read configuration: {error}") from None
    if b"\0" in data:
        raise ConfigError(f"configuration '{path}' holds a NUL byte: it is no text")
    return data.decode("utf-8", "replace")


def parse(text: str, profile: Profile, layout: str | None = None, keep: int | None = None) -> Config:
    """Read a text by the places of a profile (or of another layout); any text gives some fields."""
    lines = kept_lines(text, profile.keep if keep is None else keep)
    value_of = after_first_colon if profile.first_colon else second_piece
    fields = {
        name: Line(key_of(lines[place]), value_of(lines[place]))
        for name, place in LAYOUTS[layout or profile.layout].items()
        if place < len(lines)
    }
    if profile.name == "rs" and "model_name" in fields:
        task, _, model = lines[1].partition(":")[2].partition(":")
        fields["task"], fields["model_name"] = Line("task", task), Line("model_name", model.split(":")[0])
    if profile.name in ("det", "yolo"):  # mode lists keep the usual rule
        for name in ("epoch", "batch"):
            if name in fields:
                fields[name] = Line(fields[name].key, second_piece(lines[LAYOUTS[profile.layout][name]]))
    physical = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    after = next((number for number, line in enumerate(physical, 1) if _TO_STATIC.search(line)), 0)
    to_static = Line(key_of(lines[after]), value_of(lines[after])) if after < len(lines) else Line()
    extra = dict(piece.split(":")[:2] for piece in lines[-1].split(";") if ":" in piece) if lines else {}
    return Config(lines, fields, to_static, extra)


def dialect_of(text: str) -> str:
    """Recognise the form of a text by its landmarks; 'unknown' where none fits."""
    lines = kept_lines(text)
    headers = [number for number, line in enumerate(lines) if line.startswith("=")]
    trainer = next((number for number, line in enumerate(lines) if line.startswith("trainer:")), None)

    def header(number: int, *words: str) -> bool:
        return number in headers and (not words or any(word in lines[number] for word in words))

    if not headers:
        return "unknown"
    if "kl_quant_params" in lines[headers[0]]:
        return "kl-20"
    if "ptq_params" in lines[headers[0]]:
        return "ptq"
    if trainer == 12 and header(15) and header(18):
        return "tutorial-32"
    if trainer == 15 and header(23) and header(27) and header(38):
        return "panoptic-55"
    if trainer == 14 and header(22):
        if header(26, "export_params"):
            return "rs-53" if header(36) else "seg-52" if header(35) else "unknown"
        if header(27) and header(32):
            return "passl"
        if header(26):
            return "clas-52" if len(lines) == 52 or header(52) else "standard-51"
        return "standard-51" if len(lines) <= 26 else "unknown"
    if trainer in (16, 17):
        return "science"
    if trainer is None and len(headers) == 1:
        return "supplementary"
    if trainer is None and header(8) and header(11):
        return "mini-14"
    return "unknown"


_BY_DIALECT = {
    "tutorial-32": "tutorial",
    "seg-52": "seg",
    "standard-51": "ocr",
    "clas-52": "clas",
    "rs-53": "rs",
    "panoptic-55": "panoptic",
    "passl": "passl",
    "supplementary": "supplementary",
    "kl-20": "ocr-2022",
    "science": "science",
}


def choose_profile(name: str | None, text: str, root: Path) -> tuple[Profile, str]:
    """Return the profile and why: the one named, else the repository's, else the dialect's; raises ConfigError."""
    if name is not None:
        if name not in PROFILES:
            raise ConfigError(unknown_choice("profile", name, sorted(PROFILES)))
        return PROFILES[name], "as asked for"
    dialect = dialect_of(text)
    if (root / "src" / "mezzo").is_dir() or (root / "test_tipc" / ".mezzo").exists():
        if dialect == "tutorial-32":
            return PROFILES["mezzo-tutorial"], "this repository is mezzo's"
        if dialect == "seg-52":
            return PROFILES["mezzo"], "this repository is mezzo's"
    found = _of_repository(root)
    if found is not None:
        return PROFILES[found], "by the repository's script"
    if dialect in _BY_DIALECT:
        return PROFILES[_BY_DIALECT[dialect]], f"by the text's form ({dialect})"
    what = {
        "ptq": "it is of the form of another script (post-training quantisation)",
        "mini-14": "it is of the 14-line form of two papers",
    }
    why = what.get(dialect, "its headers stand at none of the known places")
    raise ConfigError(
        f"cannot tell which profile the configuration needs: {why}; name one with --profile ({', '.join(sorted(PROFILES))})"
    )


# What only the script of one repository says; looked for in this order.
_FEATURES = (
    ("clas", "CLS_ROOT_PATH"),
    ("passl", "lin_py"),
    ("video", "--max_iters=30"),
    ("nlp", "ROOT_PATH"),
    ("3d", "rm -rf ${LOG_PATH}/${trainer}_gpus_${gpu}_autocast_${autocast}"),
    ("gan", "set_export_weight_path"),
    ("rec", "results.log"),
    ("rs", "task_name"),
    ("panoptic", "export_config_key"),
    ("dbnet", "amp.scale_loss"),
    ("medseg", "best_model/model.pdparams"),
    ("seg", "deploy.yaml"),
    ("parl", "xparl"),
    ("tutorial", "trainer_py"),
)


def _of_repository(root: Path) -> str | None:
    """Tell the profile by the repository's own script, if there is one that is not a call of mezzo."""
    script = root / "test_tipc" / "test_train_inference_python.sh"
    if not script.is_file():
        return None
    with open_regular(script, raising=ConfigError) as file:
        text = file.read(_MOST_BYTES).decode(errors="replace")
    if "mezzo" in text:
        return None
    if (root / "test_tipc" / "utils_func.sh").is_file():
        return "yolo" if (root / "configs" / "yolov5").is_dir() else "det"
    for profile, feature in _FEATURES:
        if feature in text:
            if profile == "tutorial" and "./log/${model_name}" in text:
                return "tutorial-early"
            if profile == "seg":
                return _of_seg(text)
            return profile
    if "func_inference" not in text:
        return None
    if "train.log" in text:
        return "ocr"
    return "template" if "load_norm_train_model" in text else "ocr-2022"


def _of_seg(script: str) -> str:
    """Tell the release of PaddleSeg: 2.5 counts addresses by another length, 2.7 has a folder for the mode."""
    if "-le 26" in script:
        return "seg-2022-04"
    return "seg" if "${model_name}/${MODE}" in script else "seg-2.6"
