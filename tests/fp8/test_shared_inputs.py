"""Layers that share an input convert it once, and never take another tensor's, or another state of it, for it."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.amp import Fp8Recipe, auto_cast, decorate
from mezzo.fp8 import fp8_linear, make_operand, recipe_to_text

RECIPE = Fp8Recipe(emulate=True, min_width=0, min_size=0)
TEXT = recipe_to_text(RECIPE)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of inputs that were converted."""
    found: list[tuple[int, ...]] = []

    def spy(x: Tensor, *args: Any, **options: Any) -> Any:
        found.append(tuple(x.shape))
        return make_operand(x, *args, **options)

    monkeypatch.setattr("mezzo.fp8._inputs.make_operand", spy)
    return found


def heads() -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    decorate(layers, level="O3", dtype="bfloat16", half_layers=(), fp8=RECIPE)
    return layers


def apart(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the result of a layer that shares its input with none."""
    return fp8_linear(x.clone(), layer.weight.detach().clone(), layer.bias, TEXT)  # type: ignore[arg-type, operator]


def test_three_layers_convert_their_input_once_and_keep_it_once(converted: list[tuple[int, ...]]) -> None:
    layers, x = heads(), torch.randn(16, 32).bfloat16()
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.float8_e4m3fn:
            kept[tensor.data_ptr()] = tensor
        return tensor

    region = auto_cast(level="O3", dtype="bfloat16", fp8=RECIPE)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), region:
        results = [layer(x) for layer in layers]
    assert converted == [(16, 32)]
    assert len(kept) == 1
    for result, layer in zip(results, layers, strict=True):
        assert torch.equal(result, apart(layer, x))


def test_gradients_are_those_of_layers_that_share_nothing() -> None:
    layers = heads()
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    with auto_cast(level="O3", dtype="bfloat16", fp8=RECIPE):
        sum(layer(x).float().square().sum() for layer in layers).backward()  # type: ignore[union-attr]
    together = [param.grad for param in layers.parameters()]
    layers.zero_grad()
    for layer in layers:
        with auto_cast(level="O3", dtype="bfloat16", fp8=RECIPE):
            layer(x.detach().clone()).float().square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(together, layers.parameters(), strict=True))  # type: ignore[arg-type]


def test_an_input_that_changed_is_converted_again(converted: list[tuple[int, ...]]) -> None:
    layer, x = heads()[0], torch.randn(16, 32).bfloat16()
    fp8_linear(x, layer.weight, layer.bias, TEXT)  # type: ignore[arg-type]
    x.mul_(3)
    assert torch.equal(fp8_linear(x, layer.weight, layer.bias, TEXT), apart(layer, x))  # type: ignore[arg-type]
    x.data = torch.randn(16, 32).bfloat16()
    assert torch.equal(fp8_linear(x, layer.weight, layer.bias, TEXT), apart(layer, x))  # type: ignore[arg-type]
    assert len(converted) == 3  # what it is compared with does not train, and shares nothing


def test_another_tensor_at_the_same_place_is_another_input(converted: list[tuple[int, ...]]) -> None:
    layer, memory = heads()[0], torch.randn(2, 16, 32).bfloat16()
    fp8_linear(memory[0], layer.weight, None, TEXT)  # type: ignore[arg-type]
    fp8_linear(memory[0], layer.weight, None, TEXT)  # type: ignore[arg-type]  # a view of its own
    fp8_linear(memory[0].view(8, 2, 32), layer.weight, None, TEXT)  # type: ignore[arg-type]
    assert len(converted) == 3


def test_only_training_shares(converted: list[tuple[int, ...]]) -> None:
    layer, x = heads()[0], torch.randn(16, 32).bfloat16()
    with torch.no_grad():
        fp8_linear(x, layer.weight, None, TEXT)  # type: ignore[arg-type]
        x.data.mul_(5)  # leaves no version, and no gradient is wanted that it could spoil
        assert torch.equal(fp8_linear(x, layer.weight, layer.bias, TEXT), apart(layer, x))  # type: ignore[arg-type]
    assert converted == []  # nothing went through what is shared


def test_compiled_code_that_writes_one_activation_over_another_shares_nothing(converted: list[tuple[int, ...]]) -> None:
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())))
    decorate(net, level="O3", dtype="bfloat16", half_layers=(), fp8=RECIPE)
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.randn(16, 32)
    with auto_cast(level="O3", dtype="bfloat16", fp8=RECIPE):
        eager, count = net(x), len(converted)
        assert count == 4
        assert torch.equal(compiled(x), eager)
    assert len(converted) == count  # it went another way


def test_rows_and_tensors_are_not_taken_for_each_other() -> None:
    layer, x = heads()[0], torch.randn(16, 32).bfloat16() * torch.logspace(-3, 3, 16)[:, None].bfloat16()
    by_row = recipe_to_text(Fp8Recipe(emulate=True, min_width=0, min_size=0, granularity="row"))
    first, second = (fp8_linear(x, layer.weight, None, text) for text in (TEXT, by_row))  # type: ignore[arg-type]
    assert torch.equal(second, fp8_linear(x.clone(), layer.weight, None, by_row))  # type: ignore[arg-type]
    assert not torch.equal(first, second)


def test_nothing_is_held_once_the_input_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    operands: list[weakref.ref[Tensor]] = []

    def spy(x: Tensor, **options: Any) -> Any:
        operand = make_operand(x, **options)
        operands.append(weakref.ref(operand.values))
        return operand

    monkeypatch.setattr("mezzo.fp8._inputs.make_operand", spy)
    layer, x = heads()[0], torch.randn(16, 32).bfloat16()
    result = fp8_linear(x, layer.weight, None, TEXT)  # type: ignore[arg-type]
    assert operands[0]() is not None
    assert result.requires_grad
    del x
    gc.collect()
    assert operands[0]() is None


def test_each_thread_has_its_own(converted: list[tuple[int, ...]]) -> None:
    layer, x = heads()[0], torch.randn(16, 32).bfloat16()
    for _ in range(2):
        thread = threading.Thread(target=lambda: fp8_linear(x, layer.weight, None, TEXT))  # type: ignore[arg-type]
        thread.start()
        thread.join()
    assert len(converted) == 2
