"""A few stores at work on one pool while everything is recorded, and what each moment of it has promised."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from tests.store.powerloss.recorder import Recorder, Trace

from rewarm.store.contract import Store
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

CAPACITY = 4 << 20
NAMESPACE = "power"
SIZES = (1, 3000, 4096, 9000, 40_000)
STORES = 3
BATCHES = 8
WAIT_S = 60.0


def size_of(key: bytes) -> int:
    """Bytes of the block under `key`."""
    return SIZES[key[0] % len(SIZES)]


def block(key: bytes) -> bytes:
    """The block under `key`."""
    return payload(key, size_of(key))


@dataclass
class Recording:
    """A trace, the keys that were saved, and from when to when each had to survive."""

    trace: Trace
    keys: list[bytes] = field(default_factory=list)
    promised: dict[bytes, int] = field(default_factory=dict)
    dropped: dict[bytes, int] = field(default_factory=dict)

    def must_hold(self, moment: int) -> set[bytes]:
        """Keys that a completed sync covers at that moment, and that nobody has begun to evict."""
        return {
            key
            for key, since in self.promised.items()
            if since <= moment and not self.dropped.get(key, moment + 1) <= moment
        }


class Life:
    """One store at work."""

    def __init__(self, recorder: Recorder, recording: Recording, store: Store) -> None:
        self.recorder, self.recording, self.store = recorder, recording, store
        self.unsynced: list[bytes] = []

    def save(self, keys: list[bytes]) -> None:
        """Save a batch."""
        assert all(self.store.save(keys, [block(key) for key in keys]).wait(WAIT_S))
        self.recording.keys += keys
        self.unsynced += keys

    def promise(self) -> None:
        """A sync has completed."""
        now = self.recorder.tick()
        for key in self.unsynced:
            self.recording.promised.setdefault(key, now)
        self.unsynced = []

    def evict(self, share: float) -> None:
        """Drop some segments; their keys are promised no longer."""
        self.store.refresh()
        held, since = set(self.recording.keys), self.recorder.tick()
        self.store.evict(int(self.store.stats().used_bytes * share))
        gone = held - {key for key in held if key in self.store}
        for key in gone:
            self.recording.dropped.setdefault(key, since)
        self.unsynced = [key for key in self.unsynced if key not in gone]


def record(root: Path, seed: int, options: str, *, evicting: bool) -> Recording:
    """Let several stores save, flush and close on `root`, an empty directory."""
    recorder, dice = Recorder(root), random.Random(seed)
    recording = Recording(recorder.trace)
    with recorder.recording():
        lives = []
        for number in range(STORES):
            url = f"file://{root}?capacity={CAPACITY}&poll=1h{options}"
            lives.append(
                Life(recorder, recording, open_store(url, namespace=NAMESPACE, write_device_wrapper=recorder.wrap))
            )
            for batch in range(BATCHES):
                life = dice.choice(lives)
                life.save(make_keys(dice.randint(1, 5), f"{seed} {number} {batch}"))
                if dice.random() < 0.4:
                    life.store.flush()
                    life.promise()
            if evicting:
                dice.choice(lives).evict(0.6)
        for life in lives:
            life.store.close()
            life.promise()
    return recording
