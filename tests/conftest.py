"""Every test starts from the same state and leaves none behind."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples each time, so that a change is what makes a test fail; `--hypothesis-profile=explore` looks further.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def clean_torch_state() -> Iterator[None]:
    """Seed, default dtype, autocast state and threads are as if the test ran alone."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    default_dtype = torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(default_dtype)
    for device_type in ("cpu", "cuda"):
        assert not torch.is_autocast_enabled(device_type), f"the test left autocast on for {device_type}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu skip with a reason where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
