"""Which form (dialect) a text has, and which profile a repository or a text needs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mezzo.errors import unknown_choice
from mezzo.files import open_regular
from mezzo.tipc._config import MAX_BYTES, ConfigError
from mezzo.tipc._profile import Profile
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._text import kept_lines
from mezzo.vision.shipped import MARKER


@dataclass(frozen=True)
class _Landmarks:
    """What the form of a text is told by: numbers of lines, counted from 0 without empty ones."""

    lines: tuple[str, ...]
    headers: tuple[int, ...]
    trainer: int | None

    def title_has(self, word: str) -> bool:
        return word in self.lines[self.headers[0]]

    def has_headers(self, *places: int) -> bool:
        return set(places) <= set(self.headers)

    def is_usual(self, *places: int) -> bool:
        """Tell whether the trainer and the evaluation are where most texts have them."""
        return self.trainer == 14 and self.has_headers(22, *places)

    def exports_at_26(self, *places: int) -> bool:
        return self.is_usual(26, *places) and "export_params" in self.lines[26]


# The first that fits.
_DIALECTS: tuple[tuple[str, Callable[[_Landmarks], bool]], ...] = (
    ("kl-20", lambda text: text.title_has("kl_quant_params")),
    ("ptq", lambda text: text.title_has("ptq_params")),
    ("tutorial-32", lambda text: text.trainer == 12 and text.has_headers(15, 18)),
    ("panoptic-55", lambda text: text.trainer == 15 and text.has_headers(23, 27, 38)),
    ("rs-53", lambda text: text.exports_at_26(36)),
    ("seg-52", lambda text: text.exports_at_26(35)),
    ("unknown", lambda text: text.exports_at_26()),
    ("passl", lambda text: text.is_usual(27, 32)),
    ("clas-52", lambda text: text.is_usual(26) and (len(text.lines) == 52 or text.has_headers(52))),
    ("standard-51", lambda text: text.is_usual(26) or (text.is_usual() and len(text.lines) <= 26)),
    ("science", lambda text: text.trainer in (16, 17)),
    ("supplementary", lambda text: text.trainer is None and len(text.headers) == 1),
    ("mini-14", lambda text: text.trainer is None and text.has_headers(8, 11)),
)
_WITHOUT_PROFILE = {
    "ptq": "it is a text of another script (post-training quantisation)",
    "mini-14": "it has the 14-line form of two papers",
}


def dialect_of(text: str) -> str:
    """Recognise the form of a text by its landmarks; 'unknown' where none fits."""
    lines = kept_lines(text)
    headers = tuple(number for number, line in enumerate(lines) if line.startswith("="))
    trainer = next((number for number, line in enumerate(lines) if line.startswith("trainer:")), None)
    if not headers:
        return "unknown"
    landmarks = _Landmarks(lines, headers, trainer)
    return next((name for name, fits in _DIALECTS if fits(landmarks)), "unknown")


def choose_profile(name: str | None, text: str, root: Path, *, is_ours: bool = False) -> tuple[Profile, str]:
    """Return the profile and why: the one named, else the repository's, else the one for the text's form.

    Args:
        name: Of the profile, as a user gives it.
        text: The configuration.
        root: Where its commands run.
        is_ours: Whether the text came with mezzo, whatever the folder holds.

    Raises:
        ConfigError: The name is unknown, or none is given and neither repository nor text tells.
    """
    if name is not None:
        if name not in PROFILES:
            raise ConfigError(unknown_choice("profile", name, sorted(PROFILES)))
        return PROFILES[name], "as asked for"
    dialect = dialect_of(text)
    if is_ours or (root / "src" / "mezzo").is_dir() or (root / MARKER).exists():
        own = _for_dialect(dialect, runs_mezzo=True)
        if own is not None:
            return own, "the text is mezzo's" if is_ours else "this repository is mezzo's"
    profile = _profile_of_repository(root)
    if profile is not None:
        return profile, "by the repository's script"
    profile = _for_dialect(dialect, runs_mezzo=False)
    if profile is not None:
        return profile, f"by the text's form ({dialect})"
    why = _WITHOUT_PROFILE.get(dialect, "its headers stand at none of the known places")
    names = ", ".join(sorted(PROFILES))
    raise ConfigError(f"cannot tell which profile the configuration needs: {why}; name one with --profile ({names})")


def _for_dialect(dialect: str, *, runs_mezzo: bool) -> Profile | None:
    profiles = (profile for profile in PROFILES.values() if profile.runs_mezzo == runs_mezzo)
    return next((profile for profile in profiles if dialect in profile.dialects), None)


def _profile_of_repository(root: Path) -> Profile | None:
    """Return the profile of the repository's own script; None if there is none, or if it only calls mezzo."""
    script = root / "test_tipc" / "test_train_inference_python.sh"
    if not script.is_file():
        return None
    with open_regular(script, raising=ConfigError) as file:
        text = file.read(MAX_BYTES).decode(errors="replace")
    if "mezzo" in text:
        return None
    return next((profile for profile in PROFILES.values() if _is_described(profile, root, text)), None)


def _is_described(profile: Profile, root: Path, script: str) -> bool:
    """Tell whether a repository has the files and the words of a profile; one without either describes none."""
    has_files = all((root / name).exists() for name in profile.repository_files)
    has_words = all(word in script for word in profile.script_words)
    return bool(profile.repository_files or profile.script_words) and has_files and has_words
