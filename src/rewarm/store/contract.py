"""The contract of a store: what every medium promises and what connectors, tiers and outside checks rely on.

A store keeps opaque blocks under keys, in one namespace per handle. Every verb takes a batch. `load` and `save` return
at once with a `Transfer`; nothing on the data path raises: a block is returned whole and verified, or it is a miss
with a cause. Exceptions come from `rewarm.open` (`ConfigError`, `StorageError`) and from misuse (`MisuseError`):
a closed handle, a handle used after fork, keys that are not 8 to 64 bytes, lists of different lengths.

**Borrowed memory.** The buffers of a transfer belong to the store from submission until *release*. A transfer has a
verdict for each block (hit or miss, at once when it times out or is cancelled) and one release (no request of it is in
the kernel any more). Cancelling does not stop a running DMA: memory goes back to its owner only after `released()`.

**Threads.** Every method may be called from any thread. `lookup`, `in`, `stats` never touch the medium.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError, MisuseError

KEY_BYTES_MIN = 8
KEY_BYTES_MAX = 64
NAMESPACE_BYTES = 32
EMPTY_NAMESPACE = bytes(NAMESPACE_BYTES)
"""The namespace of a handle opened without one: for experiments only."""

SAVE_QUEUE_BYTES = 1 << 30
"""Saves waiting in memory above this are refused (`refused_budget`), not waited for."""


class Outcome(enum.StrEnum):
    """What became of one block of a transfer."""

    HIT = "hit"
    STORED = "stored"
    ALREADY = "already"
    MISSING = "missing"
    CORRUPT = "corrupt"
    WRONG_SIZE = "wrong_size"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    LOST_MEDIUM = "lost_medium"
    REFUSED_FULL = "refused_full"
    REFUSED_BUDGET = "refused_budget"
    REFUSED_ADMISSION = "refused_admission"


GOOD_OUTCOMES = frozenset({Outcome.HIT, Outcome.STORED, Outcome.ALREADY})
MISS_CAUSES = (
    Outcome.MISSING,
    Outcome.CORRUPT,
    Outcome.WRONG_SIZE,
    Outcome.TIMED_OUT,
    Outcome.CANCELLED,
    Outcome.LOST_MEDIUM,
)
REFUSAL_CAUSES = (
    Outcome.REFUSED_FULL,
    Outcome.REFUSED_BUDGET,
    Outcome.REFUSED_ADMISSION,
    Outcome.TIMED_OUT,
    Outcome.CANCELLED,
    Outcome.LOST_MEDIUM,
)


class Presence(msgspec.Struct, frozen=True, eq=False):
    """Answer of `lookup`: `mask[i]` says whether key i is held; `leading` is the length of the leading run of hits."""

    mask: npt.NDArray[np.bool_]
    leading: int

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_]) -> Presence:
        """Build a presence from its mask, shape (keys,)."""
        first = int(mask.argmin()) if len(mask) else 0
        return cls(mask, len(mask) if not len(mask) or mask[first] else first)


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One medium of a store that has several: `tier` is `dram`, `local` or `shared`; bytes are what this handle moved.

    `hits` and `bytes_read` are what was restored from it, `bytes_written` what was kept there for whatever reason.
    """

    tier: str
    medium: str
    hits: int
    bytes_read: int
    bytes_written: int
    capacity_bytes: int
    used_bytes: int


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one handle since it was opened. Bytes are bytes, seconds are seconds; names are those of the JSON."""

    device: str
    device_refusals: list[str]
    hits: int
    misses: dict[str, int]
    stored: int
    already: int
    refused: dict[str, int]
    bytes_read: int
    bytes_written: int
    bytes_padding: int
    bytes_log: int
    unreleased_bytes: int
    queued_bytes: int
    capacity_bytes: int
    used_bytes: int
    blocks: int
    visibility_bound_s: float
    evicted_segments: int = 0
    evicted_bytes: int = 0
    registered_bytes: int = 0
    notes: list[str] = []
    tiers: list[TierStats] = []
    """Where a store has several media. The figures above are then those of the local drives; reads are of all."""
    writes_saved_bytes: int = 0
    """Not written to flash because of admission."""
    hits_lost: int = 0
    """Blocks that were computed and saved again because admission had kept them off flash."""
    behind_refused_bytes: int = 0
    """Not copied to the next tier because the budget of write-behind was used up."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that `check` found: `kind` is a stable word, `where` a path inside the pool, `fixed` what was done."""

    kind: str
    where: str
    what: str
    fixed: bool = False


class CheckReport(msgspec.Struct, frozen=True):
    """Result of `check`. `clean` is True when nothing is left that loses data or space: notes do not count."""

    clean: bool
    findings: list[Finding]
    notes: list[Finding]
    blocks: int
    bytes_verified: int


@runtime_checkable
class NamespaceLike(Protocol):
    """What `namespace=` accepts beside bytes and str: for example `rewarm.geometry.Namespace`."""

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for everything that makes blocks incompatible."""

    def describe(self) -> str:
        """A readable copy, kept in the pool beside the digest."""


def resolve_namespace(namespace: object) -> tuple[bytes, str]:
    """Return (digest of 32 bytes, description) of what a caller gave as `namespace=`.

    Bytes and str of any length are hashed, so two spellings never meet by accident. Raises `ConfigError`.
    """
    if namespace is None:
        return EMPTY_NAMESPACE, "the empty namespace (experiments only)"
    if isinstance(namespace, (bytes, bytearray, str)):
        raw = namespace.encode() if isinstance(namespace, str) else bytes(namespace)
        if not raw:
            raise ConfigError("namespace is empty; leave it out for the empty namespace, or give a name")
        label = namespace if isinstance(namespace, str) else raw.hex()
        return hashlib.sha256(b"rewarm namespace 1\0" + raw).digest(), label
    if isinstance(namespace, NamespaceLike):
        digest = namespace.digest
        if not isinstance(digest, bytes) or len(digest) != NAMESPACE_BYTES:
            raise ConfigError(f"namespace.digest must be {NAMESPACE_BYTES} bytes, got {digest!r}")
        return digest, namespace.describe()
    raise ConfigError(f"namespace must be bytes, str or have .digest and .describe(), got {type(namespace).__name__}")


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise `MisuseError` unless every key is bytes of 8 to 64."""
    for key in keys:
        if type(key) is not bytes or not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            raise MisuseError(f"keys are bytes of {KEY_BYTES_MIN} to {KEY_BYTES_MAX}, got {key!r}")


class Transfer(Protocol):
    """A batch under way. Safe to use from several threads."""

    @property
    def outcomes(self) -> list[Outcome | None]:
        """One outcome per key, in key order; None where there is no verdict yet."""

    @property
    def first_verdict_at(self) -> float | None:
        """`time.monotonic()` when the first block got its verdict; None before that."""

    def wait(self, timeout: float | None = None) -> list[bool]:
        """Wait for verdicts; what has none after `timeout` seconds becomes `timed_out`. True per key: hit or saved."""

    def done(self) -> bool:
        """True when every block has a verdict."""

    def cancel(self) -> None:
        """Give every block without a verdict the verdict `cancelled`; requests not yet in the kernel are dropped."""

    def released(self) -> bool:
        """True when the buffers belong to the caller again."""

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait for the release, seconds; returns `released()`."""

    def fileno(self) -> int:
        """An eventfd that becomes readable when every block has a verdict; owned by the transfer."""


class Pin(Protocol):
    """Blocks that this handle will not evict until `release()`; also a context manager."""

    mask: npt.NDArray[np.bool_]

    def release(self) -> None:
        """Let go; calling it twice is harmless."""

    def __enter__(self) -> Pin: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


Buffers = Sequence[Any] | npt.NDArray[np.uint8]
"""One buffer per key (any object with the buffer protocol, C-contiguous), or a uint8 array of shape (keys, bytes)."""


class Store(Protocol):
    """Blocks on one medium. Use it as a context manager, or call `close`."""

    def lookup(self, keys: Sequence[bytes]) -> Presence:
        """Which keys are held. Reads memory only: never blocks on I/O."""

    def __contains__(self, key: bytes) -> bool: ...

    def load(self, keys: Sequence[bytes], buffers: Buffers) -> Transfer:
        """Read blocks into the caller's writable buffers. A buffer of another size than the block is `wrong_size`."""

    def save(self, keys: Sequence[bytes], buffers: Buffers) -> Transfer:
        """Queue blocks for writing. True in `wait` means published, or already there; over budget is refused."""

    def pin(self, keys: Sequence[bytes]) -> Pin:
        """Keep this handle from evicting the segments of these keys until the pin is released."""

    def evict(self, to_bytes: int) -> int:
        """Drop whole sealed segments, oldest first, until at most `to_bytes` are used; returns bytes freed."""

    def erase(self) -> int:
        """Remove every block of this handle's namespace, whoever wrote it; returns bytes freed."""

    def check(self, *, fix: bool = False) -> CheckReport:
        """Verify every file and block of the pool; with `fix` repair or remove what is damaged."""

    def refresh(self) -> None:
        """Read what other writers have published since the last poll; returns when it is visible to `lookup`."""

    def register(self, arena: Any) -> int:
        """Announce memory that many buffers will come from; returns the bytes pinned (0: nothing to gain from it).

        The memory stays exported until `close`.
        """

    def stats(self) -> Stats:
        """Counters since open."""

    def flush(self) -> None:
        """Wait until everything saved so far is published and synced to the medium."""

    def close(self) -> None:
        """Finish queued saves within a bounded time, stop threads, give the medium back. Idempotent."""

    def __enter__(self) -> Store: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
