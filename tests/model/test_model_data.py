"""What `mezzo.Model` takes for data, in which order it goes through it, and what it refuses."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import mezzo
from mezzo.model._data import as_tensors, count_inputs, make_loader, with_last
from mezzo.static import InputSpec
from model_loops import (
    FEATURES,
    Logs,
    Losses,
    assert_same_weights,
    batches_of,
    make_data,
    make_model,
    make_network,
    plain_loop,
)

CPU = torch.device("cpu")


class Pairs(Dataset):  # type: ignore[type-arg]
    """A data set that gives what it is told to."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples one after the other, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*make_data().tensors, strict=True)))


class Again:
    """An iterable of batches that may be gone through more than once."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches_of(make_data(), 4))


def kinds_of_data() -> dict[str, Any]:
    """Return the same 14 samples in batches of 4, in all the forms that are taken."""
    samples = list(zip(*make_data().tensors, strict=True))
    return {
        "data set": make_data(),
        "loader": DataLoader(make_data(), batch_size=4),
        "loader without collation": DataLoader(batches_of(make_data(), 4), batch_size=None),  # type: ignore[arg-type]
        "list of tuples": samples,
        "tuple of lists": tuple([x, y] for x, y in samples),
        "samples with Python labels": [(x, int(y)) for x, y in samples],
        "iterable data set": Stream(),
        "iterable of batches": Again(),
        "arrays in a generator": ([x.numpy(), y.numpy()] for _ in range(2) for x, y in batches_of(make_data(), 4)),
    }


@pytest.mark.parametrize("kind", kinds_of_data())
def test_every_kind_of_data_trains_the_same(kind: str) -> None:
    network, model, losses = make_network(), make_model(), Losses()
    expected = plain_loop(network, batches_of(make_data(), 4), epochs=2)
    data = kinds_of_data()[kind]
    one_pass = "generator" in kind  # its two rounds are one epoch
    history = model.fit(data, batch_size=4, epochs=1 if one_pass else 2, shuffle=False, verbose=0, callbacks=losses)
    assert losses.seen == expected
    assert_same_weights(model.network, network)
    assert history[0]["step"] == (8 if one_pass else 4)


@pytest.mark.parametrize("kind", kinds_of_data())
def test_every_kind_of_data_evaluates_and_predicts_the_same(kind: str) -> None:
    model = make_model()
    expected = make_model().evaluate(make_data(), batch_size=4, verbose=0)["loss"]
    assert model.evaluate(kinds_of_data()[kind], batch_size=4, verbose=0)["loss"] == pytest.approx(expected, rel=1e-12)
    (outputs,) = model.predict(kinds_of_data()[kind], batch_size=4, stack_outputs=True, verbose=0)
    inputs = make_data().tensors[0]
    rounds = 2 if "generator" in kind else 1
    with torch.no_grad():
        assert outputs == pytest.approx(make_network()(torch.cat([inputs] * rounds)).numpy(), abs=1e-6)


@pytest.mark.parametrize("inputs", ["tensor", "array"])
def test_rows_of_a_tensor_or_array_are_samples_to_predict(inputs: str) -> None:
    rows = make_data().tensors[0]
    outputs = make_model().predict(rows if inputs == "tensor" else rows.numpy(), batch_size=5, verbose=0)
    assert [part.shape for part in outputs[0]] == [(5, 3), (5, 3), (4, 3)]


def test_arrays_of_float64_become_float32() -> None:
    model, (inputs, labels) = make_model(), make_data()[:]
    wide = inputs.double().numpy()
    assert model.predict_batch(wide)[0].dtype == np.float32
    assert model.train_batch([wide], [labels.numpy()]) == make_model().train_batch(inputs, labels)


def test_float64_samples_of_a_data_set_become_float32_too() -> None:
    inputs, labels = make_data()[:]
    data = Pairs([(x.double().numpy(), int(y)) for x, y in zip(inputs, labels, strict=True)])
    assert make_model().fit(data, batch_size=4, shuffle=False, verbose=0) == make_model().fit(
        make_data(), batch_size=4, shuffle=False, verbose=0
    )


def test_numbers_arrays_and_nested_lists_are_flattened_in_order() -> None:
    values = [torch.zeros(2), (np.ones(3, np.int64), [4, 2.5, True]), np.float64(7)]
    found = as_tensors(values, CPU)
    assert [tensor.dtype for tensor in found] == [
        torch.float32, torch.int64, torch.int64, torch.float32, torch.bool, torch.float32,
    ]  # fmt: skip
    assert [tensor.sum().item() for tensor in found] == [0, 3, 4, 2.5, 1, 7]
    assert as_tensors(None, CPU) == []


def test_an_array_that_must_not_be_written_to_is_taken_quietly() -> None:
    rows = make_data().tensors[0].numpy().copy()
    rows.flags.writeable = False
    make_model().predict_batch(rows)  # a warning would be an error


# Order


class Numbers(Pairs):
    """Notes which samples are read."""

    def __init__(self, count: int) -> None:
        super().__init__([(torch.full((FEATURES,), float(i)), 0) for i in range(count)])
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.items[index]


def test_every_epoch_has_another_order_unless_shuffle_is_off() -> None:
    data = Numbers(12)
    make_model().fit(data, batch_size=5, epochs=3, verbose=0)
    epochs = [data.read[start : start + 12] for start in (0, 12, 24)]
    assert all(sorted(order) == list(range(12)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    data = Numbers(12)
    make_model().fit(data, data, batch_size=5, epochs=2, shuffle=False, verbose=0)
    assert data.read == list(range(12)) * 4


def test_evaluation_and_prediction_keep_the_order() -> None:
    data = Numbers(7)
    model = make_model()
    model.evaluate(data, batch_size=3, verbose=0)
    model.predict(data, batch_size=3, verbose=0)
    assert data.read == list(range(7)) * 2


def test_a_last_smaller_batch_is_dropped_on_demand_in_training_alone() -> None:
    data, model, seen = Numbers(7), make_model(), []

    class Sizes(mezzo.model.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Logs) -> None:
            seen.append(logs["batch_size"])

    history = model.fit(data, data, batch_size=3, drop_last=True, shuffle=False, verbose=0, callbacks=Sizes())
    assert seen == [3, 3]
    assert history[0]["step"] == 2
    assert data.read == [*range(6), *range(7)]


def test_readers_in_other_processes_give_the_same() -> None:
    losses = []
    for workers in (0, 2):
        seen = Losses()
        make_model().fit(make_data(), batch_size=4, shuffle=False, num_workers=workers, verbose=0, callbacks=seen)
        losses.append(seen.seen)
    assert losses[0] == losses[1]


def test_num_iters_ends_an_evaluation() -> None:
    data = make_data()
    expected = make_model().evaluate(TensorDataset(*data[:8]), batch_size=4, verbose=0)
    assert make_model().evaluate(data, batch_size=4, num_iters=2, verbose=0) == expected
    assert expected["samples"] == 8


def test_an_endless_stream_ends_by_num_iters() -> None:
    def forever() -> Iterator[Any]:
        while True:
            yield from batches_of(make_data(), 4)

    assert make_model().fit(forever(), num_iters=9, epochs=5, verbose=0)[0]["step"] == 9
    assert make_model().evaluate(forever(), num_iters=4, verbose=0)["samples"] == 14


def test_no_batch_is_read_beyond_num_iters() -> None:
    source = iter(batches_of(make_data(), 2))
    make_model().fit(source, num_iters=3, verbose=0)
    assert len(list(source)) == 4


def test_the_last_of_some_items_is_known() -> None:
    assert list(with_last([])) == []
    assert list(with_last([5])) == [(5, True)]
    assert list(with_last(iter([5, 6, 7]))) == [(5, False), (6, False), (7, True)]


# Inputs and labels


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor, more: Tensor, scale: float = 1.0) -> Tensor:
        logits: Tensor = self.head(torch.cat([self.words(words), more], 1)) * scale
        return logits


def test_arguments_without_a_default_are_inputs_and_what_follows_is_labels() -> None:
    torch.manual_seed(0)
    words, more, labels = torch.randint(10, (6,)), torch.randn(6, 4), torch.randint(3, (6,))
    seen = []

    def loss(outputs: Tensor, first: Tensor, second: Tensor) -> Tensor:
        seen.append((first, second))
        return nn.functional.cross_entropy(outputs, first) + second.float().mean() * 0

    model = make_model(network=TwoInputs(), loss=loss)
    model.fit(TensorDataset(words, more, labels, labels + 1), batch_size=6, shuffle=False, verbose=0)
    assert torch.equal(seen[0][0], labels)
    assert torch.equal(seen[0][1], labels + 1)
    assert model.predict(TensorDataset(words, more), batch_size=4, stack_outputs=True, verbose=0)[0].shape == (6, 3)


def test_inputs_of_the_model_say_how_many_there_are() -> None:
    class Any_(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TwoInputs()

        def forward(self, *parts: Tensor) -> Tensor:
            logits: Tensor = self.inner(*parts)
            return logits

    data = TensorDataset(torch.randint(10, (6,)), torch.randn(6, 4), torch.randint(3, (6,)))
    specs = [InputSpec([None], "int64"), InputSpec([None, 4])]
    model = mezzo.Model(Any_(), inputs=specs, device="cpu")
    model.prepare(torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    assert model.fit(data, batch_size=3, verbose=0)[0]["step"] == 2
    assert count_inputs(Any_()) == 1
    assert count_inputs(TwoInputs()) == 2
    assert count_inputs(nn.MultiheadAttention(4, 2)) == 3


def test_several_outputs_reach_the_loss_one_by_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), self.layer(x) * 2

    def loss(one: Tensor, two: Tensor, labels: Tensor) -> list[Tensor]:
        return [nn.functional.cross_entropy(one, labels), nn.functional.cross_entropy(two, labels)]

    model = make_model(network=Two(), loss=loss)
    inputs, labels = make_data()[:]
    each = [nn.functional.cross_entropy(out, labels).item() for out in model.network(inputs)]
    assert model.eval_batch(inputs, labels)[0] == pytest.approx(sum(each), rel=1e-6)
    one, two = model.predict(make_data(), batch_size=4, verbose=0)
    assert [len(one), len(two)] == [4, 4]
    assert one[3].shape == (2, 3)
    np.testing.assert_array_equal(two[0], one[0] * 2)


# What is refused


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_dict_of_tensors_is_refused(call: str) -> None:
    data = Pairs([{"image": x, "label": y} for x, y in zip(*make_data().tensors, strict=True)])
    with pytest.raises(
        TypeError,
        match=r"^a batch holds a dict: it must be a tensor, an array, or a list or tuple of them, inputs first, then labels; "
        r"give the loader a collate_fn that makes one$",
    ):
        getattr(make_model(), call)(data, batch_size=2, verbose=0)


@pytest.mark.parametrize(("value", "kind"), [({"a": torch.ones(1)}, "dict"), ("text", "str"), ({1}, "set")])
def test_what_is_no_tensor_is_refused_also_deep_inside(value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"^a batch holds a {kind}: it must be a tensor"):
        as_tensors([torch.ones(1), [value]], CPU)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_too_few_tensors_are_told(call: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"^a batch has 1 tensors, the network's forward takes 2: the data set must give inputs first, then labels; "
        r"Model\(network, inputs=\[...\]\) sets the number of inputs$",
    ):
        getattr(make_model(network=TwoInputs()), call)(torch.zeros(4, 2), batch_size=2, verbose=0)


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_batch", "eval_batch"])
def test_missing_labels_are_told(call: str) -> None:
    inputs, model = make_data().tensors[0], make_model()
    options = {"verbose": 0} if call in ("fit", "evaluate") else {}
    with pytest.raises(
        ValueError, match=r"^the batch has no labels, and the loss function fails without them: .*'target'$"
    ):
        getattr(model, call)(inputs, **options)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("data", [3, None, 2.5, nn.ReLU()])
def test_what_cannot_be_iterated_over_is_refused(call: str, data: Any) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^data is a {type(data).__name__}: must be a Dataset, a DataLoader or an iterable of batches$",
    ):
        getattr(make_model(network=nn.Linear(1, 1)), call)(data, verbose=0)


def test_a_dict_is_no_data_set() -> None:
    with pytest.raises(TypeError, match=r"^data is a dict: must be a Dataset"):
        make_model().fit({"train": make_data()}, verbose=0)


def test_a_data_set_without_a_length_is_told() -> None:
    class Endless(Dataset):  # type: ignore[type-arg]
        def __getitem__(self, index: int) -> Any:
            return make_data()[index]

    with pytest.raises(
        TypeError, match=r"^Endless: a data set needs __len__; without a length it must be an IterableDataset$"
    ):
        make_model().fit(Endless(), verbose=0)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_empty_data_set_is_refused(call: str) -> None:
    with pytest.raises(ValueError, match=r"^the data set is empty: there is nothing to iterate over$"):
        getattr(make_model(), call)(Pairs([]), verbose=0)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("size", [0, -2])
def test_a_batch_size_below_one_is_refused(call: str, size: int) -> None:
    with pytest.raises(ValueError, match=rf"^batch_size={size}: must be at least 1$"):
        getattr(make_model(), call)(make_data(), batch_size=size, verbose=0)


def test_training_without_a_batch_is_refused() -> None:
    text = r"^the training data gave no batch: it is empty, or smaller than a batch with drop_last=True$"
    with pytest.raises(ValueError, match=text):
        make_model().fit(iter([]), verbose=0)
    with pytest.raises(ValueError, match=text):
        make_model().fit(make_data(), batch_size=20, drop_last=True, verbose=0)
    spent = iter(batches_of(make_data(), 4))
    with pytest.raises(ValueError, match=text):
        make_model().fit(spent, epochs=2, verbose=0)


def test_an_evaluation_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the evaluation data gave no batch: it is empty$"):
        make_model().evaluate(iter([]), verbose=0)


def test_a_prediction_without_a_batch_is_an_empty_list() -> None:
    assert make_model().predict(iter([]), verbose=0) == []


def test_a_loader_and_an_iterable_are_returned_as_they_are() -> None:
    world = make_model().world
    loader, source = DataLoader(make_data()), iter([1])
    assert make_loader(loader, world, batch_size=7) is loader
    assert make_loader(source, world, batch_size=7) is source
