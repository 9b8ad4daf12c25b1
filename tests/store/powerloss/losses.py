"""Makes of a recording what a power loss at one moment may leave: synced is there, the rest is up to the dice.

Of writes that no completed sync covers, each is there, is not there, or is there in some of its 512-byte sectors, one
independently of the other: they are dropped, reordered and torn. Names that no sync of their directory covers are as
they were before any of their last changes.
"""

from __future__ import annotations

import random
from pathlib import Path, PurePosixPath

from tests.store.powerloss.recorder import Change, NameChange, Trace, Write

SECTOR_BYTES = 512
DROPPED, WHOLE = 0.4, 0.4
"""Chances of an unsynced write; the rest is torn."""


def _covered(change: Change, syncs: list[Change], moment: int) -> bool:
    """True when a sync began after the change was over, and was over before the power went."""
    return any(sync.issued > change.done and sync.done <= moment for sync in syncs)


def _names_then(trace: Trace, moment: int, dice: random.Random) -> dict[str, int]:
    """Names that are there, with their inodes; those below a directory that is not there are left out."""
    found: dict[str, int] = {}
    for path, changes in trace.names.items():
        syncs = trace.directory_syncs.get(str(PurePosixPath(path).parent), [])
        begun = sorted((change for change in changes if change.issued <= moment), key=lambda one: one.issued)
        kept = max((i + 1 for i, change in enumerate(begun) if _covered(change, syncs, moment)), default=0)
        last: NameChange | None = None
        for change in begun[: dice.randint(kept, len(begun))]:
            last = change
        if last is not None and last.inode is not None:
            found[path] = last.inode
    directories = {path for path, inode in found.items() if not inode} | {"."}
    return {
        path: inode
        for path, inode in found.items()
        if all(str(parent) in directories for parent in PurePosixPath(path).parents)
    }


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset + len(data):
        content.extend(bytes(offset + len(data) - len(content)))
    content[offset : offset + len(data)] = data


def _content_then(writes: list[Write], syncs: list[Change], moment: int, dice: random.Random) -> bytearray:
    content = bytearray()
    for write in writes:
        if write.issued > moment:
            continue
        chance = 1.0 if _covered(write, syncs, moment) else dice.random()
        if chance >= 1.0 - WHOLE:
            _put(content, write.offset, write.data)
        elif chance >= DROPPED:
            for at in range(0, len(write.data), SECTOR_BYTES):
                if dice.random() < 0.5:
                    _put(content, write.offset + at, write.data[at : at + SECTOR_BYTES])
    return content


def lose_power(trace: Trace, moment: int, dice: random.Random, target: Path) -> None:
    """Make the directory that is found after a power loss at `moment` of the recording."""
    target.mkdir()
    names = _names_then(trace, moment, dice)
    contents: dict[int, bytes] = {}
    for path in sorted(names):
        inode = names[path]
        if not inode:
            (target / path).mkdir(mode=0o700)
            continue
        if inode not in contents:
            contents[inode] = bytes(_content_then(trace.writes[inode], trace.syncs[inode], moment, dice))
        (target / path).write_bytes(contents[inode])
