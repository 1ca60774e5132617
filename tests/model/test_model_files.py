"""Models on disk: training goes on bit for bit, exported forwards give the same, and what does not fit is told."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mezzo
from mezzo.checkpoint import CheckpointError, read_state, write_state
from mezzo.errors import MezzoError, RunError
from mezzo.export import load_program
from mezzo.static import InputSpec
from model_loops import assert_same_weights, batches_of, make_data, make_model, make_network
from tiny_session import frozen

LEVELS = [None, "O1", "O2", {"level": "O2", "dtype": "bfloat16"}]
GROWING = {"incr_every_n_steps": 3}


def configured(level: str | None) -> Any:
    """Return a configuration whose loss scale moves soon."""
    return None if level is None else {"level": level, **GROWING}


def optimizer_state(model: mezzo.Model) -> list[Tensor]:
    """Return all tensors of the optimizer's state."""
    assert model.optimizer is not None
    states = model.optimizer.state_dict()["state"]
    return [value for key in states for value in states[key].values() if isinstance(value, Tensor)]


def fit(model: mezzo.Model, **options: Any) -> list[dict[str, float]]:
    """Train an epoch."""
    return model.fit(make_data(), batch_size=4, shuffle=False, verbose=0, **options)


# Training goes on


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit(level: str | None, kind: str, tmp_path: Path) -> None:
    def fresh(seed: int) -> mezzo.Model:
        network = make_network(norm=True)
        if seed:
            for param in network.parameters():
                nn.init.normal_(param)
        model = mezzo.Model(network, device="cpu")
        options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=configured(level))
        return model

    unbroken, broken = fresh(0), fresh(0)
    fit(unbroken)
    expected = fit(unbroken)
    fit(broken)
    assert broken.save(tmp_path / "ck") == tmp_path / "ck"
    resumed = fresh(1)
    resumed.load(tmp_path / "ck")
    assert fit(resumed) == expected
    assert_same_weights(resumed.network, unbroken.network)
    for mine, theirs in zip(optimizer_state(resumed), optimizer_state(unbroken), strict=True):
        assert torch.equal(mine, theirs)
    if level is not None:
        assert resumed.scaler is not None
        assert unbroken.scaler is not None
        assert resumed.scaler.state_dict() == unbroken.scaler.state_dict()
        assert resumed.scaler.get_scale() == 2.0**17  # 8 steps, doubled after every third


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_a_model_that_has_trained_goes_back_to_what_it_loads(level: str | None, tmp_path: Path) -> None:
    model, other = make_model(configured(level)), make_model(configured(level))
    fit(model)
    model.save(tmp_path / "ck")
    expected = fit(model)
    fit(other, epochs=3)
    other.load(tmp_path / "ck")
    assert fit(other) == expected
    assert_same_weights(other.network, model.network)


@pytest.mark.parametrize("saved", LEVELS)
@pytest.mark.parametrize("loaded", LEVELS)
def test_weights_and_momentum_go_from_any_precision_to_any_other(saved: Any, loaded: Any, tmp_path: Path) -> None:
    one, other = make_model(saved), make_model(loaded)
    fit(one)
    one.save(tmp_path / "ck")
    other.load(tmp_path / "ck")
    assert_same_weights(other.network, one.network)
    for mine, theirs in zip(optimizer_state(other), optimizer_state(one), strict=True):
        assert mine.dtype is theirs.dtype is torch.float32
        assert torch.equal(mine, theirs)
    fit(other)


def test_what_is_saved_is_float32_and_needs_no_pickle(tmp_path: Path) -> None:
    model = make_model("O2")
    fit(model)
    model.save(tmp_path / "ck")
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == [
        "manifest.json",
        "state.json",
        "state.safetensors",
    ]
    header = (tmp_path / "ck" / "state.safetensors").read_bytes()[:4000]
    assert b'"F32"' in header
    assert b'"F16"' not in header


def test_saving_changes_nothing(tmp_path: Path) -> None:
    saved, other = make_model("O2"), make_model("O2")
    fit(saved)
    saved.save(tmp_path / "ck")
    saved.save(tmp_path / "forward", training=False)
    fit(saved)
    fit(other, epochs=2)
    assert_same_weights(saved.network, other.network)
    assert saved.network.training


def test_a_model_without_an_optimizer_saves_and_takes_weights_alone(tmp_path: Path) -> None:
    trained, plain = make_model("O2"), mezzo.Model(make_network(), device="cpu")
    fit(trained)
    trained.save(tmp_path / "trained")
    plain.load(tmp_path / "trained")
    assert_same_weights(plain.network, trained.network)
    plain.save(tmp_path / "plain")
    again = make_model("O2")
    again.load(tmp_path / "plain")
    assert_same_weights(again.network, trained.network)
    assert optimizer_state(again) == []


def test_reset_optimizer_leaves_optimizer_and_loss_scale_alone(tmp_path: Path) -> None:
    model, other = make_model({"level": "O2", **GROWING}), make_model({"level": "O2", **GROWING})
    fit(model, epochs=2)
    model.save(tmp_path / "ck")
    other.load(tmp_path / "ck", reset_optimizer=True)
    assert_same_weights(other.network, model.network)
    assert optimizer_state(other) == []
    assert other.scaler is not None
    assert other.scaler.get_scale() == 2.0**15


# What does not fit


def weights_without_a_bias(folder: Path) -> Path:
    """Return a file of weights with one entry missing."""
    state = make_network().state_dict()
    del state["2.bias"]
    torch.save(state, folder / "w.pt")
    return folder / "w.pt"


def test_the_warning_of_a_file_says_nothing_of_the_optimizer(tmp_path: Path) -> None:
    model = make_model()
    fit(model)
    before = [value.clone() for value in optimizer_state(model)]
    with pytest.warns(UserWarning, match=r"2\.bias is missing: skipped$"):
        model.load(weights_without_a_bias(tmp_path), skip_mismatch=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(optimizer_state(model), before, strict=True))


def bigger() -> mezzo.Model:
    """Return a model with one class more."""
    network = make_network()
    network[2] = nn.Linear(8, 4)
    return make_model(network=network)


MISFIT = r"ck: 2\.weight is \(3, 8\) on disk, \(4, 8\) in the network; 2\.bias is \(3,\) on disk, \(4,\) in the network"


def test_weights_of_another_shape_are_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    make_model().save(tmp_path / "ck")
    model = bigger()
    nn.init.zeros_(model.network[0].weight)
    with pytest.raises(CheckpointError, match=MISFIT + r"; load\(..., skip_mismatch=True\) takes what fits$"):
        model.load(tmp_path / "ck")
    assert not model.network[0].weight.any()


def test_skip_mismatch_takes_what_fits_and_warns_of_the_rest(tmp_path: Path) -> None:
    make_model().save(tmp_path / "ck")
    model = bigger()
    nn.init.zeros_(model.network[0].weight)
    head = model.network[2].weight.detach().clone()
    with pytest.warns(UserWarning, match=MISFIT + ": skipped") as found:
        model.load(tmp_path / "ck", skip_mismatch=True)
    assert found[0].filename == __file__
    assert torch.equal(model.network[0].weight, make_network()[0].weight)
    assert torch.equal(model.network[2].weight, head)


def test_missing_and_surplus_weights_are_named_the_first_three_of_them(tmp_path: Path) -> None:
    make_model().save(tmp_path / "ck")
    model = make_model(network=nn.Linear(6, 3))
    with pytest.raises(
        CheckpointError,
        match=r"ck: weight is missing; bias is missing; 0\.weight is not in the network and 3 more; load",
    ):
        model.load(tmp_path / "ck")
    with pytest.warns(UserWarning, match="is not in the network and 3 more: skipped"):
        model.load(tmp_path / "ck", skip_mismatch=True, reset_optimizer=True)


@pytest.mark.parametrize("level", [None, "O2"])
def test_training_goes_on_after_skip_mismatch(level: str | None, tmp_path: Path) -> None:
    trained = make_model(level)
    fit(trained)
    trained.save(tmp_path / "ck")
    network = make_network()
    network[2] = nn.Linear(8, 4)
    model = make_model(level, network=network)
    with pytest.warns(UserWarning, match="skipped"):
        model.load(tmp_path / "ck", skip_mismatch=True)
    fit(model)


def regrouped() -> mezzo.Model:
    """Return a model whose optimizer has a group for each parameter."""
    model = mezzo.Model(make_network(), device="cpu")
    groups = [{"params": [param]} for param in model.parameters()]
    model.prepare(torch.optim.SGD(groups, lr=0.1, momentum=0.9), nn.CrossEntropyLoss())
    return model


def test_an_optimizer_that_does_not_fit_is_told(tmp_path: Path) -> None:
    model = make_model()
    fit(model)
    model.save(tmp_path / "ck")
    other = regrouped()
    with pytest.raises(
        CheckpointError,
        match=r"ck: the optimizer's state does not fit \(.*1 parameter groups, this optimizer has 4\); load\(..., "
        r"reset_optimizer=True\) takes only the weights$",
    ):
        other.load(tmp_path / "ck")
    other.load(tmp_path / "ck", reset_optimizer=True)
    assert_same_weights(other.network, model.network)


def test_nothing_is_loaded_where_the_optimizer_does_not_fit(tmp_path: Path) -> None:
    model = make_model()
    fit(model)
    model.save(tmp_path / "ck")
    other = regrouped()
    with pytest.raises(CheckpointError):
        other.load(tmp_path / "ck")
    assert_same_weights(other.network, make_network())


def test_training_goes_on_where_another_kind_of_optimizer_was_refused(tmp_path: Path) -> None:
    model = make_model()
    fit(model)
    model.save(tmp_path / "ck")
    other = mezzo.Model(make_network(), device="cpu")
    other.prepare(torch.optim.Adam(other.parameters()), nn.CrossEntropyLoss())
    with pytest.raises(
        CheckpointError, match=r"the optimizer's state does not fit \(it is of SGD, but the optimizer is Adam\)"
    ):
        other.load(tmp_path / "ck")
    assert_same_weights(other.network, make_network())
    fit(other)


# Folders and files that are none of ours


def one_line(error: BaseException) -> str:
    """Return the message, which has one line and names the path first."""
    text = str(error)
    assert "\n" not in text
    assert re.match(r"/.+?: ", text)
    return text


def saved(folder: Path) -> Path:
    """Return the folder of a model that has trained."""
    model = make_model("O1")
    fit(model)
    return model.save(folder / "ck")


DAMAGES = {
    "no tensors": lambda path: (path / "state.safetensors").unlink(),
    "no structure": lambda path: (path / "state.json").unlink(),
    "half of the tensors": lambda path: (path / "state.safetensors").write_bytes(
        (path / "state.safetensors").read_bytes()[:-100]
    ),
    "a flipped bit": lambda path: (path / "state.safetensors").write_bytes(
        (path / "state.safetensors").read_bytes()[:-1] + b"\x55"
    ),
    "half of the structure": lambda path: (path / "state.json").write_text((path / "state.json").read_text()[:300]),
    "another structure": lambda path: (path / "state.json").write_text(json.dumps({"format": "other"})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line_and_nothing_changes(damage: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    DAMAGES[damage](path)
    model = make_model("O1")
    with pytest.raises(CheckpointError) as error:
        model.load(path)
    assert str(path) in one_line(error.value)
    assert_same_weights(model.network, make_model("O1").network)


EDITS: dict[str, Any] = {
    "optimizer state of another shape": ("optimizer", "state", 0, "exp_avg", torch.zeros(3)),
    "optimizer without an entry": ("optimizer", "state", 0, {"step": torch.tensor(1.0)}),
    "optimizer group": ("optimizer", "param_groups", 0, "lr", "abc"),
    "optimizer of another kind": ("optimizer_kind", "SGD"),
    "precision is no dict": ("precision", [1]),
    "scale": ("precision", "scale", float("nan")),
    "count": ("precision", "incr_count", "many"),
    "ratio": ("precision", "incr_ratio", 10**400),
    "weight of another kind": ("network", "0.weight", torch.zeros(8, 6, dtype=torch.int64)),
    "weight of another shape": ("network", "0.weight", torch.zeros(1)),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kind", ["AdamW", "Rprop"])
def test_a_refused_load_leaves_network_optimizer_and_scaler_bit_for_bit(edit: str, kind: str, tmp_path: Path) -> None:
    def trained() -> mezzo.Model:
        model = mezzo.Model(make_network(), device="cpu")
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs={"level": "O2", **GROWING})
        fit(model)
        return model

    def everything(model: mezzo.Model) -> Any:
        assert model.optimizer is not None
        assert model.scaler is not None
        return frozen([model.network.state_dict(), model.optimizer.state_dict(), model.scaler.state_dict()])

    saved_one, model = trained(), trained()
    fit(saved_one)
    saved_one.save(tmp_path / "ck")
    state = read_state(tmp_path / "ck")
    *keys, last, value = EDITS[edit]
    if kind == "Rprop" and keys[:2] == ["optimizer", "state"]:
        pytest.skip("only the optimizer itself knows its state")
    node: Any = state
    for key in keys:
        node = node[key]
    node[last] = value
    write_state(tmp_path / "ck", state)
    before = everything(model)
    with pytest.raises(CheckpointError) as error:
        model.load(tmp_path / "ck")
    one_line(error.value)
    assert everything(model) == before
    fit(model)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_path_with_nothing_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no such file; give the folder") as error:
        make_model().load(tmp_path / name)
    one_line(error.value)


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "other", {"model": {"0.weight": torch.ones(8, 6)}, "step": 3})
    with pytest.raises(
        CheckpointError,
        match=r"other: was not written by Model.save\(\); give a folder that was, or a file of weights$",
    ):
        make_model().load(tmp_path / "other")


@pytest.mark.parametrize("state", [{}, {"network": {"0.weight": 3}, "optimizer": None, "precision": {}}])
def test_a_state_that_only_claims_to_be_a_model_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    write_state(tmp_path / "false", {"kind": "mezzo.Model", **state})
    with pytest.raises(
        CheckpointError, match=r"false: its state has no weights; it is damaged, or another program wrote it$"
    ):
        make_model().load(tmp_path / "false")


# Files of weights


@pytest.mark.parametrize("level", [None, "O1", "O2"])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_file_of_weights_is_loaded(suffix: str, level: str | None, tmp_path: Path) -> None:
    state = {name: value + 1 for name, value in make_network(norm=True).state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    model = make_model(level, network=make_network(norm=True))
    model.load(tmp_path / f"w{suffix}")
    loaded = model.network.state_dict()
    for name, value in state.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(loaded[name], value), name
    fit(model)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(1)}, tmp_path / "w.pt")
    (tmp_path / "w.bin").write_bytes(b"abc")
    (tmp_path / "w.safetensors").write_bytes(b"abc")
    for name, text in (
        ("w.pt", "the weights do not fit the model"),
        ("w.bin", "w.bin: unknown format '.bin'"),
        ("w.safetensors", "not a file of only weights"),
    ):
        with pytest.raises(MezzoError, match=text):
            make_model().load(tmp_path / name)


def test_a_file_that_does_not_fit_raises_what_load_promises(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt"):
        make_model().load(tmp_path / "w.pt")


def test_skip_mismatch_warns_of_files_too(tmp_path: Path) -> None:
    state = make_network().state_dict()
    del state["2.bias"]
    torch.save(state, tmp_path / "w.pt")
    with pytest.warns(UserWarning, match="w.pt: 2.bias is missing: skipped"):
        make_model().load(tmp_path / "w.pt", skip_mismatch=True)


def test_the_warning_of_a_file_names_the_callers_line(tmp_path: Path) -> None:
    state = make_network().state_dict()
    del state["2.bias"]
    torch.save(state, tmp_path / "w.pt")
    with pytest.warns(UserWarning, match="2.bias is missing") as found:
        make_model().load(tmp_path / "w.pt", skip_mismatch=True)
    assert found[0].filename == __file__


def test_the_optimizer_begins_anew_where_it_is_said(tmp_path: Path) -> None:
    make_model().save(tmp_path / "ck")
    model = bigger()
    fit(model)
    with pytest.warns(UserWarning, match="the optimizer starts with an empty state"):
        model.load(tmp_path / "ck", skip_mismatch=True)
    assert optimizer_state(model) == []


# Writing


@pytest.mark.parametrize("name", ["my model", "latest", ".hidden"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a name for a checkpoint"):
        make_model().save(tmp_path / name)


def test_places_where_nothing_can_be_written_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: is a file; move it away, a checkpoint is a folder"):
        make_model().save(tmp_path / "file")
    with pytest.raises(RunError, match="cannot be written"):
        make_model().save(tmp_path / "file" / "ck")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_the_old_one(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("O2")
    fit(model)
    model.save(tmp_path / "ck")
    before = {path.name: path.read_bytes() for path in (tmp_path / "ck").iterdir()}
    fit(model)

    def fail(*arguments: object, **options: object) -> None:
        (arguments[0] / "state.safetensors").write_bytes(b"half")  # type: ignore[operator]
        raise error

    monkeypatch.setattr("mezzo.model._files.write_state", fail)
    with pytest.raises(type(error)):
        model.save(tmp_path / "ck")
    with pytest.raises(type(error)):
        model.save(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "ck").iterdir()} == before


# The forward alone


class Words(nn.Module):
    """Whole numbers and more: an embedding, a batch norm, two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, words: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.norm(self.words(words).mean(1) + more)
        return self.head(self.drop(mixed)), mixed


class Picture(nn.Module):
    """A convolution with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).mean((2, 3)))
        return logits


def first_loss(outputs: Tensor, *rest: Tensor) -> Tensor:
    """Return the cross-entropy of the first output; the labels come last."""
    return nn.functional.cross_entropy(outputs, rest[-1])


def inputs_of(kind: str) -> tuple[nn.Module, list[Tensor]]:
    """Return a network and ten samples."""
    source = torch.Generator().manual_seed(2)
    if kind == "two inputs":
        return Words(), [torch.randint(10, (10, 5), generator=source), torch.randn(10, 4, generator=source)]
    if kind == "embedding":
        network = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(20, 3))
        return network, [torch.randint(10, (10, 5), generator=source)]
    return Picture(), [torch.randn(10, 3, 8, 8, generator=source)]


@pytest.mark.parametrize("kind", ["picture", "two inputs", "embedding"])
@pytest.mark.parametrize("level", [None, "O2"])
def test_an_exported_forward_gives_the_same_for_any_batch(kind: str, level: str | None, tmp_path: Path) -> None:
    network, inputs = inputs_of(kind)
    model = make_model(level, network=network, loss=first_loss)
    model.fit(TensorDataset(*inputs, torch.arange(10) % 3), batch_size=5, epochs=2, verbose=0)
    path = model.save(tmp_path / "deep" / "net", training=False)
    assert path == tmp_path / "deep" / "net.pt2"
    assert [p.name for p in path.parent.iterdir()] == ["net.pt2"]
    exported = load_program(path).module()
    reference = type(network)() if kind != "embedding" else inputs_of(kind)[0]
    reference.load_state_dict(model.network.state_dict())  # float32 masters
    reference.eval()
    for size in (1, 2, 10):
        with torch.no_grad():
            expected, seen = (f(*(part[:size] for part in inputs)) for f in (reference, exported))
        for want, got in zip(*(out if isinstance(out, tuple) else (out,) for out in (expected, seen)), strict=True):
            assert got.dtype is torch.float32
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # sums in another order
    ours = model.predict_batch(inputs)[0]
    tolerance = 1e-5 if level is None else 2e-2  # 11 bits in values of about 1, through three layers
    with torch.no_grad():
        out = exported(*inputs)
    np.testing.assert_allclose(ours, (out[0] if isinstance(out, tuple) else out).numpy(), rtol=0, atol=tolerance)


def test_a_name_with_or_without_the_suffix_gives_one_file(tmp_path: Path) -> None:
    model = make_model()
    model.predict_batch(make_data().tensors[0])
    assert model.save(tmp_path / "a.pt2", training=False) == tmp_path / "a.pt2"
    assert model.save(str(tmp_path / "v1.5"), training=False) == tmp_path / "v1.5.pt2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt2", "v1.5.pt2"]


def test_specs_say_what_an_exported_forward_takes(tmp_path: Path) -> None:
    model = mezzo.Model(make_network(), [InputSpec([None, 6])], device="cpu")
    path = model.save(tmp_path / "net", training=False)  # no batch was ever seen
    rows = make_data().tensors[0]
    with torch.no_grad():
        torch.testing.assert_close(load_program(path).module()(rows), make_network()(rows))


def test_specs_may_fix_the_batch(tmp_path: Path) -> None:
    model = mezzo.Model(make_network(), [InputSpec([4, 6])], device="cpu")
    rows = make_data().tensors[0][:4]
    model.predict_batch(rows)
    path = model.save(tmp_path / "net", training=False)
    with torch.no_grad():
        torch.testing.assert_close(load_program(path).module()(rows), make_network()(rows))


def test_a_model_that_was_fed_half_is_exported_or_says_why_not(tmp_path: Path) -> None:
    model = make_model("O2")
    rows = make_data().tensors[0]
    model.predict_batch(rows.half())
    path = model.save(tmp_path / "net", training=False)
    with torch.no_grad():
        torch.testing.assert_close(load_program(path).module()(rows), make_network()(rows))


def test_shapes_that_nobody_knows_are_told(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"^save\(training=False\): the shapes of the inputs are unknown; use Model\(network, "
        r"inputs=\[InputSpec\(...\)\]\), or train or predict a batch first$",
    ):
        make_model().save(tmp_path / "net", training=False)
    assert list(tmp_path.iterdir()) == []


class Scaled(nn.Linear):
    """Takes a number beside its samples."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


@pytest.mark.parametrize("call", ["save", "summary"])
def test_an_input_may_be_a_single_number(call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, rows = mezzo.Model(Scaled(6, 3), device="cpu"), make_data().tensors[0]
    (expected,) = model.predict_batch([rows, torch.tensor(2.0)])
    if call == "summary":
        model.summary()
        assert "[2, 3]" in capsys.readouterr().out
        return
    exported = load_program(model.save(tmp_path / "net", training=False)).module()
    with torch.no_grad():
        np.testing.assert_allclose(exported(rows, torch.tensor(2.0)).numpy(), expected, rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    """What `torch.export` cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def test_a_network_that_cannot_be_exported_is_told_in_one_line(tmp_path: Path) -> None:
    model = mezzo.Model(Branches(), device="cpu")
    model.predict_batch(torch.ones(2, 3))
    with pytest.raises(RunError, match=r"^the program cannot be exported: ") as error:
        model.save(tmp_path / "net", training=False)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


class Changes(nn.Module):
    """Gives something else each time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Changes.calls += 1
        return x + Changes.calls


def test_a_file_that_gives_other_results_is_not_written(tmp_path: Path) -> None:
    model = mezzo.Model(Changes(), device="cpu")
    model.predict_batch(torch.ones(2, 3))
    (tmp_path / "net.pt2").write_text("the old one")
    with pytest.raises(
        RunError, match=r"^the exported file gives different results than the network: nothing was written$"
    ):
        model.save(tmp_path / "net", training=False)
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]
    assert (tmp_path / "net.pt2").read_text() == "the old one"


def test_an_interrupted_export_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = make_model()
    model.predict_batch(make_data().tensors[0])
    (tmp_path / "net.pt2").write_text("the old one")
    monkeypatch.setattr("mezzo.model._files._verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.save(tmp_path / "net", training=False)
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]
    assert (tmp_path / "net.pt2").read_text() == "the old one"


def test_a_folder_in_the_way_of_an_exported_file_is_told(tmp_path: Path) -> None:
    model = make_model()
    model.predict_batch(make_data().tensors[0])
    (tmp_path / "net.pt2").mkdir()
    with pytest.raises(RunError, match=r"net\.pt2: cannot be written"):
        model.save(tmp_path / "net", training=False)


def test_batches_seen_first_are_what_an_exported_file_is_tried_on() -> None:
    model = make_model()
    (first, *_) = batches_of(make_data(), 4)
    model.train_batch(*first)
    model.predict_batch(torch.zeros(3, 6))
    assert model._prepared.sample is not None
    assert torch.equal(model._prepared.sample[0], first[0][:2])


class Strided(nn.Module):
    """Uses an operator that programs from anyone may not use."""

    def forward(self, x: Tensor) -> Tensor:
        return x.as_strided((2, 2), (1, 1)) + x.sum()


def test_a_network_whose_file_mezzo_refuses_is_written_with_one_warning(tmp_path: Path) -> None:
    model = mezzo.Model(Strided(), InputSpec([2, 4], "float32", "x"))
    with pytest.warns(UserWarning, match="will not load") as seen:
        path = model.save(tmp_path / "net", training=False)
    (warning,) = [str(one.message) for one in seen]
    assert warning.startswith(f"{tmp_path / 'net.pt2'}: mezzo will not load this program: the operator 'as_strided.def")
    assert "ONNX" in warning
    assert ".part" not in warning
    x = torch.randn(2, 4)
    assert torch.equal(torch.export.load(path).module()(x), Strided()(x))
