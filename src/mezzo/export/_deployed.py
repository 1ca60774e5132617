"""The folder of an exported model: `deploy.yaml`, and the files that it names with their hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from mezzo.errors import unknown_choice
from mezzo.export._engine_options import PRECISIONS
from mezzo.export._errors import DeployError
from mezzo.files import is_regular, open_regular, read_yaml, short_repr, write_text

FILE = "deploy.yaml"
OUTPUT_OPS = ("argmax", "softmax", "none")
MAX_BYTES = 1 << 20  # of deploy.yaml: a thousand class names are 20 KiB

OutputOp = Literal["argmax", "softmax", "none"]
TaskName = Literal["classification", "segmentation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployed:
    """An exported model: inputs, outputs and files."""

    folder: Path
    task: TaskName
    model_name: str
    num_classes: int
    class_names: tuple[str, ...] = ()
    """Empty if unknown."""
    input_shape: tuple[int, ...] = (-1, 3, -1, -1)
    """Batch, channels, height, width; -1 is free."""
    output_op: OutputOp
    """The last operator: labels (int32), probabilities or logits (float32)."""
    transforms: tuple[Mapping[str, Any], ...]
    """From an image to the input, as in training files: `type` and its arguments."""
    variants: Mapping[str, Mapping[str, str]]
    """Per precision: `program` (torch.export) and `onnx`, each a file of the folder."""
    files: Mapping[str, str]
    """SHA-256 of each file."""
    made_by: Mapping[str, str] = field(default_factory=dict)
    """Versions."""

    def file(self, precision: str, kind: str) -> Path:
        """Return the path of a file of the model, after a check of its hash.

        Raises:
            DeployError: The model has no file of this precision and kind, or the file was changed.
        """
        if precision not in self.variants:
            has = ", ".join(self.variants)
            raise DeployError(
                f"{self.folder}: has no {precision} model, only {has}; export with --precision {precision}"
            )
        name = self.variants[precision].get(kind)
        if name is None:
            what = {"program": "torch.export program", "onnx": "ONNX file"}[kind]
            raise DeployError(f"{self.folder}: has no {what} in {precision}; choose another engine or precision")
        path = self.folder / name
        if not is_regular(path):
            raise DeployError(f"{path}: no such file, but {FILE} names it; export again")
        if sha256(path) != self.files.get(name):
            raise DeployError(f"{path}: is not the file that {FILE} was written for (other SHA-256); export again")
        return path

    @property
    def path(self) -> Path:
        """The file that describes it."""
        return self.folder / FILE

    def has(self, precision: str, kind: str) -> bool:
        """Return whether there is a file of a kind in a precision."""
        return kind in self.variants.get(precision, {})

    @property
    def is_person_model(self) -> bool:
        """Whether it has two classes, person and background."""
        return self.task == "segmentation" and self.num_classes == 2

    def write(self) -> Path:
        """Write deploy.yaml; it also has the entries of PaddleSeg's format."""
        first = self.variants[next(iter(self.variants))]
        entries = {
            "model": first.get("onnx", first.get("program")),
            "transforms": [dict(item) for item in self.transforms],
            "input_shape": list(self.input_shape),
            "output_op": self.output_op,
            "output_dtype": "int32" if self.output_op == "argmax" else "float32",
            "task": self.task,
            "model_name": self.model_name,
            "num_classes": self.num_classes,
            "class_names": list(self.class_names),
            "variants": {name: dict(files) for name, files in self.variants.items()},
            "files": dict(self.files),
            "made_by": dict(self.made_by),
        }
        path = self.folder / FILE
        write_text(path, yaml.safe_dump({"Deploy": entries}, sort_keys=False, allow_unicode=True))
        return path


def sha256(path: Path) -> str:
    """Return the hash of a file.

    Raises:
        DeployError: The file cannot be read, or is not a regular file.
    """
    with open_regular(path, raising=DeployError) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_deployed(place: Path) -> Deployed:
    """Return the model of a folder, or of its deploy.yaml.

    Raises:
        DeployError: deploy.yaml does not exist, or is not valid.
    """
    path = place / FILE if os.path.isdir(place) else place
    entries = _entries(path)
    try:
        return Deployed(
            folder=path.parent,
            task=_one_of(entries, "task", ("classification", "segmentation")),
            model_name=_text(entries, "model_name"),
            num_classes=_whole(entries, "num_classes"),
            class_names=tuple(_texts(entries.get("class_names") or [], "class_names")),
            input_shape=_shape(entries),
            output_op=_one_of(entries, "output_op", OUTPUT_OPS),
            transforms=tuple(_transforms(entries)),
            variants=_variants(entries),
            files=_text_map(entries, "files"),
            made_by=_text_map(entries, "made_by") if "made_by" in entries else {},
        )
    except _Wrong as error:
        raise DeployError(f"{path}: {error}") from error


class _Wrong(Exception):
    """An entry has a wrong value."""


def _entries(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise DeployError(f"{path}: no such file; give a folder that `mezzo export` has written")
    loaded = read_yaml(path, limit=MAX_BYTES, raising=DeployError)
    entries = loaded.get("Deploy") if isinstance(loaded, dict) else None
    if not isinstance(entries, dict):
        raise DeployError(f"{path}: has no block 'Deploy'; export again with `mezzo export`")
    if "variants" not in entries:
        raise DeployError(f"{path}: was not written by `mezzo export` (no 'variants'); export the model with it")
    return entries


def _one_of(entries: Mapping[str, Any], key: str, allowed: tuple[str, ...]) -> Any:
    value = entries.get(key)
    if value not in allowed:
        raise _Wrong(unknown_choice(key, value, allowed))
    return value


def _text(entries: Mapping[str, Any], key: str) -> str:
    value = entries.get(key)
    if not isinstance(value, str):
        raise _Wrong(f"{key}={short_repr(value)}: must be text")
    return value


def _texts(value: object, key: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _Wrong(f"{key}: must be a list of texts")
    return cast(list[str], value)


def _whole(entries: Mapping[str, Any], key: str) -> int:
    value = entries.get(key)
    if type(value) is not int or value < 1:
        raise _Wrong(f"{key}={short_repr(value)}: must be a whole number of at least 1")
    return value


def _shape(entries: Mapping[str, Any]) -> tuple[int, ...]:
    value = entries.get("input_shape")
    is_shape = isinstance(value, list) and len(value) == 4 and all(type(n) is int and (n == -1 or n > 0) for n in value)
    if not is_shape:
        raise _Wrong(f"input_shape={short_repr(value)}: must be [batch, channels, height, width], -1 where it is free")
    return tuple(cast(list[int], value))


def _transforms(entries: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    value = entries.get("transforms")
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise _Wrong("transforms: must be a list, as in [{type: Normalize}]")
    return value


def _text_map(entries: Mapping[str, Any], key: str) -> dict[str, str]:
    value = entries.get(key)
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise _Wrong(f"{key}: must map names to texts")
    return value


def _variants(entries: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    value = entries.get("variants")
    if not isinstance(value, dict) or not value:
        raise _Wrong("variants: must have at least one precision")
    for precision in value:
        if precision not in PRECISIONS:
            raise _Wrong(unknown_choice("precision", precision, PRECISIONS))
        for name in _text_map(value, precision).values():
            if Path(name).name != name or name in ("", ".", ".."):
                raise _Wrong(f"variants: {name!r} must be the name of a file in the same folder")
    return value
