"""`GLOG_v=5` shows the operators of the first region, once, and never disturbs what runs."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from mezzo import amp, record, static
from mezzo.amp.debugging import collect_operator_stats, glog_asks_for_operators, operator_log, tensor_checker
from mezzo.proof import run_at

HEADING = "GLOG_v=5: operators and dtypes in the forward pass of the first auto_cast region"
Rows = dict[str, list[int]]


@pytest.fixture(autouse=True)
def new_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has seen no region yet; `GLOG_v` is 5."""
    monkeypatch.setenv("GLOG_v", "5")
    operator_log.reset()
    yield
    assert operator_log.recording is None, "the test left a recording open"
    monkeypatch.undo()
    operator_log.reset()


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().out


def region(**options: object) -> amp.auto_cast:
    """Return a region whose products are computed in bfloat16 on any CPU."""
    return amp.auto_cast(dtype="bfloat16", cpu_compute="native", **options)


def rows(text: str) -> Rows:
    """Return the calls in float16, bfloat16, float32 and other dtypes by operator."""
    cells = [line.split("|") for line in text.splitlines() if line.startswith("  ") and "|" in line]
    return {name.strip(): [int(count) for count in counts] for name, *counts in cells}


def forward(size: int = 4) -> Tensor:
    return nn.Linear(size, size)(torch.ones(2, size)).sum()


def test_first_region_is_printed_once_under_a_heading_that_tells_how_to_see_more(
    printed: Callable[[], str],
) -> None:
    for _ in range(3):
        with region():
            loss = forward()
        loss.backward()
    text = printed()
    heading, hint, table = text.split("\n", 2)
    assert heading == HEADING
    assert "collect_operator_stats" in hint
    assert table.startswith("<")
    assert text.count("op list") == 1
    assert rows(text)["addmm"] == [0, 1, 0, 0]
    assert "mm" not in rows(text), "the backward runs after the region"


@pytest.mark.parametrize("value", [None, "", "0", "4", "-5", "five", "5.0"])
def test_nothing_is_recorded_or_printed_unless_the_level_is_5(
    value: str | None, printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("GLOG_v")
    else:
        monkeypatch.setenv("GLOG_v", value)
    assert not glog_asks_for_operators()
    with region():
        forward()
        assert _get_current_dispatch_mode() is None
    assert printed() == ""


@pytest.mark.parametrize("value", ["0", "5"])
def test_environment_is_read_once_whatever_it_says(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setenv("GLOG_v", value)
    monkeypatch.setattr(
        "mezzo.amp._operator_log.glog_asks_for_operators", lambda: asked.append(True) or glog_asks_for_operators()
    )
    for _ in range(3):
        with region():
            forward()
    assert asked == [True]
    assert not operator_log.is_pending, "later regions test this one flag and do nothing else"


@pytest.mark.parametrize("is_same_object", [True, False])
def test_outermost_of_nested_regions_is_recorded_to_its_end(is_same_object: bool, printed: Callable[[], str]) -> None:
    outer = region()
    with outer:
        with outer if is_same_object else region(level="O2"):
            forward()
        assert printed() == ""
        torch.ones(2).exp()
    assert {"addmm", "exp"} <= set(rows(printed()))


def test_enabled_region_inside_a_disabled_one_is_the_first(printed: Callable[[], str]) -> None:
    with amp.auto_cast(enable=False), amp.auto_cast(level="O0"):
        forward()
        with region():
            torch.ones(2).exp()
        assert set(rows(printed())) == {"exp", "ones"}


def test_decorated_function_is_a_region_too(printed: Callable[[], str]) -> None:
    region()(forward)()
    assert "addmm" in rows(printed())


def test_region_without_an_operator_leaves_its_turn_to_the_next(printed: Callable[[], str]) -> None:
    with region():
        pass
    assert printed() == ""
    with region():
        forward()
    assert "addmm" in rows(printed())


def test_statistics_of_the_user_take_the_place_of_the_table(printed: Callable[[], str]) -> None:
    with collect_operator_stats(), region():
        forward()
    text = printed()
    assert text.count("op list") == 1
    assert HEADING not in text
    with region():
        forward()
    assert printed() == ""


def test_another_listener_of_the_recorder_does_not_keep_the_table_away(printed: Callable[[], str]) -> None:
    with tensor_checker(), region():
        forward()
    assert rows(printed())["addmm"] == [0, 1, 0, 0]


def test_exception_of_the_region_passes_and_the_next_region_is_recorded(printed: Callable[[], str]) -> None:
    def fail() -> None:
        with region():
            forward()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert printed() == ""
    assert _get_current_dispatch_mode() is None
    with region():
        forward()
    assert "addmm" in rows(printed())


def test_recorder_that_cannot_start_is_a_warning(printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no recorder today")

    monkeypatch.setattr(record, "listening", refuse)
    with pytest.warns(UserWarning, match="no recorder today"), region():
        assert forward().isfinite()
    assert printed() == ""


def test_recorder_that_cannot_start_is_silent_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "listening", lambda *_: 1 / 0)
    with region():  # pytest makes warnings errors here
        assert forward().isfinite()


def test_output_that_is_closed_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, _: str) -> int:
            raise BrokenPipeError("closed")

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.warns(UserWarning, match="closed"), region():
        forward()
    assert _get_current_dispatch_mode() is None


def test_mode_that_is_left_after_the_region_delays_the_table_by_a_region(printed: Callable[[], str]) -> None:
    mode, first = TorchDispatchMode(), region()
    with pytest.warns(UserWarning, match="TorchDispatchMode was entered"), first:
        mode.__enter__()
    mode.__exit__(None, None, None)
    assert printed() == ""
    with region():
        forward()
    assert "addmm" in rows(printed())
    assert _get_current_dispatch_mode() is None


def test_regions_of_other_threads_neither_end_the_recording_nor_count(printed: Callable[[], str]) -> None:
    def other() -> None:
        with region():
            torch.ones(2).exp()

    with region():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        forward()
    text = printed()
    assert text.count("op list") == 1
    assert "addmm" in rows(text)
    assert "exp" not in rows(text)


@pytest.mark.parametrize(("rank", "tables"), [(0, 1), (1, 0)])
def test_first_of_several_processes_prints(
    rank: int, tables: int, printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    for _ in range(2):
        with region():
            forward()
    assert printed().count("op list") == tables


# -- places where nothing can be recorded


def test_region_inside_a_compiled_function_is_left_alone_and_the_next_is_recorded(
    printed: Callable[[], str],
) -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x.exp()

    @torch.compile(backend=backend)
    def step(x: Tensor) -> Tensor:
        with region():
            return inner(x)

    step(torch.ones(2))
    assert "exp" in compiled, "Dynamo gives up a function that it meets under a recording"
    assert printed() == ""
    with region():
        forward()
    assert "addmm" in rows(printed())


def test_region_over_fake_tensors_is_left_alone(printed: Callable[[], str]) -> None:
    with FakeTensorMode(), region():
        forward()
    assert printed() == ""
    assert operator_log.is_pending


def test_traced_region_is_left_alone(printed: Callable[[], str]) -> None:
    def run(x: Tensor) -> Tensor:
        with region():
            return x @ x

    torch.jit.trace(run, torch.ones(2, 2), check_trace=False)
    assert printed() == ""
    assert operator_log.is_pending


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_step_of_graph_mode_is_left_alone(backend: str, printed: Callable[[], str]) -> None:
    net = nn.Linear(4, 4)
    step = static.compile_step(
        net,
        nn.functional.mse_loss,
        torch.optim.SGD(net.parameters(), lr=0.1),
        policy=amp.Policy.create("O1", "bfloat16"),
        backend=backend,
    )
    step(torch.ones(2, 4), torch.ones(2, 4))
    assert printed() == ""
    assert operator_log.is_pending


@pytest.mark.gpu
def test_region_under_capture_of_a_cuda_graph_is_left_alone(printed: Callable[[], str]) -> None:
    layer, x = nn.Linear(16, 16).cuda(), torch.ones(8, 16, device="cuda")
    with torch.no_grad(), amp.auto_cast(enable=False):
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad(), region():
        layer(x)
    graph.replay()
    assert printed() == ""
    with region():
        layer(x)
    assert rows(printed())["addmm"] == [0, 1, 0, 0]


def test_regions_of_mezzos_own_tools_are_not_the_first(printed: Callable[[], str]) -> None:
    run_at(nn.Linear(4, 4), torch.ones(2, 4), torch.ones(2, 4), nn.functional.mse_loss, dtype="bfloat16")
    assert printed() == ""
    assert operator_log.is_pending


# -- programs

LOOP = """
import torch
from mezzo import amp

net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    with amp.auto_cast(dtype="bfloat16", cpu_compute="native"):
        if step == 0 and {compiles}:
            net = torch.compile(net.forward, backend="eager", fullgraph=True)
        loss = net(torch.ones(2, 8)).square().mean()
    loss.backward()
    optimizer.step()
"""


def run_program(tmp_path: Path, *, compiles: bool = False, **environment: str) -> str:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.format(compiles=compiles), encoding="utf-8")
    inherited = {name: value for name, value in os.environ.items() if name != "GLOG_v"}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_program_started_with_the_variable_shows_its_matrix_product_in_bfloat16(tmp_path: Path) -> None:
    text = run_program(tmp_path, GLOG_v="5")
    assert text.count(HEADING) == 1
    assert rows(text)["addmm"] == [0, 1, 0, 0]


def test_program_that_compiles_inside_the_first_region_still_runs(tmp_path: Path) -> None:
    assert rows(run_program(tmp_path, compiles=True, GLOG_v="5"))["addmm"] == [0, 1, 0, 0]


def test_program_started_without_the_variable_prints_nothing(tmp_path: Path) -> None:
    assert run_program(tmp_path) == ""
