"""mezzo's kernels in torch's dispatcher, for tests that need a process without them."""

import pytest

from mezzo.amp._kernel_table import KERNELS, KernelTable


def uninstall_kernels() -> None:
    """Remove every kernel of mezzo; the next region installs what it needs."""
    KERNELS.uninstall()


def count_kernels() -> int:
    return len(KERNELS.installed)


def install_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on regions install no kernels."""
    KERNELS.uninstall()
    monkeypatch.setattr(KernelTable, "install", lambda *_: None)
