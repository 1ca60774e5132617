"""Messages to a logger inside a captured step: written while the step is captured, never a reason to stop."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from mezzo.precision import Precision
from mezzo.static import CaptureError, CompiledStep

logger = logging.getLogger("network")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Telling(nn.Module):
    """A layer that sends messages, as models of transformers do."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.linear, self.tell = nn.Linear(4, 2), tell

    def forward(self, x: Tensor) -> Tensor:
        self.tell(x)
        return self.linear(x)


def compiled(tell: Callable[[Tensor], None]) -> CompiledStep:
    precision = Precision("O2", "bfloat16")
    net = Telling(tell)
    net, optimizer = precision.prepare(net, SGD(net.parameters(), lr=0.1))
    return precision.compile(net, mse_loss, optimizer, backend="aot_eager")


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "network"]  # torch logs too


def constants(x: Tensor) -> None:
    logger.warning("%s has %d columns", "the input", x.shape[1])
    if logger.isEnabledFor(logging.INFO):
        logger.info("a step of %s rows", x.shape[0], extra={"stage": 1})


def test_a_message_is_written_when_the_step_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "network")
    step = compiled(constants)
    batch = torch.ones(3, 4), torch.zeros(3, 2)
    first = step(*batch)
    assert messages(caplog) == ["the input has 4 columns", "a step of 3 rows"]
    assert step(*batch) < first
    assert len(messages(caplog)) == 2


def test_a_message_with_a_tensor_names_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "network")
    with pytest.raises(CaptureError, match=r"test_loggers\.py.*mean of the input"):
        compiled(lambda x: logger.info("mean of the input: %s", x.mean()))(torch.ones(3, 4), torch.zeros(3, 2))


def test_a_message_with_a_tensor_that_nobody_reads_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "network")
    step = compiled(lambda x: logger.debug("mean of the input: %s", x.mean()))
    assert step(torch.ones(3, 4), torch.zeros(3, 2)).isfinite()
    assert not messages(caplog)


def test_torch_compile_keeps_its_own_treatment_of_loggers(caplog: pytest.LogCaptureFixture) -> None:
    compiled(constants)(torch.ones(3, 4), torch.zeros(3, 2))
    torch._dynamo.reset()
    caplog.clear()
    plain = torch.compile(Telling(constants), backend="eager")
    for _ in range(2):
        plain(torch.ones(3, 4))
    assert messages(caplog) == ["the input has 4 columns"] * 2
