"""Rewrites keep the result and do what they are for."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.export import _files
from mezzo.export._files import to_onnx, trace
from mezzo.export._openvino import with_classes_first
from mezzo.export._rewrites import _padded, rewrite


class Shuffled(nn.Module):
    """A convolution with odd channels, joined with another one, by channel, then pointwise; as in PP-HumanSeg-Lite."""

    def __init__(self, odd: int, other: int, *, shows: bool = False) -> None:
        super().__init__()
        self.odd, self.other = nn.Conv2d(3, odd, 1), nn.Conv2d(3, other, 3, padding=1)
        self.by_channel = nn.Conv2d(odd + other, odd + other, 3, padding=1, groups=odd + other)
        self.pointwise = nn.Conv2d(odd + other, 5, 1)
        self.shows = shows

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.odd(x))
        logits: Tensor = self.pointwise(self.by_channel(torch.cat([first, F.relu(self.other(x))], dim=1)))
        return logits + first.sum(dim=1, keepdim=True) if self.shows else logits


class Labels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, stride=4, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.conv(x)
        logits = logits * logits.mean(dim=1, keepdim=True)
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear").argmax(1).to(torch.int32)


def both(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return a network as ONNX, as torch writes it and rewritten."""
    program = trace(network.eval(), (-1, 3, -1, -1))
    monkeypatch.setattr(_files, "rewrite", lambda model: model)
    plain = to_onnx(program)
    monkeypatch.undo()
    return plain, to_onnx(program)


def run(model: Any, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"images": x})[0]


def groups(model: Any) -> list[int]:
    return [a.i for node in model.graph.node if node.op_type == "Conv" for a in node.attribute if a.name == "group"]


@pytest.mark.parametrize(("odd", "other"), [(18, 12), (5, 3), (1, 6)])
def test_channels_are_padded_where_a_convolution_by_channel_follows(
    odd: int, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, better = both(Shuffled(odd, other), monkeypatch)
    x = np.random.default_rng(0).standard_normal((2, 3, 9, 14), dtype=np.float32)
    np.testing.assert_allclose(run(better, x), run(plain, x), rtol=1e-5, atol=1e-5)
    assert odd + other in groups(plain)
    padded = sum(n + -n % 4 for n in (odd, other))
    assert padded in groups(better)


class Ghost(nn.Module):
    """A padded value that meets itself again, as in GhostNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cheap = nn.Conv2d(3, 18, 1), nn.Conv2d(18, 18, 3, padding=1, groups=18)
        self.last = nn.Conv2d(36, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        out: Tensor = self.last(torch.cat([y, F.relu(self.cheap(y))], dim=1))
        return out


def test_a_value_that_meets_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, better = both(Ghost(), monkeypatch)
    x = np.random.default_rng(0).standard_normal((1, 3, 9, 9), dtype=np.float32)
    np.testing.assert_allclose(run(better, x), run(plain, x), rtol=1e-5, atol=1e-5)


def test_channels_that_someone_sees_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, better = both(Shuffled(18, 12, shows=True), monkeypatch)
    assert groups(better) == groups(plain)


def test_aligned_channels_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, better = both(Shuffled(8, 12), monkeypatch)
    assert better.graph.initializer == plain.graph.initializer


@pytest.mark.parametrize("size", [(32, 48), (17, 31)])
def test_labels_are_taken_with_the_classes_last(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, better = both(Labels(), monkeypatch)
    x = np.random.default_rng(0).standard_normal((2, 3, *size), dtype=np.float32)
    assert np.array_equal(run(better, x), run(plain, x))
    axes = [a.i for node in better.graph.node if node.op_type == "ArgMax" for a in node.attribute if a.name == "axis"]
    assert axes == [3]


def test_openvino_gets_the_classes_first_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    _, better = both(Labels(), monkeypatch)
    onnx.save(better, tmp_path / "m.onnx")
    back = onnx.load_from_string(with_classes_first(tmp_path / "m.onnx"))
    axes = [a.i for node in back.graph.node if node.op_type == "ArgMax" for a in node.attribute if a.name == "axis"]
    assert axes == [1]
    x = np.random.default_rng(0).standard_normal((2, 3, 17, 31), dtype=np.float32)
    assert np.array_equal(run(back, x), run(better, x))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert with_classes_first(tmp_path / "m.onnx") == str(tmp_path / "m.onnx")


def test_means_over_channels_become_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, better = both(Labels(), monkeypatch)
    before, after = (Counter(node.op_type for node in model.graph.node) for model in (plain, better))
    assert (before["ReduceMean"], after["ReduceMean"], after["Conv"] - before["Conv"]) == (1, 0, 1)


def test_a_second_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, better = both(Labels(), monkeypatch)
    before = better.SerializeToString()
    assert rewrite(better).SerializeToString() == before


@settings(deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=9), st.integers(0, 1))
def test_padding_puts_each_channel_in_its_slot(slots: list[int], axis: int) -> None:
    values = np.arange(1.0, 26.0).reshape(5, 5)
    found = _padded(values, tuple(slots), axis)
    for place, slot in enumerate(slots):
        row = np.take(found, place, axis=axis)
        assert np.array_equal(row, np.take(values, slot, axis=axis) if slot >= 0 else np.zeros(5))
