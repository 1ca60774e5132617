"""`compare_accuracy` over the files of two tensor checkers, and the operator lists of the process."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from mezzo.amp import auto_cast, debugging
from mezzo.errors import MezzoError, MissingExtra

LINE = "[PRECISION] in [device=gpu:0, op={}, tensor={}, dtype={}], numel={}, num_nan={}, num_inf={}, num_zero=0, max={}, min={}, mean={}\n"  # noqa: E501


def dump(folder: Path, *lines: tuple[object, ...], name: str = "worker_gpu.0.log") -> Path:
    """Write lines as Paddle does: op, tensor, dtype, numel, num_nan, num_inf, max, min, mean."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("seed = 1\n" + "".join(LINE.format(*line) for line in lines))
    return folder


@pytest.fixture(autouse=True)
def no_lists_of_the_process() -> Iterator[None]:
    yield
    debugging.set_checked_op_list(None)
    debugging.set_skipped_op_list(None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.exp(self.first(x)))


def checked_run(folder: Path, level: str, scale: float = 1.0, large: float = 1.0) -> None:
    """Write the numbers of every result of a step, its gradients included."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 8)
    with torch.no_grad():
        net.first.weight.mul_(large)
    config = debugging.TensorCheckerConfig(debug_mode=debugging.DebugMode.CHECK_ALL, output_dir=folder)
    with debugging.tensor_checker(config), auto_cast(level=level, cpu_compute="native"):
        (net(x).float().mean() * scale).backward()


def test_a_run_compared_with_itself_differs_nowhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        checked_run(tmp_path / name, "O0")
    rows = debugging.compare_accuracy(tmp_path / "a", tmp_path / "b", tmp_path / "rows.csv")
    assert {row.op for row in rows} >= {"linear", "exp", "linear_grad", "exp_grad"}
    assert {(row.state, row.error) for row in rows} == {("", 0.0)}
    written = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert [line["op"] for line in written] == [row.op for row in rows]
    assert float(written[0]["max_a"]) == rows[0].a.max


def test_gradients_of_a_scaled_loss_agree_only_with_the_scale(tmp_path: Path) -> None:
    checked_run(tmp_path / "float32", "O0")
    checked_run(tmp_path / "scaled", "O0", scale=1024.0)
    folders = tmp_path / "float32", tmp_path / "scaled"

    def marked(loss_scale: float) -> set[str]:
        rows = debugging.compare_accuracy(*folders, tmp_path / "rows.csv", loss_scale=loss_scale)
        return {row.op for row in rows if row.state == "orange" and row.op.endswith("_grad")}

    assert marked(1024.0) == set()
    assert marked(1.0) >= {"linear_grad", "exp_grad"}


def test_an_overflow_of_float16_is_red_and_half_results_are_yellow(tmp_path: Path) -> None:
    # exp(first) of weights times 30 exceeds 65504, which float32 holds
    checked_run(tmp_path / "float32", "O0", large=30.0)
    checked_run(tmp_path / "float16", "O2", large=30.0)
    rows = debugging.compare_accuracy(tmp_path / "float32", tmp_path / "float16", tmp_path / "rows.csv")
    linear = next(row for row in rows if row.op == "linear" and row.a and row.b)
    assert (linear.a.dtype, linear.b.dtype, linear.state) == ("fp32", "fp16", "yellow")
    exp = next(row for row in rows if row.op == "exp")
    assert exp.b.num_inf > exp.a.num_inf == 0
    assert exp.state == "red"
    assert {row.state for row in rows if row.op == "_to_copy"} == {""}  # only the half run casts


def test_lines_of_paddle_are_read_and_paired_by_operator_tensor_and_occurrence(tmp_path: Path) -> None:
    a = dump(
        tmp_path / "a",
        ("matmul", "x, [0]", "fp32", 4, 0, 0, 2.0, -1.0, 0.5), ("matmul", "x, [0]", "fp32", 4, 0, 0, 8.0, 0.0, 1.0),
        ("exp", "", "fp32", 4, 0, 0, 7e4, 0.0, 1.0), ("relu", "", "fp32", 4, 0, 0, 1.0, 1.0, 1.0),
    )  # fmt: skip
    b = dump(
        tmp_path / "b",
        ("matmul", "x, [0]", "fp16", 4, 0, 0, 2.05, -1.0, 0.5), ("matmul", "x, [0]", "fp16", 4, 1, 0, 8.0, 0.0, 1.0),
        ("exp", "", "fp16", 4, 0, 0, 6e4, 0.0, 1.0), ("tanh", "", "bf16", 4, 0, 0, "-nan", "nan", "inf"),
    )  # fmt: skip
    rows = debugging.compare_accuracy(a, b, tmp_path / "rows.csv")
    found = [(row.op, row.tensor, row.number, row.state) for row in rows]
    assert found == [
        ("matmul", "x, [0]", 1, "yellow"),
        ("matmul", "x, [0]", 2, "red"),  # a new NaN
        ("exp", "", 1, "red"),  # the reference does not fit into float16
        ("relu", "", 1, "orange"),
        ("tanh", "", 1, "orange"),
    ]
    assert rows[0].error == pytest.approx(0.025)  # 0.05 of 2
    assert rows[3].b is None
    assert math.isnan(rows[3].error)


def test_files_of_several_workers_are_paired_by_name_or_device(tmp_path: Path) -> None:
    for folder, numbers in (("a", (0, 1)), ("b", (0, 1))):
        for number in numbers:
            dump(
                tmp_path / folder,
                ("exp", "", "fp32", 1, 0, 0, number, number, number),
                name=f"worker_gpu.{number}.log",
            )
    rows = debugging.compare_accuracy(tmp_path / "a", tmp_path / "b", tmp_path / "rows.csv")
    assert [(row.worker, row.error) for row in rows] == [("worker_gpu.0.log", 0.0), ("worker_gpu.1.log", 0.0)]
    for folder, process in (("c", 11), ("d", 22)):  # without RANK the process is in the name
        for device in ("cpu", "cuda0"):
            dump(tmp_path / folder, ("exp", device, "fp32", 1, 0, 0, 1, 1, 1), name=f"worker_{device}.{process}.log")
    rows = debugging.compare_accuracy(tmp_path / "c", tmp_path / "d", tmp_path / "rows.csv")
    assert [(row.tensor, row.b is None) for row in rows] == [("cpu", False), ("cuda0", False)]
    with pytest.raises(MezzoError, match=r"do not match .*RANK"):
        debugging.compare_accuracy(tmp_path / "a", tmp_path / "d", tmp_path / "rows.csv")


def test_wrong_folders_lines_and_arguments_are_one_clear_line(tmp_path: Path) -> None:
    good = dump(tmp_path / "good", ("exp", "", "fp32", 1, 0, 0, 1, 1, 1))
    (tmp_path / "empty").mkdir()
    bad = dump(tmp_path / "bad", ("exp", "", "fp32", 1, 0, 0, "1.2.3", 1, 1))
    out = tmp_path / "rows.csv"
    with pytest.raises(MezzoError, match=r"none: cannot be read as a folder"):
        debugging.compare_accuracy(tmp_path / "none", good, out)
    with pytest.raises(MezzoError, match=r"empty: no file worker_\*"):
        debugging.compare_accuracy(good, tmp_path / "empty", out)
    with pytest.raises(MezzoError, match=r"worker_gpu\.0\.log:2: not a line of a tensor checker"):
        debugging.compare_accuracy(good, bad, out)
    with pytest.raises(ValueError, match="dump_all_tensors=True"):
        debugging.compare_accuracy(good, good, out, dump_all_tensors=True)
    with pytest.raises(ValueError, match="loss_scale=0"):
        debugging.compare_accuracy(good, good, out, loss_scale=0)
    assert not out.exists()


def test_a_workbook_needs_xlsxwriter_and_says_so_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"XlsxWriter.*mezzo\[xlsx\]"):
        debugging.compare_accuracy(tmp_path / "none", tmp_path / "none", tmp_path / "rows.xlsx")


def test_a_workbook_has_the_rows(tmp_path: Path) -> None:
    pytest.importorskip("xlsxwriter")
    a = dump(tmp_path / "a", ("exp", "", "fp32", 1, 0, 0, "nan", "inf", 1))
    debugging.compare_accuracy(a, a, tmp_path / "rows.xlsx")
    assert (tmp_path / "rows.xlsx").read_bytes()[:2] == b"PK"


# Operator lists of the process


def findings(config: debugging.TensorCheckerConfig) -> list[str]:
    """Return the operators of a step that are reported: log(-1) gives NaN, which exp passes on."""
    with debugging.tensor_checker(config) as checker:
        before = checker.num_findings
        torch.exp(torch.log(torch.tensor([-1.0])))
    return [finding.op for finding in checker.findings[before:]]


def config(**lists: list[str]) -> debugging.TensorCheckerConfig:
    return debugging.TensorCheckerConfig(debug_mode=debugging.DebugMode.CHECK_NAN_INF, **lists)


def test_lists_of_the_process_hold_for_configurations_without_lists_made_before_or_after(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = config()
    assert findings(before) == ["log", "exp"]
    debugging.set_checked_op_list(["log"])
    assert findings(before) == findings(config()) == ["log"]
    debugging.set_checked_op_list(None)
    debugging.set_skipped_op_list(["log"])
    assert findings(before) == findings(config()) == ["exp"]
    debugging.set_skipped_op_list(None)
    assert findings(before) == ["log", "exp"]


def test_a_list_of_a_configuration_is_preferred_to_that_of_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    debugging.set_checked_op_list(["exp"])
    debugging.set_skipped_op_list(["exp"])
    assert findings(config(checked_op_list=["log", "exp"], skipped_op_list=[])) == ["log", "exp"]


@pytest.mark.parametrize("setter", [debugging.set_checked_op_list, debugging.set_skipped_op_list])
def test_a_wrong_operator_of_the_process_is_an_error_and_changes_nothing(
    setter: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="did you mean 'log'"):
        setter(["logg"])  # type: ignore[operator]
    assert findings(config()) == ["log", "exp"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("1.0", "0.0", "0.5"), ("1.0", "0.0", "nan"), ("orange", math.inf)),
        (("1.0", "0.0", "0.5"), ("nan", "0.0", "0.5"), ("orange", math.inf)),
        (("inf", "0.0", "0.5"), ("1.0", "0.0", "0.5"), ("orange", math.inf)),
        (("inf", "0.0", "0.5"), ("-inf", "0.0", "0.5"), ("orange", math.inf)),
        (("nan", "nan", "nan"), ("nan", "nan", "nan"), ("", 0.0)),
        (("inf", "0.0", "inf"), ("inf", "0.0", "inf"), ("", 0.0)),
    ],
)
def test_numbers_that_only_one_dump_has_finite_are_marked(
    first: tuple[str, ...], second: tuple[str, ...], expected: tuple[str, float], tmp_path: Path
) -> None:
    folders = [
        dump(tmp_path / name, ("add", "y", "fp32", 4, 0, 0, *numbers))
        for name, numbers in (("a", first), ("b", second))
    ]
    (row,) = debugging.compare_accuracy(*folders, tmp_path / "rows.csv")
    assert (row.state, row.error) == expected
