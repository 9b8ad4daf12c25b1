"""Compute or load for the requests of one engine: which of a request's blocks are offered, and which it computes.

Knows no engine: it is told the keys of a request once, before anything of it is restored, and keeps the answer until
the request is over. It promises that a restore is offered only where it is expected to end before prefill would, by the
measured bandwidth of every medium, what waits for it, and a given or learned cost of prefill. Without a cost of prefill
yet, and on a medium that nobody has measured, everything is offered: that is how both are learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.connectors.failures import LOG_INTERVAL_S
from rewarm.connectors.vllm.traffic import log
from rewarm.tiers.decide import Context, Decision, MediumState, Queue, decide
from rewarm.tiers.pool import PoolStore
from rewarm.tiers.prefill import PrefillCurve
from rewarm.units import format_duration

NOTHING: frozenset[bytes] = frozenset()


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A block as it is stored: its bytes and its tokens, and what a restore takes however small, seconds."""

    block_bytes: int
    block_tokens: int
    fixed_s: float


class Prompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request: the keys of its blocks after the `computed` tokens that the engine has, and all its tokens."""

    request: str
    keys: Sequence[bytes]
    tokens: int
    computed: int


class _Offer(msgspec.Struct):
    """What was offered to a request: bytes in all, by medium, and what of them the store has not been asked for yet.

    It is expected to be there at `due_s` and would be computed by `late_s`, `time.monotonic()`.
    """

    bytes: int
    by_medium: npt.NDArray[np.int64]
    coming_bytes: int
    due_s: float
    late_s: float


class Chooser:
    """See the module. One thread, the scheduler's. `refused` holds the keys that a request computes though they are
    there, by request."""

    def __init__(self, pool: PoolStore, shape: Shape, curve: Callable[[], PrefillCurve | None]) -> None:
        self.refused: dict[str, frozenset[bytes]] = {}
        self.refused_blocks = 0
        self.cut_requests = 0
        self.asked_requests = 0
        self._chosen: set[str] = set()
        self._pool = pool
        self._shape = shape
        self._curve = curve
        self._offers: dict[str, _Offer] = {}
        self._logged_s = -LOG_INTERVAL_S

    def has_chosen(self, request: str) -> bool:
        """True once `choose` has decided for a request."""
        return request in self._chosen

    def choose(self, prompt: Prompt, failed: Container[bytes], near: Callable[[bytes], bool]) -> Decision | None:
        """Decide for a request, once; `near` says which blocks the engine's own memory holds. None: all is offered."""
        curve = self._curve()
        if prompt.request in self._chosen or curve is None or not prompt.keys:
            return None
        self._chosen.add(prompt.request)
        self.asked_requests += 1
        places = np.where([key not in failed for key in prompt.keys], self._pool.places(prompt.keys), -1)
        at_hand = np.array([near(key) for key in prompt.keys], np.bool_)
        wanted = int(((places >= 0) & ~at_hand).sum()) * self._shape.block_bytes
        media = self._media(wanted)
        context = Context(
            places=np.where(at_hand, len(media), places),
            block_bytes=self._shape.block_bytes,
            block_tokens=self._shape.block_tokens,
            tokens=prompt.tokens,
            computed=prompt.computed,
        )
        at_once = MediumState(bytes_per_s=math.inf)
        decision = decide(context, [*media, at_once], curve, fixed_s=self._shape.fixed_s)
        loads = places[: decision.blocks][~at_hand[: decision.blocks]]
        if not self._offer(prompt.request, loads, media, decision):
            decision = msgspec.structs.replace(decision, blocks=0, tokens=0, expected_s=decision.recompute_s)
        self._refuse(prompt, decision, places)
        return decision

    def submitted(self, request: str, blocks: int) -> None:
        """The store has been asked for blocks of a request: they wait there now."""
        offer = self._offers.get(request)
        if offer is not None:
            offer.coming_bytes = max(offer.coming_bytes - blocks * self._shape.block_bytes, 0)

    def forget(self, request: str) -> None:
        """A request is over, or will not be restored."""
        self._chosen.discard(request)
        self.refused.pop(request, None)
        self._offers.pop(request, None)

    def _media(self, wanted: int) -> list[MediumState]:
        """The pool's media for a request of so many bytes, with what was offered and has not reached them yet.

        The queue is that of the whole request: a part of it would go before others that were promised their turn.
        """
        coming = [offer for offer in self._offers.values() if offer.coming_bytes]
        found = []
        for number, medium in enumerate(self._pool.media()):
            waiting = [(float(o.bytes), int(o.by_medium[number] * o.coming_bytes // o.bytes)) for o in coming]
            ahead = medium.queue.joined_by(waiting).ahead_bytes(np.array(float(wanted)))
            found.append(MediumState(bytes_per_s=medium.bytes_per_s, queue=Queue.of(int(ahead))))
        return found

    def _offer(
        self, request: str, loads: npt.NDArray[np.int64], media: Sequence[MediumState], decision: Decision
    ) -> bool:
        """Note what is loaded; False when it would overtake an offer that would then end after prefill."""
        now_s = time.monotonic()
        self._offers = {r: o for r, o in self._offers.items() if o.coming_bytes or now_s < o.due_s}
        if not len(loads):
            return True
        by_medium = np.bincount(loads, minlength=len(media)) * self._shape.block_bytes
        size = int(by_medium.sum())
        delay_s = max(count / medium.bytes_per_s for count, medium in zip(by_medium.tolist(), media, strict=True))
        overtaken = [offer for offer in self._offers.values() if offer.bytes > size]
        if any(offer.due_s + delay_s > offer.late_s for offer in overtaken):
            return False
        for offer in overtaken:
            offer.due_s += delay_s
        self._offers[request] = _Offer(size, by_medium, size, now_s + decision.expected_s, now_s + decision.recompute_s)
        return True

    def _refuse(self, prompt: Prompt, decision: Decision, places: npt.NDArray[np.int64]) -> None:
        """Note what the engine computes though it is there; the last token is computed in any case."""
        usable = (prompt.tokens - prompt.computed - 1) // self._shape.block_tokens
        beyond = places[decision.blocks :] >= 0
        if not beyond[: max(usable - decision.blocks, 0)].any():
            return
        keys = prompt.keys[decision.blocks :]
        self.refused[prompt.request] = frozenset(key for key, there in zip(keys, beyond, strict=True) if there)
        self.refused_blocks += int(beyond.sum())
        self.cut_requests += 1
        self._log(prompt, decision)

    def _log(self, prompt: Prompt, decision: Decision) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        log.info(
            "rewarm: loading pays for %d of %d tokens of request %s: it would be there after %s, computed after %s; "
            "%d of %d requests were cut so far",
            decision.tokens,
            prompt.tokens,
            prompt.request,
            format_duration(decision.expected_s),
            format_duration(decision.recompute_s),
            self.cut_requests,
            self.asked_requests,
        )
