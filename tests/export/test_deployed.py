"""deploy.yaml: written, read back, and what is wrong with one that was not written by us."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mezzo.export import Deployed, DeployError, read_deployed
from mezzo.vision.infer import compose_transforms

GOOD = {
    "transforms": [{"type": "Normalize"}],
    "input_shape": [-1, 3, -1, -1],
    "output_op": "argmax",
    "task": "segmentation",
    "model_name": "net",
    "num_classes": 2,
    "variants": {"fp32": {"onnx": "model.onnx"}},
    "files": {"model.onnx": "0" * 64},
}

FILE = "deploy.yaml"


def written(folder: Path, **changes: object) -> Path:
    entries = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    (folder / FILE).write_text(yaml.safe_dump({"Deploy": entries}))
    return folder


@given(
    st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1),
    st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc"]))),
    st.sampled_from(["argmax", "softmax", "none"]),
    st.integers(1, 10**6),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, name: str, names: list[str], op: str, classes: int
) -> None:
    model = Deployed(
        folder=tmp_path_factory.mktemp("d"), task="classification", model_name=name, num_classes=classes,
        class_names=tuple(names), output_op=op, transforms=({"type": "ResizeShort", "size": 8},),  # type: ignore[arg-type]
        variants={"fp32": {"onnx": "a.onnx"}}, files={"a.onnx": "1"},
    )  # fmt: skip
    assert read_deployed(model.write()) == model


def test_the_file_has_what_a_reader_of_paddleseg_looks_for(segmenter: Deployed) -> None:
    entries = yaml.safe_load((segmenter.folder / FILE).read_text())["Deploy"]
    assert (entries["model"], entries["output_op"], entries["output_dtype"]) == ("model.onnx", "argmax", "int32")
    assert entries["transforms"][1] == {"type": "Normalize"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "detection"}, "unknown task 'detection'; allowed: classification, segmentation"),
        ({"output_op": "max"}, "unknown output_op 'max'; did you mean 'argmax'? allowed: argmax, softmax, none"),
        ({"num_classes": 0}, "num_classes=0: must be a whole number of at least 1"),
        ({"model_name": 3}, "model_name=3: must be text"),
        ({"class_names": [1]}, "class_names: must be a list of texts"),
        ({"input_shape": [1, 3]}, "input_shape=[1, 3]: must be [batch, channels, height, width], -1 where it is free"),
        ({"transforms": "x"}, "transforms: must be a list, as in [{type: Normalize}]"),
        ({"files": {"a": 1}}, "files: must map names to texts"),
        ({"variants": {}}, "variants: must have at least one precision"),
        ({"variants": {"fp8": {}}}, "unknown precision 'fp8'; allowed: fp32, fp16, bf16, int8"),
        ({"variants": {"fp32": 3}}, "fp32: must map names to texts"),
        ({"variants": {"fp32": {"onnx": "../x"}}}, "variants: '../x' must be the name of a file in the same folder"),
        ({"variants": None}, "was not written by `mezzo export` (no 'variants'); export the model with it"),
    ],
)
def test_a_wrong_entry_is_one_line(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(DeployError) as error:
        read_deployed(written(tmp_path, **changes))
    assert str(error.value) == f"{tmp_path / FILE}: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", "deploy.yaml:1: not YAML: "),
        ("a: 1", "has no block 'Deploy'; export again with `mezzo export`"),
        ("!!python/object/apply:os.system ['true']", "os.system' is not used here"),
        ("#" * (2 << 20), "larger than 1048576 bytes"),
    ],
)
def test_another_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DeployError) as error:
        read_deployed(tmp_path)
    assert message in str(error.value)


def test_no_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="no such file; give a folder that `mezzo export` has written"):
        read_deployed(tmp_path)


def test_a_changed_or_missing_file_is_not_loaded(tmp_path: Path) -> None:
    model = read_deployed(written(tmp_path))
    with pytest.raises(DeployError, match=r"model.onnx: no such file, but deploy.yaml names it; export again"):
        model.file("fp32", "onnx")
    (tmp_path / "model.onnx").write_bytes(b"other")
    with pytest.raises(DeployError, match=r"is not the file that deploy.yaml was written for \(other SHA-256\)"):
        model.file("fp32", "onnx")


def test_a_precision_that_was_not_exported_says_how(tmp_path: Path) -> None:
    model = read_deployed(written(tmp_path))
    with pytest.raises(DeployError, match="has no int8 model, only fp32; export with --precision int8"):
        model.file("int8", "onnx")
    with pytest.raises(DeployError, match=r"has no torch.export program in fp32; choose another engine or precision"):
        model.file("fp32", "program")


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([{"type": "Normalise"}], "unknown transform 'Normalise'; did you mean 'Normalize'? allowed: Resize, "),
        ([{"type": "Resize", "size": 3}], "transform Resize: "),
        ([{"type": ["Resize"]}], "unknown transform ['Resize']; did you mean 'Resize'? allowed"),
        ([{"type": "RandomHorizontalFlip"}], "RandomHorizontalFlip"),
    ],
)
def test_transforms_that_cannot_be_used_are_one_line(
    transforms: list[dict[str, object]], message: str, segmenter: Deployed
) -> None:
    with pytest.raises(DeployError) as error:
        compose_transforms(replace(segmenter, transforms=tuple(transforms)))
    assert message in str(error.value)
    assert FILE in str(error.value)


def test_pipes_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(DeployError, match=r"deploy\.yaml: is a named pipe"):
        read_deployed(tmp_path)
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(DeployError, match=r"model\.onnx: no such file"):
        read_deployed(written(tmp_path)).file("fp32", "onnx")
