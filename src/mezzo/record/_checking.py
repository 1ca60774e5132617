"""The tensor checker on and off: around a block, or step by step."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from mezzo.record._checker_config import TensorCheckerConfig
from mezzo.record._listening import listening, start_listening, stop_listening
from mezzo.record._tensor_checker import TensorChecker

_checkers: WeakKeyDictionary[TensorCheckerConfig, TensorChecker] = WeakKeyDictionary()
"""One per configuration: it counts the steps of all its calls."""


def _checker_of(config: TensorCheckerConfig) -> TensorChecker:
    if config not in _checkers:
        _checkers[config] = TensorChecker(config)
    return _checkers[config]


class _Active(threading.local):
    """What `enable_tensor_checker` has started in a thread."""

    checker: TensorChecker | None = None


_active = _Active()


def enable_tensor_checker(config: TensorCheckerConfig) -> TensorChecker:
    """Begin a step: check the kernels of this thread and of its backward, if the step is one of `config.debug_step`.

    Call it at the beginning of every step, and `disable_tensor_checker` at the end of the run. Another configuration
    replaces the previous one, and counts its own steps.

    Returns:
        The checker of the configuration, with its findings so far; the same object at each call.
    """
    disable_tensor_checker()
    checker = _checker_of(config)
    if config.is_in_window(checker.begin_step()):
        start_listening(checker)
        _active.checker = checker
    return checker


def disable_tensor_checker() -> None:
    """Stop what `enable_tensor_checker` started in this thread; silent if nothing was started."""
    checker, _active.checker = _active.checker, None
    if checker is not None:
        stop_listening(checker)
        checker.close()


@contextmanager
def tensor_checker(config: TensorCheckerConfig | None = None) -> Iterator[TensorChecker]:
    """Check the kernels that run inside, as one step of a configuration; off afterwards, also after an exception.

    Args:
        config: What to check; None: everything, and the first NaN or inf raises `NonFiniteError`.
    """
    with checking(TensorCheckerConfig() if config is None else config) as checker:
        yield checker


@contextmanager
def checking(config: TensorCheckerConfig, inside: nn.Module | None = None) -> Iterator[TensorChecker]:
    """Check one step of a configuration.

    Args:
        config: What to check.
        inside: The module whose forward is in progress; paths are relative to it.
    """
    checker = _checker_of(config)
    if not config.is_in_window(checker.begin_step()):
        yield checker
        return
    try:
        with listening(checker, inside=inside):
            yield checker
    finally:
        checker.close()
