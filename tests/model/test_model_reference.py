"""The loops of `model_loops`, compared with NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from model_loops import CLASSES, FEATURES, amp_loop, batches_of, make_data, make_network, plain_loop


def softmax_step(weight: Any, bias: Any, inputs: Any, labels: Any) -> tuple[float, Any, Any]:
    """Return the cross-entropy of a linear classifier and its gradients, by formula in float64."""
    logits = inputs @ weight.T + bias
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(shares[rows, labels]).mean()
    shares[rows, labels] -= 1
    return float(loss), shares.T @ inputs / len(labels), shares.mean(0)


def test_the_plain_loop_is_gradient_descent_with_momentum() -> None:
    torch.manual_seed(0)
    network = nn.Linear(FEATURES, CLASSES)
    weight, bias = (value.detach().double().numpy().copy() for value in (network.weight, network.bias))
    batches = batches_of(make_data(), 4)
    losses = plain_loop(network, batches, epochs=2, window=2)
    expected, moved = [], [np.zeros_like(weight), np.zeros_like(bias)]
    for _ in range(2):
        summed = [np.zeros_like(weight), np.zeros_like(bias)]
        for (inputs, labels), updates_now in zip(batches, [False, True, False, True], strict=True):
            loss, *gradients = softmax_step(weight, bias, inputs.double().numpy(), labels.numpy())
            expected.append(loss)
            summed = [s + g for s, g in zip(summed, gradients, strict=True)]
            if updates_now:
                moved = [0.9 * m + s for m, s in zip(moved, summed, strict=True)]
                weight, bias = weight - 0.1 * moved[0], bias - 0.1 * moved[1]
                summed = [np.zeros_like(weight), np.zeros_like(bias)]
    assert losses == pytest.approx(expected, rel=1e-6)  # float32 has 24 bits
    np.testing.assert_allclose(network.weight.detach().numpy(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_loop_in_half_stays_near_the_plain_one(level: str) -> None:
    batches = batches_of(make_data(), 4)
    expected = plain_loop(make_network(), batches, epochs=3)
    seen = amp_loop(make_network(), batches, level=level, epochs=3)
    assert seen != expected
    assert seen == pytest.approx(expected, abs=5e-3)  # 11 bits in values below 3, over 12 steps
