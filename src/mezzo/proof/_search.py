"""Find a minimal set that makes a run pass: by binary search, then by delta debugging if the set is not minimal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Passes = Callable[[frozenset[str]], bool]
"""Returns whether the run passes with these names in float32."""

Outcome = Literal["found", "nothing needed", "not the cause", "out of evaluations"]

MIN_EVALUATIONS = 2
"""One with nothing kept, one with everything kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Result of a search."""

    outcome: Outcome
    """`found`; `nothing needed`: passes with none; `not the cause`: fails with all; `out of evaluations`: the set passes,
    but a smaller one may pass too."""
    kept: tuple[str, ...]
    """The smallest set known to pass, in the order of the candidates; empty if none passes."""
    is_minimal: bool
    """Whether the run was seen to fail without each one of the names."""
    evaluations: int


class _OutOfEvaluations(Exception):
    """The limit of evaluations is reached."""


class _Search:
    """Evaluates each set once, and counts the evaluations."""

    def __init__(
        self,
        passes: Passes,
        max_evaluations: int,
        progress: Callable[[int, int], None] | None,
        known: Mapping[frozenset[str], bool],
    ) -> None:
        self._passes, self._limit, self._progress = passes, max_evaluations, progress
        self.answers = dict(known)
        self.count = 0

    def ask(self, kept: Sequence[str]) -> bool:
        """Return whether a set passes."""
        key = frozenset(kept)
        if key not in self.answers:
            if self.count == self._limit:
                raise _OutOfEvaluations
            self.answers[key] = self._passes(key)
            self.count += 1
            if self._progress is not None:
                self._progress(self.count, self._limit)
        return self.answers[key]

    def by_halves(self, pool: Sequence[str]) -> list[str]:
        """Return a passing subset of a passing pool, by binary search.

        The shortest passing prefix of the pool ends with a needed name; the other needed names come before it.
        """
        needed: list[str] = []
        while not self.ask(needed):
            fails, works = 0, len(pool)
            while works - fails > 1:
                middle = (fails + works) // 2
                if self.ask([*needed, *pool[:middle]]):
                    works = middle
                else:
                    fails = middle
            needed.append(pool[works - 1])
            pool = pool[: works - 1]
        return needed

    def is_minimal(self, kept: Sequence[str]) -> bool:
        """Return whether each set with one name fewer fails."""
        return all(not self.ask(_without(kept, [name])) for name in kept)

    def by_parts(self, kept: list[str]) -> list[str]:
        """Return a minimal passing subset, by delta debugging: try parts, then complements, then smaller parts."""
        parts = 2
        while len(kept) > 1:
            chunks = _split(kept, parts)
            smaller = next((chunk for chunk in chunks if self.ask(chunk)), None)
            if smaller is not None:
                kept, parts = smaller, 2
                continue
            smaller = next((rest for rest in (_without(kept, chunk) for chunk in chunks) if self.ask(rest)), None)
            if smaller is not None:
                kept, parts = smaller, max(parts - 1, 2)
            elif parts == len(kept):
                break
            else:
                parts = min(2 * parts, len(kept))
        return kept


def minimal_set(
    passes: Passes,
    candidates: Sequence[str],
    max_evaluations: int = 60,
    progress: Callable[[int, int], None] | None = None,
    *,
    known: Mapping[frozenset[str], bool] | None = None,
) -> SearchResult:
    """Return a minimal set of candidates for which `passes` is true.

    If keeping more names never makes a passing run fail, k of n names take about k (log2 n + 2) + 2 evaluations.
    Otherwise the result may not be minimal, and delta debugging continues with the remaining evaluations. Minimal means
    that no name can be left out; a different set may be smaller.

    Args:
        passes: Called once per set.
        candidates: Names without duplicates; earlier names are preferred.
        max_evaluations: Maximum number of calls of `passes`.
        progress: Called after each evaluation with its number and `max_evaluations`.
        known: Answers that are already known; they do not count as evaluations.

    Raises:
        ValueError: `max_evaluations` is too small, or a candidate is duplicated.

    >>> minimal_set(lambda kept: {"b", "d"} <= kept, ["a", "b", "c", "d", "e"]).kept
    ('b', 'd')
    """
    if max_evaluations + len(known or {}) < MIN_EVALUATIONS:
        raise ValueError(f"max_evaluations={max_evaluations}: must be at least {MIN_EVALUATIONS}")
    if len(set(candidates)) != len(candidates):
        twice = next(name for name in candidates if list(candidates).count(name) > 1)
        raise ValueError(f"candidates: {twice!r} is duplicated")
    search = _Search(passes, max_evaluations, progress, known or {})
    is_over = False
    try:
        if search.ask(()):
            return SearchResult(outcome="nothing needed", kept=(), is_minimal=True, evaluations=search.count)
        if not search.ask(candidates):
            return SearchResult(outcome="not the cause", kept=(), is_minimal=False, evaluations=search.count)
        found = search.by_halves(candidates)
        if not search.is_minimal(found):
            search.by_parts(found)
    except _OutOfEvaluations:
        is_over = True
    return _best(search, candidates, is_over)


def _best(search: _Search, candidates: Sequence[str], is_over: bool) -> SearchResult:
    """Return the smallest passing set; of equally small ones the last."""
    passing = [kept for kept, passed in search.answers.items() if passed]
    best = min(reversed(passing), key=len)
    is_minimal = all(search.answers.get(best - {name}) is False for name in best)
    return SearchResult(
        outcome="out of evaluations" if is_over and not is_minimal else "found",
        kept=tuple(name for name in candidates if name in best),
        is_minimal=is_minimal,
        evaluations=search.count,
    )


def _without(kept: Sequence[str], names: Sequence[str]) -> list[str]:
    return [name for name in kept if name not in names]


def _split(names: Sequence[str], parts: int) -> list[list[str]]:
    """Return `parts` pieces of nearly equal length."""
    cuts = [len(names) * part // parts for part in range(parts + 1)]
    return [list(names[start:end]) for start, end in pairwise(cuts)]
