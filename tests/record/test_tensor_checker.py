"""The tensor checker: modes, lists, steps, files, and what it leaves alone."""

import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from installed import installed
from torch import Tensor, nn

from mezzo import amp
from mezzo.amp.debugging import (
    DebugMode,
    Finding,
    NonFiniteError,
    TensorCheckerConfig,
    check_layer_numerics,
    collect_operator_stats,
    disable_tensor_checker,
    enable_tensor_checker,
    tensor_checker,
)
from mezzo.errors import MezzoError

INF, NAN = math.inf, math.nan
ABORT, REPORT, OVERFLOW, ALL = DebugMode


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    assert installed() == []
    yield
    disable_tensor_checker()
    assert installed() == []


def bad_log() -> Tensor:
    return torch.zeros(3).log()


def config(mode: DebugMode = REPORT, **fields: Any) -> TensorCheckerConfig:
    return TensorCheckerConfig(enable=True, debug_mode=mode, **fields)


def findings(own: TensorCheckerConfig) -> list[Finding]:
    """Return the findings of a configuration; this begins another step of it."""
    checker = enable_tensor_checker(own)
    disable_tensor_checker()
    return checker.findings


def ops(own: TensorCheckerConfig) -> list[str]:
    return [finding.op for finding in findings(own)]


# -- modes


def test_abort_raises_at_the_first_kernel_with_nan_or_inf() -> None:
    done: list[str] = []

    def run() -> None:
        x = torch.zeros(3) + 1
        done.append("add")
        x.sub(1).log()
        done.append("log")

    with pytest.raises(NonFiniteError) as caught, tensor_checker():
        run()
    assert done == ["add"]
    finding = caught.value.finding
    assert finding is not None
    assert (finding.op, finding.api_op, finding.phase, finding.dtype, finding.kind) == (
        "log", "log", "forward", "float32", "formula",
    )  # fmt: skip
    assert finding.outputs[0].num_negative_inf == 3
    assert isinstance(caught.value, MezzoError)


def test_the_error_is_one_readable_paragraph() -> None:
    x = torch.tensor([0.0, 1.0])
    with pytest.raises(NonFiniteError) as caught, tensor_checker():
        x.log()
    line = re.escape(str(Path(__file__))) + r":\d+"
    assert re.fullmatch(
        rf"inf from `log`, forward, float32 at {line}\. Output: out float32\[2\] 0 to 0, 1 -inf, 1 of 2 are 0\. Inputs: self "
        r"float32\[2\] 0 to 1, 1 of 2 are 0\. Cause: not the precision: the kernel computed in float32, from finite inputs\.",
        str(caught.value),
    )


def test_reporting_goes_on_and_tells_what_was_only_carried_on(capsys: pytest.CaptureFixture[str]) -> None:
    with tensor_checker(config()) as checker:
        bad_log() * 2
        torch.ones(2).add(1)
    assert [(finding.op, finding.kind) for finding in checker.findings] == [("log", "formula"), ("mul", "carried")]
    assert checker.findings[1].cause == "input `self` was not finite already: the origin is an earlier finding"
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r"op=(\w+)", line)[1] for line in lines] == ["log", "mul"]  # type: ignore[index]
    assert all(line.startswith("[PRECISION] [ERROR] in [device=cpu, ") for line in lines)


def test_in_the_next_step_bad_data_is_again_from_outside() -> None:
    own, data = config(), torch.tensor([NAN])
    for _ in range(2):
        with tensor_checker(own) as checker:
            data + 1
    assert [finding.kind for finding in checker.findings] == ["outside", "outside"]


def test_overflow_mode_also_finds_what_float16_could_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with tensor_checker(config(OVERFLOW)) as checker:
        x = torch.full((2,), 60000.0)
        x + x
        x + 5503
    (finding,) = checker.findings
    assert (finding.op, finding.kind, finding.dtype) == ("add", "would overflow", "float32")
    assert finding.cause == "the largest value is 1.2e+05, and float16 ends at 65504"
    assert str(finding).startswith("more than float16 holds from `add`, forward, float32 at ")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_check_all_keeps_and_prints_the_numbers_of_every_result(capsys: pytest.CaptureFixture[str]) -> None:
    linear = nn.Linear(2, 3)
    with tensor_checker(config(ALL)) as checker:
        linear(torch.ones(1, 2)).sum().backward()
    seen = [(each.op, each.phase, each.numbers.shape) for each in checker.checked]
    assert seen[:3] == [("ones", "forward", (1, 2)), ("linear", "forward", (1, 3)), ("sum", "forward", ())]
    assert ("linear_grad", "backward", (3, 2)) in seen
    assert checker.findings == []
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(seen)
    assert all(line.startswith("[PRECISION] in [device=cpu, ") for line in lines)


def test_lines_tell_module_and_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(dim=1))
    with tensor_checker(config(ALL)):
        model(torch.ones(1, 2)).sum().backward()
    found = re.findall(r"op=(\w+), tensor=(\S*),", capsys.readouterr().out)
    assert ("linear", "0") in found
    assert ("softmax_grad", "1@GRAD") in found


def test_of_many_findings_the_first_are_kept_and_all_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mezzo.record._tensor_checker.MAX_FINDINGS", 2)
    monkeypatch.setattr("mezzo.record._tensor_checker.MAX_CHECKED", 3)
    with tensor_checker(config(ALL)) as checker:
        for _ in range(5):
            bad_log()
    assert (len(checker.findings), checker.num_findings, len(checker.checked)) == (2, 5, 3)
    assert len(capsys.readouterr().out.splitlines()) == 10  # zeros and log, five times


# -- files


def test_lines_go_to_one_file_a_device_and_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "3")
    own = config(output_dir=tmp_path / "new" / "folder")
    for _ in range(2):
        with tensor_checker(own):
            bad_log()
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert file.name == "worker_cpu.3.log"
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        "[PRECISION] [ERROR] in [device=cpu, op=log, tensor=, dtype=fp32], numel=3, num_nan=0, num_inf=3"
    )
    assert capsys.readouterr().out == ""


def test_without_a_rank_the_file_has_the_number_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with tensor_checker(config(output_dir=str(tmp_path))):
        bad_log()
    assert [re.fullmatch(r"worker_cpu\.\d+\.log", file.name) is not None for file in tmp_path.iterdir()] == [True]


# -- operator lists


def run_three() -> None:
    x = torch.zeros(2, 2)
    x.log()
    x.reciprocal()
    (x / 0).sum(dim=1)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, ["log", "reciprocal", "div", "sum"]),
        ({"checked_op_list": ["log"]}, ["log"]),
        ({"checked_op_list": ("elementwise_div", "log")}, ["log", "div"]),
        ({"skipped_op_list": ["elementwise_div", "reduce_sum"]}, ["log", "reciprocal"]),
        ({"checked_op_list": ["log", "div"], "skipped_op_list": ["div"]}, ["log"]),
        ({"checked_op_list": ["sum.dim"]}, ["sum"]),
        ({"checked_op_list": ["sum.full"]}, []),
        ({"checked_op_list": []}, []),
    ],
)
def test_lists_choose_operators_under_all_their_names(lists: dict[str, Any], expected: list[str]) -> None:
    own = config(**lists)
    with tensor_checker(own):
        run_three()
    assert ops(own) == expected


def test_lists_hold_for_the_gradient_of_an_operator_too() -> None:
    def run(own: TensorCheckerConfig) -> None:
        x = torch.zeros(2, requires_grad=True)
        with tensor_checker(own):
            x.sqrt().sum().backward()

    only, without = config(checked_op_list=["sqrt"]), config(skipped_op_list=["sqrt"])
    run(only)
    run(without)
    assert [(finding.op, finding.api_op, finding.phase) for finding in findings(only)] == [("div", "sqrt", "backward")]
    assert ops(without) == []


def test_a_result_of_a_skipped_operator_counts_as_from_outside() -> None:
    with tensor_checker(config(skipped_op_list=["log"])) as checker:
        bad_log() + 1
    (finding,) = checker.findings
    assert (finding.op, finding.kind) == ("add", "outside")


# -- the configuration


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"enable": "yes"}, TypeError, "enable='yes': must be True or False"),
        ({"debug_mode": 7}, ValueError, "unknown debug_mode 7; .*allowed: 0, 1, 2, 3"),
        ({"output_dir": 3}, TypeError, "output_dir=3: must be the path of a folder, or None"),
        ({"checked_op_list": ["sofmax"]}, ValueError, "unknown operator 'sofmax'; did you mean 'softmax'?"),
        (
            {"checked_op_list": "softmax"},
            TypeError,
            "checked_op_list='softmax': must be a list or set of operator names",
        ),
        ({"skipped_op_list": [3]}, TypeError, "skipped_op_list: 3 is int; operator names are strings"),
        ({"debug_step": 3}, ValueError, r"debug_step=3: must be \[first, end\], two step numbers"),
        ({"debug_step": [1, 2, 3]}, ValueError, r"debug_step=\[1, 2, 3\]: must be \[first, end\], two step numbers"),
        ({"debug_step": [0, 1.5]}, ValueError, r"debug_step=\[0, 1.5\]: step numbers are integers"),
        (
            {"debug_step": [3, 3]},
            ValueError,
            r"debug_step=\[3, 3\]: the first step must be 0 or more, and less than the",
        ),
        ({"debug_step": [-1, 3]}, ValueError, r"debug_step=\[-1, 3\]: the first step must be 0 or more"),
        ({"stack_height_limit": -1}, ValueError, "stack_height_limit=-1: must be a number of lines, 0 or more"),
        ({"stack_height_limit": 1.0}, ValueError, "stack_height_limit=1.0: must be a number of lines"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        TensorCheckerConfig(**fields)


def test_modes_may_be_given_as_numbers() -> None:
    assert TensorCheckerConfig(True, 1).debug_mode is REPORT  # type: ignore[arg-type]


@pytest.mark.parametrize("height", [0, 1, 2])
def test_the_stack_holds_as_many_of_the_users_lines_as_asked_for(height: int) -> None:
    with tensor_checker(config(stack_height_limit=height)) as checker:
        bad_log()
    (finding,) = checker.findings
    code = [Path(__file__).read_text().splitlines()[int(line.rsplit(":", 1)[1]) - 1].strip() for line in finding.stack]
    assert code == ["return torch.zeros(3).log()", "bad_log()"][:height]
    assert finding.line == (finding.stack[0] if height else "")


# -- steps


def checked_steps(own: TensorCheckerConfig, steps: int) -> list[int]:
    for _ in range(steps):
        checker = enable_tensor_checker(own)
        bad_log()
    disable_tensor_checker()
    return [finding.step for finding in checker.findings]


@pytest.mark.parametrize(
    ("window", "expected"),
    [(None, [0, 1, 2, 3, 4, 5]), ([0, 2], [0, 1]), ((3, 5), [3, 4]), ([5, 90], [5]), ([6, 7], [])],
)
def test_the_window_of_steps_begins_and_ends_where_it_says(window: Any, expected: list[int]) -> None:
    assert checked_steps(config(debug_step=window), 6) == expected


def test_each_configuration_counts_its_own_steps() -> None:
    first, second = config(debug_step=[1, 2]), config(debug_step=[1, 2])
    assert checked_steps(first, 4) == [1]
    assert checked_steps(second, 4) == [1]


def test_another_configuration_takes_the_place_of_the_one_before() -> None:
    first, second = config(), config()
    enable_tensor_checker(first)
    enable_tensor_checker(second)
    bad_log()
    assert (ops(first), ops(second)) == ([], ["log"])


def test_outside_of_the_window_nothing_is_installed() -> None:
    enable_tensor_checker(config(debug_step=[1, 2]))
    assert installed() == []
    with tensor_checker(config(debug_step=[1, 2])):
        assert installed() == []


def test_a_configuration_that_is_off_checks_nothing() -> None:
    enable_tensor_checker(TensorCheckerConfig(enable=False))
    bad_log()
    with tensor_checker(TensorCheckerConfig(enable=False)):
        bad_log()


def test_disabling_stops_it_and_is_silent_without_a_checker() -> None:
    own = config()
    enable_tensor_checker(own)
    disable_tensor_checker()
    disable_tensor_checker()
    bad_log()
    assert ops(own) == []


def test_after_its_error_it_is_silent_until_the_next_step() -> None:
    own = config(ABORT)
    for _ in range(2):
        checker = enable_tensor_checker(own)
        with pytest.raises(NonFiniteError):
            bad_log()
        bad_log()  # whoever handles the error may look at what is bad
    assert checker.num_findings == 2


def test_the_context_is_off_after_an_exception() -> None:
    with pytest.raises(KeyError), tensor_checker():
        raise KeyError
    assert installed() == []
    bad_log()


def test_checker_and_operator_statistics_work_together() -> None:
    with collect_operator_stats(print_table=False) as stats:
        with pytest.raises(NonFiniteError), tensor_checker():
            bad_log()
        torch.ones(2)
    assert stats.raw() == {"log": "0,0,1,0", "ones": "0,0,1,0", "zeros": "0,0,1,0"}


# -- what it leaves alone


def train(model: nn.Module, optimizer_type: type[torch.optim.Optimizer], steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    optimizer = optimizer_type(model.parameters(), lr=0.1)
    model, optimizer = amp.decorate(model, optimizer, level="O2")
    scaler, losses = amp.GradScaler(), []
    for _ in range(steps):
        with amp.auto_cast(level="O2"):
            loss = F.cross_entropy(model(torch.randn(8, 6)), torch.randint(4, (8,)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 4))


@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("mode", [ABORT, OVERFLOW])
def test_a_checked_training_run_is_the_same_bit_for_bit(
    mode: DebugMode, optimizer_type: type[torch.optim.Optimizer], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(build(), optimizer_type)
    with tensor_checker(config(mode)) as checker:
        assert train(build(), optimizer_type) == expected
    assert [finding for finding in checker.findings if finding.kind != "would overflow"] == []


def test_no_random_numbers_are_drawn_and_nothing_is_seeded_even_where_a_kernel_is_random() -> None:
    def states() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    x = torch.full((4,), 6e4, dtype=torch.float16)
    torch.native_dropout(x, 0.9, True)
    after = states()
    torch.manual_seed(0)
    with tensor_checker(config()) as checker:
        torch.native_dropout(x, 0.9, True)  # some of them 6e5
    assert states() == after
    if checker.findings:
        assert checker.findings[0].cause.startswith("the kernel draws random numbers or knows no float32")


def test_memory_that_is_only_allocated_or_filled_in_part_is_not_looked_at() -> None:
    memory = torch.full((4,), NAN)
    with tensor_checker():
        torch.empty(4)
        memory[1] = 3.0
        memory.index_copy_(0, torch.tensor([2]), torch.ones(1))
        memory[torch.tensor([0])] = 2.0


# -- one layer


class Half(nn.Module):
    """Square root of a product; at zero its gradient is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.inner.weight)

    @check_layer_numerics
    def forward(self, x: Tensor, *, divisor: float = 1.0) -> Tensor:
        y = self.inner(x) / divisor
        return y.sqrt()


def test_a_layer_that_is_fine_gives_the_same_as_without_the_check() -> None:
    layer, x = Half(), torch.ones(1, 2, requires_grad=True)
    layer(x).sum().backward()
    assert layer(x).tolist() == [[pytest.approx(math.sqrt(2))] * 2]
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert installed() == []


def test_a_layer_names_the_kernel_of_its_forward_and_the_module_below_it() -> None:
    layer = Half()
    with pytest.raises(NonFiniteError, match=r"`div`.*Cause: not the precision") as caught:
        layer(torch.ones(1, 2), divisor=0.0)
    assert caught.value.finding is not None
    assert caught.value.finding.module == ""
    assert installed() == []
    nn.init.constant_(layer.inner.weight, NAN)
    with pytest.raises(NonFiniteError, match=r"when it first appeared: parameter `inner\.weight`") as caught:
        layer(torch.ones(1, 2))
    assert caught.value.finding is not None
    assert caught.value.finding.module == "inner"


def test_a_layer_names_the_gradient_that_is_not_finite() -> None:
    with pytest.raises(NonFiniteError, match="the gradient of `sqrt`") as caught:
        Half()(torch.zeros(1, 2)).sum().backward()
    finding = caught.value.finding
    assert finding is not None
    assert (finding.op, finding.api_op, finding.phase, finding.kind) == ("SqrtBackward0", "sqrt", "backward", "unknown")
    line = int(finding.line.rsplit(":", 1)[1])
    assert Path(__file__).read_text().splitlines()[line - 1].strip() == "return y.sqrt()"


def test_a_gradient_that_is_bad_before_it_comes_to_the_layer_is_said_to_be() -> None:
    y = Half()(torch.ones(1, 2))
    with pytest.raises(
        NonFiniteError, match=r"gradient `grad\[0\]` was not finite already when it came into the layer"
    ):
        y.backward(torch.full((1, 2), NAN))


def test_only_the_layer_is_looked_at_not_what_comes_before_it() -> None:
    x = torch.zeros(2, requires_grad=True)
    before = x.sqrt() + 1  # its gradient is inf
    Half()(before[None]).sum().backward()
    assert x.grad is not None
    assert x.grad.isinf().all()


@pytest.mark.parametrize("arguments", [(), (3,), ("text", [1])])
def test_a_decorated_function_takes_any_arguments(arguments: tuple[object, ...]) -> None:
    @check_layer_numerics
    def run(*values: object) -> object:
        """Return what came."""
        return values

    assert run(*arguments) == arguments
    assert run.__doc__ == "Return what came."


def test_the_layer_leaves_its_arguments_alone_and_checks_without_gradients_too() -> None:
    x = torch.ones(1, 2)
    with torch.no_grad():
        Half()(x)
        with pytest.raises(NonFiniteError):
            Half()(x, divisor=0.0)
    Half()(x)
    assert not x.requires_grad
