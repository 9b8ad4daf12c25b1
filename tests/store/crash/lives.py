"""Writer processes that are killed: what one of them does until then, and what it has told its parent.

Children are forked from a server process that has the package loaded, so that a life costs milliseconds and its kill
falls into work on files, not into imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from rewarm.store.contract import Outcome, Store
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

NAMESPACE = "lives"
SIZES = (1, 4096, 10_000, 65_536, 200_000)
BATCH_BLOCKS_MAX = 12
BATCHES_MAX = 400
"""End of a life that nobody kills: a test in which that happens says so."""

MESSAGES_MAX = 12
MOMENT_S_MAX = 0.02
"""A life is killed this long at most after its last counted message: the time of a few batches."""


def server() -> ForkServerContext:
    """The context whose children start fast."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rewarm.store.opening", "rewarm.testing", "tests.store.crash.lives"])
    return context


def batch_keys(life: int, batch: int) -> list[bytes]:
    """Keys of one batch of one life."""
    return make_keys(1 + (life * 7 + batch * 5) % BATCH_BLOCKS_MAX, f"life {life} batch {batch}")


def size_of(key: bytes) -> int:
    """Bytes of the block under `key`."""
    return SIZES[key[0] % len(SIZES)]


def block(key: bytes) -> bytes:
    """The block under `key`."""
    return payload(key, size_of(key))


def load(store: Store, keys: list[bytes]) -> list[bytes]:
    """Load `keys`; returns those that missed. A wrong byte fails."""
    buffers = [bytearray(size_of(key)) for key in keys]
    transfer = store.load(keys, buffers)
    good = transfer.wait(60)
    assert transfer.wait_released(60)
    assert not set(transfer.outcomes) - {Outcome.HIT, Outcome.MISSING}, transfer.outcomes
    for key, buffer, hit in zip(keys, buffers, good, strict=True):
        assert not hit or buffer == block(key), f"wrong bytes under {key.hex()}"
    return [key for key, hit in zip(keys, good, strict=True) if not hit]


def write_until_killed(url: str, life: int, tell: Connection, may_drop: bool) -> None:
    """Save, flush and load at random, and tell what was done: ('saved', batch, outcomes) or ('done',)."""
    dice = random.Random(life)
    store = open_store(url, namespace=NAMESPACE)
    tell.send(("open",))
    for batch in range(BATCHES_MAX):
        keys = batch_keys(life, batch)
        transfer = store.save(keys, [block(key) for key in keys])
        if dice.random() < 0.3:
            store.flush()
        good = transfer.wait(60)
        tell.send(("saved", batch, good))
        if dice.random() < 0.2:
            store.refresh()
            load(store, batch_keys(dice.randrange(life + 1), dice.randrange(batch + 1)))
        if may_drop and dice.random() < 0.1:
            store.evict(store.stats().used_bytes * 3 // 4)
    tell.send(("done",))


@dataclass
class Story:
    """What a killed child had told."""

    saved: list[bytes] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)
    pending: list[bytes] = field(default_factory=list)
    """Keys of the batch it may have been writing."""
    was_open: bool = False
    finished: bool = False


def live_and_die(context: ForkServerContext, url: str, life: int, *, may_drop: bool = False) -> Story:
    """Run one life and kill it at a moment that its number decides; returns its story."""
    listen, tell = context.Pipe(duplex=False)
    child = context.Process(target=write_until_killed, args=(url, life, tell, may_drop))
    child.start()
    tell.close()
    dice = random.Random(f"kill {life}")
    story = Story()
    for message in _messages(listen, dice, child.kill):
        _note(story, life, message)
    child.join()
    child.close()
    listen.close()
    return story


def _messages(listen: Connection, dice: random.Random, kill: Callable[[], None]) -> Iterator[tuple[Any, ...]]:
    """Messages of a child; kills it a random moment after a random number of them, perhaps before the first."""
    with contextlib.suppress(EOFError):
        for _ in range(dice.randrange(MESSAGES_MAX)):
            yield listen.recv()
        kill_at = time.monotonic() + dice.random() * MOMENT_S_MAX
        while (left_s := kill_at - time.monotonic()) > 0:
            if listen.poll(left_s):
                yield listen.recv()
        kill()
        while True:
            yield listen.recv()


def _note(story: Story, life: int, message: tuple[Any, ...]) -> None:
    if message[0] == "open":
        story.was_open = True
        story.pending = batch_keys(life, 0)
    elif message[0] == "done":
        story.finished = True
    else:
        _, batch, good = message
        for key, kept in zip(batch_keys(life, batch), good, strict=True):
            (story.saved if kept else story.refused).append(key)
        story.pending = batch_keys(life, batch + 1)
