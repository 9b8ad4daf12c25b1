"""Compute or load: how many leading tokens of a cached context to load, and how many to compute instead.

It promises that a restore is offered only where it is expected to end clearly before prefill would; it is arithmetic on
what `PoolStore.media` measures and a `PrefillCurve` says. Loading starts with the first token, because an engine
computes what follows a loaded prefix; media of one request work in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError
from rewarm.tiers.prefill import PrefillCurve

GAIN_MIN = 0.03
"""Share of the time of pure recompute that loading must be expected to save: bandwidth is known no better than that."""


class Queue(msgspec.Struct, frozen=True, eq=False):
    """What waits for a medium: `ahead[i]` bytes are served before a request of `sizes[i-1]` to `sizes[i]` bytes.

    Shapes (waiting,) ascending and (waiting + 1,). A smaller request goes before larger ones, so it waits for less.
    """

    sizes: npt.NDArray[np.float64]
    ahead: npt.NDArray[np.float64]

    @classmethod
    def of(cls, in_flight_bytes: int, waiting: Sequence[tuple[float, int]] = ()) -> Queue:
        """From what the medium has been asked for, and `RestoreOrder.queue`."""
        rows = np.array(sorted(waiting), np.float64).reshape(-1, 2)
        return cls(rows[:, 0], in_flight_bytes + np.concatenate(([0.0], np.cumsum(rows[:, 1]))))

    def joined_by(self, waiting: Sequence[tuple[float, int]]) -> Queue:
        """The same with more that waits, each as `RestoreOrder.queue` says it."""
        mine = zip(self.sizes.tolist(), np.diff(self.ahead).astype(int).tolist(), strict=True)
        return Queue.of(int(self.ahead[0]), [*mine, *waiting])

    def ahead_bytes(self, count: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Bytes served before requests of `count` bytes that come now, if nothing comes later; any shape."""
        return self.ahead[np.searchsorted(self.sizes, count, "right")]


class MediumState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A medium at this moment; `bytes_per_s` is `inf` while nobody has measured it: loading is how that is done."""

    bytes_per_s: float
    queue: Queue = Queue.of(0)

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"a medium has a bandwidth above 0 bytes/s, got {self.bytes_per_s!r}")


class Context(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request: `places` is the number of the medium of each leading cached block, shape (blocks,), see
    `PoolStore.places`; `tokens` counts the whole prompt, cached or not; the engine has the first `computed` itself, and
    the blocks come after them."""

    places: npt.NDArray[np.int64]
    block_bytes: int
    block_tokens: int
    tokens: int
    computed: int = 0

    def __post_init__(self) -> None:
        counts = self.block_bytes, self.block_tokens, self.tokens - self.computed
        if min(counts) < 1 or self.computed < 0 or self.places.ndim != 1:
            raise ConfigError(f"a context has tokens, and blocks of at least 1 byte and 1 token, got {self}")


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks` leading blocks, `tokens` tokens to load (0: compute everything); seconds until the prompt is there."""

    blocks: int
    tokens: int
    expected_s: float
    recompute_s: float


def decide(context: Context, media: Sequence[MediumState], prefill: PrefillCurve, *, fixed_s: float = 0.0) -> Decision:
    """The number of leading blocks with the earliest end, or none where that saves less than `GAIN_MIN`.

    With x blocks loaded the prompt is there after max over media of (bytes served before x + bytes of x) / bandwidth,
    plus `fixed_s` (what a restore takes however small), plus the prefill of the rest after x. Every x is looked at, as
    arrays. A block on no medium (place -1) ends the prefix, and the last token is always computed: an engine needs its
    logits.
    """
    held = context.places
    usable = int((held < 0).argmax()) if (held < 0).any() else len(held)
    usable = min(usable, (context.tokens - context.computed - 1) // context.block_tokens)
    blocks = np.arange(usable + 1)
    loading_s = np.zeros(usable + 1)
    for number, medium in enumerate(media):
        mine = np.concatenate(([0], np.cumsum(held[:usable] == number)))
        wanted = medium.queue.ahead_bytes(blocks * float(context.block_bytes)) + mine * float(context.block_bytes)
        loading_s = np.maximum(loading_s, np.where(mine > 0, wanted / medium.bytes_per_s, 0.0))
    loaded = context.computed + blocks * float(context.block_tokens)
    ends_s = loading_s + np.where(blocks > 0, fixed_s, 0.0) + prefill.seconds(context.tokens - loaded, loaded)
    best, recompute_s = int(ends_s.argmin()), float(ends_s[0])
    if not ends_s[best] <= (1 - GAIN_MIN) * recompute_s:
        best = 0
    return Decision(
        blocks=best,
        tokens=best * context.block_tokens,
        expected_s=float(ends_s[best]),
        recompute_s=recompute_s,
    )
