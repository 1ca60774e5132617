"""Whether this CPU computes in half as fast as in float32. If not, heavy operators compute in float32."""

from __future__ import annotations

import threading
import time
from functools import cache
from typing import TYPE_CHECKING

import torch

from mezzo.amp.hardware import CPU_HALF_SLOWDOWN

if TYPE_CHECKING:
    from mezzo.amp._policy import Policy

_SIZE, _REPEATS, _ROUNDS = 192, 2, 12
_LEAST_ROUNDS = 3
"""The first round also loads the kernels, so one slow round proves nothing."""
_PAUSE_S = 0.003


def _best_time_s(dtype: torch.dtype) -> float:
    """Return the best processor time of a small matrix product and a convolution, forward and backward.

    The clock counts only this thread. Time in which another process has the core does not make a dtype look slow.
    On some CPUs (AVX512-FP16, torch 2.11) half convolutions are fast forward and twenty times slower backward.
    """
    left = torch.ones(_SIZE, _SIZE).to(dtype)
    image = torch.ones(2, 16, 24, 24).to(dtype)
    filters = torch.ones(16, 16, 3, 3).to(dtype)
    gradient = torch.ones(2, 16, 22, 22).to(dtype)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.thread_time()
        torch.mm(left, left)
        torch.mm(left.t(), left)
        torch.conv2d(image, filters)
        torch.ops.aten.convolution_backward(
            gradient, image, filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        best = min(best, time.thread_time() - start)
    return best


def _keeps_up(dtype: torch.dtype) -> bool:
    """Return whether half is fast. Both dtypes are measured in turns, with pauses: other processes slow both alike."""
    half = full = float("inf")
    for done in range(1, _ROUNDS + 1):
        full = min(full, _best_time_s(torch.float32))
        half = min(half, _best_time_s(dtype))
        if done >= _LEAST_ROUNDS and half > 2 * CPU_HALF_SLOWDOWN * full:
            break
        time.sleep(_PAUSE_S)
    return half < CPU_HALF_SLOWDOWN * full


@cache
def has_half_units(dtype: torch.dtype) -> bool:
    """Whether products and convolutions in a half dtype are as fast as in float32 on this CPU; measured once."""
    answers: list[bool] = []

    def measure() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # on a busy machine, threads that wait for each other make float32 look slow
        try:
            with torch.no_grad():
                answers.append(_keeps_up(dtype))
        finally:
            torch.set_num_threads(threads)

    thread = threading.Thread(target=measure)  # in its own thread, no recorder, mode or policy sees the operators
    thread.start()
    thread.join()
    return answers[0]


def emulates(policy: Policy) -> bool:
    """Whether heavy operators on CPU tensors compute in float32 under a policy, with half inputs and outputs."""
    if policy.cpu_compute == "auto":
        return not has_half_units(policy.dtype)
    return policy.cpu_compute == "float32"
