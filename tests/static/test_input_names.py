"""Inputs of programs by any name: those of Paddle's examples, words of Python and torch, and odd strings."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from mezzo import static
from mezzo.errors import DeployError
from mezzo.static import Executor, InputSpec, Program, ProgramError, data, program_guard, save_forward
from mezzo.static._input_names import escaped, identifier_of, name_of

NAMES = [
    "X", "input", "Image", "id", "sum", "x", "label", "y:0", "class", "self", "torch", "nn", "device", "inf", "print",
    "constants", "forward", "run", "Linear_0", "linear", "图像", "with space", "1st", "a.b", "a/b@GRAD", "", "_", "'\"\n",
    "x__y", "__init__", "_x", "y::0", escaped("X"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    yield
    static.disable_static()
    torch._dynamo.reset()


def new_program() -> Program:
    program = Program()
    program.backend = "aot_eager"
    return program


@pytest.mark.parametrize("name", NAMES)
def test_a_name_and_its_identifier_stand_for_each_other(name: str) -> None:
    identifier = identifier_of(name)
    assert identifier.isidentifier()
    assert identifier.isascii()
    assert "__" not in identifier  # not loaded in a guard
    assert name_of(identifier) == name_of(identifier.lower()) == name
    assert name_of(escaped(name)) == name


def test_every_name_has_an_identifier_of_its_own() -> None:
    assert len({identifier_of(name) for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    "identifier", ["x_named_hex_ff", "x_named_hex_5", "foo_named_hex_78", "x_named_hex_", "a_x_named_hex_78"]
)
def test_an_identifier_that_is_not_the_escape_of_its_own_name_is_a_plain_name(identifier: str) -> None:
    assert name_of(identifier) == identifier


def test_one_program_is_fed_and_fetched_by_all_kinds_of_names() -> None:
    with program_guard(new_program()):
        inputs = [data(name, [None, 2]) for name in NAMES]
        total = torch.stack([torch.relu(x) for x in inputs]).sum(0)
    assert [x.name for x in inputs] == NAMES
    feed = {name: np.full((1, 2), place) for place, name in enumerate(NAMES)}
    results = Executor("cpu").run(total._program, feed, [total, *NAMES])
    assert results[0].tolist() == [[sum(range(len(NAMES)))] * 2]
    assert [result[0, 0] for result in results[1:]] == list(range(len(NAMES)))


def test_an_input_may_have_the_name_of_a_call_that_was_written_before() -> None:
    with program_guard(new_program()):
        y = torch.relu(data("x", [2]))
        z = y + data("relu", [2])
    [result] = Executor("cpu").run(z._program, {"x": [1.0, -1.0], "relu": [3.0, 4.0]}, [z])
    assert result.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_program_with_the_names_of_paddles_examples_trains(level: str) -> None:
    net = nn.Linear(4, 2)
    with program_guard(new_program()):
        loss = F.cross_entropy(net(data("X", [None, 4])), data("input", [None], "int64"))
        optimizer = static.amp.decorate(SGD(net.parameters(), lr=0.5), level=level, dtype="bfloat16")
        optimizer.minimize(loss)
    optimizer.amp_init("cpu")
    feed = {"X": np.eye(4, dtype="float32"), "input": np.array([0, 1, 0, 1])}
    losses = [Executor("cpu").run(loss._program, feed, [loss])[0] for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["X", "y:0", "input", escaped("X")])
def test_a_saved_program_keeps_the_names_of_its_inputs(name: str, tmp_path: Path) -> None:
    with program_guard(new_program()):
        y = data(name, [None, 2]) * 2
    y._program.clone(for_test=True).save(tmp_path / "one.pt2", [y.name])
    Program.load(tmp_path / "one.pt2").save(tmp_path / "two.pt2", [y.name])
    loaded = Program.load(tmp_path / "two.pt2")
    loaded.backend = "aot_eager"
    assert [x.name for x in loaded.inputs] == [name]
    assert Executor("cpu").run(loaded, {name: [[1.0, 2.0]]}, [y.name])[0].tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("names", [("x", "y"), ("X", "Y"), ("y:0", "input"), ("a__b", "__a"), ("图像", "a/b@GRAD")])
def test_a_saved_program_whose_inputs_share_a_free_size_is_loaded(names: tuple[str, str], tmp_path: Path) -> None:
    with program_guard(new_program()):
        x, y = (data(name, [None, 2]) for name in names)
        z = torch.relu(x * 2 + y)  # torch writes a guard: both sizes are the same
    z._program.clone(for_test=True).save(tmp_path / "net.pt2", [z.name])
    loaded = Program.load(tmp_path / "net.pt2")
    loaded.backend = "aot_eager"
    assert [given.name for given in loaded.inputs] == list(names)
    feed = {name: np.ones((3, 2), "float32") for name in names}
    assert Executor("cpu").run(loaded, feed, [z.name])[0].tolist() == [[3.0] * 2] * 3


def test_a_file_with_two_inputs_of_one_name_is_refused(tmp_path: Path) -> None:
    class Forged(nn.Module):
        def forward(self, x: torch.Tensor, x_named_hex_78: torch.Tensor) -> torch.Tensor:
            return x - x_named_hex_78

    save_forward(Forged(), [InputSpec([2], name="x"), InputSpec([2], name="y")], tmp_path / "net.pt2")
    with pytest.raises(DeployError, match="two inputs have the name 'x'"):
        Program.load(tmp_path / "net.pt2")


def test_a_variable_by_any_name_can_stay_in_float32() -> None:
    net = nn.Linear(4, 2)
    with program_guard(new_program()):
        loss = net(data("X", [None, 4])).square().mean()
        lists = static.amp.CustomOpLists(custom_black_varnames=["X"])
        static.amp.decorate(SGD(net.parameters(), lr=0.5), lists, dtype="bfloat16").minimize(loss)
    Executor("cpu").run(loss._program, {"X": np.ones((3, 4))}, [loss])
    assert loss._program.operators().totals()["addmm"] == (0, 0, 1, 0)


def test_a_printed_program_shows_the_names_as_they_were_given() -> None:
    with program_guard(new_program()):
        y = torch.relu(data("Image", [2]))
    assert "%Image : " in str(y._program)
    assert "named_" not in str(y._program)


def test_two_inputs_of_one_name_are_refused() -> None:
    with program_guard(new_program()):
        data("X", [1])
        with pytest.raises(ProgramError, match="variable 'X' already"):
            data("X", [1])
        data("x", [1])
