"""The step of SGD, Adam, AdamW and any other optimizer, against the stock optimizer in float32."""

import copy

import pytest
import torch
from stepping import Pair, assert_same_bits, snapshot
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, RMSprop, SparseAdam

from mezzo.optim import StepRequest, attach, attach_master, engine_of, master_of

# Fused and foreach kernels round in another order; a few units in the last place over six steps.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}

FUSED = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd-dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd-nesterov-decay": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd-maximize": lambda p: SGD(p, lr=0.1, momentum=0.5, maximize=True, weight_decay=0.1),
    "sgd-tensor-lr": lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "adam-decay-maximize": lambda p: Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1, maximize=True),
    "adam-tensor-lr": lambda p: Adam(p, lr=torch.tensor(0.01)),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw-eps": lambda p: AdamW(p, lr=0.01, eps=1e-3, betas=(0.5, 0.6)),
    "adamw-fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "sgd-fused-dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "sgd-fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
}


class HalfStepSGD(SGD):
    """A user's own rule: every step goes half as far."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-0.5 * group["lr"])
                    self.state[p].setdefault("seen", torch.zeros_like(p)).add_(p.grad.abs())


GENERIC = {
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "adagrad": lambda p: Adagrad(p, lr=0.05),
    "adagrad-fused": lambda p: Adagrad(p, lr=0.05, fused=True),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "amsgrad-fused": lambda p: AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "adam-tensor-betas": lambda p: Adam(p, lr=0.01, betas=(torch.tensor(0.9), torch.tensor(0.99))),
    "own-rule": lambda p: HalfStepSGD(p, lr=0.1),
}
ALL = FUSED | GENERIC


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_steps_on_masters_equal_the_stock_optimizer_in_float32(name: str, dtype: torch.dtype) -> None:
    pair = Pair(ALL[name], dtype)
    for _ in range(6):
        pair.set_grads()
        pair.optimizer.step()
        pair.stock.step()
        pair.assert_equal(**CLOSE)


@pytest.mark.parametrize("name", ALL)
def test_step_unscales_without_rewriting_gradients(name: str) -> None:
    pair = Pair(ALL[name])
    scale = torch.tensor(64.0)
    for _ in range(3):
        pair.set_grads(scale=64.0)
        before = [p.grad.clone() for p in pair.params]
        pair.engine.step(StepRequest(scale=scale))
        pair.stock.step()
        assert_same_bits(before, [p.grad for p in pair.params])
        assert [p.grad.dtype for p in pair.params] == [torch.float16, torch.float16, torch.float32]
    pair.assert_equal(**CLOSE)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ALL)
def test_overflow_leaves_parameters_state_and_step_count_as_they_are(name: str, bad: float) -> None:
    pair = Pair(ALL[name])
    for _ in range(2):
        pair.set_grads()
        pair.optimizer.step()
    before = snapshot(pair.optimizer, pair.params) + [m.clone() for m in pair.masters]
    pair.set_grads()
    pair.params[1].grad[0, 1, 1, 0] = bad
    verdict = pair.engine.check()
    pair.engine.step(StepRequest(verdict=verdict))
    assert (verdict.found_inf.item(), verdict.first_bad.item()) == (1.0, 1)
    assert_same_bits(before, snapshot(pair.optimizer, pair.params) + pair.masters)
    assert not hasattr(pair.optimizer, "found_inf")


@pytest.mark.parametrize("name", ALL)
def test_a_skipped_first_step_does_not_change_the_following_ones(name: str) -> None:
    pair = Pair(ALL[name])
    pair.set_grads()
    pair.params[0].grad[0, 0] = float("inf")
    pair.engine.step(StepRequest())
    for _ in range(3):
        pair.set_grads()
        pair.engine.step(StepRequest())
        pair.stock.step()
    pair.assert_equal(**CLOSE)


@pytest.mark.parametrize("name", FUSED)
def test_sgd_adam_and_adamw_do_not_fall_back_to_the_optimizers_own_step(name: str, monkeypatch) -> None:
    pair = Pair(FUSED[name])
    pair.set_grads()
    pair.optimizer.step()  # the first step of dampened SGD does, by design
    monkeypatch.setattr(pair.engine, "_own_step", lambda *_: pytest.fail("own step called"))
    pair.set_grads()
    pair.optimizer.step()


def test_without_fused_kernels_the_generic_path_gives_the_same(monkeypatch) -> None:
    monkeypatch.setattr("mezzo.optim._fused._has_kernels", lambda names, device_type: False)
    pair = Pair(FUSED["adamw"])
    for _ in range(3):
        pair.set_grads()
        pair.optimizer.step()
        pair.stock.step()
    pair.assert_equal(**CLOSE)


@pytest.mark.parametrize("name", ALL)
def test_state_is_float32_under_torchs_keys_and_belongs_to_the_model_parameter(name: str) -> None:
    pair = Pair(ALL[name])
    pair.set_grads()
    pair.optimizer.step()
    pair.stock.step()
    assert all(a is b for a, b in zip(pair.optimizer.param_groups[0]["params"], pair.params, strict=True))
    assert set(map(id, pair.optimizer.state)) <= set(map(id, pair.params))
    for param, stock in zip(pair.params, pair.stock_params, strict=True):
        ours, theirs = pair.optimizer.state.get(param, {}), pair.stock.state.get(stock, {})
        assert ours.keys() == theirs.keys()
        assert all(t.dtype == torch.float32 for t in ours.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", ALL)
def test_state_dict_goes_to_the_stock_optimizer_and_back(name: str) -> None:
    pair = Pair(ALL[name])
    for _ in range(2):
        pair.set_grads()
        pair.optimizer.step()
        pair.stock.step()
    ours, theirs = pair.optimizer.state_dict(), pair.stock.state_dict()
    pair.stock.load_state_dict(ours)
    pair.optimizer.load_state_dict(theirs)
    for param in pair.params[:2]:
        floats = [t for t in pair.optimizer.state.get(param, {}).values() if isinstance(t, torch.Tensor)]
        assert all(t.dtype == torch.float32 for t in floats)
    for _ in range(2):
        pair.set_grads()
        pair.optimizer.step()
        pair.stock.step()
    pair.assert_equal(**CLOSE)


@pytest.mark.parametrize("name", ["sgd-momentum", "adamw", "rmsprop"])
def test_channels_last_parameters_keep_their_layout(name: str) -> None:
    pair = Pair(ALL[name], channels_last=True)
    for _ in range(3):
        pair.set_grads()
        pair.params[1].grad = pair.params[1].grad.contiguous()  # a gradient of another layout
        pair.optimizer.step()
        pair.stock.step()
    pair.assert_equal(**CLOSE)
    assert pair.masters[1].is_contiguous(memory_format=torch.channels_last)


def test_state_of_another_layout_is_brought_into_the_masters() -> None:
    pair = Pair(FUSED["adamw"], channels_last=True)
    pair.set_grads()
    pair.optimizer.step()
    pair.stock.step()
    saved = copy.deepcopy(pair.stock.state_dict())  # torch shares the tensors of a loaded dict
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].contiguous()
    pair.optimizer.load_state_dict(saved)
    pair.set_grads()
    pair.optimizer.step()
    pair.stock.step()
    pair.assert_equal(**CLOSE)


def test_float32_gradients_of_half_parameters_are_used_at_full_precision() -> None:
    pair = Pair(FUSED["sgd"])
    pair.set_grads()
    for param, stock in zip(pair.params[:2], pair.stock_params, strict=False):
        stock.grad = torch.randn_like(stock)
        param.grad = None
        param.grad_dtype = torch.float32
        param.grad = stock.grad.clone()
    pair.optimizer.step()
    pair.stock.step()
    pair.assert_equal(rtol=0, atol=0)


@pytest.mark.parametrize("make", [FUSED["sgd"], FUSED["adamw"], GENERIC["rmsprop"]])
def test_half_parameter_without_master_is_updated_in_half(make) -> None:
    value, grad = torch.randn(4).half(), torch.randn(4).half()
    ours, stock = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    optimizer, reference = make([ours]), make([stock])
    engine = attach(optimizer)
    ours.grad, stock.grad = grad * 8, grad.clone()
    engine.step(StepRequest(scale=torch.tensor(8.0)))
    reference.step()
    assert torch.equal(ours, stock)
    assert torch.equal(ours.grad, grad * 8)
    assert all(t.dtype == torch.float16 for k, t in optimizer.state[ours].items() if k != "step")


def test_half_parameter_without_master_takes_a_float32_gradient_and_keeps_it() -> None:
    param = nn.Parameter(torch.ones(3).half())
    param.grad_dtype = torch.float32
    param.grad = torch.full((3,), 2.0)
    optimizer = SGD([param], lr=0.5)
    engine_of(optimizer).step(StepRequest(checks=False))
    assert torch.equal(param.detach(), torch.zeros(3).half())
    assert param.grad.dtype == param.grad_dtype == torch.float32


def test_frozen_parameters_and_missing_gradients_are_ignored() -> None:
    pair = Pair(FUSED["adamw"])
    pair.set_grads()
    pair.params[0].requires_grad_(False)
    pair.params[0].grad = pair.stock_params[0].grad = None
    pair.optimizer.step()
    pair.stock.step()
    pair.assert_equal(**CLOSE)
    assert pair.params[0] not in pair.optimizer.state


def test_step_uses_the_half_value_that_was_loaded_from_outside() -> None:
    param = nn.Parameter(torch.zeros(2).half())
    attach_master(param, torch.zeros(2))
    optimizer = SGD([param], lr=1.0)
    attach(optimizer)
    with torch.no_grad():
        param.copy_(torch.tensor([4.0, 8.0]))
    param.grad = torch.ones(2).half()
    optimizer.step()
    assert param.tolist() == [3.0, 7.0]
    assert master_of(param).tolist() == [3.0, 7.0]


def test_small_updates_add_up_in_the_master() -> None:
    param = nn.Parameter(torch.ones(1).half())
    attach_master(param, torch.ones(1))
    optimizer = SGD([param], lr=1e-4)
    attach(optimizer)
    for _ in range(100):
        param.grad = torch.ones(1).half()
        optimizer.step()
    assert param.item() == pytest.approx(0.99, abs=1e-3)  # in half alone 1 - 1e-4 stays 1


def test_tied_parameter_is_updated_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).half()
    model[1].weight = model[0].weight
    attach_master(model[0].weight, torch.ones(2, 2))
    optimizer = SGD(model.parameters(), lr=1.0)
    attach(optimizer)
    model[0].weight.grad = torch.ones(2, 2).half()
    optimizer.step()
    assert torch.equal(model[1].weight.detach(), torch.zeros(2, 2).half())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11 says so even when they are on
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: SparseAdam(p, lr=0.1)])
def test_sparse_gradients_update_the_master(make) -> None:
    value = torch.randn(6, 3)
    ours, stock = nn.Parameter(value.half()), nn.Parameter(value.clone())
    master = attach_master(ours, value.clone())
    optimizer, reference = make([ours]), make([stock])
    engine = attach(optimizer)
    for _ in range(2):
        rows = torch.tensor([[1, 4, 1]])
        values = torch.randn(3, 3).half()
        ours.grad = torch.sparse_coo_tensor(rows, values * 4, (6, 3), check_invariants=True)
        # Duplicate rows are added up in half, as backward would have left them to coalesce().
        exact = ours.grad.coalesce()
        stock.grad = torch.sparse_coo_tensor(exact.indices(), exact.values().float() / 4, (6, 3), check_invariants=True)
        engine.step(StepRequest(scale=torch.tensor(4.0)))
        reference.step()
    torch.testing.assert_close(master, stock.detach(), **CLOSE)
    ours.grad = torch.sparse_coo_tensor([[2]], [[1.0, float("nan"), 1.0]], (6, 3), check_invariants=True).half()
    before = master.clone()
    engine.step(StepRequest())
    assert torch.equal(master, before)


def test_added_group_gets_masters_and_is_stepped() -> None:
    pair = Pair(FUSED["sgd"])
    extra = nn.Parameter(torch.ones(3).half())
    pair.optimizer.add_param_group({"params": [extra], "lr": 1e-4})
    extra.grad = torch.ones(3).half()
    pair.optimizer.step()
    torch.testing.assert_close(master_of(extra), torch.full((3,), 1 - 1e-4))


def test_non_dense_float32_parameter_is_stepped_correctly() -> None:
    base = torch.zeros(4, 4)
    param = nn.Parameter(base[:, :2])
    optimizer = attach(SGD([param], lr=1.0)).optimizer
    param.grad = torch.arange(8.0).reshape(4, 2)
    optimizer.step()
    assert torch.equal(param.detach(), -torch.arange(8.0).reshape(4, 2))
    assert base[:, 2:].abs().sum() == 0


def test_norm_of_finite_gradients_whose_squares_overflow_is_no_false_alarm() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3e38, -3e38])
    verdict = engine_of(SGD([param], lr=1.0)).check()
    assert verdict.found_inf.item() == 0
    assert verdict.first_bad.item() == -1


def test_first_bad_is_counted_over_all_groups_and_dtypes() -> None:
    params = [
        nn.Parameter(torch.zeros(2, dtype=d)) for d in (torch.float32, torch.float16, torch.float64, torch.float16)
    ]
    optimizer = SGD([{"params": params[:2]}, {"params": params[2:]}], lr=1.0)
    for bad in range(4):
        for i, param in enumerate(params):
            param.grad = torch.ones_like(param)
            if i >= bad:
                param.grad[1] = float("nan")
        assert engine_of(optimizer).check(torch.tensor(2.0)).first_bad.item() == bad
    optimizer.zero_grad()
    assert engine_of(optimizer).check().found_inf.item() == 0


def test_a_scale_that_pushes_finite_gradients_over_the_top_is_found() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1e38, 0.0])
    engine = engine_of(SGD([param], lr=1.0))
    assert engine.check(torch.tensor(2.0**-3)).found_inf.item() == 1
    param.grad = torch.zeros(2)
    assert engine.check(torch.tensor(0.0)).found_inf.item() == 1


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_large_models_are_updated_part_by_part_with_the_same_result(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporaries of the gradients are bounded: the largest call of the fused kernel holds at most the limit."""
    torch.manual_seed(3)
    values = [torch.randn(n, 4) for n in (1, 2, 9, 3, 3)]

    def stepped() -> tuple[list[torch.Tensor], list[int]]:
        params = [nn.Parameter(value.half()) for value in values]
        for param, value in zip(params, values, strict=True):
            attach_master(param, value.clone())
            param.grad = torch.ones_like(param)
        sizes: list[int] = []
        kernel = torch._fused_sgd_ if kind is SGD else torch._fused_adamw_

        def counted(targets: list[torch.Tensor], *args: object, **options: object) -> None:
            sizes.append(sum(map(len, targets)))
            kernel(targets, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(f"mezzo.optim._fused.{kernel.__name__[1:]}", counted)
            optimizer = kind(params, lr=0.1)
            attach(optimizer)
            optimizer.step()
        return [master_of(param) for param in params], sizes

    whole, calls = stepped()
    assert calls == [18]
    monkeypatch.setattr("mezzo.optim._fused.PART_ELEMENTS", 24)
    parts, calls = stepped()
    assert calls == [3, 9, 6]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize(("channels", "is_copied"), [(1, False), (4, True)])
def test_a_gradient_in_another_memory_format_is_copied_only_if_its_elements_are_in_another_order(
    channels: int, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    param = nn.Parameter(torch.zeros(8, channels, 3, 3))
    grad = torch.randn(8, channels, 3, 3)
    param.grad = grad.to(memory_format=torch.channels_last)
    used: list[torch.Tensor] = []

    def noted(targets: list[torch.Tensor], grads: list[torch.Tensor], *args: object, **options: object) -> None:
        used.extend(grads)
        torch._fused_sgd_(targets, grads, *args, **options)

    monkeypatch.setattr("mezzo.optim._fused.fused_sgd_", noted)
    attach(optimizer := SGD([param], lr=1.0))
    optimizer.step()
    assert torch.equal(param.detach(), -grad)
    assert (used[0] is not param.grad) == is_copied
