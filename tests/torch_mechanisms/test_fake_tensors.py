"""Calls are tried on tensors without memory."""

import logging

import pytest
import torch
from torch import nn

from mezzo._torch.fake_tensors import FakeTensor, FakeTensorMode, FunctionalTensor, no_report_of_misfits


def test_a_real_module_takes_a_tensor_without_memory() -> None:
    layer = nn.Linear(4, 2)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        out = layer(torch.empty(1009, 4))
    assert isinstance(out, FakeTensor)
    assert out.shape == (1009, 2)


def test_a_call_that_does_not_fit_raises_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with FakeTensorMode(), no_report_of_misfits():
        assert logger.disabled
        x = torch.empty(2, 3)
        with pytest.raises(RuntimeError):
            x @ x
    assert not logger.disabled
    assert not caplog.records


def test_a_functional_tensor_is_a_tensor() -> None:
    assert issubclass(FunctionalTensor, torch.Tensor)
