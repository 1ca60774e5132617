"""Where an event of torch's profiler ran.

Why: events of the profiler name their device by an enumeration that only this module has.
Releases: 2.11 to 2.15.
Without it: recordings with `kernels=True` cannot tell kernels of the GPU from calls on the host.
"""

from torch._C._autograd import DeviceType

__all__ = ["DeviceType"]
