"""Padding as TensorFlow's 'same'."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo.vision.models._blocks import pad_same


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 7), st.integers(1, 5))
def test_a_convolution_gives_the_size_over_the_stride_and_the_smaller_half_is_in_front(
    height: int, width: int, kernel: int, stride: int
) -> None:
    x = torch.ones(1, 1, height, width)
    padded = pad_same(x, kernel, stride)
    for axis, size in ((2, height), (3, width)):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)  # TensorFlow's formula
        assert padded.shape[axis] == size + total
        ones = padded.sum(dim=5 - axis).flatten().nonzero()
        assert ones[0] == total // 2
