"""Numbers of a comparison against numpy in float64, and rows against what was planted."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from accuracy_nets import Cancel, Energy, Large, batch, cross_entropy, network, run
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mezzo.proof import AccuracyComparison, AccuracyRow, AccuracyRun, compare_accuracy, record_run, run_at
from mezzo.proof._accuracy_numbers import difference, max_ulps, norm, ulps
from mezzo.proof._accuracy_pairs import CANCELS, gradient_limit, output_limit
from mezzo.proof._accuracy_record import record_tensor
from mezzo.proof._accuracy_rows import by_harm

WHOLE = 2**16
HALVES = (torch.float16, torch.bfloat16)


def row_of(found: AccuracyComparison, name: str, kind: str = "output") -> AccuracyRow:
    (row,) = [row for row in found.rows if (row.name, row.kind) == (name, kind)]
    return row


def pair(seed: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    a = torch.randn(7, 33, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 2)
    return a, a.to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("seed", range(4))
def test_figures_are_those_of_numpy_in_float64(seed: int, dtype: torch.dtype) -> None:
    a, b = pair(seed, dtype)
    x, y = a.double().numpy().ravel(), b.double().numpy().ravel()
    found = difference(record_tensor(a, WHOLE), record_tensor(b, WHOLE))
    # Sums in another order: a few units of float64.
    assert found.error == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-12)
    assert found.max_abs_error == np.abs(y - x).max()
    assert found.cosine == pytest.approx(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)), rel=1e-12)
    assert found.underflow == np.mean((y == 0) & (x != 0))
    assert found.distance == pytest.approx(np.linalg.norm(y - x), rel=1e-12)


@given(st.lists(st.floats(-60000, 60000, width=16), min_size=1, max_size=20))
def test_units_in_the_last_place_of_float16_are_numpys(values: list[float]) -> None:
    magnitudes = np.abs(np.array(values, dtype=np.float16))
    assert ulps(torch.from_numpy(magnitudes).double(), "float16").tolist() == np.spacing(magnitudes).tolist()


@given(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=20))
def test_units_in_the_last_place_of_float32_are_numpys(values: list[float]) -> None:
    magnitudes = np.array(values, dtype=np.float32)
    assert ulps(torch.from_numpy(magnitudes).double(), "float32").tolist() == np.spacing(magnitudes).tolist()


def test_rounding_to_a_dtype_is_half_a_unit_at_most() -> None:
    for dtype in HALVES:
        a, b = pair(2, dtype)
        name = str(dtype).removeprefix("torch.")
        assert 0.4 < max_ulps(record_tensor(a, WHOLE), record_tensor(b, WHOLE), name) <= 0.5


def test_units_of_a_scaled_gradient_are_those_of_the_number_that_was_rounded() -> None:
    scale = 2.0**15
    true = torch.full((4,), 3e-7)
    stored = record_tensor((true * scale).half(), WHOLE, scale)
    assert max_ulps(record_tensor(true, WHOLE), stored, "float16", scale) <= 0.5
    unscaled = 3e-7 / 2.0**-24 * 2.0**-11  # in float16's smallest units, which is what it would be without a scale
    assert max_ulps(record_tensor(true, WHOLE), stored, "float16") <= unscaled


def test_elements_that_are_not_finite_are_counted_and_left_out() -> None:
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    b = torch.tensor([1.0, math.inf, math.nan, 5.0])
    record = record_tensor(b, WHOLE)
    assert (record.num_nan, record.num_inf, record.max_abs) == (1, 1, 5.0)
    assert difference(record_tensor(a, WHOLE), record).error == pytest.approx(1 / math.sqrt(17), rel=1e-12)


def test_a_reference_of_zeros_is_an_error_of_one_and_two_of_them_none() -> None:
    zero, one = record_tensor(torch.zeros(3), WHOLE), record_tensor(torch.ones(3), WHOLE)
    assert difference(zero, one).error == 1.0
    assert difference(zero, one).cosine == 0.0
    assert (difference(zero, zero).error, difference(zero, zero).cosine) == (0.0, 1.0)
    assert difference(one, zero).underflow == 1.0


def test_tensors_without_elements_are_equal() -> None:
    empty = record_tensor(torch.empty(0, 3), WHOLE)
    assert difference(empty, empty).error == 0.0
    assert max_ulps(empty, empty, "float16") == 0.0


def test_a_sample_is_the_same_in_every_run_and_tells_of_the_whole() -> None:
    a = torch.randn(100, 1000)
    b = a + 1e-3 * torch.randn(100, 1000)
    state = torch.random.get_rng_state()
    kept_a, kept_b = record_tensor(a, 4096), record_tensor(b, 4096)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert kept_a.is_sampled
    assert kept_a.values.numel() == 4096
    assert torch.equal(record_tensor(a, 4096).values, kept_a.values)
    whole = difference(record_tensor(a, a.numel()), record_tensor(b, b.numel()))
    # 4096 draws know a variance to sqrt(2 / 4096) = 2.2 %, its root to half of that; three times that is allowed.
    assert difference(kept_a, kept_b).error == pytest.approx(whole.error, rel=0.033)
    assert difference(kept_a, kept_b).distance == pytest.approx(whole.distance, rel=0.033)
    assert norm(kept_a) == pytest.approx(float(a.double().norm()), rel=0.033)


def test_a_single_inf_is_seen_though_the_sample_misses_it() -> None:
    a = torch.zeros(10_000)
    a[1234] = math.inf
    record = record_tensor(a, 10)
    assert record.num_inf == 1
    assert record.values.isfinite().all()


def test_limits_follow_their_formulas() -> None:
    assert output_limit("bfloat16", 9) == 4 * 2.0**-8 * 3
    assert gradient_limit("float16", 16) == math.sqrt(4 * 2.0**-11 * 4)


def test_identical_runs_have_no_difference() -> None:
    model = network(act=nn.ReLU())
    found = compare_accuracy(run(model), run(model))
    assert found.loss_a == found.loss_b
    assert {row.error for row in found.rows} == {0.0}
    assert {row.harm for row in found.rows} == {0.0}
    assert [row.cosine for row in found.rows] == pytest.approx([1.0] * len(found.rows), rel=1e-12)
    assert found.first_divergence is None
    assert found.first_gradient_divergence is None


@pytest.mark.parametrize(
    ("level", "dtype"), [("O1", "float16"), ("O2", "float16"), ("O1", "bfloat16"), ("O2", "bfloat16")]
)
def test_a_sound_network_does_not_diverge(level: str, dtype: str) -> None:
    model = network(norm=nn.BatchNorm1d(16), act=nn.ReLU(), more=nn.Linear(16, 16), smooth=nn.GELU())
    found = compare_accuracy(run(model), run(model, level, dtype=dtype))
    assert found.first_divergence is None
    assert found.first_gradient_divergence is None
    errors = [row.error for row in found.rows if row.kind == "output"]
    assert 0 < max(errors) < 20 * 2.0 ** {"float16": -11, "bfloat16": -8}[dtype]
    assert {row.rounding for row in found.rows} == {dtype}


def test_bfloat16_differs_eight_times_as_much_as_float16() -> None:
    model = network(act=nn.GELU())
    reference = run(model)
    half, brain = (compare_accuracy(reference, run(model, "O2", dtype=each)) for each in ("float16", "bfloat16"))
    ratios = [row_of(brain, name).error / row_of(half, name).error for name in ("encoder", "act", "head")]
    assert all(4 < ratio < 16 for ratio in ratios)  # three bits of the significand are 8; a factor 2 for luck


def test_an_output_that_overflows_is_the_first_divergence_and_does_the_most_harm() -> None:
    model = network(large=Large(), small=nn.Tanh())
    found = compare_accuracy(run(model), run(model, "O2"))
    first = found.first_divergence
    assert first is not None
    assert (first.name, first.module, first.state) == ("large", "Large", "red")
    assert first is found.rows[0]
    assert first.inf_b > 0
    assert first.overflows
    assert not first.is_inherited
    assert first.max_abs_a > 65504
    assert "inf of 512" in found.summary()[2]
    assert "range of float16" in found.summary()[2]


def test_what_inherits_nan_comes_after_what_makes_it() -> None:
    model = network(energy=Energy())
    found = compare_accuracy(run(model), run(model, "O2"))
    bad = [row for row in found.rows if row.is_bad]
    assert bad[0].name == "energy"
    assert [row.is_inherited for row in bad] == sorted(row.is_inherited for row in bad)
    assert row_of(found, "head").is_inherited
    assert found.first_divergence is row_of(found, "energy")
    assert "of 128, as in its inputs" in found.summary()[3], "the gradient of the head's output"


def test_bfloat16_has_the_range_that_float16_has_not() -> None:
    model = network(energy=Energy())
    found = compare_accuracy(run(model), run(model, "O2", dtype="bfloat16"))
    assert found.first_divergence is None
    assert not any(row.is_bad or row.overflows for row in found.rows)


def test_cancellation_is_named_and_what_follows_adds_nothing() -> None:
    model = network(cancel=Cancel(), tail=nn.Identity())
    found = compare_accuracy(run(model), run(model, "O2", loss_scale=1.0))
    first = found.first_divergence
    assert first is row_of(found, "cancel")
    assert first.state == "orange"
    assert found.rows[0] is first
    assert first.error > 100 * row_of(found, "encoder").error
    assert row_of(found, "head").harm < 0.1 * first.harm
    assert not [row for row in found.rows if row.name == "tail"], "an identity makes no tensor of its own"
    assert "this layer added" in found.summary()[2]


def tiny_loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, labels) * 1e-6


def test_gradients_that_underflow_are_found() -> None:
    model = network(act=nn.GELU())
    reference = run(model, loss_fn=tiny_loss)
    found = compare_accuracy(reference, run(model, "O2", tiny_loss, loss_scale=1.0))
    first = found.first_gradient_divergence
    assert found.first_divergence is None, "the forward is sound"
    assert first is not None
    assert (first.name, first.kind) == ("head", "output gradient")
    assert first.underflow > 0.5
    assert first.error > 0.5
    assert row_of(found, "encoder.weight", "parameter gradient").max_abs_b == 0.0
    assert found.rows[0].kind != "output"


def test_a_loss_scale_keeps_gradients_from_underflowing() -> None:
    model = network(act=nn.GELU())
    reference = run(model, loss_fn=tiny_loss)
    found = compare_accuracy(reference, run(model, "O2", tiny_loss, loss_scale=2.0**15))
    assert found.first_gradient_divergence is None
    assert max(row.underflow for row in found.rows) < 0.01
    assert row_of(found, "encoder.weight", "parameter gradient").error < gradient_limit("float16", 1)


def test_a_scaled_gradient_that_overflows_is_red() -> None:
    model = network(act=nn.GELU())
    found = compare_accuracy(run(model), run(model, "O2", loss_scale=2.0**24))
    first = found.first_gradient_divergence
    assert first is not None
    assert (first.name, first.state, first.overflows) == ("head", "red", True)
    assert found.first_divergence is None


def test_a_bias_before_batch_norm_is_excused() -> None:
    """Its gradient is zero but for rounding: noise in both runs, however large its relative error."""
    model = network(norm=nn.BatchNorm1d(16), act=nn.GELU())
    found = compare_accuracy(run(model), run(model, "O2"))
    bias = row_of(found, "encoder.bias", "parameter gradient")
    assert bias.error > 10
    assert bias.note == CANCELS
    assert (bias.harm, bias.diverges) == (0.0, False)


def test_harm_is_what_was_added_over_the_inputs() -> None:
    model = network(act=nn.GELU())
    for row in compare_accuracy(run(model), run(model, "O1")).rows:
        if not row.note:
            assert row.added == max(0.0, row.error - row.inflow)
            assert row.harm >= row.added
    inflows = {
        row.name: row.inflow for row in compare_accuracy(run(model), run(model, "O1")).rows if row.kind == "output"
    }
    assert inflows["encoder"] == 0.0, "both runs were given the same batch"
    assert inflows["act"] > 0


def test_a_parameter_whose_module_is_not_called_belongs_to_the_module_that_used_it() -> None:
    """Attention takes the weight of its output projection and never calls the layer."""
    model, (x, labels) = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 16, 0.0), nn.Linear(16, 4)), batch()
    runs = [run_at(model, x, labels, cross_entropy, level=level) for level in ("O0", "O2")]
    found = compare_accuracy(*runs)
    assert any("0.self_attn.out_proj" in note for note in found.notes)
    weight = row_of(found, "0.self_attn.out_proj.weight", "parameter gradient")
    assert weight.inflow > 0
    assert weight.depth == row_of(found, "0.self_attn[0]").depth


def test_rows_come_by_harm_and_can_be_had_as_computed() -> None:
    model = network(cancel=Cancel(), act=nn.GELU())
    found = compare_accuracy(run(model), run(model, "O2", loss_scale=1.0))
    assert list(found.rows) == sorted(found.rows, key=by_harm)
    finite = [row.harm for row in found.rows if row.harm < math.inf]
    assert finite == sorted(finite, reverse=True)
    names = [(row.kind, row.name) for row in found.in_order()]
    assert names[:4] == [("output", name) for name in ("encoder", "cancel", "act", "head")]
    assert names[4] == ("output gradient", "head")
    assert {name for kind, name in names[-3:]} == {"encoder", "encoder.weight", "encoder.bias"}


def test_runs_of_different_models_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match="different models: 'act' is GELU in 'float32' and nothing in 'O1 float16'",
    ):
        compare_accuracy(run(network(act=nn.GELU())), run(network(), "O1"))
    with pytest.raises(ValueError, match="'act' is GELU in 'float32' and ReLU in 'float32'"):
        compare_accuracy(run(network(act=nn.GELU())), run(network(act=nn.ReLU())))


def test_samples_of_different_sizes_are_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match="max_elements is 65536 in 'a', 10 in 'b'"):
        compare_accuracy(run(model, name="a"), run(model, name="b", max_elements=10))


def forward(model: nn.Module, x: Tensor, name: str = "run") -> AccuracyRun:
    return record_run(model, lambda: model(x).sum().backward(), name=name)


def test_other_shapes_are_named_and_marked() -> None:
    model, (x, _) = network(), batch()
    found = compare_accuracy(forward(model, x), forward(model, x[:8]))
    first = found.first_divergence
    assert first is not None
    assert (first.name, first.note, first.harm) == ("encoder", "shape [32, 16] against [8, 16]", math.inf)
    assert math.isnan(first.error)
    assert "shape [32, 16] against [8, 16]" in found.table()


def test_other_inputs_are_told() -> None:
    model, (x, _) = network(), batch()
    found = compare_accuracy(forward(model, x), forward(model, x + 1))
    assert any("inputs of the model differ" in note for note in found.notes)
    assert compare_accuracy(forward(model, x), forward(model, x)).notes == ()


class Loop(nn.Module):
    """Calls its layer until it has had enough."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(16, 16), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


@pytest.mark.parametrize(("first", "second", "note"), [(3, 2, "in a, not in b"), (2, 3, "in b, not in a")])
def test_a_call_that_one_run_has_not_is_marked(first: int, second: int, note: str) -> None:
    x, _ = batch()
    found = compare_accuracy(forward(Loop(first), x, "a"), forward(Loop(second), x, "b"))
    assert row_of(found, "layer#3").note == note
    assert row_of(found, "layer#3").diverges


@pytest.mark.parametrize(("frozen", "note"), [(0, "in b, not in a"), (1, "in a, not in b")])
def test_a_gradient_that_one_run_has_not_is_marked(frozen: int, note: str) -> None:
    x, _ = batch()
    models = [network(), network()]
    models[frozen].encoder.bias.requires_grad_(False)
    found = compare_accuracy(*(forward(model, x, name) for model, name in zip(models, "ab", strict=True)))
    assert row_of(found, "encoder.bias", "parameter gradient").note == note
    assert found.rows[0].name == "encoder.bias"


def test_a_run_without_backward_is_compared_by_its_outputs() -> None:
    model, (x, _) = network(), batch()
    found = compare_accuracy(forward(model, x), record_run(model, lambda: model(x).sum()))
    assert {row.kind for row in found.rows} == {"output"}
    assert len(found.notes) == 1
    assert "no gradients" in found.notes[0]
    assert not any("gradient that" in line for line in found.summary())


def test_modules_that_were_never_called_are_told() -> None:
    model = network()
    model.spare = nn.ModuleList([nn.Linear(1, 1)])
    x, _ = batch()

    def step() -> None:
        model.head(model.encoder(x)).sum().backward()

    found = compare_accuracy(record_run(model, step), record_run(model, step))
    assert found.notes == ("never called: (model), spare.0",)


def test_the_whole_is_plain_types() -> None:
    model = network(large=Large())
    told = compare_accuracy(run(model), run(model, "O2")).to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["first_divergence"] == "large"
    assert told["rows"][0]["harm"] == "inf"
    assert told["rows"][0]["shape"] == [32, 16]


def test_a_loss_that_is_not_finite_is_a_text() -> None:
    model, (x, _) = network(), batch()
    found = compare_accuracy(forward(model, x), record_run(model, lambda: model(x).sum() * math.nan))
    assert dataclasses.replace(found, loss_a=1.0).to_dict()["loss_b"] == "nan"


def test_the_table_shows_the_worst_rows_and_counts_the_others() -> None:
    model = network(act=nn.GELU())
    found = compare_accuracy(run(model), run(model, "O1"))
    lines = found.table(limit=3).splitlines()
    assert lines[0] == f"O1 float16 against float32: {len(found.rows)} tensors"
    assert lines[-1] == f"... and {len(found.rows) - 3} rows with less harm"
    assert lines[-4].endswith(found.rows[0].name)
    assert len(found.table(limit=None).splitlines()) == len(lines) + len(found.rows) - 4
