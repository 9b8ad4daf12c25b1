"""A state machine for any store: random verbs on several handles of one small pool, compared with the memory store.

After any sequence of save, load, lookup, pin, evict, erase, refresh and reopen, three things hold: a hit has the bytes
of its key and namespace; what nobody saved, or somebody erased, is a miss; what was saved, and that nothing may have
evicted since, is a hit. Between handles the last two hold from the next `refresh` on. It promises to rely on the
contract alone, so it does not know which block an eviction picks: after one, blocks that were not pinned may be gone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rewarm.store.contract import Outcome, Pin, Store
from rewarm.store.memory import MemoryStore
from rewarm.testing.kit.base import finish
from rewarm.testing.payload import make_keys, payload

CAPACITY_BYTES = 4 << 20
"""Small enough that a few fills make a store evict."""

NAMESPACES = ("first", "first", "second")
"""One handle each: two that share a namespace, and one that must not notice them."""

SIZES = (1, 511, 4096, 4097, 20_000, 65_536)
_PLAIN = make_keys(16, "machine")
KEYS = [*_PLAIN, _PLAIN[0][:8], _PLAIN[0][:31], _PLAIN[0] + b"\0", _PLAIN[1][:8]]
"""Some are beginnings of others: keys are compared whole."""

FILL_BLOCKS = 32
FILL_BYTES = 16 << 10
OVERHEAD_BYTES = 16 << 10
"""Generous share of one block or one batch in padding, headers and log, for telling when eviction may begin."""


def size_of(key: bytes) -> int:
    """Bytes of the one block that this machine saves under `key`."""
    return SIZES[key[0] % len(SIZES)] if key in KEYS else FILL_BYTES


class Model:
    """What may be held in one namespace (a memory store that never evicts), and what must be."""

    def __init__(self, namespace: str, pool: str) -> None:
        self.namespace = namespace
        self.may = MemoryStore(namespace, name=pool)
        self.must: set[bytes] = set()

    def block(self, key: bytes) -> bytes:
        """The only right bytes for a key: they differ between namespaces."""
        return payload(self.namespace.encode() + key, size_of(key))


class Handle:
    """A handle of the store under test, and what it must know without a refresh."""

    def __init__(self, store: Store, model: Model) -> None:
        self.store = store
        self.model = model
        self.sees = set(model.must)
        self.stale: set[bytes] = set()
        self.pins: list[Pin] = []
        self.pinned: set[bytes] = set()

    def may_hit(self, key: bytes) -> bool:
        """False for what nobody saved."""
        return key in self.model.may or key in self.stale

    def must_hit(self, key: bytes) -> bool:
        """True for what was saved, is known here, and cannot have been evicted."""
        return key in self.model.must and key in self.sees

    def caught_up(self) -> None:
        """Everything published is known, everything erased is forgotten."""
        self.sees = set(self.model.must)
        self.stale.clear()

    def unpin(self) -> None:
        """Release every pin."""
        for pin in self.pins:
            pin.release()
        self.pins.clear()
        self.pinned.clear()


some_keys = st.lists(st.sampled_from(KEYS), max_size=8)
some_handle = st.integers(0, len(NAMESPACES) - 1)


class StoreMachine(RuleBasedStateMachine):
    """Inherit from it, override `open_store`, and hand `YourMachine.TestCase` to pytest."""

    persistent = True
    """False when the blocks go with the last handle."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="rewarm-machine-")
        self.pool = Path(self._folder.name) / "pool"
        self.pool.mkdir()
        models = {name: Model(name, str(self.pool)) for name in NAMESPACES}
        self.models = list(models.values())
        self.handles = [Handle(self._open(name), models[name]) for name in NAMESPACES]
        self.written_bytes = 0
        self.filled = 0

    def open_store(self, pool: Path, namespace: str, capacity_bytes: int) -> Store:
        """Open one more handle on the pool in (or called) `pool`, an empty directory at first."""
        raise NotImplementedError("a subclass of StoreMachine opens its store here")

    def _open(self, namespace: str) -> Store:
        return self.open_store(self.pool, namespace, CAPACITY_BYTES)

    def teardown(self) -> None:
        """Close everything, also after a failure."""
        for handle in self.handles:
            handle.store.close()
        self._folder.cleanup()

    @initialize()
    def begin(self) -> None:
        """Start with something to lose."""
        for which, handle in enumerate(self.handles):
            self._save(handle, KEYS[which::2])

    @rule(which=some_handle, keys=some_keys)
    def save(self, which: int, keys: list[bytes]) -> None:
        """Save blocks; the same key always with the same bytes."""
        self._save(self.handles[which], keys)

    @rule(which=some_handle)
    def fill(self, which: int) -> None:
        """Save an eighth of the capacity under keys that nobody used before."""
        self.filled += 1
        self._save(self.handles[which], make_keys(FILL_BLOCKS, f"fill {self.filled}"))

    @rule(which=some_handle, keys=some_keys)
    def load(self, which: int, keys: list[bytes]) -> None:
        """Load blocks and compare every byte."""
        self._load(self.handles[which], keys)

    @rule(which=some_handle, turns=st.integers(1, 4))
    def load_filled(self, which: int, turns: int) -> None:
        """Load what some fill has saved, as one large batch."""
        self._load(self.handles[which], make_keys(FILL_BLOCKS, f"fill {max(self.filled + 1 - turns, 0)}"))

    @rule(which=some_handle, key=st.sampled_from(KEYS))
    def load_with_another_size(self, which: int, key: bytes) -> None:
        """A buffer of another size is never a hit."""
        handle = self.handles[which]
        transfer = handle.store.load([key], [bytearray(size_of(key) + 1)])
        assert finish(transfer) == [False]
        assert transfer.outcomes[0] in (Outcome.MISSING, Outcome.WRONG_SIZE)
        self._agree(handle, key, transfer.outcomes[0] is Outcome.WRONG_SIZE)

    @rule(which=some_handle, keys=some_keys)
    def pin(self, which: int, keys: list[bytes]) -> None:
        """Pin blocks for this handle."""
        handle = self.handles[which]
        pin = handle.store.pin(keys)
        for key, held in zip(keys, pin.mask.tolist(), strict=True):
            self._agree(handle, key, held)
        handle.pins.append(pin)
        handle.pinned |= {key for key in keys if handle.must_hit(key)}

    @rule(which=some_handle)
    def unpin(self, which: int) -> None:
        """Let go of everything that this handle has pinned."""
        self.handles[which].unpin()

    @rule(
        which=some_handle,
        to_bytes=st.sampled_from([0, CAPACITY_BYTES // 64, CAPACITY_BYTES // 8, CAPACITY_BYTES // 2]),
        pinning=st.booleans(),
    )
    def evict(self, which: int, to_bytes: int, pinning: bool) -> None:
        """Anything but this handle's own pins may be gone afterwards; `pinning`: it pins all it knows before."""
        if pinning:
            self.pin(which, sorted(self.handles[which].sees & self.handles[which].model.must))
        handle = self.handles[which]
        assert handle.store.evict(to_bytes) >= 0
        kept = handle.pinned & handle.model.must & handle.sees
        self._forget_all()
        handle.model.must |= kept
        handle.sees |= kept
        self.written_bytes = handle.store.stats().used_bytes

    @rule(which=some_handle)
    def erase(self, which: int) -> None:
        """The namespace is empty at once for this handle, and for the others with their next refresh."""
        handle = self.handles[which]
        erased = {key for key in self._all_keys() if key in handle.model.may}
        assert handle.store.erase() >= 0
        handle.model.may.erase()
        handle.model.must.clear()
        for other in self.handles:
            if other.model is handle.model:
                other.stale |= erased
                other.sees.clear()
                other.pinned.clear()
        handle.caught_up()
        self.written_bytes = handle.store.stats().used_bytes

    @rule(which=some_handle)
    def refresh(self, which: int) -> None:
        """What other handles published or erased is known from now on."""
        self.handles[which].store.refresh()
        self.handles[which].caught_up()

    @rule(which=some_handle)
    def reopen(self, which: int) -> None:
        """Close one handle and open another in its place."""
        old = self.handles[which]
        old.store.close()
        self.handles[which] = Handle(self._open(old.model.namespace), old.model)

    @precondition(lambda self: self.persistent)
    @rule()
    def restart(self) -> None:
        """Close all handles, then open them again."""
        for handle in self.handles:
            handle.store.close()
        self.handles = [Handle(self._open(handle.model.namespace), handle.model) for handle in self.handles]

    @rule(which=some_handle)
    def check(self, which: int) -> None:
        """Nothing here damages anything, so there is nothing to find."""
        report = self.handles[which].store.check()
        assert report.clean, report.findings

    @invariant()
    def lookup_agrees(self) -> None:
        """Every handle agrees with the model about every key."""
        for handle in self.handles:
            found = handle.store.lookup(KEYS)
            for key, held in zip(KEYS, found.mask.tolist(), strict=True):
                self._agree(handle, key, held)

    @invariant()
    def space_is_bounded(self) -> None:
        """The pool stays within its capacity."""
        for handle in self.handles:
            assert handle.store.stats().used_bytes <= CAPACITY_BYTES

    def _save(self, handle: Handle, keys: Sequence[bytes]) -> None:
        model = handle.model
        transfer = handle.store.save(keys, [model.block(key) for key in keys])
        finish(transfer)
        stored = set()
        for key, outcome in zip(keys, transfer.outcomes, strict=True):
            if outcome is Outcome.STORED:
                assert key in stored or not handle.must_hit(key), "written twice"
                stored.add(key)
                self.written_bytes += size_of(key) + OVERHEAD_BYTES
            elif outcome is Outcome.ALREADY:
                assert key in stored or handle.may_hit(key), "said to be there already, but nobody saved it"
            else:
                assert outcome is Outcome.REFUSED_FULL, f"{outcome} without a reason"
                assert self._may_be_full(), "refused below capacity"
        self.written_bytes += OVERHEAD_BYTES
        if self._may_be_full():
            self._forget_all()
        finish(model.may.save(list(stored), [model.block(key) for key in stored]))
        model.must |= stored
        handle.sees |= stored

    def _load(self, handle: Handle, keys: Sequence[bytes]) -> None:
        buffers = [bytearray(size_of(key)) for key in keys]
        transfer = handle.store.load(keys, buffers)
        finish(transfer)
        for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
            assert outcome in (Outcome.HIT, Outcome.MISSING), f"{outcome} without damage"
            if outcome is Outcome.HIT:
                assert buffer == handle.model.block(key), "wrong bytes"
            self._agree(handle, key, outcome is Outcome.HIT)

    def _may_be_full(self) -> bool:
        return self.written_bytes > CAPACITY_BYTES // 2

    def _forget_all(self) -> None:
        for model in self.models:
            model.must.clear()
        for handle in self.handles:
            handle.sees.clear()

    def _all_keys(self) -> list[bytes]:
        filled = [make_keys(FILL_BLOCKS, f"fill {turn + 1}") for turn in range(self.filled)]
        return [*KEYS, *(key for keys in filled for key in keys)]

    def _agree(self, handle: Handle, key: bytes, held: bool) -> None:
        about = f"key {key.hex()[:8]} of namespace {handle.model.namespace}"
        if held:
            assert handle.may_hit(key), f"{about} is held, but was never saved, or was erased"
        else:
            assert not handle.must_hit(key), f"{about} was saved and not evicted, but is missing"
