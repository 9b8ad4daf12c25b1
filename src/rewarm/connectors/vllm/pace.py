"""What prefill costs in this engine, learned from its steps: scheduled tokens in, seconds out.

A step counts when one request's prompt is nearly all of it: mixed steps say little about either. Steps may overlap (the
next one is scheduled before the last has ended), so a step begins when it is scheduled or when the one before it ended.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rewarm.tiers.prefill import PrefillCurve, PrefillLearner

TOKENS_MIN = 128
"""Below that a step costs what any step costs."""
SHARE_MIN = 0.9
"""Of a step's tokens that must be one request's."""
OVERLAP_MAX = 2
"""Steps under way at one time; more that never ended are forgotten."""


class Pace:
    """Told of every step. `given` tokens/s take the place of what is learned."""

    def __init__(self, given: float | None = None) -> None:
        self._given = None if given is None else PrefillCurve.of_rate(given)
        self._learner = PrefillLearner()
        self._began: deque[tuple[float, int, int]] = deque(maxlen=OVERLAP_MAX)
        self._ended_s = 0.0

    def curve(self) -> PrefillCurve | None:
        """What prefill costs; None before anything is known."""
        return self._given or self._learner.curve()

    def began(self, step: Any, now_s: float) -> None:
        """A step was scheduled; `step` is vLLM's `SchedulerOutput`."""
        counts = step.num_scheduled_tokens
        if not counts:
            return
        request = max(counts, key=counts.__getitem__)
        tokens = counts[request]
        if tokens < max(TOKENS_MIN, SHARE_MIN * sum(counts.values())):
            self._began.append((now_s, 0, 0))
            return
        self._began.append((now_s, tokens, _computed(step, request)))

    def ended(self, now_s: float) -> None:
        """The oldest step that is under way has ended."""
        if not self._began:
            return
        began_s, tokens, cached = self._began.popleft()
        if tokens:
            self._learner.note(tokens, cached, now_s - max(began_s, self._ended_s))
        self._ended_s = now_s


def _computed(step: Any, request: str) -> int:
    """Tokens of a request that were there before this step."""
    for new in step.scheduled_new_reqs:
        if new.req_id == request:
            return int(new.num_computed_tokens)
    known = step.scheduled_cached_reqs
    return int(known.num_computed_tokens[known.req_ids.index(request)])
