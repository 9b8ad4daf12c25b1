"""The tree of a pool beside its blocks: names that are not of the format, modes, owners, files left on their way.

Part of `check`, with the repair of `pool.json`. What is ours and wrong is put right with `fix`; what is not ours is
named, and removed by nothing but `remove_unknown`, which somebody must ask for.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from rewarm.errors import FormatError
from rewarm.store.contract import Finding
from rewarm.store.layout import FORMAT, PAGE, Kind, decode_frame
from rewarm.store.pool import (
    ADOPTED,
    NAMESPACES,
    NUMBERED,
    POOL_FILE,
    TEMPORARY,
    WRITER_NAME,
    WRITERS,
    Pool,
    PoolFacts,
    close_file,
    decode_facts,
    encode_facts,
    host_id,
    open_regular,
)

TEMPORARY_AGE_S = 86400.0
"""A file on its way to its name is there for moments; after a day whoever made it is gone (format-1, section 1)."""

BECOMING_S = 60.0
"""A file is made with fewer rights than it gets: one that is new and too narrow is not judged."""

_KNOWN = frozenset({POOL_FILE, WRITERS, NAMESPACES})


def unknown_names(pool: Pool) -> list[Path]:
    """Everything that is not of this format, with what has a known name but is a link or a special file."""
    found = []
    for path in _tree(pool):
        inside = path.relative_to(pool.root).parts
        name = path.name
        if name.startswith(TEMPORARY) and _is_file(path):
            continue
        if len(inside) == 1:
            good = name in _KNOWN and (_is_file(path) if name == POOL_FILE else _is_directory(path))
        elif inside[0] == NAMESPACES:
            good = name.endswith(".json") and _is_file(path)
        elif len(inside) == 2:
            good = bool(WRITER_NAME.fullmatch(name)) and _is_directory(path)
        else:
            good = (bool(NUMBERED.fullmatch(name)) or name == ADOPTED) and _is_file(path)
        if not good:
            found.append(path)
    return found


def remove_unknown(pool: Pool) -> list[Finding]:
    """Remove everything that is not of this format, directories with all that is in them; links are not followed."""
    findings = []
    for path in unknown_names(pool):
        try:
            if _is_directory(path):
                shutil.rmtree(path)
            else:
                path.unlink()
            found = Finding("unknown_name", _inside(pool, path), "not of this format; removed as told", fixed=True)
        except OSError as error:
            found = Finding("unknown_name", _inside(pool, path), f"cannot be removed: {error.strerror}")
        findings.append(found)
    return findings


def stale_temporaries(pool: Pool) -> list[Path]:
    """Files that were on their way to a name a day ago."""
    old_s = time.time() - TEMPORARY_AGE_S
    paths = (path for path in _tree(pool) if path.name.startswith(TEMPORARY))
    return [path for path in paths if _is_file(path) and path.lstat().st_mtime < old_s]


def wrong_access(pool: Pool, *, fix: bool) -> list[Finding]:
    """Files and directories of the format whose mode or owner is not the pool's; `fix` puts them right if allowed.

    Too wide a mode lets others read or change blocks; too narrow a one, or another owner, keeps the pool's own
    processes out.
    """
    findings = []
    strangers = set(unknown_names(pool))
    owner = (pool.root / POOL_FILE).lstat().st_uid
    for path in _tree(pool):
        if path in strangers or strangers.intersection(path.parents):
            continue
        try:
            facts = path.lstat()
        except OSError:
            continue
        wanted = pool.directory_mode if stat.S_ISDIR(facts.st_mode) else pool.file_mode
        mode = stat.S_IMODE(facts.st_mode)
        foreign = pool.facts.access == "private" and facts.st_uid != owner
        if not foreign and not mode & ~wanted and facts.st_ctime > time.time() - BECOMING_S:
            continue
        if mode != wanted or foreign:
            fixed = fix and _put_right(path, wanted, owner if foreign else -1)
            what = f"mode {mode:04o} of user {facts.st_uid}, where {wanted:04o} is the pool's"
            what += f" and {owner} its owner" if foreign else ""
            findings.append(Finding("wrong_access", _inside(pool, path), what, fixed=fixed))
    return findings


def _put_right(path: Path, mode: int, owner: int) -> bool:
    try:
        if owner >= 0:
            os.chown(path, owner, -1, follow_symlinks=False)
        os.chmod(path, mode)
        return stat.S_IMODE(path.lstat().st_mode) == mode
    except OSError:
        return False


def _tree(pool: Pool) -> Iterator[Path]:
    """Every name in a pool, directories before what is in them; below names that are not of the format nothing."""
    for path in _names(pool.root):
        yield path
        if path.name in (WRITERS, NAMESPACES) and _is_directory(path):
            for inner in _names(path):
                yield inner
                if path.name == WRITERS and WRITER_NAME.fullmatch(inner.name) and _is_directory(inner):
                    yield from _names(inner)


def _names(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _inside(pool: Pool, path: Path) -> str:
    return str(path.relative_to(pool.root))


def rebuild_facts(root: Path) -> PoolFacts | None:
    """What `pool.json` must have said, from the OPEN frames of the logs; None where no log has one, or two disagree."""
    found: set[tuple[bytes, int, int]] = set()
    shared = False
    for path in sorted((root / WRITERS).glob("*/*.log")):
        with contextlib.suppress(OSError):
            descriptor = open_regular(path, os.O_RDONLY)
            try:
                frame = decode_frame(memoryview(os.pread(descriptor, PAGE, 0)))
                shared |= bool(os.fstat(descriptor).st_mode & stat.S_IWGRP)
            finally:
                close_file(descriptor)
            if frame and frame.kind == Kind.OPEN:
                found.add(frame.opening())
    if len(found) != 1:
        return None
    pool_id, capacity, segment = found.pop()
    facts = PoolFacts(FORMAT, pool_id.hex(), capacity, segment, "group" if shared else "private", host_id())
    try:
        return decode_facts(encode_facts(facts), root / POOL_FILE)
    except FormatError:
        return None
