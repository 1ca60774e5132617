"""Layers that FP8 breaks are planted in a stack, and found; half is enough for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mezzo import amp
from mezzo.proof import bisect

WIDTH = 32
RECIPE = amp.Fp8Recipe(emulate=True, min_width=0, min_size=0)


class Layer(nn.Linear):
    """A residual layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.tanh(super().forward(x))


class Shifted(Layer):
    """The same on numbers around 64, where e4m3 counts in steps of 8 and float16 in steps of 1/16; the shift is taken back."""

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.nn.functional.linear(torch.full_like(x[:1], 64.0).expand(3, -1), self.weight)[:1]
        return x + 0.3 * torch.tanh(nn.Linear.forward(self, x + 64.0) - shift)


def net_with(*planted: int, count: int = 14) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*((Shifted if index in planted else Layer)(WIDTH, WIDTH) for index in range(count)))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(32, WIDTH, generator=generator), torch.randn(32, WIDTH, generator=generator)


def output_error(model: nn.Module, lists: Path | None) -> float:
    """Return how far a forward at O3 is off float32, by a list file or without."""
    inputs, _ = batch()
    right = model(inputs).detach().double()
    amp.decorate(model, level="O3", fp8=RECIPE)
    keywords: dict[str, Any] = {} if lists is None else amp.read_lists(lists, model=model)
    with amp.auto_cast(level="O3", fp8=RECIPE, **keywords), torch.no_grad():
        found = model(inputs).double()
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("planted", [(6,), (2, 11)])
def test_layers_that_fp8_breaks_are_found_and_their_list_keeps_them_in_half(
    planted: tuple[int, ...], tmp_path: Path
) -> None:
    found = bisect(net_with(*planted), *batch(), mse_loss, metric="output", level="O3", tolerance=0.1, fp8=RECIPE)
    assert found.kept == tuple(map(str, planted))
    assert (found.outcome, found.stays) == ("found", "half")
    assert f"{len(planted)} of 12 modules must stay in half: {', '.join(found.kept)} (output" in found.summary()
    assert found.table()[0][1] == "modules in half"
    assert found.to_dict()["stays"] == "half"
    lists = tmp_path / "half.yml"
    found.write(lists)
    assert found.to_lists() == {"half_layers": list(found.kept)}
    assert output_error(net_with(*planted), None) > 0.1 > output_error(net_with(*planted), lists)


@pytest.mark.parametrize("metric", ["loss", "output", "finite"])
def test_a_sound_stack_passes_at_the_usual_tolerances(metric: str) -> None:
    found = bisect(net_with(), *batch(), mse_loss, metric=metric, level="O3", dtype="bfloat16", steps=2, fp8=RECIPE)
    assert found.outcome == "nothing needed", found.summary()
    assert "nothing must stay in half: " in found.summary()
    assert metric in found.summary()


def test_the_first_and_the_last_layer_are_no_candidates_for_they_are_in_half_anyway() -> None:
    found = bisect(net_with(6), *batch(), mse_loss, metric="output", level="O3", tolerance=0.1, fp8=RECIPE)
    assert set(found.candidates) == set(map(str, range(1, 13)))


def test_without_a_recipe_a_cpu_emulates() -> None:
    found = bisect(net_with(), *batch(), mse_loss, metric="output", level="O3")
    assert found.candidates == ()  # the usual recipe finds these layers too narrow
    assert found.outcome == "nothing needed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O3", "by": "ops"}, "level='O3' needs by='modules'"),
        ({"level": "O2", "fp8": RECIPE}, "fp8 with level='O2': it belongs to level O3"),
    ],
)
def test_a_mistake_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bisect(net_with(), *batch(), mse_loss, **options)
