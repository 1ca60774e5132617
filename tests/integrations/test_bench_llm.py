"""`mezzo bench llm` with the real Llama of transformers, at a tiny size on a CPU."""

import json

import pytest
from torch import nn

from mezzo.bench import NetworkSizes, find_network
from mezzo.cli import run

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def test_the_operations_are_those_of_the_networks_products() -> None:
    network = find_network("transformers:llama-tiny", NetworkSizes(size=4, simple_net_batch=3, layers=3, length=8))
    weights = sum(layer.weight.numel() for layer in network.create().modules() if isinstance(layer, nn.Linear))
    attention = 3 * 2 * (2 * 8 * 64) / 2 * 3  # forward and backward, two products, half of each, three layers
    assert network.flops == 6 * weights + attention


def test_all_recipes_that_a_cpu_can_run_reach_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "llm", "--size", "tiny", "--steps", "1", "--check-steps", "8", "--device", "cpu", "--json"]
    assert run([*words, "--recompute", "--recipes", "stock-eager,mezzo-eager,mezzo-o3-graph,torchao"]) == 0
    result = json.loads(capsys.readouterr().out)
    losses = [each["loss"] for each in result["results"]]
    assert losses == [pytest.approx(losses[0], rel=2e-3)] * 2  # bfloat16 in other places
    assert sorted(each["recipe"]["by"] for each in result["not_run"]) == ["mezzo", "mezzo", "torchao"]
    assert all("FP8" in each["reason"] or "torchao" in each["reason"] for each in result["not_run"])
