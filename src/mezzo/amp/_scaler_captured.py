"""A loss scaler inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mezzo.amp._scaler_outcome import OutcomeLog
from mezzo.amp._scaler_rule import ScaleRule

if TYPE_CHECKING:
    from mezzo.amp._scaler import GradScaler


class CapturedScaling:
    """What graph mode needs of a scaler whose `step` and `update` are inside a CUDA graph.

    The host learns the outcome of a replay later.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Return a context for trial steps.

        No outcome hook is called, and the scaler's state is restored afterwards.
        """
        scaler = self._scaler
        state, log = scaler._state.read(), scaler._log
        scaler._log = OutcomeLog()
        try:
            yield
        finally:
            scaler._log = log
            scaler._state.write(state)
            scaler._has_idle_step = False
            scaler._progress.clear()
            scaler._stepped.clear()
            for guard in scaler._norms:
                guard.refresh()

    @property
    def settings(self) -> tuple[ScaleRule, bool]:
        """The settings that a captured update contains.

        When they change, the step must be captured again.
        """
        return self._scaler._rule, self._scaler._dynamic

    def take_outcome(self) -> Any:
        """Return where the update that was just captured leaves its outcome.

        `note_replay` needs it.
        """
        return self._scaler._log.take_captured()

    def note_replay(self, outcome: Any) -> None:
        """Record the outcome of a replayed step; raises what `GradScaler.update` raises."""
        scaler = self._scaler
        scaler._log.record(*outcome)
        scaler._log.process(scaler._rule.max_skips_at_floor)
