"""TIPC texts that come with mezzo, by the names of their recipes."""

from pathlib import Path

from mezzo.files import say
from mezzo.vision.shipped import is_name, text_file, text_name, write_recipe


def text_of(config: Path) -> Path:
    """Return the TIPC text that an argument stands for: a file, or `NAME` or `NAME/TEXT` of a recipe."""
    return text_file(config, Path.cwd()) if is_name(config) else config


def written_text(config: Path) -> Path:
    """Return the same; first write what the commands of a recipe's text name into this folder, if it is not there."""
    if is_name(config):
        name, written = text_name(config), write_recipe(config.parts[0], Path.cwd())
        if written:
            say(f"{len(written)} files of {config.parts[0]} written: {name} and what its commands name", err=True)
    return text_of(config)
