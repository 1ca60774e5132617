"""What a recording keeps, and that it leaves nothing behind."""

import copy
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accuracy_nets import batch, cross_entropy, network, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo import amp
from mezzo.proof import AccuracyRun, compare_accuracy, record_run, run_at


def call_of(found: AccuracyRun, path: str, occurrence: int = 1) -> Any:
    (call,) = [call for call in found.calls if (call.path, call.occurrence) == (path, occurrence)]
    return call


def value_of(found: AccuracyRun, path: str) -> Tensor:
    return whole(call_of(found, path).outputs[0].value)


def whole(record: Any) -> Tensor:
    assert not record.is_sampled
    return record.values.reshape(record.shape)


def step_of(model: nn.Module, x: Tensor) -> Any:
    return lambda: model(x).square().mean().backward()


def test_outputs_and_gradients_are_those_of_autograd() -> None:
    model, (x, labels) = network(act=nn.Tanh()), batch()
    hidden = model.encoder(x)
    hidden.retain_grad()
    active = model.act(hidden)
    loss = cross_entropy(model.head(active), labels)
    loss.backward()
    wanted = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()

    def step() -> Tensor:
        loss = cross_entropy(model(x), labels)
        loss.backward()
        return loss

    found = record_run(model, step, name="plain")
    assert (found.name, found.loss, found.dtype) == ("plain", loss.item(), "float32")
    assert torch.equal(value_of(found, "encoder"), hidden)
    assert torch.equal(value_of(found, "act"), active)
    assert torch.equal(whole(call_of(found, "encoder").outputs[0].grad), hidden.grad)
    assert {each.name: whole(each.grad).tolist() for each in found.parameters} == {
        name: grad.tolist() for name, grad in wanted.items()
    }


def test_calls_come_in_the_order_in_which_they_end_and_know_their_inner_calls() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 4))
    found = record_run(model, step_of(model, batch()[0]))
    assert [call.path for call in found.calls] == ["0.0", "0.1", "0", "1", ""]
    assert call_of(found, "0").inner == (0, 1)
    assert call_of(found, "").inner == (2, 3)
    assert [call.outputs[0].is_passed_on for call in found.calls] == [False, False, True, False, True]
    orders = {call.path: call.outputs[0].grad_order for call in found.calls}
    assert orders[""] == orders["1"] < orders["0"] == orders["0.1"] < orders["0.0"]


def test_gradients_are_divided_by_the_loss_scale() -> None:
    model, (x, _) = network(), batch()
    plain = record_run(model, step_of(model, x))
    model.zero_grad()
    scaled = record_run(model, lambda: (model(x).square().mean() * 1024).backward(), loss_scale=1024)
    for one, other in zip(plain.parameters, scaled.parameters, strict=True):
        assert torch.equal(one.grad.values, other.grad.values), "a power of two moves exponents alone"
        assert one.grad.max_abs == other.grad.max_abs
    assert torch.equal(plain.calls[0].outputs[0].grad.values, scaled.calls[0].outputs[0].grad.values)


def test_the_scale_is_read_from_a_scaler_before_the_step() -> None:
    model, (x, _) = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp.GradScaler(init_loss_scaling=256.0, incr_every_n_steps=1)

    def step() -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert record_run(model, step, loss_scale=scaler).loss_scale == 256.0
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_no_positive_number_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=f"loss_scale={scale}: must be a positive number"):
        record_run(network(), lambda: None, loss_scale=scale)


def test_a_sample_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_elements=0: must be at least 1"):
        record_run(network(), lambda: None, max_elements=0)


@pytest.mark.parametrize(
    ("loss", "what"), [("x", "str"), (torch.ones(2, 3), r"a tensor of shape \(2, 3\)"), (True, "bool")]
)
def test_what_is_no_loss_is_refused(loss: object, what: str) -> None:
    with pytest.raises(TypeError, match=f"step returned {what}"):
        record_run(network(), lambda: loss)


def test_a_step_that_calls_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match="called no module of the model"):
        record_run(network(), lambda: 1.0)


def test_a_module_that_works_in_place_leaves_the_output_before_it_as_it_was() -> None:
    model = network(act=nn.ReLU(inplace=True))
    plain = network(act=nn.ReLU())
    one, other = run(model), run(plain)
    assert (value_of(one, "encoder") < 0).any()
    for path in ("encoder", "act", "head"):
        assert torch.equal(value_of(one, path), value_of(other, path))
    assert not call_of(one, "act").outputs[0].is_passed_on
    pairs = zip(one.calls, other.calls, strict=True)
    assert all(torch.equal(a.outputs[0].grad.values, b.outputs[0].grad.values) for a, b in pairs)


def test_in_place_changes_are_seen_in_inference_mode_too() -> None:
    model = network(act=nn.ReLU(inplace=True))

    def step() -> None:
        with torch.inference_mode():
            model(batch()[0])

    found = record_run(model, step)
    assert (value_of(found, "encoder") < 0).any()
    assert (value_of(found, "act") >= 0).all()
    assert found.parameters == ()


@dataclass
class Answer:
    logits: Tensor
    count: int


Pair = namedtuple("Pair", "left right")


class Many(nn.Module):
    """Returns what networks return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, factor: Tensor) -> Any:
        y = self.layer(x)
        return OrderedDict(a=Answer(y * factor, 3), b=[y + 1, y.argmax(-1)], c=Pair(y, None), d=torch.complex(y, y))


def test_tensors_are_found_in_whatever_a_module_returns() -> None:
    model, (x, _) = Many(), batch()

    def step() -> None:
        answer = model(x, factor=torch.tensor(2.0))
        (answer["a"].logits.sum() + answer["b"][0].sum() + answer["c"].left.sum()).backward()

    call = call_of(record_run(model, step), "")
    assert [output.place for output in call.outputs] == ["['a'].logits", "['b'][0]", "['c'].left", "['d']"]
    assert [output.is_passed_on for output in call.outputs] == [False, False, True, False]
    assert call.outputs[3].value.shape == (32, 4, 2), "a complex number is two"
    assert len(call.inputs) == 2, "named arguments are inputs too"


def test_a_class_in_a_result_is_no_value() -> None:
    class WithClass(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), Answer

    model, (x, _) = WithClass(16, 4), batch()
    call = call_of(record_run(model, lambda: model(x)[0].sum().backward()), "")
    assert [output.place for output in call.outputs] == ["[0]"]


def test_a_sparse_gradient_is_kept_as_a_dense_one() -> None:
    model = nn.Embedding(8, 3, sparse=True)
    found = record_run(model, lambda: model(torch.tensor([1, 1, 5])).sum().backward())
    assert whole(found.parameters[0].grad).sum(1).tolist() == [0, 6, 0, 0, 0, 3, 0, 0]


def test_a_module_that_is_called_twice_has_two_calls() -> None:
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    found = record_run(model, step_of(model, batch()[0]))
    assert [(call.path, call.occurrence) for call in found.calls] == [("0", 1), ("1", 1), ("0", 2), ("", 1)]
    assert len(found.parameters) == 2


def test_what_is_computed_again_in_the_backward_is_not_recorded_again() -> None:
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    found = record_run(model, step_of(model, batch()[0]))
    assert [call.path for call in found.calls] == ["inner.0", "inner.1", "inner", ""]
    assert all(call.outputs[0].grad is not None for call in found.calls)


def test_a_call_that_raised_and_was_caught_is_left_out() -> None:
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrong, self.right = nn.Linear(3, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.wrong(x)
            except RuntimeError:
                return self.right(x)

    model = Careful()
    found = record_run(model, step_of(model, batch()[0]))
    assert [call.path for call in found.calls] == ["right", ""]


def hooks_of(model: nn.Module) -> int:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    on_modules = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    return on_modules + sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())


def test_hooks_are_gone_after_a_step_and_after_an_error() -> None:
    model, (x, _) = network(), batch()
    record_run(model, step_of(model, x))
    assert hooks_of(model) == 0

    def fail() -> None:
        assert hooks_of(model) > 0
        model(x)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        record_run(model, fail)
    assert hooks_of(model) == 0


def test_a_graph_that_outlives_the_recording_is_not_listened_to() -> None:
    model, (x, _) = network(), batch()
    kept: list[Tensor] = []
    found = record_run(model, lambda: kept.append(model(x).sum()))
    kept[0].backward()
    assert found.parameters == ()
    assert all(call.outputs[0].grad is None for call in found.calls)


def test_run_at_changes_neither_the_model_nor_its_inputs_nor_random_states() -> None:
    class Inplace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    model = nn.Sequential(Inplace(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4))
    x, labels = batch()
    before, given, state = copy.deepcopy(model.state_dict()), x.clone(), torch.random.get_rng_state()
    for level in ("O0", "O1", "O2"):
        run_at(model, x, labels, cross_entropy, level=level)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(x, given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None and param.dtype is torch.float32 for param in model.parameters())
    assert hooks_of(model) == 0


class Noise(nn.Module):
    """Random in a way of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape)


def test_random_numbers_are_the_same_in_every_run_of_a_seed() -> None:
    model = network(noise=Noise())
    one, same, other = run(model), run(model), run(model, seed=1)
    assert torch.equal(value_of(one, "noise"), value_of(same, "noise"))
    assert not torch.equal(value_of(one, "noise"), value_of(other, "noise"))


def test_dropout_layers_are_off_and_the_rest_is_in_training() -> None:
    model = network(norm=nn.BatchNorm1d(16), drop=nn.Dropout(0.5))
    found = run(model)
    assert torch.equal(value_of(found, "drop"), value_of(found, "norm"))
    assert value_of(found, "norm").mean(0).abs().max() < 1e-6, "the batch's own mean was taken off"
    assert model.drop.training


@pytest.mark.parametrize(
    ("level", "dtype", "name", "scale", "coarsest"),
    [
        ("O0", "float16", "float32", 1.0, "float32"),
        ("O1", "float16", "O1 float16", 2.0**15, "float16"),
        ("O2", "float16", "O2 float16", 2.0**15, "float16"),
        ("O2", "bfloat16", "O2 bfloat16", 1.0, "bfloat16"),
    ],
)
def test_a_run_at_a_level_has_its_name_scale_and_dtype(
    level: str, dtype: str, name: str, scale: float, coarsest: str
) -> None:
    found = run(network(), level, dtype=dtype)
    assert (found.name, found.loss_scale, found.dtype) == (name, scale, coarsest)
    assert call_of(found, "encoder").outputs[0].value.dtype == coarsest
    weights = {each.name: each.grad.dtype for each in found.parameters}
    assert weights["encoder.weight"] == (coarsest if level == "O2" else "float32")


def test_a_decorated_model_starts_from_its_masters() -> None:
    model = network()
    wanted = value_of(run(model), "encoder")
    amp.decorate(model, level="O2")
    assert torch.equal(value_of(run(model), "encoder"), wanted)
    assert model.encoder.weight.dtype is torch.float16


def test_inputs_may_be_several_or_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x - y)

    model, (x, labels) = Two(), batch()
    one = run_at(model, (x, 0.5 * x), labels, cross_entropy, level="O0")
    other = run_at(model, {"y": 0.5 * x, "x": x}, labels, cross_entropy, level="O0")
    assert torch.equal(value_of(one, "layer"), value_of(other, "layer"))


def test_further_arguments_reach_the_region() -> None:
    found = run(network(act=nn.Softmax(-1)), "O2", custom_black_list=["linear"])
    assert call_of(found, "encoder").outputs[0].value.dtype == "float32"


def test_a_region_of_torch_is_known_by_its_dtype() -> None:
    model, (x, _) = network(), batch()

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x).float().sum().backward()

    assert record_run(model, step).dtype == "bfloat16"


@pytest.mark.gpu
def test_runs_on_a_gpu_agree_with_themselves_and_put_its_random_state_back() -> None:
    from mezzo.proof import compare_accuracy

    model = network(norm=nn.BatchNorm1d(16), act=nn.ReLU(), drop=nn.Dropout(0.1)).cuda()
    x, labels = (each.cuda() for each in batch())
    state = torch.cuda.get_rng_state()
    reference = run_at(model, x, labels, cross_entropy, level="O0")
    for level, dtype in (("O0", "float16"), ("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")):
        found = compare_accuracy(reference, run_at(model, x, labels, cross_entropy, level=level, dtype=dtype))
        assert found.first_divergence is None, found.table()
        assert found.first_gradient_divergence is None, found.table()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert next(model.parameters()).is_cuda


def test_at_o3_layers_are_off_by_fp8s_rounding_and_the_first_and_the_last_by_halfs() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    x, target = torch.randn(32, 64), torch.randn(32, 64)
    recipe = amp.Fp8Recipe(emulate=True, min_width=0, min_size=0)
    runs = [
        run_at(model, x, target, nn.functional.mse_loss, **options)
        for options in ({"level": "O0"}, {"level": "O3", "dtype": "bfloat16", "fp8": recipe})
    ]
    assert runs[1].name == "O3 bfloat16"
    rows = {(row.kind, row.name): row for row in compare_accuracy(*runs).rows}
    assert rows["output", "0"].error < 0.004  # bfloat16: 2^-9 at most, for input, weight and result
    assert 0.02 < rows["output", "1"].error < 0.06  # e4m3: 3.7 %, as a product of two rounded matrices is off
    usual = run_at(model, x, target, nn.functional.mse_loss, level="O3", dtype="bfloat16")  # a CPU emulates
    assert compare_accuracy(runs[0], usual).rows[0].error < 0.02  # and these layers are too narrow to be FP8
