"""Weights in and out of the formats."""

import errno
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mezzo.checkpoint import (
    WeightsError,
    convert,
    load_paddle_state,
    load_pdparams,
    load_weights,
    paddle_state,
    read_pdparams,
    save_pdparams,
)
from mezzo.cli import run
from mezzo.errors import RunError
from mezzo.vision.models import create_from_types, create_model


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return create_model("mobilenet_v3_small", num_classes=10)


def fresh() -> nn.Module:
    torch.manual_seed(1)
    return create_model("mobilenet_v3_small", num_classes=10)


def same(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return all(torch.equal(states[0][key], states[1][key]) for key in states[0] if not key.endswith("tracked"))


def test_names_and_layouts_are_paddles(model: nn.Module) -> None:
    state = paddle_state(model)
    assert state["classifier.3.weight"].shape == (1024, 10)
    np.testing.assert_array_equal(state["classifier.3.weight"], model.classifier[3].weight.detach().numpy().T)
    assert "features.0.1._mean" in state
    assert not any("running" in key or "tracked" in key for key in state)
    assert all(value.flags.c_contiguous for value in state.values())


def test_another_number_of_classes_loads_all_but_the_heads_and_says_so(model: nn.Module) -> None:
    other = create_model("mobilenet_v3_small", num_classes=7)
    head = other.classifier[3].weight.detach().clone()
    report = load_paddle_state(other, paddle_state(model))
    assert torch.equal(other.classifier[3].weight.detach(), head)
    assert torch.equal(other.classifier[0].weight, model.classifier[0].weight)
    assert "2 of the heads not loaded (another number of classes): classifier.3." in str(report)
    assert "classifier.3.weight ((1024, 10), (1024, 7))" in report.heads
    assert len(report.loaded) == 208


def test_a_network_of_a_recipe_keeps_its_head_for_another_number_of_classes() -> None:
    published = paddle_state(create_model("pp_humanseg_lite", num_classes=2))
    report = load_paddle_state(create_from_types({"type": "PPHumanSegLite", "num_classes": 3}), published)
    assert report.heads
    assert all("piontwise_conv" in line for line in report.heads)


def test_what_does_not_fit_is_named_and_nothing_is_loaded(model: nn.Module) -> None:
    state = paddle_state(model)
    state["stranger"] = state.pop("features.0.0.weight")
    state["features.0.1.bias"] = np.zeros(3, np.float32)
    other = fresh()
    before = fresh()
    with pytest.raises(WeightsError) as error:
        load_paddle_state(other, state)
    for part in ("missing: features.0.0.weight", "unexpected: stranger", "features.0.1.bias ((3,), (16,))"):
        assert part in str(error.value)
    assert same(other, before)
    report = load_paddle_state(other, state, strict=False)
    assert (report.missing, report.unexpected) == (("features.0.0.weight",), ("stranger",))
    assert torch.equal(other.features[0][1].weight, model.features[0][1].weight)
    assert torch.equal(other.features[0][0].weight, before.features[0][0].weight)
    with pytest.raises(WeightsError, match="0 entries loaded"):
        load_paddle_state(other, {"a": np.zeros(1)}, strict=False)


def test_weights_of_a_backbone_alone_are_recognised() -> None:
    torch.manual_seed(0)
    source, target = create_model("pp_humanseg_mobile"), create_model("pp_humanseg_mobile")
    prefix = "backbone."
    state = {k.removeprefix(prefix): v for k, v in paddle_state(source).items() if k.startswith(prefix)}
    state["fc.weight"] = np.zeros((4, 4), np.float32)  # a classifier that comes along
    head = target.head.cls.weight.detach().clone()
    report = load_paddle_state(target, state)
    assert same(source.backbone, target.backbone)
    assert torch.equal(target.head.cls.weight.detach(), head)
    assert (report.missing, report.unexpected) == ((), ("backbone.fc.weight",))
    del state["conv_layer1_1._conv.weight"]
    with pytest.raises(WeightsError, match=r"1 missing: backbone\.conv_layer1_1\._conv\.weight"):
        load_paddle_state(target, state)


@pytest.mark.parametrize("suffix", ["pdparams", "safetensors", "pt", "pth"])
def test_every_format_there_and_back(model: nn.Module, suffix: str, tmp_path: Path) -> None:
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    first, second, third = tmp_path / "a.pdparams", tmp_path / f"b.{suffix}", tmp_path / "c.pdparams"
    save_pdparams(model, first)
    assert convert(first, second) == 210
    assert convert(second, third) == 210
    for path in (first, second, third):
        other = fresh()
        load_weights(other, path)
        assert same(other, model)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"a.pdparams", f"b.{suffix}", "c.pdparams"})


def test_torchs_own_state_dict_loads(model: nn.Module, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "own.pt")
    other = fresh()
    load_weights(other, tmp_path / "own.pt")
    assert same(other, model)


def test_old_files_with_sliced_arrays_and_name_tables(tmp_path: Path) -> None:
    big = np.arange(24, dtype=np.float32).reshape(4, 6)
    content = {
        "w@@.0": big.ravel()[:10],
        "w@@.1": big.ravel()[10:],
        "b": np.zeros(2, np.float32),
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (4, 6), "slices": ["w@@.0", "w@@.1"]}},
        "StructuredToParameterName@@": {"w": "linear_0.w_0"},
    }
    path = tmp_path / "old.pdparams"
    path.write_bytes(pickle.dumps(content, protocol=2))
    read = read_pdparams(path)
    assert sorted(read) == ["b", "w"]
    np.testing.assert_array_equal(read["w"], big)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.bin", b"", "unknown format '.bin'"),
        ("x.pt", b"", "x.pt: is empty"),
        ("x.pdparams", b"", "x.pdparams: is empty"),
        ("x.pt", b"rubbish", "not a file of only weights"),
        ("x.pdparams", pickle.dumps({"iter": 3}), "iter: not an array"),
    ],
)
def test_bad_files_are_one_line_and_exit_code_2(
    name: str, content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert run(["convert", str(path), str(tmp_path / "out.pt")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out.pt").exists()


def test_a_state_dict_must_hold_tensors_and_a_folder_must_be_there(tmp_path: Path, model: nn.Module) -> None:
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="must hold a state dict"):
        load_weights(model, tmp_path / "x.pt")
    save_pdparams(model, tmp_path / "a.pdparams")
    with pytest.raises(WeightsError, match="there is no folder"):
        convert(tmp_path / "a.pdparams", tmp_path / "no" / "b.pt")


def test_a_torch_file_with_code_is_refused(tmp_path: Path, model: nn.Module) -> None:
    torch.save(model, tmp_path / "whole.pt")
    with pytest.raises(WeightsError, match="not a file of only weights"):
        load_weights(fresh(), tmp_path / "whole.pt")


def test_half_and_bfloat16_files_load(model: nn.Module, tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
        torch.save(state, tmp_path / "half.pt")
        load_weights(other := fresh(), tmp_path / "half.pt")
        assert torch.equal(other.classifier[3].weight, model.classifier[3].weight.to(dtype).float())
    paddle = {key: (value.view(np.uint32) >> 16).astype(np.uint16) for key, value in paddle_state(model).items()}
    load_paddle_state(other := fresh(), paddle)  # how Paddle saves bfloat16
    expected = (model.classifier[3].weight.detach().numpy().view(np.uint32) >> 16 << 16).view(np.float32)
    np.testing.assert_array_equal(other.classifier[3].weight.detach().numpy(), expected)


@pytest.mark.parametrize("value", [np.zeros((16, 3, 3, 3), np.int64), torch.zeros(16, 3, 3, 3, dtype=torch.int8)])
def test_what_is_no_floating_number_is_refused(value: object, model: nn.Module) -> None:
    state = {**paddle_state(model), "features.0.0.weight": value}
    with pytest.raises(WeightsError, match=r"features\.0\.0\.weight: is an? .*"):
        load_paddle_state(fresh(), state)


def test_a_head_of_another_width_is_no_other_number_of_classes(model: nn.Module) -> None:
    state = {**paddle_state(model), "classifier.3.weight": np.zeros((999, 10), np.float32)}
    with pytest.raises(WeightsError, match=r"1 mismatched: classifier\.3\.weight \(\(999, 10\), \(1024, 10\)\)"):
        load_paddle_state(fresh(), state)


@pytest.mark.parametrize(
    "table",
    [
        {"w": 3},
        {"w": {"slices": ["a"]}},
        {"w": {"slices": [1], "OriginShape": [1]}},
        {"w": {"slices": ["a", "a"], "OriginShape": [4]}},
        {"w": {"slices": ["no"], "OriginShape": [2]}},
        {"w": {"slices": ["a"], "OriginShape": [5]}},
        {"w": {"slices": ["a"], "OriginShape": [-2, -1]}},
        {"w": {"slices": ["a"], "OriginShape": ["x"]}},
    ],
)
def test_tables_of_pieces_that_cannot_be_are_refused(table: object, tmp_path: Path) -> None:
    path = tmp_path / "x.pdparams"
    path.write_bytes(pickle.dumps({"a": np.zeros(2, np.float32), "UnpackBigParamInfor@@": table}))
    with pytest.raises(WeightsError, match=r"w: (its table|a piece|its pieces)"):
        read_pdparams(path)


def test_names_that_would_collide_in_paddle_are_refused(tmp_path: Path) -> None:
    for names in (("a.running_mean", "a._mean"), ("StructuredToParameterName@@",)):
        torch.save(dict.fromkeys(names, torch.ones(1)), tmp_path / "x.pt")
        with pytest.raises(WeightsError, match="same name in Paddle"):
            convert(tmp_path / "x.pt", tmp_path / "y.pdparams")


def test_numbers_that_are_not_floating_keep_their_value(tmp_path: Path) -> None:
    torch.save({"count": torch.tensor(2**25 + 1)}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "y.pdparams")
    assert read_pdparams(tmp_path / "y.pdparams")["count"] == 2**25 + 1


def test_links_are_replaced_and_permissions_kept(model: nn.Module, tmp_path: Path) -> None:
    real, link = tmp_path / "real.pdparams", tmp_path / "link.pdparams"
    link.symlink_to(real)
    save_pdparams(model, link)
    assert not link.is_symlink()
    assert not real.exists()
    mask = os.umask(0)
    os.umask(mask)
    assert link.stat().st_mode & 0o777 == 0o666 & ~mask
    link.chmod(0o640)
    save_pdparams(model, link)
    assert link.stat().st_mode & 0o777 == 0o640


def test_a_place_that_cannot_be_written_is_one_line(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot be written: (Not a directory|File exists)"):
        save_pdparams(model, tmp_path / "file" / "a.pdparams")
    (tmp_path / "folder.pdparams").mkdir()
    with pytest.raises(WeightsError, match="cannot be written: Is a directory"):
        save_pdparams(model, tmp_path / "folder.pdparams")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.pdparams"]


def test_a_damaged_safetensors_file_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"rubbish")
    with pytest.raises(WeightsError, match="not a file of only weights"):
        load_weights(fresh(), tmp_path / "x.safetensors")


def test_an_interrupted_write_leaves_the_old_file(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pdparams"
    save_pdparams(model, path)
    before = path.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_pdparams(fresh(), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.pdparams"]


def test_convert_says_what_it_did(model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_pdparams(model, tmp_path / "a.pdparams")
    assert run(["convert", str(tmp_path / "a.pdparams"), str(tmp_path / "b.pt")]) == 0
    assert "210 entries written to" in capsys.readouterr().out
    load_pdparams(fresh(), tmp_path / "a.pdparams")


@pytest.mark.parametrize("suffix", ["pdparams", "safetensors", "pt"])
def test_a_tensor_of_stride_0_is_converted_within_the_limit_and_refused_above(suffix: str, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(1000)}, tmp_path / "x.pt")
    assert convert(tmp_path / "x.pt", tmp_path / f"y.{suffix}") == 1
    assert convert(tmp_path / f"y.{suffix}", tmp_path / "z.pt") == 1
    assert torch.load(tmp_path / "z.pt")["a"].sum() == 1000
    torch.save({"a": torch.ones(1).expand(10**12)}, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="MEZZO_MAX_UNPACKED"):
        convert(tmp_path / "x.pt", tmp_path / f"y.{suffix}")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_a_run_that_failed(
    code: int, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    save_pdparams(model, tmp_path / "a.pdparams")

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", full)
    for target in ("b.pdparams", "b.pt", "b.safetensors"):
        assert run(["convert", str(tmp_path / "a.pdparams"), str(tmp_path / target)]) == 1
        assert os.strerror(code) in capsys.readouterr().err
    with pytest.raises(RunError, match="cannot be written"):
        save_pdparams(model, tmp_path / "b.pdparams")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**62]}},
        {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("a", "b")},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}},
        None,
    ],
)
def test_safetensors_with_an_impossible_header_are_one_line(header: object, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    text = json.dumps(header).encode()
    length = len(text) if header else 2**40
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(WeightsError, match="not a file of only weights") as error:
        load_weights(fresh(), tmp_path / "x.safetensors")
    assert "\n" not in str(error.value)


def test_a_pipe_in_place_of_weights_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="a named pipe, not a file"):
        load_weights(fresh(), tmp_path / "x.pt")


@pytest.mark.parametrize("shape", [[2**63, 0], [2**62, 2**62, 0]])
def test_pieces_of_an_impossible_shape_name_the_file(shape: list[int], tmp_path: Path) -> None:
    table = {"a": {"slices": ["a@1"], "OriginShape": shape}}
    content = {"a@1": np.ones(0, np.float32), "UnpackBigParamInfor@@": table}
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(WeightsError, match=r"a\.pdparams: a: its pieces"):
        read_pdparams(tmp_path / "a.pdparams")


@pytest.mark.parametrize("suffix", [".safetensors", ".pdparams", ".pt"])
@pytest.mark.parametrize("dtype", ["complex128", "complex32", "uint3", "int4", "float4_e2m1fn_x2", "float8_e8m0fnu"])
def test_numbers_that_a_format_does_not_hold_are_one_line(dtype: str, suffix: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    state = {"part.w": torch.frombuffer(bytearray(32), dtype=kind)}
    fits = {".pt": ("complex128", "complex32", "float8_e8m0fnu"), ".pdparams": ("complex128",)}
    if dtype in fits.get(suffix, ()):
        assert _convert(state, tmp_path / f"b{suffix}") == 1
        return
    with pytest.raises(WeightsError, match=rf"a\.pt: 'part\.w' is torch\.{dtype}, which a {suffix} file"):
        _convert(state, tmp_path / f"b{suffix}")
    assert not (tmp_path / f"b{suffix}").exists()


def _convert(state: dict[str, torch.Tensor], target: Path) -> int:
    """Convert a state dict from a torch file; torch itself does not write every kind of numbers."""
    (target.parent / "a.pt").write_bytes(b"x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mezzo.checkpoint._weights_files.read_torch_file", lambda _: state)
        return convert(target.parent / "a.pt", target)


def test_numbers_that_no_model_has_do_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(32))
    (tmp_path / "a.pt").write_bytes(b"x")
    packed = {"w": torch.frombuffer(bytearray(32), dtype=torch.float4_e2m1fn_x2)}
    monkeypatch.setattr("mezzo.checkpoint._weights_files.read_torch_file", lambda _: packed)
    with pytest.raises(WeightsError, match="float4"):
        load_weights(module, tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_names_that_a_safetensors_file_cannot_have_name_the_file(name: str, tmp_path: Path) -> None:
    torch.save({name: torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match=r"a\.pt: a \.safetensors file cannot have an entry") as error:
        convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert ascii(name) in str(error.value)
    assert convert(tmp_path / "a.pt", tmp_path / "b.pdparams") == 1


def test_entries_that_read_the_same_bytes_as_two_kinds_are_converted(tmp_path: Path) -> None:
    base = torch.arange(4, dtype=torch.int32)
    state = {"a": base, "b": base.view(torch.float32), "c": base[1:]}
    assert _convert(state, tmp_path / "b.pt") == 3
    read = torch.load(tmp_path / "b.pt", weights_only=True)
    assert all(torch.equal(read[name], value) for name, value in state.items())
