"""Parts that libraries write out by hand, replaced by fused ones: stand-ins with the arithmetic of transformers 5."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo import Precision
from mezzo.amp import causal_lm_loss


class NewGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))


class QuickGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * torch.sigmoid(1.702 * input)


class GELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input)


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class GemmaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


def ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    logits = logits.float()
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    reduction = "sum" if num_items_in_batch is not None else "mean"
    rows = logits.view(-1, vocab_size)
    loss = F.cross_entropy(rows, shift_labels.view(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class TinyForCausalLM(nn.Module):
    def __init__(self, norm: type[nn.Module] = LlamaRMSNorm, activation: type[nn.Module] = NewGELUActivation) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        self.norm, self.up, self.act, self.down = norm(16), nn.Linear(16, 32), activation(), nn.Linear(32, 16)
        self.head = nn.Linear(16, 19, bias=False)
        self._loss_function = ForCausalLMLoss

    @property
    def loss_function(self):
        return self._loss_function

    @loss_function.setter
    def loss_function(self, value) -> None:
        self._loss_function = value

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        logits = self.head(x + self.down(self.act(self.up(self.norm(x)))))
        return self.loss_function(logits=logits, labels=ids, vocab_size=19)


def prepared(model: nn.Module, level: str = "O2", **options: object) -> Precision:
    precision = Precision(level, "bfloat16", **options)
    precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), fuse=True)
    return precision


def test_the_list_says_what_was_replaced_and_keys_and_parameters_stay() -> None:
    model = TinyForCausalLM()
    keys, weight = list(model.state_dict()), model.norm.weight
    fused = prepared(model).fused
    assert [(part.name, part.before) for part in fused] == [
        ("", "ForCausalLMLoss"), ("norm", "LlamaRMSNorm"), ("act", "NewGELUActivation"),
    ]  # fmt: skip
    assert str(fused[2]) == "act: NewGELUActivation -> GELU(approximate='tanh')"
    assert list(model.state_dict()) == keys
    assert model.norm.weight is weight


def test_nothing_is_replaced_unless_asked_for() -> None:
    model = TinyForCausalLM()
    precision = Precision("O2", "bfloat16")
    precision.prepare(model)
    assert not precision.fused
    assert type(model.norm) is LlamaRMSNorm


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_loss_and_gradients_are_those_of_the_original_in_float64(level: str) -> None:
    torch.manual_seed(0)
    model = TinyForCausalLM()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 1.5)
    ids = torch.randint(19, (3, 7))
    original = copy.deepcopy(model)
    precision = prepared(model, level)
    for one in (model, copy.deepcopy(model)):
        with precision.autocast():
            loss = one(ids)
        assert loss.dtype is torch.float32
        expected = original(ids)
        # bfloat16 has 8 bits: a mean of 18 losses near 3 errs by far less than one unit of 2**-7
        torch.testing.assert_close(loss, expected, rtol=2**-8 if level == "O2" else 1e-5, atol=0)
        (grad,) = torch.autograd.grad(loss, one.head.weight)
        (wanted,) = torch.autograd.grad(expected, original.head.weight)
        torch.testing.assert_close(grad.float(), wanted, rtol=0.05 if level == "O2" else 1e-4, atol=2e-3)


@pytest.mark.parametrize("norm", [GemmaRMSNorm, GatedRMSNorm])
def test_a_namesake_that_computes_something_else_stays(norm: type[nn.Module]) -> None:
    model = TinyForCausalLM(norm)
    prepared(model)
    assert type(model.norm) is norm


@pytest.mark.parametrize("activation", [QuickGELUActivation, GELUActivation])
def test_another_formula_and_a_single_operator_stay(activation: type[nn.Module]) -> None:
    model = TinyForCausalLM(activation=activation)
    prepared(model)
    assert type(model.act) is activation


def test_a_namesake_that_takes_other_inputs_stays() -> None:
    class GatedGELU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            value, gate = x.chunk(2, -1)  # the trial input has an odd length
            return F.gelu(gate) * value

    class ImageRMSNorm(GemmaRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            _, _, height, width = x.shape
            return x / (height * width)

    net = nn.Sequential(GatedGELU(), ImageRMSNorm(8))
    precision = Precision("O2", "bfloat16")
    precision.prepare(net, fuse=True)
    assert [type(part) for part in net] == [GatedGELU, ImageRMSNorm]
    assert not precision.fused


def test_the_causal_loss_works_inside_of_torch_func() -> None:
    logits, labels = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    found = torch.func.grad(lambda given: causal_lm_loss(given, labels, 11))(logits)
    wide = logits.double().requires_grad_()
    F.cross_entropy(wide[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1)).backward()
    torch.testing.assert_close(found, wide.grad.float())


def test_an_excluded_layer_stays() -> None:
    model = TinyForCausalLM()
    prepared(model, excluded_layers=[LlamaRMSNorm])
    assert type(model.norm) is LlamaRMSNorm


def test_a_module_in_two_places_is_one_module_afterwards() -> None:
    model = nn.Module()
    model.first = model.second = NewGELUActivation()
    prepared_model = nn.Sequential(model, nn.Linear(2, 2))
    prepared(prepared_model)
    assert model.first is model.second
    assert isinstance(model.first, nn.GELU)


def test_eval_mode_stays_and_num_items_divides() -> None:
    model = TinyForCausalLM().eval()
    prepared(model)
    assert not model.norm.training
    logits, labels = torch.randn(2, 5, 19), torch.randint(19, (2, 5))
    given = {"labels": labels, "vocab_size": 19, "num_items_in_batch": torch.tensor(4)}
    torch.testing.assert_close(model.loss_function(logits, **given), ForCausalLMLoss(logits, **given))


def test_a_value_that_is_no_switch_is_refused() -> None:
    with pytest.raises(TypeError, match="fuse='yes': must be True or False"):
        Precision("O2").prepare(nn.Linear(2, 2), fuse="yes")
