"""`cast_model_to_fp16`: a program without an optimizer in mixed precision, and lists for one dtype."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mezzo import static
from mezzo.optim import master_of
from mezzo.static import Executor, Program, ProgramError
from mezzo.static.amp import AutoMixedPrecisionLists, CustomOpLists, NoGuardError, decorate, fp16_guard
from mezzo.static.amp import cast_model_to_fp16 as cast_model
from mezzo.static.amp import cast_parameters_to_fp16 as cast_parameters


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    yield
    static.disable_static()
    torch._dynamo.reset()


class Net(nn.Module):
    """Two linear layers around a norm; the second one inside a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        with fp16_guard():
            return self.second(x)


def written(net: nn.Module) -> tuple[Program, Any]:
    """Return a program of a forward, and its result."""
    program = Program()
    program.backend = "aot_eager"
    return program, net(program.data("x", [None, 4]))


def run(program: Program, result: Any) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    (found,) = Executor("cpu").run(program, feed={"x": x}, fetch_list=[result])
    return found


@pytest.mark.parametrize(("dest_type", "bits"), [("float16", 11), (torch.bfloat16, 8)])
def test_a_cast_program_computes_in_half_what_it_computed_in_float32(dest_type: Any, bits: int) -> None:
    net = Net()
    program, result = written(net)
    expected = run(program, result)
    assert expected.dtype == np.float32
    cast_model(program, use_fp16_guard=False, dest_type=dest_type)
    assert program.precision.policy is not None
    assert program.precision.policy.level == "O2"
    found = run(program, result).astype(np.float32)
    # Some four roundings to `bits` bits, of values up to about 3
    np.testing.assert_allclose(found, expected, atol=4 * 3 * 2.0**-bits)
    assert not np.array_equal(found, expected)


def test_parameters_are_stored_in_half_with_masters_and_norms_stay_float32() -> None:
    net = Net()
    before = net.first.weight.detach().clone()
    program, result = written(net)
    names = cast_model(program, use_fp16_guard=False)
    cast = run(program, result)
    cast_parameters("cpu", program, to_fp16_var_names=names)
    assert {net.first.weight.dtype, net.second.bias.dtype} == {torch.float16}
    assert {net.norm.weight.dtype, net.norm.bias.dtype} == {torch.float32}
    assert torch.equal(master_of(net.first.weight), before)
    assert np.array_equal(run(program, result), cast)  # stored or cast at each use: the same weights


def test_only_the_named_parameters_are_stored_in_half() -> None:
    net = Net()
    program, _ = written(net)
    names = cast_model(program, use_fp16_guard=False)
    cast_parameters(None, program, to_fp16_var_names={name for name in names if "second" in name})
    assert (net.first.weight.dtype, net.second.weight.dtype) == (torch.float32, torch.float16)


def test_names_that_the_program_does_not_have_are_refused() -> None:
    net = Net()
    program, _ = written(net)
    cast_model(program, use_fp16_guard=False)
    with pytest.raises(
        ProgramError, match=r"to_fp16_var_names: no parameter is named 'scond.weight'; the program has "
    ):
        cast_parameters(None, program, to_fp16_var_names=["scond.weight"])
    with pytest.raises(TypeError, match=r"to_fp16_var_names='second.weight': give a list of names"):
        cast_parameters(None, program, to_fp16_var_names="second.weight")
    assert net.second.weight.dtype is torch.float32


def test_lists_from_a_generator_are_kept() -> None:
    lists = CustomOpLists((name for name in ["add"]), iter({"softmax": 1}))
    assert (lists.custom_white_list, lists.custom_black_list) == ({"add"}, {"softmax"})
    with pytest.raises(TypeError, match="custom_white_list"):
        CustomOpLists("add")


def test_with_the_guard_only_calls_inside_are_half() -> None:
    net = Net()
    program, _ = written(net)
    names = cast_model(program)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in names} == {"second"}
    cast_parameters("cpu", program)
    assert (net.first.weight.dtype, net.second.weight.dtype) == (torch.float32, torch.float16)


def test_black_lists_keep_operators_and_variables_in_float32() -> None:
    net = Net()
    program, result = written(net)
    lists = AutoMixedPrecisionLists(custom_black_list=["linear"], dtype="float16")
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in cast_model(program, lists, False)} == {"norm"}
    program, result = written(net)
    expected = run(program, result)
    cast_model(program, CustomOpLists(custom_black_list=["linear", "layer_norm"]), use_fp16_guard=False)
    np.testing.assert_array_equal(run(program, result).astype(np.float32), expected)


def test_faults_are_named() -> None:
    net = Net()
    program, result = written(net)
    with pytest.raises(ProgramError, match="call cast_model_to_fp16"):
        cast_parameters("cpu", program)
    with pytest.raises(ProgramError, match="custom_black_varnames"):
        cast_model(program, CustomOpLists(custom_black_varnames=["nothing"]), use_fp16_guard=False)
    with pytest.raises(ValueError, match="level='O9'"):
        cast_model(program, level="O9", use_fp16_guard=False)
    plain, _ = written(nn.Linear(4, 4))
    with pytest.raises(NoGuardError, match="use_fp16_guard=False"):
        cast_model(plain)
    assert not program.precision.is_on
    cast_model(program)
    loss = result.mean()
    with pytest.raises(ProgramError, match=r"runs at O2 float16.*static\.amp\.decorate"):
        static.minimize(SGD(net.parameters(), lr=0.1), loss)
    decorate(SGD(net.parameters(), lr=0.1), level="O1").minimize(loss)
    for call in (lambda: cast_model(program), lambda: cast_parameters("cpu", program)):
        with pytest.raises(ProgramError, match=r"minimize|amp_init"):
            call()


def test_lists_for_another_dtype_than_the_program_are_refused() -> None:
    assert AutoMixedPrecisionLists is CustomOpLists
    net = nn.Linear(4, 4)
    lists = CustomOpLists(dtype="bfloat16")
    with pytest.raises(ValueError, match=r"torch\.bfloat16, but the program is torch\.float16: give one dtype"):
        decorate(SGD(net.parameters(), lr=0.1), lists)
    program, _ = written(net)
    with pytest.raises(ValueError, match="give one dtype"):
        cast_model(program, lists, use_fp16_guard=False)
    assert decorate(SGD(net.parameters(), lr=0.1), lists, dtype="bfloat16").precision.policy.dtype is torch.bfloat16
