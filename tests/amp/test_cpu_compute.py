"""On a CPU without half units heavy operators compute in float32 between half borders, forward and backward."""

import dataclasses
import time

import pytest
import torch
from torch import nn

from installed_kernels import uninstall_kernels
from mezzo.amp import Policy, _compile, auto_cast, debugging
from mezzo.amp import _cpu as cpu


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_the_result_is_the_rounded_float32_product_of_rounded_inputs(half: torch.dtype) -> None:
    x, weight = torch.randn(16, 64), torch.randn(32, 64)
    with auto_cast(dtype=half, cpu_compute="float32"):
        seen = nn.functional.linear(x, weight)
    expected = nn.functional.linear(x.to(half).float(), weight.to(half).float()).to(half)
    assert seen.dtype is half
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_gradients_are_those_of_half_borders(half: torch.dtype) -> None:
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    with auto_cast(dtype=half, cpu_compute="float32"):
        out = nn.functional.linear(x, weight)
    grad = torch.randn(8, 4).to(half)
    out.backward(grad)
    # the half gradient of each input, as a Tensor Core kernel would store it, then cast to the float32 leaf
    expected = (grad.float() @ weight.detach().to(half).float()).to(half).float()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def kernels(cpu_compute: str) -> dict[str, tuple[int, int, int, int]]:
    x = torch.rand(2, 3, 8, 8)
    conv = nn.Conv2d(3, 4, 3)
    with auto_cast(cpu_compute=cpu_compute), debugging.collect_operator_stats(print_table=False) as stats:
        conv(x).float().sum().backward()
    return stats.totals()


def test_the_argument_decides_what_runs() -> None:
    between = kernels("float32")
    assert between["convolution"] == (0, 0, 1, 0)
    assert between["convolution_backward"] == (0, 0, 1, 0)
    native = kernels("native")
    assert native["convolution"] == (1, 0, 0, 0)
    assert native["convolution_backward"] == (1, 0, 0, 0)


@pytest.mark.parametrize(("half_s", "fast"), [(1.0, True), (1.9, True), (2.1, False), (15.0, False)])
def test_the_probe_compares_half_with_float32(half_s: float, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_best_time_s", lambda dtype: 1.0 if dtype is torch.float32 else half_s)
    assert cpu.has_half_units.__wrapped__(torch.float16) is fast


def test_one_disturbed_round_does_not_make_half_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, `mezzo check` once called fast bfloat16 slow, and the next process disagreed."""
    half_s = iter([50.0])
    monkeypatch.setattr(cpu, "_best_time_s", lambda dtype: 1.0 if dtype is torch.float32 else next(half_s, 1.0))
    assert cpu.has_half_units.__wrapped__(torch.bfloat16)


def test_the_probe_does_not_count_time_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.mm

    def interrupted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)  # far longer than the probe's operators (about 1 ms), also on a busy machine
        return product(left, right)

    monkeypatch.setattr(torch, "mm", interrupted)
    assert cpu._best_time_s(torch.float32) < 0.5


def test_the_probe_decides_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4, 4)
    for fast in (True, False):
        monkeypatch.setattr(cpu, "has_half_units", lambda _dtype, fast=fast: fast)
        uninstall_kernels()
        # a policy object of its own each time: what a policy does with an operator is worked out once
        region = auto_cast(policy=dataclasses.replace(Policy.create(dtype="bfloat16")))
        with region, debugging.collect_operator_stats(print_table=False) as stats:
            torch.mm(x, x)
        assert stats.totals()["mm"] == ((0, 1, 0, 0) if fast else (0, 0, 1, 0))


def test_the_probe_runs_and_answers() -> None:
    assert cpu._best_time_s(torch.float32) > 0
    assert cpu.has_half_units(torch.bfloat16) in (True, False)


def test_the_probe_measures_on_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other on a busy machine would make float32 look slow."""
    seen = []
    monkeypatch.setattr(cpu, "_best_time_s", lambda dtype: seen.append(torch.get_num_threads()) or 1.0)
    before = torch.get_num_threads()
    cpu.has_half_units.__wrapped__(torch.float16)
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_the_answer_of_the_probe_is_part_of_compile_cache_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = []
    for answer in (True, False):
        monkeypatch.setattr(_compile, "emulates", lambda _, answer=answer: answer)
        with auto_cast(level="O2"):
            _compile._begin()
            tags.append(torch.compiler.config.cache_key_tag)
            _compile._end()
    assert tags[0] != tags[1]
