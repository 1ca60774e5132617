"""`MezzoPrecision` under Lightning's Trainer: the same bits as a loop with `mezzo.Precision`."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo import amp, optim

pytest.importorskip("lightning_utilities")  # of both distributions

from lightning_nets import (
    IGNORED,
    QUIET,
    Classifier,
    Fabric,
    L,
    make_batches,
    make_loader,
    same_state,
    train_by_hand,
)

from mezzo.integrations.lightning import MezzoPrecision

pytestmark = [pytest.mark.integrations, *(pytest.mark.filterwarnings(each) for each in IGNORED)]

EMULATED = {"fp8": {"emulate": True, "min_width": 0, "min_size": 0}}
RECIPES = [(level, dtype) for level in ("O1", "O2", "O3") for dtype in ("float16", "bfloat16")]


def options_of(level: str) -> dict[str, Any]:
    return EMULATED if level == "O3" else {}


def fit(model: Any, plugin: Any, batches: Any = None, **options: Any) -> Any:
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1, **options}, plugins=[plugin])
    trainer.fit(model, make_loader(batches))
    return trainer


@pytest.mark.parametrize(("level", "dtype"), RECIPES)
def test_fit_gives_the_bits_of_a_loop_by_hand(level, dtype):
    trained, by_hand = Classifier(), Classifier()
    fit(trained, MezzoPrecision(level, dtype, **options_of(level)))
    train_by_hand(by_hand, mezzo.Precision(level, dtype, **options_of(level)), make_batches())
    assert same_state(trained, by_hand)
    assert trained.losses == by_hand.losses


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_accumulation_clipping_and_scheduler_give_the_bits_of_a_loop_by_hand(dtype):
    trained, by_hand = Classifier(), Classifier()
    trainer = fit(trained, MezzoPrecision("O2", dtype), gradient_clip_val=0.1, accumulate_grad_batches=2)
    train_by_hand(by_hand, mezzo.Precision("O2", dtype), make_batches(), max_norm=0.1, accumulate=2)
    assert same_state(trained, by_hand)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 * 0.5  # four steps, halved after three


def test_weights_are_half_masters_and_checkpoints_float32(tmp_path):
    model = Classifier()
    trainer = fit(model, MezzoPrecision("O2", "bfloat16"))
    weight = model.net[0].weight
    assert (weight.dtype, optim.master_of(weight).dtype) == (torch.bfloat16, torch.float32)
    assert model.output_dtype is torch.bfloat16
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt")
    assert torch.equal(saved["state_dict"]["net.0.weight"], optim.master_of(weight))
    moments = [value for state in saved["optimizer_states"][0]["state"].values() for value in state.values()]
    assert {value.dtype for value in moments} == {torch.float32}
    Classifier().load_state_dict(saved["state_dict"])  # a float32 module loads it


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_checkpoint_of_stock_lightning_is_resumed(tmp_path, dtype):
    stock = L.Trainer(**QUIET, max_epochs=1, precision="bf16-mixed")
    first = Classifier()
    stock.fit(first, make_loader())
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    saved = torch.load(tmp_path / "stock.ckpt")
    resumed = Classifier()
    trainer = L.Trainer(**QUIET, max_epochs=1, plugins=[MezzoPrecision("O2", dtype)])
    trainer.fit(resumed, make_loader(), ckpt_path=tmp_path / "stock.ckpt")  # it has trained its epoch already
    assert resumed.net[0].weight.dtype is getattr(torch, dtype)
    assert all(torch.equal(value, saved["state_dict"][name]) for name, value in resumed.state_dict().items())
    moments = trainer.optimizers[0].state_dict()["state"][0]
    assert torch.equal(moments["exp_avg"], saved["optimizer_states"][0]["state"][0]["exp_avg"])
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    back = Classifier()
    stock = L.Trainer(**QUIET, max_epochs=2, precision="bf16-mixed")
    stock.fit(back, make_loader(), ckpt_path=tmp_path / "own.ckpt")
    assert stock.global_step == 16


def test_an_overflowing_step_changes_nothing_but_the_scale():
    batches = make_batches(1)
    model = Classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler = amp.GradScaler(init_loss_scaling=2.0**60, decr_every_n_nan_or_inf=1)  # overflows float16 for sure
    with pytest.warns(UserWarning, match=r"lr_scheduler.step"):  # torch's own: the only step was skipped
        trainer = fit(model, MezzoPrecision("O2", scaler=scaler), batches, gradient_clip_val=1.0)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)  # running statistics too
    assert (trainer.scaler.get_scale(), trainer.scaler.skipped_steps) == (2.0**59, 1)


class ShowsGradients(L.Callback):
    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append(pl_module.net[3].weight.grad.double())


def true_gradient(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient of the last weight at the first step, in float64."""
    model = Classifier().double()
    model.loss((batch[0].double(), batch[1])).backward()
    return model.net[3].weight.grad


def test_hooks_before_the_step_see_true_gradients():
    callback, batches = ShowsGradients(), make_batches(1)
    fit(Classifier(), MezzoPrecision("O2", "float16"), batches, callbacks=[callback])
    expected = true_gradient(batches[0])
    # float16 has 11 bits; a batch of 4 and two layers add a few roundings
    torch.testing.assert_close(callback.gradients[0], expected, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clipping_by_norm_bounds_the_update_of_sgd(dtype):
    model = Classifier("SGD", lr=1.0)
    before = torch.cat([p.detach().flatten().double() for p in model.parameters()])
    fit(model, MezzoPrecision("O2", dtype), make_batches(1), gradient_clip_val=0.05)
    after = torch.cat([p.flatten().double() for p in amp.master_parameters(model)])
    # with a learning rate of 1 the update is the clipped gradient
    assert (after - before).norm().item() == pytest.approx(0.05, rel=2e-3)


def test_a_fused_optimizer_can_be_clipped():
    class Fused(Classifier):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    model = Fused()  # stock Lightning refuses it, in bfloat16 too
    fit(model, MezzoPrecision("O2", "float16"), gradient_clip_val=0.1)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    assert model.losses[-1] != model.losses[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_clipping_by_value_bounds_each_element_of_the_update(dtype):
    model, batches = Classifier("SGD", lr=1.0), make_batches(1)
    before = model.net[3].weight.detach().double().clone()
    fit(model, MezzoPrecision("O2", dtype), batches, gradient_clip_val=0.02, gradient_clip_algorithm="value")
    update = before - optim.master_of(model.net[3].weight).double()
    expected = true_gradient(batches[0]).clamp(-0.02, 0.02)
    # bfloat16 has 8 bits, in weights, activations and the clipping value
    torch.testing.assert_close(update, expected, rtol=0.05, atol=4e-3)
    assert update.abs().max().item() == pytest.approx(0.02, rel=2**-8)


class TwoOptimizers(Classifier):
    """Manual optimization: two optimizers step after one backward pass."""

    def __init__(self, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization, self.clip = False, clip

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            if self.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self):
        halves = self.net[:2], self.net[2:]
        return [torch.optim.AdamW(half.parameters(), lr=1e-2) for half in halves]


@pytest.mark.parametrize("clip", [None, 0.01])
def test_two_optimizers_of_one_backward_pass_share_the_scale(clip):
    def scaler() -> amp.GradScaler:
        return amp.GradScaler(init_loss_scaling=4.0, incr_every_n_steps=1)  # grows after every step

    trained, by_hand = TwoOptimizers(clip), TwoOptimizers()
    trainer = fit(trained, MezzoPrecision("O2", scaler=scaler()))
    precision = mezzo.Precision("O2", scaler=scaler())
    optimizers = by_hand.configure_optimizers()
    precision.prepare(by_hand, optimizers)
    for batch in make_batches():
        with precision.autocast():
            loss = by_hand.loss(batch)
        precision.backward(loss)
        precision.step(*optimizers, max_norm=clip)
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert same_state(trained, by_hand)
    assert trainer.scaler.get_scale() == 4.0 * 2**8


class Adversaries(TwoOptimizers):
    """Manual optimization as GANs do it: toggled, each optimizer with its own loss, one by a closure."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with first.toggle_model():
            first.zero_grad()
            self.manual_backward(self.loss(batch))
            first.step()

        def closure() -> None:
            second.zero_grad()
            self.manual_backward(self.loss(batch))

        with second.toggle_model():
            second.step(closure=closure)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_optimizers_with_their_own_losses_give_the_bits_of_a_loop_by_hand(dtype):
    trained, by_hand = Adversaries(), Adversaries()
    fit(trained, MezzoPrecision("O2", dtype))
    precision = mezzo.Precision("O2", dtype)
    optimizers = by_hand.configure_optimizers()
    precision.prepare(by_hand, optimizers)
    for batch in make_batches():
        for optimizer in optimizers:
            with precision.autocast():
                loss = by_hand.loss(batch)
            for each in optimizers:
                each.zero_grad()
            precision.backward(loss)
            precision.step(optimizer)
    assert same_state(trained, by_hand)


@pytest.mark.parametrize(("level", "dtype"), RECIPES)
def test_validate_test_and_predict_compute_in_half_and_leave_weights_float32(level, dtype):
    model, precision = Classifier(), mezzo.Precision(level, dtype, **options_of(level))
    trainer = L.Trainer(**QUIET, plugins=[MezzoPrecision(level, dtype, **options_of(level))])
    trainer.validate(model, make_loader(), verbose=False)
    (tested,) = trainer.test(model, make_loader(), verbose=False)
    predicted = trainer.predict(model, make_loader())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    other = Classifier().eval()
    precision.prepare_for_evaluation(other)
    with precision.autocast(), torch.no_grad():
        expected = [other.net(inputs) for inputs, _ in make_batches()]
        loss = torch.stack([other.loss(batch) for batch in make_batches()]).mean()
    assert all(torch.equal(a, b) for a, b in zip(predicted, expected, strict=True))
    assert predicted[0].dtype is getattr(torch, dtype)
    # torchmetrics sums in another order
    assert tested["test_loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_a_second_fit_continues_with_the_masters_after_a_test():
    trained, by_hand = Classifier(), Classifier()
    trainer = fit(trained, MezzoPrecision("O2", "bfloat16"))
    trainer.test(trained, make_loader(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trained, make_loader())  # with a new optimizer and scheduler, as by hand
    precision = mezzo.Precision("O2", "bfloat16")
    for _ in range(2):
        train_by_hand(by_hand, precision, make_batches())
    assert trainer.global_step == 16
    assert same_state(trained, by_hand)


def test_lists_and_excluded_layers_are_followed():
    model = Classifier()
    fit(model, MezzoPrecision("O2", "bfloat16", custom_black_list=["linear"], excluded_layers=["net.3"]))
    assert model.output_dtype is torch.float32
    assert (model.net[0].weight.dtype, model.net[3].weight.dtype) == (torch.bfloat16, torch.float32)


def test_fuse_replaces_parts_of_the_module():
    model = Classifier()
    model.head = nn.Linear(4, 50257, bias=False)  # an odd number of outputs is padded
    plugin = MezzoPrecision("O2", "bfloat16", fuse=True)
    fit(model, plugin)
    assert [part.name for part in plugin.mezzo.fused] == ["head"]


def test_a_training_step_that_returns_none_takes_no_step():
    class Skips(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    batches = make_batches(3)
    trained, by_hand = Skips("SGD", lr=0.5), Classifier("SGD", lr=0.5)
    with pytest.warns(UserWarning, match="returned `None`"):
        fit(trained, MezzoPrecision("O2"), batches)
    train_by_hand(by_hand, mezzo.Precision("O2"), [batches[0], batches[2]])
    assert same_state(trained, by_hand)


def test_lbfgs_runs_its_closure_without_a_scale_and_is_refused_with_one():
    class Lbfgs(Classifier):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    model = Lbfgs()
    fit(model, MezzoPrecision("O2", "bfloat16"), make_batches(4))
    assert len(model.losses) > 4
    with pytest.raises(RuntimeError, match="LBFGS evaluates a closure several times"):
        fit(Lbfgs(), MezzoPrecision("O2", "float16"))


def test_a_compiled_module_trains_to_the_same_loss():
    eager, compiled = Classifier(), Classifier()
    compiled.net = torch.compile(compiled.net, backend="aot_eager")
    fit(eager, MezzoPrecision("O2", "bfloat16"))
    fit(compiled, MezzoPrecision("O2", "bfloat16"))
    assert compiled.output_dtype is torch.bfloat16
    assert compiled.losses == pytest.approx(eager.losses, abs=0.02)  # bfloat16: roundings in another order


def test_a_whole_compiled_lightning_module_trains():
    class Plain(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    eager, compiled = Plain(), Plain()
    fit(eager, MezzoPrecision("O2", "bfloat16"))
    fit(torch.compile(compiled, backend="aot_eager"), MezzoPrecision("O2", "bfloat16"))
    for name, value in eager.state_dict().items():
        # eight steps of AdamW with a rate of 0.01 in bfloat16
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=0.05, atol=0.03)


class KeepsMasters(L.Callback):
    """Notes the float32 weights after each step."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.weights.append(pl_module.state_dict()["net.3.weight"].double())


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("master_weight", [None, "compact"])
def test_averaged_weights_are_those_of_the_masters_and_validation_does_not_round_them(master_weight, validates):
    averages = getattr(L, "pytorch", L).callbacks.WeightAveraging(use_buffers=False)
    model, keeps = Classifier(), KeepsMasters()
    plugin = MezzoPrecision("O2", "bfloat16", master_weight=master_weight)
    trainer = L.Trainer(**QUIET, max_epochs=2, val_check_interval=2, plugins=[plugin], callbacks=[keeps, averages])
    trainer.fit(model, make_loader(), make_loader() if validates else None)
    expected = torch.stack(keeps.weights).mean(0)
    found = model.state_dict()["net.3.weight"]  # Lightning puts the average into the model at the end
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)  # sixteen roundings of float32
    assert torch.equal(model.net[3].weight, found.bfloat16())


def test_stochastic_weight_averaging_averages_masters():
    class Plain(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    class Epochs(L.Callback):
        def __init__(self) -> None:
            self.weights: list[Tensor] = []

        def on_train_epoch_start(self, trainer, pl_module):
            self.weights.append(pl_module.state_dict()["net.3.weight"].double())

    model, epochs = Plain(), Epochs()
    model.net[1] = nn.Identity()  # with BatchNorm Lightning trains one more step, also without mezzo
    averages = getattr(L, "pytorch", L).callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)
    fit(model, MezzoPrecision("O2", "bfloat16"), max_epochs=4, callbacks=[epochs, averages])
    expected = torch.stack(epochs.weights[1:4]).mean(0)  # at the starts of epochs 2 to 4
    found = model.state_dict()["net.3.weight"]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def test_a_module_that_was_made_float32_is_prepared_again():
    model, plugin = Classifier(), MezzoPrecision("O2", "bfloat16")
    trainer = fit(model, plugin)
    model.float()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_loader())
    assert model.net[0].weight.dtype is torch.bfloat16
    assert optim.master_of(model.net[0].weight) is not None


def test_a_precision_flag_beside_the_plugin_is_refused():
    plugin = MezzoPrecision("O2", "bfloat16")
    message = r"^Received both `precision=bf16-mixed` and `plugins=MezzoPrecision\('O2', 'bfloat16'\)`. Choose one.$"
    with pytest.raises(ValueError, match=message):
        L.Trainer(**QUIET, precision="bf16-mixed", plugins=[plugin])
    with pytest.raises(ValueError, match=message):
        Fabric(accelerator="cpu", precision="bf16-mixed", plugins=[plugin])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("O7",), {}, "^level='O7': must be one of O0, OD, O1, O2, O3$"),
        (("O2", "float8"), {}, "float8"),
        (("O1",), {"half_layers": ["net"]}, "half_layers with level='O1'"),
    ],
)
def test_contradictions_are_refused_when_the_plugin_is_made(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        MezzoPrecision(*arguments, **options)


def test_the_plugin_is_pickled_with_its_state():
    plugin = MezzoPrecision("O2", scaler=amp.GradScaler(init_loss_scaling=8.0))
    copied = pickle.loads(pickle.dumps(plugin))  # noqa: S301  # our own bytes
    assert (repr(copied), copied.scaler.get_scale()) == ("MezzoPrecision('O2', 'float16')", 8.0)


def test_lightning_knows_the_compute_dtype():
    compute_dtype = getattr(L, "pytorch", L).callbacks.throughput_monitor._plugin_to_compute_dtype
    assert compute_dtype(MezzoPrecision("O2", "bfloat16")) is torch.bfloat16
    assert compute_dtype(MezzoPrecision("O2", "float16")) is torch.float16
