"""The first step: torch's caches on disk are used by a new process, few trial steps, and what the user sees."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from graph_backends import skip_without_compiler
from mezzo._torch.step_tier import step_tier
from mezzo.kernels import torch_operators_only
from mezzo.static import _choice, _graph, _progress
from mezzo.static._region import CastRules, casting_region


def norms() -> nn.Module:
    """Return a network with two batch norms: one call of mezzo advances both counters."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def loss_of(y: Tensor, _: Tensor) -> Tensor:
    return y.float().square().mean()


BATCH = torch.ones(2, 3, 8, 8), torch.zeros(1)


SCRIPT = """
import sys, torch, mezzo
from torch import nn
from torch._dynamo.utils import counters
from mezzo.amp import auto_cast
from mezzo.static.amp import fp16_guard

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Conv2d(i, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for i in (3, 4))

    def forward(self, x):
        if sys.argv[1] == "norms":
            return self.second(self.first(x))
        if sys.argv[1] == "region":
            with auto_cast(level="O1", dtype="bfloat16", custom_black_list=["conv2d"]):
                x = self.first(x)
        else:
            x = self.first(x)
        with fp16_guard():
            return self.second(x)

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
precision = mezzo.Precision(policy=mezzo.amp.Policy.create("O2", "bfloat16", cpu_compute=sys.argv[2]))
precision.prepare(net, optimizer)
is_guarded = sys.argv[1] == "guard"
step = precision.compile(net, lambda y, _: y.float().square().mean(), optimizer, backend="inductor", use_fp16_guard=is_guarded)
loss = step(torch.rand(2, 3, 8, 8), torch.zeros(1)).item()
print(loss, *(counters["aot_autograd"][f"autograd_cache_{word}"] for word in ("hit", "miss", "bypass")))
"""


def run(cache: Path, *arguments: str) -> tuple[float, list[int]]:
    """Train the first step in a new process; return its loss, and hits, misses and bypasses of AOTAutograd's cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    script = cache.with_name("run.py")
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    loss, *counts = done.stdout.split()
    return float(loss), list(map(int, counts))


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["norms", "region", "guard"])
def test_a_new_process_finds_the_traced_graph_in_the_cache(parts: str, tmp_path: Path) -> None:
    skip_without_compiler()
    first, counts = run(tmp_path / "cache", parts, "native")
    assert counts == [0, 1, 0], "torch refused to cache the graph"
    second, counts = run(tmp_path / "cache", parts, "native")
    assert counts == [1, 0, 0]
    assert second == first


@pytest.mark.slow
def test_a_guarded_part_with_another_policy_is_another_graph_in_the_cache(tmp_path: Path) -> None:
    skip_without_compiler()
    run(tmp_path / "cache", "guard", "native")
    _, counts = run(tmp_path / "cache", "guard", "float32")
    assert counts == [0, 1, 0]


def settings_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """Return the settings that Inductor gets."""
    found = []

    def compile_graph(module: Any, inputs: Any, settings: dict[str, Any], **_: Any) -> Any:
        found.append(settings)
        return module

    monkeypatch.setattr(_graph, "compile_graph", compile_graph)
    monkeypatch.setattr(_graph, "_usable", lambda backend: backend)
    precision = mezzo.Precision("O2", "bfloat16")
    precision.prepare(net := norms(), optimizer := torch.optim.SGD(net.parameters(), lr=0.1))
    precision.compile(net, loss_of, optimizer, backend="inductor", **options)(*BATCH)
    return found[0]


def keys_of(settings: dict[str, Any]) -> tuple[str, set[str]]:
    """Return the key of the pass, and those of mezzo's functions in the graph."""
    return settings["joint_custom_pre_pass"].uuid(), set(settings["unsafe_marked_cacheable_functions"].values())


def test_keys_of_caches_name_what_mezzo_put_into_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = keys_of(settings_of(monkeypatch))
    assert keys_of(settings_of(monkeypatch)) == plain
    with torch_operators_only():
        assert keys_of(settings_of(monkeypatch))[0] != plain[0]
    with step_tier("fused"):
        assert keys_of(settings_of(monkeypatch))[0] != plain[0]
    monkeypatch.setattr(_graph, "source_digest", lambda: "of another release")
    other = keys_of(settings_of(monkeypatch))
    assert other[0] != plain[0]
    assert other[1] != plain[1]


@pytest.mark.parametrize("use_guard", [False, True])
def test_keys_of_markers_tell_policies_apart(use_guard: bool) -> None:
    def key(dtype: str) -> str:
        with casting_region(CastRules(mezzo.amp.Policy.create("O1", dtype), use_guard)):
            return _graph._region.markers_key()

    assert key("bfloat16") == key("bfloat16") != key("float16")


# Trial steps


class FakeClock:
    """A clock that only the forms of a step move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(_choice, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def run_for(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("compiled_s", "passes"), [(1.0, 3), (9.0, 3), (3.1, 6)])
def test_forms_of_a_step_that_differ_clearly_run_two_rounds(
    compiled_s: float, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch)
    runs = {"compiled": 0, "as written": 0}

    def compile_graph(module: Any, inputs: Any, settings: Any, **_: Any) -> Any:
        def run_compiled(*args: Any) -> Any:
            runs["compiled"] += 1
            clock.run_for(compiled_s)
            return module(*args)

        return run_compiled

    monkeypatch.setattr(_graph, "compile_graph", compile_graph)
    monkeypatch.setattr(_graph, "_usable", lambda backend: backend)

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():
                runs["as written"] += 1
                clock.run_for(3.0)
            return super().forward(x)

    net = Net(4, 4)
    step = mezzo.static.compile_step(net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
    step(torch.ones(2, 4), torch.ones(2, 4))
    runs["compiled" if step.report().chosen == "compiled" else "as written"] -= 1  # the step itself
    assert runs == {"compiled": passes, "as written": passes}


# What the user sees


@pytest.fixture
def slow_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler that takes longer than the time until the first line."""

    def compile_graph(module: Any, inputs: Any, settings: Any, **_: Any) -> Any:
        time.sleep(0.3)
        return module

    monkeypatch.setattr(_graph, "compile_graph", compile_graph)
    monkeypatch.setattr(_graph, "_usable", lambda backend: backend)
    monkeypatch.setattr(_progress, "FIRST_LINE_S", 0.05)
    monkeypatch.setattr(_progress, "NEXT_LINE_S", 0.05)
    yield
    torch._dynamo.reset()


def first_step(backend: str, loss: Any = loss_of) -> None:
    net = norms()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = mezzo.static.compile_step(net, loss, optimizer, backend=backend)
    for _ in range(2):
        step(*BATCH)


@pytest.mark.usefixtures("slow_build")
@pytest.mark.parametrize(("backend", "what"), [("inductor", "compiling"), ("auto", "compiling and measuring")])
def test_lines_show_a_build_where_there_is_no_terminal(
    backend: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first_step(backend)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == ""
    assert all(line.startswith(f"{what} the training step: ") for line in lines)
    assert [line.rpartition(" s ")[2] for line in lines[:-1]] == ["so far"] * (len(lines) - 1)
    assert len(lines) >= 2
    assert "done in" in lines[-1]


@pytest.mark.usefixtures("slow_build")
@pytest.mark.parametrize("backend", ["eager", "as_written"])
def test_a_step_that_is_not_compiled_shows_nothing(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    first_step(backend, lambda y, _: (time.sleep(0.2), y.float().mean())[1])
    assert capsys.readouterr() == ("", "")


def test_a_short_build_shows_no_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_graph, "compile_graph", lambda module, *_, **__: module)
    monkeypatch.setattr(_graph, "_usable", lambda backend: backend)
    first_step("inductor")
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    """A terminal that keeps what it gets."""

    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("slow_build")
def test_a_terminal_shows_the_build_and_is_clean_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    first_step("inductor")
    shown = terminal.getvalue()
    assert "compiling the training step" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden and shown again
    assert shown.endswith("\x1b[2K")  # the line is removed
    assert "so far" not in shown


@pytest.mark.usefixtures("slow_build")
def test_an_error_while_a_step_is_built_leaves_a_clean_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_graph, "compile_graph", fail)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(KeyboardInterrupt):
        first_step("inductor")
    assert terminal.getvalue().endswith("\x1b[2K")
    assert terminal.getvalue().count("\x1b[?25h") == 1


@pytest.mark.usefixtures("slow_build")
def test_lines_appear_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console
    from rich.progress import Progress

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = Terminal()
    with Progress(console=Console(file=bar, force_terminal=True, width=100)) as progress:
        progress.add_task("epoch", total=10)
        first_step("inductor")
    assert bar.getvalue().count("\x1b[?25l") == 1
    assert "compiling the training step: done in" in bar.getvalue()
