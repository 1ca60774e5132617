"""torch.compile under a policy: the same results as eager or a clear error, in one process and across processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mezzo.amp import auto_cast, exclude_layers

POLICIES: list[dict] = [
    {},
    {"custom_black_list": ["mm"]},
    {"custom_white_list": ["softmax"]},
    {"level": "O2"},
    {"level": "OD"},
    {"dtype": "bfloat16"},
    {"enable": False},
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def function(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.mm(x, weight)
    if y.dtype is torch.float32:  # Python code that reads a dtype must be traced with the policy in force
        y = y + 1
    return torch.softmax(y, 1)


def test_a_compiled_function_follows_the_region_around_each_call() -> None:
    """R4 in one process: each change of the lists compiles again, going back re-uses what was compiled."""
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        compilations.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x, weight = torch.rand(4, 8), torch.rand(8, 8, requires_grad=True)
    for policy in (*POLICIES, *POLICIES):
        with auto_cast(**policy):
            expected, seen = function(x, weight), compiled(x, weight)
        assert seen.dtype is expected.dtype, policy
        torch.testing.assert_close(seen, expected, rtol=0, atol=0)
        ours = torch.autograd.grad(seen.float().square().sum(), weight)[0]
        torch.testing.assert_close(
            ours, torch.autograd.grad(expected.float().square().sum(), weight)[0], rtol=0, atol=0
        )
    assert len(compilations) == len(POLICIES)


def test_a_region_inside_a_compiled_function_gives_the_eager_result() -> None:
    region = auto_cast(custom_white_list=["softmax"])

    def inside(x: Tensor, weight: Tensor) -> Tensor:
        with auto_cast(custom_black_list=["mm"]):
            y = function(x, weight)
        with region:
            return y + function(x, weight)

    x, weight = torch.rand(4, 8), torch.rand(8, 8)
    compiled = torch.compile(inside, backend="aot_eager")
    expected = inside(x, weight)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, weight), expected, rtol=0, atol=0)


def test_a_region_inside_a_fullgraph_function_is_a_clear_error() -> None:
    def inside(x: Tensor) -> Tensor:
        with auto_cast():
            return torch.mm(x, x)

    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="enter the region around the call of the compiled function"
    ):
        torch.compile(inside, backend="aot_eager", fullgraph=True)(torch.rand(4, 4))


def test_a_decorated_function_called_from_a_compiled_one_gives_the_eager_result() -> None:
    decorated = auto_cast(custom_black_list=["mm"])(function)
    x, weight = torch.rand(4, 8), torch.rand(8, 8)
    compiled = torch.compile(lambda x, w: decorated(x, w) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), decorated(x, weight) * 2, rtol=0, atol=0)


def test_excluded_layers_stay_float32_in_a_compiled_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    exclude_layers(model, "1")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.rand(2, 4)
    with auto_cast():
        expected, seen = model(x), compiled(x)
    assert seen.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


SCRIPT = """
import sys, torch
from torch._dynamo.utils import counters
from mezzo.amp import auto_cast
lists = eval(sys.argv[1])
def function(x, w):
    return torch.relu(torch.mm(x, w))
compiled = torch.compile(function)
x, w = torch.rand(8, 8), torch.rand(8, 8)
with auto_cast(dtype="bfloat16", **lists):
    print(compiled(x, w).dtype, function(x, w).dtype, counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_warm_cache_on_disk_never_gives_another_policys_dtypes(tmp_path: Path) -> None:
    """R4 across processes: the same function under other lists must miss, under the same lists hit."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)

    def run(lists: dict) -> list[str]:
        command = [sys.executable, str(script), repr(lists)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        return done.stdout.split()

    assert run({}) == ["torch.bfloat16", "torch.bfloat16", "0"]
    assert run({"custom_black_list": ["mm"]}) == ["torch.float32", "torch.float32", "0"]
    assert run({}) == ["torch.bfloat16", "torch.bfloat16", "1"]
    assert run({"custom_black_list": ["mm"]}) == ["torch.float32", "torch.float32", "1"]
