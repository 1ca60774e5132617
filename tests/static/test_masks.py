"""Attention in captured graphs: a mask that is causal or hides nothing is dropped, every other one stays."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mezzo import static
from mezzo.static import _masks

LENGTH, WIDTH, HEADS = 12, 16, 2
Mask = Callable[[Tensor], Tensor]


def compared(x: Tensor) -> Tensor:
    """The way of transformers: positions, compared and indexed, for each row of the batch."""
    places = torch.arange(LENGTH, device=x.device) + 0
    batch = torch.arange(len(x), device=x.device)[:, None, None, None]
    rows = places.unsqueeze(0).expand(len(x), -1)
    packed = (torch.diff(rows, prepend=rows[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    query, key = places[None, None, :, None], places[None, None, None, :]
    allowed = query.new_ones((), dtype=torch.bool) & (packed[batch, query] == packed[batch, key])
    return (allowed & (rows[batch, key] <= rows[batch, query])).expand(len(x), -1, LENGTH, LENGTH)


def lower(x: Tensor) -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()


def by_methods(x: Tensor) -> Tensor:
    """Operators as methods, which is how torch 2.11 captures those of `compared`."""
    places = torch.arange(LENGTH, device=x.device)
    rows, columns = places[:, None], places[None]
    return rows.__ge__(columns).__and__(rows.__eq__(rows))


def nothing(x: Tensor) -> Tensor:
    """The way of transformers for a bidirectional model."""
    places = torch.arange(LENGTH, device=x.device) + 0
    return (places[None, None, :, None] >= 0).expand(len(x), -1, LENGTH, LENGTH)


def band(x: Tensor) -> Tensor:
    return lower(x) & torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(-3)


def padded(x: Tensor) -> Tensor:
    return lower(x) & (x[:, None, None, :, 0] < 1e9)  # all of it, but only the data know


def written(x: Tensor) -> Tensor:
    mask = lower(x)
    mask[3, 1] = False
    return mask


def written_in_place(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()
    mask.logical_not_()
    return mask.logical_not().logical_or(lower(x))


def written_by_a_method(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()
    mask.__setitem__((3, 1), False)
    return mask


def written_by_an_operator(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()
    mask &= torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(-3)
    return mask


def written_through_a_view(x: Tensor) -> Tensor:
    mask = lower(x)
    mask[5:, :2].fill_(False)
    return mask


def written_in_a_column(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
    mask.t()[3].zero_()
    return mask


def written_under_another_name(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
    mask.contiguous()[:, 3] = False  # `contiguous` returns the mask itself
    return mask


def written_along_the_diagonal(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
    mask.diagonal().logical_not_()
    return mask


_LIBRARY = torch.library.Library("mezzo_test_masks", "FRAGMENT")
_LIBRARY.define("hide(Tensor(a!) mask) -> ()")
_LIBRARY.impl("hide", lambda mask: (mask[:, 3].zero_(), None)[1], "CompositeExplicitAutograd")


def written_by_an_operator_of_the_user(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
    torch.ops.mezzo_test_masks.hide(mask)
    return mask


@torch.compiler.allow_in_graph
def _hide(mask: Tensor) -> Tensor:
    return mask[:, 3].zero_()


def written_by_a_function_of_the_user(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
    _hide(mask)
    return mask


def written_in_a_checkpoint(x: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
    checkpoint(lambda column: column.logical_not_(), mask[:, 3], use_reentrant=False)
    return mask


def in_numbers(x: Tensor) -> Tensor:
    return torch.zeros(LENGTH, LENGTH, device=x.device).masked_fill(~lower(x), float("-inf"))


class Attention(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.inputs = mask, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(query, key, value, attn_mask=self.mask(x)).transpose(1, 2).flatten(2)


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def train(mask: Mask, backend: str) -> tuple[list[float], Any]:
    model = Attention(mask)
    step = static.compile_step(model, mse_loss, torch.optim.SGD(model.parameters(), lr=0.5), backend=backend)
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randn(3, LENGTH, WIDTH, generator=generator) for _ in range(2)]
    return [step(*batch).item() for _ in range(3)], step


def attention_of(step: Any) -> dict[str, Any]:
    (node,) = [each for each in step.graphs[-1].calls_of_dynamo if each.target is scaled_dot_product_attention]
    return dict(node.kwargs)


@pytest.mark.parametrize(("mask", "is_causal"), [(compared, True), (lower, True), (by_methods, True), (nothing, False)])
def test_a_needless_mask_is_dropped_and_the_numbers_stay(mask: Mask, is_causal: bool) -> None:
    expected, _ = train(mask, "eager")
    found, step = train(mask, "aot_eager")
    assert attention_of(step)["is_causal"] is is_causal
    assert attention_of(step)["attn_mask"] is None
    assert found == pytest.approx(expected, rel=1e-5)  # float32, other kernels of attention
    names = [str(node.target) for node in step.graphs[-1].calls_of_dynamo]
    assert not any("arange" in name or "tril" in name for name in names), "the mask is no longer computed"


@pytest.mark.parametrize(
    "mask",
    [
        *(band, padded, in_numbers),
        *(written, written_in_place, written_by_a_method, written_by_an_operator, written_through_a_view),
        *(written_in_a_column, written_under_another_name, written_along_the_diagonal),
        *(written_by_an_operator_of_the_user, written_by_a_function_of_the_user, written_in_a_checkpoint),
    ],
)
def test_every_other_mask_stays(mask: Mask) -> None:
    expected, _ = train(mask, "eager")
    found, step = train(mask, "aot_eager")
    assert not attention_of(step).get("is_causal")
    assert attention_of(step)["attn_mask"] is not None
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_mask_that_would_take_too_much_memory_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_masks, "MOST_LENGTH", LENGTH - 1)
    _, step = train(lower, "aot_eager")
    assert attention_of(step)["attn_mask"] is not None


class Cross(nn.Module):
    """Attention of half as many queries as keys: kernels differ in what `is_causal` means then."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(LENGTH // 2, LENGTH, dtype=torch.bool, device=x.device).tril()
        return scaled_dot_product_attention(self.inputs(x[:, ::2]), x, x, attn_mask=mask).repeat(1, 2, 1)


class Dropped(Cross):
    """Attention with dropout, given by its place behind the mask."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(self.inputs(x), x, x, lower(x), 0.5)


@pytest.mark.parametrize("kind", [Cross, Dropped])
def test_the_mask_of_other_calls_of_attention_stays(kind: type[nn.Module]) -> None:
    model = kind()
    step = static.compile_step(model, mse_loss, torch.optim.SGD(model.parameters(), lr=0.5), backend="aot_eager")
    step(torch.ones(3, LENGTH, WIDTH), torch.ones(3, LENGTH, WIDTH))
    (node,) = [each for each in step.graphs[-1].calls_of_dynamo if each.target is scaled_dot_product_attention]
    assert not node.kwargs.get("is_causal")
    assert len(node.args) == 5 or isinstance(node.kwargs["attn_mask"], torch.fx.Node)
