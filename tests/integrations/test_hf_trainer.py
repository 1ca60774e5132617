"""`MezzoTrainer` with the real transformers and peft: curves, checkpoints, generation, LoRA."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from accelerate.state import AcceleratorState, GradientState
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

from mezzo import Precision
from mezzo.amp import GradScaler
from mezzo.integrations.transformers import MezzoTrainer, MezzoTrainerMixin
from mezzo.optim import has_master

# Warnings of transformers, torchao and safetensors are not ours to mend.
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

VOCABULARY, LENGTH = 64, 16
HALVES = ["float16", "bfloat16"]


@pytest.fixture(autouse=True)
def _forget_state():
    """Accelerate keeps its state in the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def make_bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=3, **sizes)
    return BertForSequenceClassification(config)


def sequences(count: int = 64) -> list[dict[str, Tensor]]:
    """Counting in threes, from any start: a language that a small model learns."""
    start = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (start + 3 * torch.arange(LENGTH)) % VOCABULARY]


def classes(count: int = 64) -> list[dict[str, Tensor]]:
    return [{"input_ids": each["input_ids"], "labels": each["input_ids"][0] % 3} for each in sequences(count)]


def train(
    folder: Path, precision: Precision | None, *, make=make_gpt2, data=None, resume=None, fuse=False, **options
) -> tuple[Trainer, list[float]]:
    defaults = {"max_steps": 24, "learning_rate": 3e-3, "save_strategy": "no", "logging_steps": 1}
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 8}
    args = TrainingArguments(output_dir=str(folder), **(settings | defaults | options))
    data = data or sequences()
    parts = {"train_dataset": data, "eval_dataset": data[:16]}
    model = make()
    trainer = (
        Trainer(model, args, **parts)
        if precision is None
        else MezzoTrainer(model, args, precision=precision, fuse=fuse, **parts)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_loss_curve_is_that_of_float32(tmp_path: Path, kind: str, dtype: str, fuse: bool) -> None:
    parts = {"make": make_gpt2} if kind == "gpt2" else {"make": make_bert, "data": classes()}
    _, expected = train(tmp_path, None, **parts)
    trainer, found = train(tmp_path, Precision("O2", dtype), fuse=fuse, **parts)
    assert expected[-1] < expected[0] - 0.05
    # bfloat16 keeps 8 bits: a step's rounding is 0.4 %, and 24 short steps do not add up to more
    band = 0.02 if dtype == "bfloat16" else 0.005
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=band)
    linear = trainer.model.transformer.h[0].mlp.c_fc if kind == "gpt2" else trainer.model.classifier
    assert linear.weight.dtype is getattr(torch, dtype)
    assert trainer.evaluate()["eval_loss"] < expected[0]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(tmp_path: Path, level: str, dtype: str) -> None:
    def precision() -> Precision:
        fp8 = {"fp8": {"emulate": True, "scaling": "delayed"}, "half_layers": ()} if level == "O3" else {}
        scaler = GradScaler(enable=dtype == "float16", init_loss_scaling=64.0, incr_every_n_steps=3)
        return Precision(level, dtype, scaler=scaler, **fp8)

    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
    whole, losses = train(tmp_path, precision(), **options)
    resumed, later = train(tmp_path, precision(), resume=str(tmp_path / "checkpoint-4"), **options)
    assert_same(weights(whole.model), weights(resumed.model))
    assert losses == later  # those of the first four steps come from the checkpoint
    assert whole.precision.state_dict() == resumed.precision.state_dict()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_recomputed_layers_train_with_the_same_bits(tmp_path: Path, dtype: str, use_reentrant: bool) -> None:
    kept, _ = train(tmp_path, Precision("O2", dtype), max_steps=4)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    recomputed, _ = train(tmp_path, Precision("O2", dtype), max_steps=4, **options)
    assert_same(weights(kept.model), weights(recomputed.model))


@pytest.mark.parametrize("dtype", HALVES)
def test_accumulated_batches_train_as_the_whole_batch(tmp_path: Path, dtype: str) -> None:
    data = sequences()
    _, whole = train(tmp_path, Precision("O2", dtype), data=data, max_steps=8)
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    _, parts = train(tmp_path, Precision("O2", dtype), data=data, max_steps=8, **options)
    # dropout draws other numbers for other batches, so that the curves agree only roughly
    assert parts == pytest.approx(whole, rel=0.02)


def test_the_norm_of_the_true_gradients_is_clipped_and_logged(tmp_path: Path) -> None:
    stock, _ = train(tmp_path, None, max_steps=4, max_grad_norm=0.1)
    ours, _ = train(tmp_path, Precision("O2", "float16"), max_steps=4, max_grad_norm=0.1)
    norms = [[entry["grad_norm"] for entry in each.state.log_history if "loss" in entry] for each in (stock, ours)]
    assert norms[1] == pytest.approx(norms[0], rel=0.01)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_clipped_step_has_the_length_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    options = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 1, "max_grad_norm": 0.1}
    trainer, _ = train(tmp_path, Precision("O2", dtype), **options)
    before, after = dict(make_gpt2().named_parameters()), weights(trainer.model)
    moved = torch.stack([(after[name] - value).norm() for name, value in before.items()]).norm()
    assert moved.item() == pytest.approx(0.1, rel=1e-3)


def test_a_norm_is_logged_without_clipping_too(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, Precision("O2", "bfloat16"), max_steps=2, max_grad_norm=0.0)
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(1.2, abs=0.3)


def test_a_skipped_step_leaves_the_schedule_where_it_was(tmp_path: Path) -> None:
    # The first scale overflows float16 until it has fallen: these steps are skipped
    scaler = GradScaler(init_loss_scaling=2.0**24, decr_every_n_nan_or_inf=1)
    trainer, _ = train(tmp_path, Precision("O2", scaler=scaler), max_steps=12)
    skipped = scaler.skipped_steps
    assert 0 < skipped < 12
    assert trainer.lr_scheduler.last_epoch == 12 - skipped
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["precision/skipped_steps"] == skipped
    assert last["precision/loss_scale"] == scaler.get_scale() == 2.0 ** (24 - skipped)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_trained_model_generates_and_is_saved_in_float32(tmp_path: Path, dtype: str) -> None:
    trainer, _ = train(tmp_path, Precision("O2", dtype), max_steps=96)
    written = trainer.model.generate(torch.tensor([[1, 4, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert written.tolist() == [[1, 4, 7, 10, 13, 16, 19]]
    trainer.model.save_pretrained(tmp_path / "saved")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert loaded.dtype is torch.float32
    assert_same(weights(loaded), weights(trainer.model))
    trainer.save_model(str(tmp_path / "by_trainer"))
    assert_same(weights(GPT2LMHeadModel.from_pretrained(tmp_path / "by_trainer")), weights(trainer.model))


def test_predictions_of_a_model_that_was_never_trained_use_the_precision(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = MezzoTrainer(make_gpt2(), args, eval_dataset=sequences(16), precision=Precision("O2", "bfloat16"))
    before = weights(trainer.model)
    predicted = trainer.predict(sequences(16))
    with torch.no_grad():
        ids = torch.stack([each["input_ids"] for each in sequences(16)])
        expected = make_gpt2().eval()(ids).logits
    assert predicted.predictions.shape == expected.shape
    found = torch.from_numpy(predicted.predictions)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)  # logits below 1 in bfloat16
    assert not torch.equal(found, expected)
    assert_same(weights(trainer.model), before)


@pytest.mark.parametrize("dtype", HALVES)
def test_metrics_get_float32_predictions(tmp_path: Path, dtype: str) -> None:
    seen = []
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    metrics = {"compute_metrics": lambda given: seen.append(given.predictions) or {}}
    trainer = MezzoTrainer(make_bert(), args, eval_dataset=classes(8), precision=Precision("O2", dtype), **metrics)
    trainer.evaluate()
    assert seen[0].dtype == "float32"  # numpy's exp() of 12 overflows float16


def test_an_evaluation_before_the_training_leaves_half_weights_to_it(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True)
    data = sequences(16)
    options = {"train_dataset": data, "eval_dataset": data, "precision": Precision("O2", "bfloat16")}
    trainer = MezzoTrainer(make_gpt2(), args, **options)
    trainer.evaluate()
    trainer.train()
    assert trainer.model.lm_head.weight.dtype is torch.bfloat16


def test_a_run_in_float16_continues_in_bfloat16(tmp_path: Path) -> None:
    train(tmp_path, Precision("O2", "float16"), max_steps=4, save_strategy="steps", save_steps=4)
    checkpoint = str(tmp_path / "checkpoint-4")
    trainer, losses = train(tmp_path, Precision("O2", "bfloat16"), max_steps=8, resume=checkpoint)
    assert (trainer.state.global_step, len(losses)) == (8, 8)
    assert losses[-1] < losses[0]


def test_uploading_while_saving_is_refused(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, Precision("O2", "bfloat16"), max_steps=1)
    with pytest.raises(ValueError, match=r"call push_to_hub\(repo_id\)"):
        trainer.model.save_pretrained(tmp_path / "saved", push_to_hub=True)


def test_a_second_training_continues_with_the_prepared_model(tmp_path: Path) -> None:
    trainer, losses = train(tmp_path, Precision("O2", "bfloat16"), fuse=True)
    trainer.train()
    later = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert later[0] < losses[0] - 0.2
    assert trainer.model.transformer.wte.weight.dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", HALVES)
def test_lora_trains_adapters_on_a_frozen_half_model_without_masters(tmp_path: Path, dtype: str) -> None:
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(make_gpt2().to(getattr(torch, dtype)), config)  # adapters are float32

    options = {"learning_rate": 3e-2, "save_strategy": "steps", "save_steps": 12}
    trainer, losses = train(tmp_path, Precision("O2", dtype), make=make, **options)
    assert losses[-1] < losses[0] - 0.03
    named = dict(trainer.model.named_parameters())
    trained = {name: param for name, param in named.items() if param.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert all(param.dtype is getattr(torch, dtype) for param in trained.values())
    assert {name for name, param in named.items() if has_master(param)} == set(trained)
    resumed, later = train(
        tmp_path, Precision("O2", dtype), make=make, resume=str(tmp_path / "checkpoint-12"), **options
    )
    assert later == losses
    assert_same(weights(resumed.model), weights(trainer.model))
    trainer.model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(make_gpt2(), tmp_path / "adapter")
    for name, value in loaded.state_dict().items():
        if "lora_" in name:
            assert torch.equal(value, trainer.model.state_dict()[name]), name


@pytest.mark.parametrize("name", ["bf16", "bf16_full_eval"])
def test_half_arguments_of_the_trainer_beside_ours_are_an_error_in_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=True beside precision=") as caught:
        train(tmp_path, Precision("O2", "bfloat16"), **{name: True})
    assert "\n" not in str(caught.value)


def test_the_mixin_goes_before_a_trainer_of_ones_own(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            self.is_in_region = torch.is_autocast_enabled("cpu")
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Mixed(MezzoTrainerMixin, Own):
        pass

    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = Mixed(make_gpt2(), args, train_dataset=sequences(), precision=Precision("O2", "bfloat16"))
    trainer.train()
    assert trainer.is_in_region
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_the_share_of_half_operators_is_logged_after_a_recorded_step(tmp_path: Path) -> None:
    precision = Precision("O2", "bfloat16")
    trainer, _ = train(tmp_path, precision, max_steps=1)
    with precision.record():
        trainer.evaluate()
    trainer.log({"loss": 1.0})
    share = trainer.state.log_history[-1]["precision/half_share"]
    assert 0.5 < share <= 1.0


def test_the_best_checkpoint_is_loaded_into_masters_and_half_weights(tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    # The loss rises after the first steps: the learning rate is far too large
    trainer, _ = train(tmp_path, Precision("O2", "bfloat16"), load_best_model_at_end=True, learning_rate=1.0, **options)
    best = Path(trainer.state.best_model_checkpoint)
    kept = GPT2LMHeadModel.from_pretrained(best)
    assert_same(weights(trainer.model), weights(kept))
    weight = trainer.model.transformer.wte.weight
    assert torch.equal(weight, kept.transformer.wte.weight.bfloat16())
    assert has_master(weight)


@pytest.mark.slow
def test_a_compiled_model_trains_as_the_eager_one(tmp_path: Path) -> None:
    _, eager = train(tmp_path, Precision("O2", "bfloat16"), max_steps=6)
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 6}
    trainer, compiled = train(tmp_path, Precision("O2", "bfloat16"), **options)
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert compiled == pytest.approx(eager, rel=0.005)  # dropout draws the same numbers; roundings differ


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_a_run_on_a_gpu_learns_and_resumes_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "use_cpu": False}
    whole, losses = train(tmp_path, Precision("O2", dtype), **options)
    resumed, later = train(tmp_path, Precision("O2", dtype), resume=str(tmp_path / "checkpoint-4"), **options)
    assert losses[-1] < losses[0]
    assert later == losses
    assert_same(weights(whole.model), weights(resumed.model))
