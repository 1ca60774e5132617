"""bfloat16 optimizer state: stochastic rounding, its random numbers, and the step of torch's fused tier."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from mezzo.amp import decorate
from mezzo.optim import StepRequest, engine_of, master_of, step_tier
from mezzo.optim._masters import stored_master
from mezzo.optim._rounding import philox, store_rounded, words_of_elements, words_of_run
from mezzo.precision import Precision

ZERO, ONES = (0, 0, 0, 0), (0xFFFFFFFF,) * 4
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)

SIGMAS = 5.0
"""A mean that is off by more than this many standard errors happens once in 1.7 million tries."""


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    # The known answers of the generator's authors (Random123, kat_vectors, philox4x32 10).
    [
        (ZERO, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_gives_the_published_answers(counter: Any, key: int, words: Any) -> None:
    assert [word.item() for word in philox([torch.tensor([c]) for c in counter], key)] == list(words)


def test_words_belong_to_an_element_wherever_a_shard_begins() -> None:
    step = torch.tensor(3.0)
    whole = words_of_run(0, 103, step, 2)
    for first in (1, 2, 3, 4, 50):
        assert torch.equal(words_of_run(first, 103 - first, step, 2), whole[first:])
    picked = torch.tensor([0, 9, 5, 102, 64])
    assert torch.equal(words_of_elements(picked, step, 2), whole[picked])
    assert not torch.equal(words_of_run(0, 103, step + 1, 2), whole)
    assert not torch.equal(words_of_run(0, 103, step, 3), whole)


def rounded_many_times(value: float, draws: int) -> Tensor:
    """Return one value, rounded for many elements and two steps, as both moments: [4 * draws]."""
    values = torch.full((draws,), value)
    found = []
    for step in (1.0, 2.0):
        stored = [torch.empty(draws, dtype=torch.bfloat16) for _ in range(2)]
        store_rounded(stored, [values, values], values, torch.tensor(step), 0)
        found += stored
    return torch.cat(found).double()


@pytest.mark.parametrize("value", [1.001, -1.003, 3.14159, 1.9999, -2.7e-20, 6.5e4, 1e-40, 0.00390625 * (1 + 2**-16)])
def test_the_mean_of_rounded_values_is_the_value(value: float) -> None:
    exact = torch.tensor(value).double().item()  # as float32 holds it
    found = rounded_many_times(value, 50_000)
    low, high = found.min().item(), found.max().item()
    gap = torch.finfo(torch.bfloat16).eps * 2.0 ** max(math.floor(math.log2(abs(exact))), -126)
    assert low <= exact <= high
    assert high - low <= gap
    share = (exact - math.floor(exact / gap) * gap) / gap
    # The standard error of a mean of independent draws of two values, `gap` apart
    error = gap * math.sqrt(share * (1 - share) / len(found))
    assert abs(found.mean().item() - exact) <= SIGMAS * error + gap * 1e-12
    assert (found == high).double().mean().item() == pytest.approx(share, abs=SIGMAS * error / gap + 1e-12)


def test_numbers_that_bfloat16_holds_keep_their_bits() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    held = bits.view(torch.bfloat16)
    stored = torch.empty_like(held)
    store_rounded([stored], [held.float()], held, torch.tensor(1.0), 0)
    numbers = ~held.isnan()
    assert torch.equal(stored[numbers].view(torch.int16), bits[numbers])
    assert stored[~numbers].isnan().all()


def test_a_nan_stays_one_whatever_its_bits() -> None:
    values = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32).repeat(1000)
    stored = torch.empty_like(values, dtype=torch.bfloat16)
    store_rounded([stored], [values], values, torch.tensor(1.0), 0)
    assert stored.isnan().all()


def make(kind: type[Optimizer] = AdamW, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(288, 5))
    rule: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    settings = {"level": "O2", "dtype": "bfloat16", "optimizer_state": "bfloat16", **options}
    optimizer = kind(net.parameters(), lr=1e-2, **rule, **settings.pop("optimizer", {}))
    decorate(net, optimizer, **settings)
    return net, optimizer


def take_steps(net: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for param in net.parameters():
            param.grad = torch.randn(param.shape).to(param)
        optimizer.step()


def everything(net: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = [value for param in net.parameters() for value in optimizer.state[param].values()]
    return [*(value.clone() for value in net.state_dict().values()), *(value.clone() for value in state)]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_the_state_is_bfloat16_and_the_update_is_that_of_float32_state(kind: type[Optimizer]) -> None:
    net, optimizer = make(kind)
    full, of_full = make(kind, optimizer_state=None)
    take_steps(net, optimizer, range(1))
    take_steps(full, of_full, range(1))
    # The first step starts from zeros and uses the moments before they are rounded.
    for param, other in zip(net.parameters(), full.parameters(), strict=True):
        assert torch.equal(master_of(param), master_of(other))
        moments = {key: value for key, value in optimizer.state[param].items() if key != "step"}
        assert {value.dtype for value in moments.values()} == {torch.bfloat16}
        for key, value in moments.items():
            wanted = of_full.state[other][key]
            assert value.stride() == wanted.stride()
            torch.testing.assert_close(value.float(), wanted, rtol=2**-7, atol=0)  # one unit of bfloat16


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_resumed_run_repeats_every_bit(kind: type[Optimizer]) -> None:
    net, optimizer = make(kind)
    take_steps(net, optimizer, range(3))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))  # as a file would hold them
    assert all(v.dtype is torch.bfloat16 for s in saved[1]["state"].values() for k, v in s.items() if k != "step")
    other, of_other = make(kind)
    other.load_state_dict(saved[0])
    of_other.load_state_dict(saved[1])
    assert_equal(everything(net, optimizer), everything(other, of_other))
    take_steps(net, optimizer, range(3, 6))
    take_steps(other, of_other, range(3, 6))
    assert_equal(everything(net, optimizer), everything(other, of_other))


def test_stock_and_bfloat16_state_load_each_other() -> None:
    net, optimizer = make()
    take_steps(net, optimizer, range(2))
    stock = AdamW([torch.zeros_like(master_of(param)) for param in net.parameters()])
    stock.load_state_dict(optimizer.state_dict())
    widened = stock.state[stock.param_groups[0]["params"][0]]["exp_avg"]
    first = optimizer.state[next(net.parameters())]
    assert widened.dtype is torch.float32
    assert torch.equal(widened, first["exp_avg"].float())
    before = everything(net, optimizer)
    optimizer.load_state_dict(stock.state_dict())
    assert_equal(before, everything(net, optimizer))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_skipped_step_leaves_state_and_random_numbers(kind: type[Optimizer]) -> None:
    runs = []
    for skips in (False, True):
        net, optimizer = make(kind, dtype="float16")
        take_steps(net, optimizer, range(2))
        if skips:
            before = everything(net, optimizer)
            for param in net.parameters():
                param.grad = torch.full_like(param, torch.inf)
            verdict = engine_of(optimizer).check()
            # As on a device: the host does not know the verdict, and the kernels skip by themselves.
            engine_of(optimizer)._update(StepRequest(verdict=verdict), (), {})
            assert_equal(before, everything(net, optimizer))
        take_steps(net, optimizer, range(2, 4))
        runs.append(everything(net, optimizer))
    assert_equal(*runs)


@pytest.mark.parametrize("other", [{"master_weight": "compact"}, {"optimizer": {"foreach": True}}])
def test_compact_masters_and_foreach_give_the_same_bits(other: dict[str, Any]) -> None:
    plain, of_plain = make()
    net, optimizer = make(**other)
    for model, its in ((plain, of_plain), (net, optimizer)):
        take_steps(model, its, range(4))
    assert_equal(everything(plain, of_plain), everything(net, optimizer))


def test_a_loss_scaler_skips_and_goes_on() -> None:
    model = nn.Linear(8, 4)
    optimizer = AdamW(model.parameters())
    precision = Precision("O2", "float16", optimizer_state="bfloat16")
    precision.prepare(model, optimizer)
    precision.train_step(lambda: (None, model(torch.ones(2, 8)).square().mean()), optimizer)
    before = everything(model, optimizer)
    precision.train_step(lambda: (None, model(torch.ones(2, 8)).square().mean() * torch.inf), optimizer)
    assert_equal(before, everything(model, optimizer))
    precision.train_step(lambda: (None, model(torch.ones(2, 8)).square().mean()), optimizer)
    assert optimizer.state[model.weight]["step"].item() == 2


def test_clipping_uses_the_true_norm() -> None:
    net, optimizer = make(SGD)
    full, of_full = make(SGD, optimizer_state=None)
    for model, its in ((net, optimizer), (full, of_full)):
        for param in model.parameters():
            param.grad = torch.full_like(param, 3.0)
        engine_of(its).clip_next_step(0.5)
        its.step()
    assert all(
        torch.equal(master_of(a), master_of(b)) for a, b in zip(net.parameters(), full.parameters(), strict=True)
    )


@pytest.mark.parametrize("level", ["O0", "OD", "O1", "O2"])
def test_every_level_can_have_it(level: str) -> None:
    model = nn.Linear(8, 4)
    optimizer = AdamW(model.parameters())
    precision = Precision(level, "bfloat16", optimizer_state="bfloat16")
    precision.prepare(model, optimizer)
    before = model.weight.detach().clone()
    precision.train_step(lambda: (None, model(torch.ones(2, 8)).square().mean()), optimizer)
    assert optimizer.state[model.weight]["exp_avg_sq"].dtype is torch.bfloat16
    assert not torch.equal(model.weight, before)


def test_prepare_may_turn_it_off_again() -> None:
    net, optimizer = make()
    take_steps(net, optimizer, range(1))
    decorate(net, optimizer, level="O2", dtype="bfloat16", optimizer_state="float32")
    take_steps(net, optimizer, range(1, 2))
    assert optimizer.state[next(net.parameters())]["exp_avg"].dtype is torch.float32


def second_moments(kind: str, steps: int = 3000) -> Tensor:
    """Return AdamW's second moments after a first gradient of 1 and then gradients of 0.1."""
    param = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([param], lr=0.0)
    Precision("O0", optimizer_state="bfloat16" if kind == "stochastic" else None).prepare(
        nn.ParameterList([param]), optimizer
    )
    param.grad = torch.ones_like(param)
    with step_tier("fused"):
        for step in range(steps):
            if step == 1:
                param.grad.fill_(0.1)
            optimizer.step()
            if kind == "nearest":
                square = optimizer.state[param]["exp_avg_sq"]
                square.copy_(square.bfloat16())
    return optimizer.state[param]["exp_avg_sq"].double()


def test_a_moving_average_moves_where_rounding_to_nearest_stops_it() -> None:
    exact = second_moments("float32").mean().item()
    assert exact == pytest.approx(0.01, rel=0.05)
    found = second_moments("stochastic")
    # The spread of one element: a step rounds by at most a unit u = 2^-8 (relative), a random walk that the average
    # forgets after 1 / (2 * 0.001) steps: u / 2 * sqrt(500) = 4.4 %. The mean of 4096 elements is 64 times closer.
    assert found.std().item() <= 0.05 * exact
    assert found.mean().item() == pytest.approx(exact, rel=SIGMAS * 0.05 / math.sqrt(len(found)))
    stuck = second_moments("nearest").mean().item()
    assert abs(stuck - exact) > 0.3 * exact


def prepare(optimizer: Optimizer, model: nn.Module, **options: Any) -> None:
    Precision("O2", "bfloat16", optimizer_state="bfloat16", **options).prepare(model, optimizer)


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        (torch.optim.RMSprop, {}, "RMSprop"),
        (AdamW, {"amsgrad": True}, "amsgrad"),
        (SGD, {"momentum": 0.9, "dampening": 0.1}, "dampening"),
        (type("OwnAdam", (AdamW,), {}), {}, "OwnAdam"),
    ],
)
def test_other_optimizers_are_refused_before_anything_changes(kind: Any, options: dict[str, Any], word: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    with pytest.raises(ValueError, match=word):
        prepare(optimizer, model)
    assert model.weight.dtype is torch.float32


def test_a_step_that_the_user_put_on_the_object_is_refused() -> None:
    model = nn.Linear(4, 2)
    optimizer = AdamW(model.parameters())
    optimizer.step = lambda: None
    with pytest.raises(ValueError, match="a step of its own"):
        prepare(optimizer, model)
    assert model.weight.dtype is torch.float32


class Wrapper(Optimizer):
    """As Accelerate's: of torch's class, without calling its `__init__`."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def test_the_optimizer_inside_a_wrapper_gets_the_state() -> None:
    model = nn.Linear(4, 2)
    inner = AdamW(model.parameters())
    prepare(Wrapper(inner), model)
    model.weight.grad = torch.ones_like(model.weight)
    inner.step()
    assert inner.state[model.weight]["exp_avg"].dtype is torch.bfloat16


def test_other_dtypes_and_missing_parts_are_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="float16"):
        Precision("O2", optimizer_state="float16")
    with pytest.raises(ValueError, match="without an optimizer"):
        Precision("O2", optimizer_state="bfloat16").prepare(model)
    with pytest.raises(ValueError, match="master_weight=False"):
        prepare(AdamW(model.parameters()), model, master_weight=False)
    assert model.weight.dtype is torch.float32


def test_a_sparse_gradient_is_refused() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    precision = Precision("O0", optimizer_state="bfloat16")
    precision.prepare(model, optimizer)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense"):
        optimizer.step()


def test_a_copied_optimizer_keeps_its_state_dtype() -> None:
    net = nn.Linear(6, 3)
    optimizer = AdamW(net.parameters(), lr=0.01)
    precision = Precision("O2", "bfloat16", optimizer_state="bfloat16")
    precision.prepare(net, optimizer)
    x = torch.randn(5, 6)

    def train(net: nn.Module, optimizer: Optimizer) -> None:
        for _ in range(3):
            precision.train_step(lambda: (None, net(x).float().square().mean()), optimizer)

    train(net, optimizer)
    copied_net, copied = copy.deepcopy((net, optimizer))
    train(net, optimizer)
    train(copied_net, copied)
    assert copied.state[copied_net.weight]["exp_avg"].dtype is torch.bfloat16
    assert_equal(everything(net, optimizer), everything(copied_net, copied))


def test_masters_of_later_groups_are_as_prepare_was_asked() -> None:
    net = nn.Linear(6, 3)
    optimizer = AdamW(net.parameters())
    Precision("O2", "bfloat16", master_weight="compact", optimizer_state="bfloat16").prepare(net, optimizer)
    later = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [later]})
    masters = [stored_master(param) for param in (later, net.weight)]
    assert [None if master is None else master.dtype for master in masters] == 2 * [torch.int16]


def test_complex_parameters_are_refused_before_anything_changes() -> None:
    net = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    optimizer = AdamW(net.parameters())
    with pytest.raises(ValueError, match="complex"):
        Precision("O0", optimizer_state="bfloat16").prepare(net, optimizer)
    assert "step" not in optimizer.__dict__
