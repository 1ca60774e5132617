"""A port for processes that meet on this machine."""

import socket


def free_port() -> int:
    """Return one that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
