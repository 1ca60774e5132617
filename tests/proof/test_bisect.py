"""Faults are planted, and found: by an overflow, by rounding, in modules, in operators, in a module's own code."""

import copy
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mezzo import amp
from mezzo.proof import Bisection, Evaluation, bisect, bisect_run

WIDTH = 8


class Layer(nn.Linear):
    """A residual layer; a planted one goes through values above 65504, the largest of float16."""

    def __init__(self, is_bad: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.factor = 1e6 if is_bad else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * (super().forward(x) * self.factor / self.factor)


class Rounded(nn.Linear):
    """A layer whose result is a small difference of large numbers: nothing overflows, float16 loses the digits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 2048.0 - 2048.0  # above 2048 the step of float16 is 2


def net_with(*planted: int, count: int = 50) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(index in planted) for index in range(count)))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator)


def losses(model: nn.Module, steps: int, level: str, lists: Path | None = None) -> list[float]:
    """Train as a user does, by the list file or without."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.decorate(model, optimizer, level=level)
    keywords = {} if lists is None else amp.read_lists(lists, model=model)
    scaler = amp.GradScaler()
    inputs, targets = batch()
    found = []
    for _ in range(steps):
        with amp.auto_cast(level=level, **keywords):
            loss = mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("planted", [(7,), (3, 30), (0, 25, 49)])
def test_planted_modules_of_a_net_of_fifty_are_found_in_fewer_than_60_evaluations_and_their_list_lets_it_train(
    planted: tuple[int, ...], level: str, tmp_path: Path
) -> None:
    found = bisect(net_with(*planted), *batch(), mse_loss, metric="finite", level=level, steps=2)
    assert found.kept == tuple(map(str, planted))
    assert (found.outcome, found.is_minimal) == ("found", True)
    assert len(found.evaluations) < 60
    assert len(found.evaluations) <= 2 + len(planted) * (math.ceil(math.log2(50)) + 2)
    assert (found.value_without, found.value_with, found.value_all) == (2, 0, 0)
    found.write(tmp_path / "fp32.yml")
    assert not any(map(math.isfinite, losses(net_with(*planted), 3, level)))
    trained = losses(net_with(*planted), 8, level, tmp_path / "fp32.yml")
    assert all(map(math.isfinite, trained))
    assert trained[-1] < trained[0]


def test_at_od_results_are_float32_and_the_same_modules_do_not_overflow() -> None:
    found = bisect(net_with(3, count=6), *batch(), mse_loss, metric="finite", level="OD", steps=2)
    assert found.outcome == "nothing needed"


def test_at_od_an_operand_above_the_range_is_found() -> None:
    class Large(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 1e6) / 1e6

    model = nn.Sequential(Layer(False), Large(WIDTH, WIDTH), Layer(False))
    assert bisect(model, *batch(), mse_loss, metric="finite", level="OD", steps=1).kept == ("1",)


@pytest.mark.parametrize("metric", ["loss", "output"])
def test_a_module_that_rounds_is_found_by_the_distance_from_float32(metric: str) -> None:
    model = net_with(count=12)
    torch.manual_seed(5)
    model[4] = Rounded(WIDTH, WIDTH)
    found = bisect(model, *batch(), mse_loss, metric=metric, level="O2", steps=3)
    assert found.kept == ("4",)
    assert found.tolerance < found.value_without < math.inf
    assert found.value_with <= found.tolerance
    finite = bisect(model, *batch(), mse_loss, metric="finite", level="O2", steps=3)
    assert finite.outcome == "nothing needed"
    assert len(finite.evaluations) == 1


@pytest.mark.parametrize(("level", "ops"), [("O1", ("mul",)), ("O2", ("mul",))])
def test_operators_are_found_and_their_list_lets_it_train(level: str, ops: tuple[str, ...], tmp_path: Path) -> None:
    """The float32 product makes the quotient float32, so that one name is enough."""
    found = bisect(net_with(2, count=6), *batch(), mse_loss, by="ops", level=level, steps=2)
    assert found.kept == ops
    assert "linear" in found.candidates
    assert "mse_loss" not in found.candidates  # a loss is float32 as it is
    found.write(tmp_path / "fp32.yml")
    assert yaml.safe_load((tmp_path / "fp32.yml").read_text()) == {"custom_black_list": list(ops)}
    assert all(map(math.isfinite, losses(net_with(2, count=6), 3, level, tmp_path / "fp32.yml")))


def test_operators_are_told_apart_from_the_group_of_their_name() -> None:
    class Products(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y += 1e5 * x  # in place: overflows under add_, for which lists say add
            return torch.matmul(y, self.weight)

    found = bisect(Products(WIDTH, WIDTH), *batch(), mse_loss, by="ops", level="O1", steps=1)
    assert {"aten::matmul", "linear"} <= set(found.candidates)


class Attended(nn.Module):
    """Computes between its children; that is where it overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.mm(self.query(x) * 1e6, self.key(x).t() @ self.key(x)) / 1e6


def test_a_parents_own_code_is_tried_when_all_modules_without_modules_inside_do_not_help() -> None:
    model = nn.Sequential(Layer(False), Attended(), Layer(True))
    found = bisect(model, *batch(), mse_loss, metric="finite", level="O2", steps=1)
    assert found.candidates == ("0", "1.query", "1.key", "2", "1")
    assert found.kept == ("2", "1")
    assert found.is_minimal
    leaves = next(one for one in found.evaluations if one.kept == ("0", "1.query", "1.key", "2"))
    assert not leaves.passed


def test_the_culprit_is_named_and_not_the_layer_before_it() -> None:
    """At O1 a float32 result before the product would keep the product from overflowing."""

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 1e6 / 1e6

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale(), nn.Linear(WIDTH, WIDTH))
    assert bisect(model, *batch(), mse_loss, level="O1", steps=1).kept == ("1",)


def test_what_fails_in_float32_too_is_not_blamed_on_the_precision() -> None:
    class Zero(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 0

    for metric in ("loss", "finite", "output"):
        found = bisect(nn.Sequential(Zero(WIDTH, WIDTH), Layer(False)), *batch(), mse_loss, metric=metric)
        assert found.outcome == "not the cause"
        assert not found.has_answer
        assert found.kept == ()
        assert "precision is not the cause" in found.summary()
        assert "with all 2 modules in float32" in found.summary()
    with pytest.raises(ValueError, match="precision is not the cause"):
        found.to_lists()


def test_out_of_evaluations_the_set_still_passes_and_says_that_fewer_may_do(tmp_path: Path) -> None:
    found = bisect(net_with(10, 20), *batch(), mse_loss, metric="finite", steps=1, max_evaluations=5)
    assert len(found.evaluations) == 5
    assert (found.outcome, found.is_minimal) == ("out of evaluations", False)
    assert {"10", "20"} < set(found.kept)
    assert found.value_with == 0
    assert "5 evaluations were not enough" in found.summary()
    assert " more (steps not finite 1 without" in found.summary()
    found.write(tmp_path / "fp32.yml")
    assert yaml.safe_load((tmp_path / "fp32.yml").read_text()) == {"excluded_layers": list(found.kept)}


def test_a_step_that_only_the_loss_scale_makes_overflow_is_repeated_and_no_fault() -> None:
    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        return 100 * mse_loss(output, targets)  # gradients above 65504 at the first scale, 2**15

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    inputs, targets = batch()
    found = bisect(model, 10 * inputs, targets, loss_fn, level="O2", learning_rate=1e-5)
    assert found.outcome == "nothing needed"


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(self.layer(x.add_(random.random() + np.random.rand()))), 0.5)


def test_model_batch_and_random_states_stay_as_they_are_and_runs_see_the_same_random_numbers() -> None:
    model = Dropped().eval()
    inputs, targets = batch()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    kept_inputs = inputs.clone()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = bisect(model, inputs, targets, mse_loss)
    second = bisect(model, inputs, targets, mse_loss)
    assert first == second
    assert first.value_without < 0.03, "other random numbers would be a large distance"
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(inputs, kept_inputs)
    assert all(param.grad is None for param in model.parameters())


def test_a_decorated_model_starts_from_its_masters() -> None:
    plain = net_with(3, count=6)
    decorated = amp.decorate(copy.deepcopy(plain), level="O2")
    expected = bisect(plain, *batch(), mse_loss, level="O2", steps=2)
    assert expected.kept == ("3",)
    assert bisect(decorated, *batch(), mse_loss, level="O2", steps=2) == expected
    assert decorated[0].weight.dtype is torch.float16


def test_what_is_excluded_already_stays_so() -> None:
    model = net_with(1, 4, count=6)
    amp.exclude_layers(model, "4")
    found = bisect(model, *batch(), mse_loss, level="O2", steps=2)
    assert found.kept == ("1",)
    assert "4" not in found.candidates


def test_candidates_can_be_chosen_and_the_first_is_preferred() -> None:
    model = nn.Sequential(nn.Sequential(Layer(True)), Layer(False))
    for names in (["0", "0.0"], ["0.0", "0"]):
        found = bisect(model, *batch(), mse_loss, level="O2", steps=1, candidates=names)
        assert found.kept == (names[0],)
    with pytest.raises(ValueError, match=r"candidates: the model has no module '0\.00'; did you mean '0\.0'\?"):
        bisect(model, *batch(), mse_loss, candidates=["0.00"])
    with pytest.raises(ValueError, match="has no module 'zzz'; dict"):
        bisect(model, *batch(), mse_loss, candidates=["zzz"])
    with pytest.raises(ValueError, match="unknown operator 'sofmax'; did you mean 'softmax'"):
        bisect(model, *batch(), mse_loss, by="ops", candidates=["sofmax"])


def test_a_module_with_a_name_that_looks_like_a_pattern_is_written_so_that_it_means_itself(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("a[1]", Layer(True))
    model.add_module("a1", Layer(False))
    bisect(model, *batch(), mse_loss, level="O2", steps=1).write(tmp_path / "fp32.yml")
    amp.read_lists(tmp_path / "fp32.yml", model=model)
    assert [row.name for row in amp.explain(model, level="O2").rows if row.reason == "excluded layer"] == ["a[1]"]


def test_output_looks_at_every_floating_tensor_and_needs_no_loss() -> None:
    class Two(nn.Sequential):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"classes": x.argmax(-1), "logits": (super().forward(x), x)}

    found = bisect(Two(Layer(True), Layer(False)), batch()[0], metric="output", level="O2")
    assert found.kept == ("0",)


def test_bfloat16_has_the_range_and_needs_no_list() -> None:
    found = bisect(net_with(2, count=6), *batch(), mse_loss, level="O2", dtype=torch.bfloat16, steps=2)
    assert found.outcome == "nothing needed"
    assert found.tolerance == 0.05
    assert found.summary().startswith("nothing must stay in float32: loss difference ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "layers"}, "unknown by 'layers'; allowed: modules, ops"),
        ({"metric": "los"}, "unknown metric 'los'; did you mean 'loss'"),
        ({"level": "O0"}, "level='O0': must be one of OD, O1, O2"),
        ({"dtype": "float32"}, "float32"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: must be above 0"),
        ({"tolerance": -1.0}, "tolerance=-1.0: must be at least 0"),
        ({"tolerance": math.nan}, "tolerance=nan: must be at least 0"),
        ({"max_evaluations": 2}, "max_evaluations=2: must be at least 3"),
        ({"loss_fn": None}, "metric='loss' trains the model: pass loss_fn"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(options: dict[str, object], message: str) -> None:
    inputs, targets = batch()
    with pytest.raises(ValueError, match=message):
        bisect(net_with(count=1), inputs, targets, **{"loss_fn": mse_loss, **options})  # type: ignore[arg-type]


def test_a_model_without_weights_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        bisect(net_with(count=1).requires_grad_(False), *batch(), mse_loss)


def test_an_output_without_numbers_is_refused() -> None:
    class Classes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    with pytest.raises(ValueError, match="metric='output': the model returns Tensor without a floating tensor"):
        bisect(Classes(WIDTH, WIDTH), batch()[0], metric="output")


def test_an_own_training_is_searched_the_same_way(tmp_path: Path) -> None:
    heard: list[tuple[Evaluation, int]] = []

    def run(kept: frozenset[str]) -> float:
        return 0.01 if {"exp", "sum"} <= kept else math.nan

    names = ["add", "exp", "mul", "sum", "softmax"]
    found = bisect_run(run, names, 0.05, by="ops", metric="accuracy lost", progress=lambda *told: heard.append(told))
    assert found.kept == ("exp", "sum")
    assert heard == [(one, 60) for one in found.evaluations]
    assert [one.number for one in found.evaluations] == list(range(1, len(found.evaluations) + 1))
    assert found.table()[:2] == [["run", "ops in float32", "accuracy lost", "passed"], ["1", "0", "nan", "no"]]
    found.write(tmp_path / "lists.yml")
    assert amp.read_lists(tmp_path / "lists.yml") == {"custom_black_list": ["exp", "sum"]}


def test_plain_data_is_strict_json() -> None:
    found = bisect_run(lambda kept: 0.0 if kept else math.inf, ["a"], 0.0)
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["value_without"] is None
    assert data["evaluations"][0] == {"number": 1, "kept": [], "value": None, "passed": False}
    assert data["kept"] == ["a"]


def test_nothing_needed_is_an_empty_list_that_can_be_read(tmp_path: Path) -> None:
    found = bisect_run(lambda kept: 0.0, ["a"], 0.0)
    found.write(tmp_path / "lists.yml")
    assert amp.read_lists(tmp_path / "lists.yml") == {}
    assert isinstance(found, Bisection)
    assert found.has_answer


def test_the_whole_model_has_a_name_in_words() -> None:
    assert ": the whole model (" in bisect_run(lambda kept: float(not kept), [""], 0.0).summary()


def test_dropout_layers_are_off_in_the_copies_and_stay_on_in_the_model() -> None:
    seen: list[float] = []

    class Watched(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.p)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Watched(0.5))
    bisect(model, *batch(), mse_loss, steps=1)
    assert set(seen) == {0.0}
    assert model[1].p == 0.5


@pytest.mark.gpu
def test_on_a_gpu_dropout_layers_are_not_taken_for_rounding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, WIDTH)).cuda()
    inputs, targets = (part.cuda() for part in batch())
    assert (
        bisect(model, inputs, targets, mse_loss, level="O2").value_without < 1e-2
    )  # with masks that differ it is larger


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["modules", "ops"])
def test_on_a_gpu_planted_modules_are_found_and_copies_of_the_model_do_not_pile_up(by: str) -> None:
    torch.manual_seed(0)
    wide = nn.Linear(2048, 2048)
    model = nn.Sequential(nn.Linear(WIDTH, 2048), wide, nn.Linear(2048, WIDTH), *net_with(3, count=12)).cuda()
    model.whole = [model]  # refers to itself, so that its copies are not freed by counting
    state = torch.cuda.get_rng_state()
    inputs, targets = (part.cuda() for part in batch())
    for level in ("O1", "O2"):
        held: list[int] = []
        found = bisect(
            model, inputs, targets, mse_loss, by=by, level=level, steps=2,
            progress=lambda one, most, held=held: held.append(torch.cuda.memory_allocated()),
        )  # fmt: skip
        assert found.kept == (("6",) if by == "modules" else ("mul",))
        # the wide layer in half or in float32, its gradient, a product's workspace at the first call; a copy has 1.5 and more
        assert max(held[1:]) - min(held[1:]) <= 1.5 * 4 * wide.weight.numel()
        assert len(held) >= 5
    assert torch.equal(torch.cuda.get_rng_state(), state)
