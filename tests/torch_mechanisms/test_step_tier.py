"""Which kernels take a step."""

import pytest
import torch

from mezzo._torch import step_tier as _tier
from mezzo.optim import step_tier


@pytest.fixture(autouse=True)
def fresh_answers():
    _tier._works_on.cache_clear()
    yield
    _tier._works_on.cache_clear()


def test_a_cpu_has_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not _tier.uses_triton(torch.device("cpu"))
    with (
        step_tier("triton"),
        pytest.raises(RuntimeError, match="Triton has no kernels for cpu tensors; use 'auto' or 'fused'"),
    ):
        _tier.uses_triton(torch.device("cpu"))


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'cuda'.*auto, triton, fused"), step_tier("cuda"):
        pass


def test_the_tier_is_put_back_after_an_error() -> None:
    with pytest.raises(KeyError), step_tier("fused"):
        raise KeyError
    assert _tier._asked == "auto"


@pytest.mark.parametrize(
    ("error", "text"), [(OSError("no gcc\nlong"), "OSError: no gcc"), (ValueError(), "ValueError: no message")]
)
def test_where_triton_cannot_build_one_warning_says_why(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from mezzo._torch import triton_probe

    def fail(device_type: str) -> None:
        raise error

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(triton_probe, "try_kernel", fail)
    with pytest.warns(
        UserWarning, match=rf"Triton cannot build a kernel here \({text}\); steps use torch's fused kernels"
    ):
        assert not _tier.uses_triton(torch.device("cpu"))
    assert not _tier.uses_triton(torch.device("cpu"))  # and only one


def test_without_triton_there_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not _tier.uses_triton(torch.device("cpu"))
