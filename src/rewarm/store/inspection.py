"""`inspect`: what is in a pool, from its logs and files alone. Leaves nothing behind and reads no payload."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from rewarm.errors import ConfigError, StorageError
from rewarm.store import capacity
from rewarm.store.checking import PoolView, WriterView, read_pool
from rewarm.store.devices.select import Choice, choose_device
from rewarm.store.hosts import shared_attachment
from rewarm.store.mounts import mount_notes
from rewarm.store.opening import parse_url
from rewarm.store.pool import NAMESPACES, Pool, open_regular, read_facts
from rewarm.store.settings import Settings, visibility_bound_s

NAMESPACE_FILE_BYTES_MAX = 1 << 20
"""Descriptions are for people; longer ones are not shown."""


class NamespaceFacts(msgspec.Struct, frozen=True):
    """One namespace of a pool: `blocks` counts published copies, evicted ones not."""

    digest: str
    describe: str
    writers: int
    blocks: int


class WriterFacts(msgspec.Struct, frozen=True):
    """One writer of a pool; `alive`: a process of this machine holds it (on a network mount: nobody has adopted it).

    `lease_s` is the lease that its log names. `silent_s` is how long ago its log was written, the server's time against
    this host's clock: a lease that is not kept shows here. `counters` are its frames that say nothing else than that it
    lives. `adopted`: another has taken over what it left.
    """

    writer: str
    namespace: str
    alive: bool
    adopted: bool
    lease_s: float | None
    silent_s: float
    counters: int
    blocks: int
    segments: int
    sealed_segments: int
    bytes_on_disk: int
    log_bytes: int


class SegmentFacts(msgspec.Struct, frozen=True):
    """One segment of a pool; `state` is open, sealed or evicted (announced, and still there)."""

    writer: str
    number: int
    state: str
    blocks: int
    bytes_on_disk: int
    age_s: float


class Inspection(msgspec.Struct, frozen=True):
    """Everything `rewarm inspect` shows; bytes and seconds. Hits are not among it: they belong to the processes that
    use the pool. `shared_device` says how the device may reach other hosts, `mount_advice` what to set otherwise."""

    path: str
    pool_id: str
    capacity_bytes: int
    segment_bytes: int
    access: str
    host: str
    used_bytes: int
    free_bytes: int
    filesystem: str
    device: str
    device_refusals: list[str]
    visibility_bound_s: float
    shared_device: str
    mount_advice: list[str]
    blocks: int
    dropped_copies: int
    namespaces: list[NamespaceFacts]
    writers: list[WriterFacts]
    segments: list[SegmentFacts]


def inspect_pool(url: str | os.PathLike[str], *, segments: bool = False) -> Inspection:
    """Inspect the pool at a `file:` URL or path, with its `segments` one by one if asked for.

    Raises `ConfigError` where there is none, `StorageError`.
    """
    location = parse_url(url)
    if location.scheme != "file":
        raise ConfigError(f"{url} is no pool on disk; inspect takes a directory")
    root = Path(location.path)
    facts = read_facts(root)
    if facts is None:
        raise ConfigError(f"{root} holds no pool")
    pool = Pool(root, facts)
    choice = choose_device(root, writable=False, sample=root / "pool.json")
    try:
        usage = capacity.measure(pool)
        view = read_pool(pool, direct=choice.direct, local=not choice.network)
    except OSError as error:
        raise StorageError(f"cannot read {root}: {error.strerror}") from error
    return _summary(pool, choice, usage, view, segments=segments)


def _summary(pool: Pool, choice: Choice, usage: capacity.Usage, view: PoolView, *, segments: bool) -> Inspection:
    writers = [_writer(one, usage, view) for one in view.writers]
    return Inspection(
        path=str(pool.root),
        pool_id=pool.facts.pool_id,
        capacity_bytes=pool.facts.capacity_bytes,
        segment_bytes=pool.facts.segment_bytes,
        access=pool.facts.access,
        host=pool.facts.host,
        used_bytes=usage.used_bytes,
        free_bytes=usage.free_bytes,
        filesystem=choice.filesystem,
        device=choice.name,
        device_refusals=list(choice.refusals),
        visibility_bound_s=visibility_bound_s(choice, Settings().poll_s),
        shared_device=shared_attachment(pool.root) or "",
        mount_advice=[note.what for note in mount_notes(pool.root)],
        blocks=sum(writer.blocks for writer in writers),
        dropped_copies=len(view.dropped),
        namespaces=_namespaces(pool, writers),
        writers=writers,
        segments=_segments(usage, view) if segments else [],
    )


def _segments(usage: capacity.Usage, view: PoolView) -> list[SegmentFacts]:
    entries = {one.writer: one.entries for one in view.writers}
    found, now_s = [], time.time()
    files = (file for file in usage.files if file.is_segment)
    for file in sorted(files, key=lambda file: (file.modified_s, file.writer, file.number)):
        place = (file.writer, file.number)
        state = "evicted" if place in view.evicted else "sealed" if place in view.sealed else "open"
        blocks = sum(len(batch) for batch in entries.get(file.writer, {}).get(file.number, []))
        age_s = max(now_s - file.modified_s, 0.0)
        found.append(SegmentFacts(*place, state, blocks, file.bytes_on_disk, age_s))
    return found


def _writer(one: WriterView, usage: capacity.Usage, view: PoolView) -> WriterFacts:
    files = [file for file in usage.files if file.writer == one.writer]
    present = {file.number for file in files if file.is_segment} - {n for w, n in view.evicted if w == one.writer}
    blocks = sum(len(entries) for number in present for entries in one.entries.get(number, []))
    return WriterFacts(
        writer=one.writer,
        namespace=one.namespace.hex(),
        alive=one.alive,
        adopted=one.adopted,
        lease_s=one.lease_s,
        silent_s=max(time.time() - max((log.modified_s for log in one.logs), default=0.0), 0.0),
        counters=one.counters,
        blocks=blocks,
        segments=len(present),
        sealed_segments=sum((one.writer, number) in view.sealed for number in present),
        bytes_on_disk=sum(file.bytes_on_disk for file in files),
        log_bytes=one.log_bytes,
    )


def _namespaces(pool: Pool, writers: list[WriterFacts]) -> list[NamespaceFacts]:
    found = []
    for digest in sorted({writer.namespace for writer in writers if writer.namespace}):
        of_it = [writer for writer in writers if writer.namespace == digest]
        found.append(NamespaceFacts(digest, _describe(pool, digest), len(of_it), sum(w.blocks for w in of_it)))
    return found


def _describe(pool: Pool, digest: str) -> str:
    try:
        with open(pool.root / NAMESPACES / f"{digest}.json", "rb", opener=open_regular) as file:
            raw = file.read(NAMESPACE_FILE_BYTES_MAX)
        return str(msgspec.json.decode(raw, type=dict[str, str]).get("describe", ""))
    except (OSError, msgspec.DecodeError):
        return ""
