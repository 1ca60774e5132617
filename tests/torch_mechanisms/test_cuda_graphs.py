"""A captured CUDA graph works in memory of its own."""

import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mezzo._torch import cuda_graphs
from mezzo._torch.cuda_graphs import capture_into

REPLAY = """
import torch
from mezzo._torch.cuda_graphs import capture_into

torch.manual_seed(0)
left, right = (torch.randn(64, 65536, device="cuda", dtype=torch.float16) / 256 for _ in range(2))  # summed in parts
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    expected = left @ right.t()  # cuBLAS gets its workspace of this stream
torch.cuda.synchronize()
with capture_into(graph, stream=stream):
    made = left @ right.t()
torch._C._cuda_clearCublasWorkspaces()  # as Inductor does when it captures
torch.cuda.empty_cache()
others = [torch.zeros(2**20, device="cuda") for _ in range(64)]  # whoever gets freed memory
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
assert torch.equal(made, expected)
assert not any(bool(other.any()) for other in others)
print("as it was")
"""


@pytest.mark.gpu
def test_a_graph_outlives_the_workspaces_of_others() -> None:
    """In a process of its own: what writes into memory that is gone ends all work on the GPU."""
    done = subprocess.run([sys.executable, "-c", REPLAY], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "as it was", done.stderr[-2000:]


@pytest.mark.parametrize("fails", [False, True])
def test_workspaces_are_forgotten_before_a_capture_and_after_it(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    seen: list[Any] = []

    @contextmanager
    def capture(graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Any:
        seen.append((graph, pool, stream))
        yield

    monkeypatch.setattr(cuda_graphs, "_forget_workspaces", lambda: seen.append("forgotten"))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    graph: Any = object()
    try:
        with capture_into(graph, pool=(0, 1)):
            seen.append("work")
            if fails:
                raise InterruptedError
    except InterruptedError:
        assert fails
    assert seen == ["forgotten", (graph, (0, 1), None), "work", "forgotten"]


@pytest.mark.gpu
def test_after_a_capture_that_failed_its_reason_is_raised_and_random_numbers_work() -> None:
    def capture_a_read() -> None:
        with capture_into(torch.cuda.CUDAGraph()):
            torch.rand(4, device="cuda").sum().item()  # not permitted while a stream is captured

    for _ in range(2):
        with pytest.raises(RuntimeError, match="not permitted"):
            capture_a_read()
        assert 0 <= torch.rand(1, device="cuda").item() < 1
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    graph = torch.cuda.CUDAGraph()
    with capture_into(graph):
        drawn = torch.rand(4, device="cuda")
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)
