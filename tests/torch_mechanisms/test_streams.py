"""The number of a stream is that of torch.cuda.current_stream."""

import pytest
import torch

from mezzo._torch.streams import raw_stream


@pytest.mark.gpu
def test_the_number_is_the_current_streams() -> None:
    assert raw_stream(0) == torch.cuda.current_stream(0).cuda_stream
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert raw_stream(0) == torch.cuda.current_stream(0).cuda_stream


def test_a_build_with_cuda_has_the_fast_function() -> None:
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    assert raw_stream is torch._C._cuda_getCurrentRawStream, "FP8 products get slower: torch has no raw stream any more"
