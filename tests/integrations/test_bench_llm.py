"""`mezzo bench llm` with the real Llama of transformers, at a tiny size on a CPU."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from mezzo.bench import NetworkSizes, find_network
from mezzo.cli import run

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def test_the_operations_are_those_of_the_networks_products() -> None:
    network = find_network("transformers:llama-tiny", NetworkSizes(size=4, simple_net_batch=3, layers=3, length=8))
    weights = sum(layer.weight.numel() for layer in network.create().modules() if isinstance(layer, nn.Linear))
    attention = 3 * 2 * (2 * 8 * 64) / 2 * 3  # forward and backward, two products, half of each, three layers
    assert network.flops == 6 * weights + attention


def test_a_smaller_vocabulary_makes_a_smaller_head() -> None:
    sizes = NetworkSizes(size=4, simple_net_batch=3, length=8, words=80)
    network = find_network("transformers:llama-tiny", sizes).create().network
    assert network.lm_head.weight.shape == (80, 64)


@pytest.mark.parametrize(("name", "mask"), [("llama-tiny", False), ("llama-tiny", True), ("gpt2", False)])
def test_head_and_loss_in_one_give_the_loss_of_the_logits(name: str, mask: bool) -> None:
    sizes = NetworkSizes(size=4, simple_net_batch=3, batch_size=1, length=8, mask=mask)
    network = find_network(f"transformers:{name}", sizes)
    model, loss_fn, ((inputs, targets), *_) = network.make(torch.device("cpu"))
    expected = loss_fn(model(inputs), targets)
    assert network.fuse_loss is not None
    fused = network.fuse_loss(model)
    torch.testing.assert_close(fused(model(inputs), targets), expected, rtol=1e-5, atol=0)


def test_attention_without_a_mask_is_causal() -> None:
    """The same weights with and without the mask tensor of transformers."""
    sizes = [NetworkSizes(size=4, simple_net_batch=3, length=8, mask=mask) for mask in (False, True)]
    (one, _, ((tokens, _), *_)), (other, *_) = (
        find_network("transformers:llama-tiny", each).make(torch.device("cpu")) for each in sizes
    )
    torch.testing.assert_close(one(tokens), other(tokens), rtol=1e-5, atol=1e-6)
    changed = tokens.clone()
    changed[:, -1] += 1
    assert torch.equal(one(tokens)[:, :-1], one(changed)[:, :-1])


def test_all_recipes_that_a_cpu_can_run_reach_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "llm", "--size", "tiny", "--steps", "1", "--check-steps", "8", "--device", "cpu", "--json"]
    assert run([*words, "--recompute", "--recipes", "stock-eager,mezzo-eager,mezzo-o3-graph,torchao"]) == 0
    result = json.loads(capsys.readouterr().out)
    losses = [each["loss"] for each in result["results"]]
    assert losses == [pytest.approx(losses[0], rel=2e-3)] * 2  # bfloat16 in other places
    assert sorted(each["recipe"]["by"] for each in result["not_run"]) == [*["mezzo"] * 4, "torchao"]
    assert all("FP8" in each["reason"] or "torchao" in each["reason"] for each in result["not_run"])


def test_the_example_computes_what_transformers_computes() -> None:
    """The same weights in both: float32 logits differ by the order of sums only."""
    code = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "llama" / "model.py"))
    size = code["SIZES"]["tiny"]
    ours = code["Llama"](size, words=100, length=16)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=size.width,
            intermediate_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.key_heads,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            max_position_embeddings=16,
        )
    )
    names = {"self_attn.q_proj": "attention.query", "self_attn.k_proj": "attention.key", "mlp.gate_proj": "gate"}
    names |= {"self_attn.v_proj": "attention.value", "self_attn.o_proj": "attention.out", "mlp.up_proj": "up"}
    names |= {"mlp.down_proj": "down", "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    names |= {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head", "model.layers": "blocks"}
    weights = {}
    for name, weight in theirs.state_dict().items():
        for before, after in names.items():
            name = name.replace(before, after)
        weights[name] = torch.randn_like(weight) * 0.2
    ours.load_state_dict(weights)
    back = dict(zip(weights, theirs.state_dict(), strict=True))
    theirs.load_state_dict({back[name]: weight for name, weight in weights.items()})
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
