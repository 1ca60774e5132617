"""Events of the profiler name their device by the enumeration that is imported."""

import pytest
import torch

from mezzo._torch.profiler import DeviceType


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
def test_an_event_on_the_host_is_a_cpu_event() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(2).add(1)
    events = profile.events()
    assert events
    assert all(event.device_type == DeviceType.CPU for event in events)
    assert DeviceType.CUDA != DeviceType.CPU
