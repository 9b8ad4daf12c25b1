"""A pool to damage, and what each byte of it is worth: which blocks may be lost when that byte is."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from rewarm.store import layout
from rewarm.store.contract import Outcome, Store
from rewarm.store.layout import PAGE, Kind
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload
from rewarm.testing.kit.base import finish

CAPACITY_BYTES = 16 << 20
NAMESPACE = "damage"
SIZES = (4096, 30_000, 1, 100_001)
BATCH = 4
WRITERS = 2
BATCHES = 5


def size_of(key: bytes) -> int:
    """Bytes of the block under `key`."""
    return SIZES[key[0] % len(SIZES)]


def open_pool(root: Path) -> Store:
    """Open the pool as a later process would."""
    return open_store(f"file://{root}?capacity={CAPACITY_BYTES}", namespace=NAMESPACE)


@dataclass
class Worth:
    """Blocks that may be lost by changing bytes of one file: (start, end, keys)."""

    spans: list[tuple[int, int, set[bytes]]] = field(default_factory=list)

    def lost(self, before: bytes, after: bytes) -> set[bytes]:
        """Keys whose bytes differ between two contents of the file, or whose last page is not all there."""
        return {
            key
            for start, end, keys in self.spans
            if before[start:end] != after[start:end] or len(after) < layout.pages(end)
            for key in keys
        }


@dataclass(repr=False)
class Template:
    """A small pool of two writers, closed."""

    root: Path
    keys: list[bytes]
    files: dict[str, Worth]
    """Every file of the pool by its path in it."""

    def copy_to(self, root: Path) -> Path:
        """A fresh copy to damage."""
        return Path(shutil.copytree(self.root, root))


def build(root: Path) -> Template:
    """Save several batches, a frame each, by two writers."""
    root.mkdir()
    keys = make_keys(WRITERS * BATCHES * BATCH, "damage")
    for first in range(WRITERS):
        with open_pool(root) as store:
            mine = keys[first * BATCHES * BATCH : (first + 1) * BATCHES * BATCH]
            for start in range(0, len(mine), BATCH):
                save(store, mine[start : start + BATCH])
    files = {str(path.relative_to(root)): Worth() for path in root.rglob("*") if path.is_file()}
    for name in [name for name in files if name.endswith(".log")]:
        _read_log(root, name, files)
    counted = {
        key for name, worth in files.items() if name.endswith(".seg") for _, _, keys in worth.spans for key in keys
    }
    assert counted == set(keys), "the template's own reading of its logs is incomplete"
    return Template(root, keys, files)


def _read_log(root: Path, name: str, files: dict[str, Worth]) -> None:
    folder = Path(name).parent
    for at, frame in layout.scan_frames(memoryview((root / name).read_bytes())):
        entries = frame.entries() if frame.kind == Kind.ENTRIES else []
        keys = {bytes(entry["key"]) for entry in entries}
        files[name].spans.append((at, at + frame.bytes_total, keys))
        for entry in entries:
            start, key = int(entry["offset"]), bytes(entry["key"])
            assert start % PAGE == 0
            segment = str(folder / f"{entry['segment']:08d}.seg")
            files[segment].spans.append((start, start + int(entry["length"]), {key}))


def save(store: Store, keys: list[bytes]) -> list[Outcome | None]:
    """Save the payloads of `keys` in one batch."""
    transfer = store.save(keys, [payload(key, size_of(key)) for key in keys])
    assert finish(transfer) == [True] * len(keys)
    return transfer.outcomes


def load(store: Store, keys: list[bytes]) -> set[bytes]:
    """Load `keys`; returns those that missed. A wrong byte fails."""
    buffers = [bytearray(size_of(key)) for key in keys]
    transfer = store.load(keys, buffers)
    finish(transfer)
    for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
        assert outcome is not Outcome.HIT or buffer == payload(key, size_of(key)), "a wrong byte was served"
        assert outcome in (Outcome.HIT, Outcome.MISSING, Outcome.CORRUPT), outcome
    return {key for key, outcome in zip(keys, transfer.outcomes, strict=True) if outcome is not Outcome.HIT}
