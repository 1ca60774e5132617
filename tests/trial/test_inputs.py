"""Models that take several inputs: by place, by name, or all in one argument."""

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

from mezzo.cli import run
from mezzo.proof import advise, bisect, compare_accuracy, run_at
from mezzo.trial import Trial, TrialSetup, Workload, arguments_of, batch_size_of, call_model

A, B = torch.ones(4, 8), torch.full((4, 8), 2.0)
Pair = namedtuple("Pair", "x y")


class Two(nn.Module):
    """Takes two tensors, and a number that has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return (self.left(x) + self.right(y)) * scale


class OneOfMany(Two):
    """Takes one argument that holds both."""

    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return super().forward(x, y)


class Features(nn.Module):
    """Takes several tensors as its one argument, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, feats, mask=None, **options):  # type: ignore[no-untyped-def]
        return self.layer(feats[0] + feats[1])


class Masked(nn.Module):
    """Takes a tensor and a mask; both have defaults."""

    def forward(self, x: Tensor | None = None, mask: Tensor | None = None) -> Any:
        return x, mask


class Any_(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@pytest.mark.parametrize(
    ("model", "inputs", "args", "kwargs"),
    [
        (Two(), (A, B), (A, B), {}),
        (Two(), (A, B, 2.0), (A, B, 2.0), {}),
        (Two(), {"y": B, "x": A}, (), {"y": B, "x": A}),
        (Two(), OrderedDict(x=A, y=B), (), {"x": A, "y": B}),
        (Two(), [A, B], (A, B), {}),  # cannot be the one argument
        # both ways are possible: a tensor by its annotation, the number of required arguments, a declared name
        (Masked(), (A, B), (A, B), {}),
        (Masked(), {"mask": B, "x": A}, (), {"mask": B, "x": A}),
        (Features(), (A,), (A,), {}),
        (Features(), {"feats": A}, (), {"feats": A}),
        # otherwise it is the one argument
        (Features(), (A, B), ((A, B),), {}),
        (Features(), [A, B], ([A, B],), {}),
        (Features(), {"image": A}, ({"image": A},), {}),
        (Any_(), (A, B), ((A, B),), {}),
        (Any_(), {"x": A}, ({"x": A},), {}),
        (nn.Identity(), [A], ([A],), {}),
        # a wrapper is asked about the module inside
        (nn.DataParallel(Two()), (A, B), (A, B), {}),
        (nn.DataParallel(Two()), {"y": B, "x": A}, (), {"y": B, "x": A}),
        (AveragedModel(OneOfMany()), {"x": A, "y": B}, ({"x": A, "y": B},), {}),
        (torch.compile(Two(), backend="eager"), (A, B), (A, B), {}),
        (torch.compile(OneOfMany(), backend="eager"), (A, B), ((A, B),), {}),
        (torch.compile(nn.DataParallel(OneOfMany()), backend="eager"), {"x": A, "y": B}, ({"x": A, "y": B},), {}),
        # what a forward does not take so is its one argument
        (OneOfMany(), (A, B), ((A, B),), {}),
        (OneOfMany(), {"x": A, "y": B}, ({"x": A, "y": B},), {}),
        (nn.Identity(), {1: A}, ({1: A},), {}),
        (nn.Identity(), [A, B], ([A, B],), {}),  # images of different sizes
        (Two(), Pair(A, B), (Pair(A, B),), {}),
        (nn.Linear(8, 8), A, (A,), {}),
    ],
)
def test_how_a_model_is_called(model: nn.Module, inputs: Any, args: Any, kwargs: Any) -> None:
    seen = arguments_of(model, inputs)
    assert repr(seen) == repr((args, kwargs))
    assert type(seen[0]) is tuple


def test_a_scripted_model_is_believed_to_take_what_it_is_given() -> None:
    class Scripted(nn.Module):
        @property
        def forward(self) -> Any:  # type: ignore[override]
            return dict.update  # of C, without a signature

    assert arguments_of(Scripted(), (A, B)) == ((A, B), {})


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        *[(A, 4), ((A, B), 4), ({"n": 3, "x": A}, 4), (torch.tensor(1.0), None), ("text", None), ([], None)],
        ((torch.ones(77, 77), A), None),  # a mask and a batch
    ],
)
def test_the_size_of_a_batch(inputs: Any, size: int | None) -> None:
    assert batch_size_of(inputs) == size
    assert Workload(nn.Identity(), inputs, None, mse_loss).batch_size == size


def test_the_size_of_a_batch_is_not_told_where_the_targets_have_another() -> None:
    sequence_first = torch.ones(50, 6, 8)
    assert batch_size_of(sequence_first, torch.ones(6)) is None
    assert batch_size_of(torch.tensor(1.0), torch.ones(4)) is None
    workload = Workload(nn.Identity(), sequence_first, None, mse_loss, samples=6)
    assert workload.batch_size == workload.copied(torch.device("cpu")).batch_size == 6


def test_an_error_names_the_dict_where_several_inputs_were_one_argument() -> None:
    class Plain(nn.Module):
        def forward(self, x, mask=None):
            return nn.functional.linear(x, torch.ones(8, 8)) * mask

    with pytest.raises(TypeError) as caught:
        call_model(Plain(), (A, B))
    assert any("dict of named arguments" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("kind", [tuple, list])
def test_every_tool_keeps_several_tensors_in_one_argument(kind: Any) -> None:
    model, inputs, target = Features(), kind([A, B]), torch.zeros(4, 8)
    assert advise(model, inputs, target, mse_loss, dtype="bfloat16", device="cpu", steps=1).full.losses
    assert bisect(model, inputs, target, mse_loss, dtype="bfloat16", steps=1).outcome == "nothing needed"
    assert run_at(model, inputs, target, mse_loss, level="O0").loss is not None


FORMS = [(Two, (A, B)), (Two, {"y": B, "x": A}), (OneOfMany, (A, B)), (OneOfMany, {"x": A, "y": B})]


@pytest.mark.parametrize(("kind", "inputs"), FORMS)
def test_every_tool_takes_every_form(kind: type[Two], inputs: Any) -> None:
    torch.manual_seed(0)
    model, target = kind(), torch.zeros(4, 8)
    report = advise(model, inputs, target, mse_loss, dtype="bfloat16", device="cpu", steps=1)
    assert report.full.losses[0] == pytest.approx(mse_loss(Two.forward(model, A, B), target).item())
    assert bisect(model, inputs, target, mse_loss, dtype="bfloat16", steps=1).outcome == "nothing needed"
    assert bisect(model, inputs, metric="output", dtype="bfloat16").outcome == "nothing needed"
    runs = [run_at(model, inputs, target, mse_loss, level=level, dtype="bfloat16") for level in ("O0", "O2")]
    assert compare_accuracy(*runs).rows


def test_a_list_means_the_same_to_every_tool() -> None:
    target = torch.zeros(4, 8)
    losses = [run_at(kind(), [A, B], target, mse_loss, level="O0").loss for kind in (Two, OneOfMany)]
    assert None not in losses
    assert bisect(Two(), [A, B], target, mse_loss, dtype="bfloat16", steps=1).outcome == "nothing needed"


@pytest.mark.parametrize(("inputs", "can_be"), [((A, B), True), ({"x": A, "y": B}, False), ((A, B, 2.0), False)])
def test_a_step_of_several_tensors_by_place_can_be_captured(inputs: Any, can_be: bool) -> None:
    workload = Workload(Two(), inputs, torch.zeros(4, 8), mse_loss)
    assert workload.can_be_captured is can_be
    if can_be:
        trial = Trial(workload.copied(torch.device("cpu")), TrialSetup(level="O0", is_captured=True))
        trial.step()
        assert trial.losses[0].isfinite()


FACTORIES = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        return self.left(x) + self.right(y)

def places():
    return Two(), (torch.ones(4, 8), torch.ones(4, 8)), torch.zeros(4, 8), nn.functional.mse_loss

def names():
    return Two(), {"y": torch.ones(4, 8), "x": torch.ones(4, 8)}, torch.zeros(4, 8), nn.functional.mse_loss
"""


@pytest.mark.parametrize("factory", ["places", "names"])
@pytest.mark.parametrize("command", [["compare", "--steps", "1", "--model"], ["doctor", "--steps", "1"], ["bisect"]])
def test_factories_of_models_with_several_inputs(tmp_path: Path, command: list[str], factory: str) -> None:
    (tmp_path / "net.py").write_text(FACTORIES)
    assert run([*command, f"{tmp_path}/net.py:{factory}", "--dtype", "bfloat16", "--device", "cpu"]) == 0
