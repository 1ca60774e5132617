"""The recorder counts what ran; expected numbers are derived by hand from the chain rule, not from a run."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from installed import installed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.amp import Decision, Policy, auto_cast
from mezzo.amp.debugging import (
    OperatorRow,
    OperatorStats,
    collect_operator_stats,
    disable_operator_stats_collection,
    enable_operator_stats_collection,
)


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    assert installed() == []
    yield
    assert installed() == []


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def train_once(model: nn.Module, dtype: torch.dtype, *, autocast: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = F.mse_loss(model(X.to(dtype)), Y.to(dtype))
    loss.backward()
    optimizer.step()


X, Y = torch.ones(5, 3), torch.zeros(5, 2)

# Per phase: two products and one activation forward; backward, each Linear has a weight and a bias gradient, and only
# the second an input gradient, as the data needs none; SGD adds to four parameters.
FORWARD = {"addmm": 2, "relu": 1, "mse_loss": 1}
BACKWARD = {"ones_like": 1, "mse_loss_backward": 1, "mm": 3, "sum": 2, "threshold_backward": 1}
OPTIMIZER = {"add_": 4}


def calls(stats: OperatorStats, phase: str) -> dict[str, int]:
    counter: Counter[str] = Counter()
    for row in stats.rows:
        if row.phase == phase:
            counter[row.op] += row.fp16 + row.bf16 + row.fp32 + row.other
    return dict(counter)


@pytest.mark.parametrize(
    ("dtype", "column"), [(torch.float16, 0), (torch.bfloat16, 1), (torch.float32, 2), (torch.float64, 3)]
)
def test_a_training_step_is_counted_kernel_by_kernel_in_the_column_of_its_dtype(
    dtype: torch.dtype, column: int
) -> None:
    model, x, y = Mlp().to(dtype), X.to(dtype), Y.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with collect_operator_stats(print_table=False) as stats:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert calls(stats, "forward") == FORWARD
    assert calls(stats, "backward") == BACKWARD
    assert calls(stats, "optimizer") == OPTIMIZER
    expected = {name: [0] * 4 for name in (*FORWARD, *BACKWARD, *OPTIMIZER)}
    for name, count in {**FORWARD, **BACKWARD, **OPTIMIZER}.items():
        expected[name][column] = count
    assert stats.totals() == {name: tuple(counts) for name, counts in expected.items()}
    assert list(stats.totals()) == sorted(expected)


def test_casts_of_autocast_are_counted_by_the_dtype_they_read() -> None:
    model = Mlp()
    with collect_operator_stats(print_table=False) as stats:
        train_once(model, torch.float32, autocast=True)
    # float32 is read for the data, four parameters, and in backward the gradient of the loss' input; bfloat16 for the
    # input of the loss, and in backward the gradients of four parameters.
    assert stats.totals()["_to_copy"] == (0, 5, 6, 0)
    assert stats.totals()["addmm"] == (0, 2, 0, 0)
    assert stats.totals()["mse_loss"] == (0, 0, 1, 0)
    assert stats.totals()["add_"] == (0, 0, 4, 0)


def test_a_row_tells_module_torch_level_call_and_phase() -> None:
    with collect_operator_stats(print_table=False) as stats:
        train_once(Mlp(), torch.float32)
    rows = {(row.op, row.module, row.api_op, row.phase) for row in stats.rows}
    assert ("addmm", "body.0", "linear", "forward") in rows
    assert ("relu", "body.1", "relu", "forward") in rows
    assert ("addmm", "head", "linear", "forward") in rows
    assert ("mse_loss", "", "mse_loss", "forward") in rows
    assert ("mm", "body.0", "", "backward") in rows  # the module of the forward
    assert ("mm", "head", "", "backward") in rows
    assert ("add_", "", "add_", "optimizer") in rows


@pytest.mark.parametrize(
    ("run", "op", "api_op"),
    [
        (lambda x: x + 1, "add", "add"),
        (lambda x: 1 - x, "rsub", "sub"),
        (lambda x: x == x, "eq", "eq"),
        (lambda x: 2**x, "pow", "pow"),
        (lambda x: x @ x, "mm", "matmul"),
        (lambda x: torch.ops.aten.mul.Tensor(x, x), "mul", "mul"),
        (F.gelu, "gelu", "gelu"),
        (lambda x: F.conv2d(x[None, None], x[None, None]), "convolution", "conv2d"),
        (lambda x: F.cross_entropy(x, x), "_log_softmax", "cross_entropy"),
        (lambda x: F.softmax(x, 0), "_softmax", "softmax"),
        (lambda x: F.layer_norm(x, (2,)), "native_layer_norm", "layer_norm"),
        (lambda x: F.max_pool2d(x[None], 2), "max_pool2d_with_indices", "max_pool2d"),
        (lambda x: F.interpolate(x[None, None], scale_factor=2), "upsample_nearest2d", "upsample_nearest2d"),
        (lambda x: F.normalize(x), "clamp_min", "clamp_min"),
        (lambda x: x.norm(), "linalg_vector_norm", "linalg_vector_norm"),
        (lambda x: torch.einsum("ij,kj->ik", x, x), "bmm", "einsum"),
        (lambda x: nn.MultiheadAttention(2, 1)(x, x, x), "addmm", "linear"),
    ],
)
def test_the_innermost_torch_level_call_names_the_kernel(run: Callable[[Tensor], object], op: str, api_op: str) -> None:
    x = torch.ones(2, 2)
    with collect_operator_stats(print_table=False) as stats:
        run(x)
    assert {row.api_op for row in stats.rows if row.op == op} == {api_op}


def test_composites_give_the_same_result_while_recording() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    x = torch.randn(3, 2, 8)
    expected = F.normalize(model(x)).norm(dim=-1)
    with collect_operator_stats(print_table=False):
        assert torch.equal(F.normalize(model(x)).norm(dim=-1), expected)


def test_a_tensor_subclass_keeps_its_own_override() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "mine" if func is F.mse_loss else super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2).as_subclass(Loud)
    with collect_operator_stats(print_table=False):
        assert F.mse_loss(x, x) == "mine"


def test_dtype_is_that_of_the_first_floating_input_else_of_the_output() -> None:
    half, single = torch.ones(2, dtype=torch.float16), torch.ones(2)
    index = torch.tensor([1, 0])
    with collect_operator_stats(print_table=False) as stats:
        torch.cat([half, half])
        torch._foreach_mul([single, single], 2.0)
        torch.where(index == 1, half, half)
        index.to(torch.bfloat16)
        torch.ones(2, dtype=torch.float16)
        index + index
    assert stats.raw() == {
        "_foreach_mul": "0,0,1,0",
        "_to_copy": "0,1,0,0",
        "add": "0,0,0,1",
        "cat": "1,0,0,0",
        "eq": "0,0,0,1",
        "ones": "1,0,0,0",
        "where": "1,0,0,0",
    }


def test_views_and_allocations_are_left_out_unless_asked_for() -> None:
    def run() -> None:
        torch.empty(2, 3).t().reshape(6)[0].unsqueeze_(0).detach()

    with collect_operator_stats(print_table=False) as stats, collect_operator_stats(False, include_views=True) as views:
        run()
    assert set(stats.totals()) == {"clone"}  # reshape of a transposed matrix copies
    assert {"empty", "t", "select", "unsqueeze_", "detach", "clone"} <= set(views.totals())


def test_an_operator_that_raises_is_not_counted() -> None:
    with collect_operator_stats(print_table=False) as stats:
        a, b = torch.ones(2, 3), torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            a @ b
    assert set(stats.totals()) == {"ones"}


# -- the policy's reason


class FakePolicy:
    def decide(self, op: str, input_dtypes: list[torch.dtype]) -> Decision:
        if op == "gelu":
            raise ValueError("unknown operator")
        return Decision(torch.float16, f"{op} of {len(input_dtypes)}", torch.float16)


def reasons(stats: OperatorStats) -> dict[str, str]:
    return {row.op: row.reason for row in stats.rows}


def test_the_reason_is_the_policys_for_the_torch_level_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3)
    linear = nn.Linear(3, 3)
    monkeypatch.setattr("mezzo.record._recorder.current_policy", FakePolicy)
    with collect_operator_stats(print_table=False) as stats:
        F.gelu(linear(x)).sum().backward()
    found = reasons(stats)
    assert found["addmm"] == "linear of 3"  # data, weight, bias
    assert found["gelu"] == "unlisted: torch's own rule"
    assert found["mm"] == found["gelu_backward"] == "gradient: follows the dtype of the forward"


def test_a_copy_is_a_cast_where_both_dtypes_are_floating_and_differ() -> None:
    whole, single, half = torch.ones(3, dtype=torch.int64), torch.ones(3), torch.ones(3, dtype=torch.float16)
    with collect_operator_stats(print_table=False) as stats:
        single.copy_(whole)
        whole.copy_(single)
        single.copy_(torch.ones(3))
        half.copy_(single, non_blocking=True)
        single.half()
        whole.float()
    found = [(row.source, row.target, row.api_op, row.calls, row.elements) for row in stats.casts]
    assert sorted(found) == [("float32", "float16", "copy_", 1, 3), ("float32", "float16", "half", 1, 3)]


def test_without_auto_cast_the_reason_says_so() -> None:
    with collect_operator_stats(print_table=False) as stats:
        F.gelu(torch.ones(2))
    assert reasons(stats)["gelu"] == "no auto_cast"


def test_the_policy_is_asked_about_the_variant_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy.create("O2")
    x = torch.ones(2, 3, dtype=torch.float16)
    monkeypatch.setattr("mezzo.record._recorder.current_policy", lambda: policy)
    with collect_operator_stats(print_table=False) as full:
        x.sum()
    with collect_operator_stats(print_table=False) as over_dims:
        x.sum(dim=1)
    assert reasons(full)["sum"] == policy.decide("sum.full", [torch.float16]).reason
    assert reasons(over_dims)["sum"] == policy.decide("sum.dim", [torch.float16]).reason
    assert reasons(full) != reasons(over_dims)


def test_inside_auto_cast_casts_and_kernels_carry_the_list_that_decided() -> None:
    model = Mlp()
    with collect_operator_stats(print_table=False) as stats, auto_cast(level="O1", dtype="bfloat16"):
        F.cross_entropy(model(X), Y)
    rows = {(row.op, row.module, row.reason) for row in stats.rows}
    assert {("addmm", "head", "white list"), ("_to_copy", "head", "white list")} <= rows
    assert ("_log_softmax", "", "black list") in rows


# -- on and off, exceptions, threads


def test_everything_global_is_installed_only_while_recording() -> None:
    assert installed() == []
    with collect_operator_stats(print_table=False):
        assert len(installed()) == 2 + 5  # two modes; of the hooks, the forward one stands in two tables
        with collect_operator_stats(print_table=False):
            assert len(installed()) == 2 + 5
    assert installed() == []


def test_after_an_exception_nothing_is_installed_or_printed_and_the_counts_remain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError, match="must match"), collect_operator_stats() as stats:
        torch.ones(2).add(torch.ones(3))
    assert installed() == []
    assert stats.raw() == {"ones": "0,0,2,0"}
    assert capsys.readouterr().out == ""


def test_module_paths_and_phases_survive_exceptions_of_model_and_optimizer() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("forward")

    class FailingSGD(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise KeyError("step")

    model, bad = Mlp(), nn.Sequential(nn.Identity(), Failing())
    optimizer = FailingSGD(model.parameters(), lr=0.1)
    with collect_operator_stats(print_table=False) as stats:
        for fail in (lambda: bad(X), optimizer.step):
            with pytest.raises(KeyError):
                fail()
        model(X)
        X.exp()
    assert {(row.op, row.module, row.phase) for row in stats.rows} == {
        ("addmm", "body.0", "forward"),
        ("relu", "body.1", "forward"),
        ("addmm", "head", "forward"),
        ("exp", "", "forward"),
    }


def test_a_model_run_by_the_closure_of_step_is_forward_not_optimizer() -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def closure() -> Tensor:
        out = model(X).sum()
        out.backward()
        return out

    with collect_operator_stats(print_table=False) as stats:
        optimizer.step(closure)
    assert calls(stats, "forward") == {"addmm": 2, "relu": 1}
    assert calls(stats, "backward")["mm"] == 3
    assert calls(stats, "optimizer") == {"sum": 1, "add_": 4}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_under_checkpointing_is_backward_with_the_paths_of_the_forward(use_reentrant: bool) -> None:
    class Checkpointed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=use_reentrant))

    model, x = Checkpointed(), X.clone().requires_grad_()
    with collect_operator_stats(print_table=False) as stats:
        model(x).sum().backward()
    rows = {(row.op, row.module, row.api_op, row.phase) for row in stats.rows}
    assert ("addmm", "body.0", "linear", "forward") in rows
    assert ("addmm", "body.0", "linear", "backward") in rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_python_code_of_a_custom_backward_is_named_by_its_calls(device: str) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return torch.addcmul(grad, grad, torch.ones_like(grad))

    x = torch.ones(2, requires_grad=True, device=device)
    with collect_operator_stats(print_table=False) as stats:
        Double.apply(x).sum().backward()
    assert ("addcmul", "addcmul", "backward") in {(row.op, row.api_op, row.phase) for row in stats.rows}


def test_nested_recordings_see_the_same_and_the_inner_only_its_part() -> None:
    model = Mlp()
    with collect_operator_stats(print_table=False) as outer:
        model(X)
        with collect_operator_stats(print_table=False) as inner:
            model(X).sum().backward()
        model(X)
    assert inner.totals()["addmm"] == (0, 0, 2, 0)
    assert outer.totals()["addmm"] == (0, 0, 6, 0)
    assert {row for row in inner.rows if row.phase == "backward"} == {r for r in outer.rows if r.phase == "backward"}


def test_other_threads_are_not_recorded() -> None:
    thread = threading.Thread(target=lambda: Mlp()(X).sum().backward())
    with collect_operator_stats(print_table=False) as stats:
        thread.start()
        thread.join()
        X.exp()
    assert set(stats.totals()) == {"exp"}


def test_no_count_is_lost_where_threads_count_at_once_and_somebody_reads() -> None:
    stats, half = OperatorStats(), X.half()

    def count() -> None:
        for _ in range(2000):
            stats.count(torch.ops.aten._to_copy.default, (X,), {"dtype": torch.float16}, half, phase="backward")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert stats.casts == [] or stats.casts[0].elements % X.numel() == 0
    assert stats.raw() == {"_to_copy": "0,0,8000,0"}
    assert [(row.calls, row.elements) for row in stats.casts] == [(8000, 8000 * X.numel())]


def test_ending_under_a_foreign_mode_is_an_error_that_names_it_and_can_be_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Foreign(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    enable_operator_stats_collection()
    with Foreign(), pytest.raises(RuntimeError, match="Foreign was entered after the operator statistics"):
        disable_operator_stats_collection()
    disable_operator_stats_collection()
    assert "op count: 0" in capsys.readouterr().out


# -- what is printed and returned


def test_table_has_the_documented_bytes() -> None:
    stats = OperatorStats()
    for name, column in (("mm", 0), ("add", 2), ("mm", 2), ("add", 2), ("eq", 3), ("_to_copy", 1)):
        stats.add((name, "forward", "", "", ""), column)
    blanks = " " * 16
    assert stats.table() == "\n".join(
        [
            "<" + "-" * 55 + " op list " + "-" * 56 + ">",
            "<--------------- Op Name ---------------- | -- FP16 Calls --- | -- BF16 Calls --- "
            "| --- FP32 Calls--- | -- Other Calls -->",
            "  _to_copy" + " " * 32 + f"|  0{blanks}|  1{blanks}|  0{blanks}|  0{blanks}",
            "  add" + " " * 37 + f"|  0{blanks}|  0{blanks}|  2{blanks}|  0{blanks}",
            "  eq" + " " * 38 + f"|  0{blanks}|  0{blanks}|  0{blanks}|  1{blanks}",
            "  mm" + " " * 38 + f"|  1{blanks}|  0{blanks}|  1{blanks}|  0{blanks}",
            "<" + "-" * 53 + " op count: 4 " + "-" * 54 + ">",
            "",
            "",
        ]
    )


def test_every_line_of_the_table_has_122_characters_even_with_long_names() -> None:
    stats = OperatorStats()
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"):
        stats.add((name, "forward", "", "", ""), 2)
    lines = stats.table().split("\n")
    assert lines[-2:] == ["", ""]
    assert {len(line) for line in lines[:-2]} == {122}
    assert len(set(lines[2:4])) == 2


def test_raw_and_dict_give_the_same_as_the_totals_and_survive_json() -> None:
    with collect_operator_stats(print_table=False) as stats:
        torch.ones(2).exp()
    assert stats.raw() == {"exp": "0,0,1,0", "ones": "0,0,1,0"}
    data = json.loads(json.dumps(stats.to_dict()))
    assert data["op_count"] == 2
    assert data["totals"]["exp"] == {"fp16": 0, "bf16": 0, "fp32": 1, "other": 0}
    assert [OperatorRow(**row) for row in data["rows"]] == stats.rows


def test_collect_prints_the_table_once_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with collect_operator_stats() as stats:
        torch.ones(2)
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out == stats.table()


def test_enable_clears_and_starts_and_disable_prints_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    disable_operator_stats_collection()
    assert capsys.readouterr().out == ""
    enable_operator_stats_collection()
    torch.ones(2)
    enable_operator_stats_collection()
    torch.zeros(2).exp()
    disable_operator_stats_collection()
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[2:4]] == ["exp", "zeros"]
    assert " op count: 2 " in printed
    torch.ones(2)
    disable_operator_stats_collection()
    assert capsys.readouterr().out == ""


def test_enable_inside_a_collection_outlives_it(capsys: pytest.CaptureFixture[str]) -> None:
    with collect_operator_stats(print_table=False):
        enable_operator_stats_collection()
    torch.ones(2)
    disable_operator_stats_collection()
    assert "  ones  " in capsys.readouterr().out


@pytest.mark.gpu
def test_the_backward_threads_of_cuda_are_recorded() -> None:
    model, x, y = Mlp().cuda(), X.cuda(), Y.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with collect_operator_stats(print_table=False) as stats:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert calls(stats, "forward") == FORWARD
    assert calls(stats, "backward") == BACKWARD
    assert calls(stats, "optimizer") == OPTIMIZER
    assert {row.api_op for row in stats.rows if row.op == "mm"} == {""}


@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_code_is_counted_as_eager_code_and_runs_compiled_again_afterwards(compiled_before: bool) -> None:
    runs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        def run(*args: Tensor) -> object:
            runs.append(graph)
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda x: F.gelu(x) + 1, backend=backend)
    if compiled_before:
        compiled(X)
    with collect_operator_stats(print_table=False) as stats:
        compiled(X)
    assert stats.raw() == {"add": "0,0,1,0", "gelu": "0,0,1,0"}
    assert len(runs) == compiled_before
    compiled(X)
    assert len(runs) == compiled_before + 1
