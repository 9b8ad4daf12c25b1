"""Isolation and hostile input: tenants, other users, special files where ours should be, and lengths that cannot be."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.geometry.test_model_namespace import PARTS
from tests.store.as_nobody import NOBODY, as_user, public_directory
from tests.store.faulty_store import WAIT_S
from tests.store.test_tailing import CAPACITY, SIZE, Forger, load, open_pool, save

from rewarm.errors import ConfigError, FormatError, StorageError
from rewarm.geometry import model_namespace
from rewarm.store import layout
from rewarm.store.contract import EMPTY_NAMESPACE, Outcome
from rewarm.store.layout import PAGE, Kind
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

HIT, MISSING, STORED = Outcome.HIT, Outcome.MISSING, Outcome.STORED
MEMORY_BYTES = 192 << 20


def tenant(salt: str) -> object:
    return model_namespace(**(PARTS | {"tenant_salt": salt}))


# Tenants.


def test_one_tenant_misses_what_another_has_saved_under_the_same_keys(tmp_path: Path) -> None:
    keys = make_keys(4)
    with open_pool(tmp_path, namespace=tenant("one")) as one, open_pool(tmp_path, namespace=tenant("two")) as two:
        assert save(one, keys) == [STORED] * 4
        two.refresh()
        assert not two.lookup(keys).mask.any()
        assert load(two, keys) == [MISSING] * 4
        assert save(two, keys) == [STORED] * 4, "and learns nothing from `already`"
        assert two.erase() > 0
        one.refresh()
        assert load(one, keys) == [HIT] * 4
    with open_pool(tmp_path) as nobody:
        assert load(nobody, keys) == [MISSING] * 4


def test_the_salt_is_not_in_the_pool(tmp_path: Path) -> None:
    with open_pool(tmp_path, namespace=tenant("a salt nobody may know")) as store:
        save(store, make_keys(1))
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert not any(b"nobody may know" in content for content in files)


def test_a_tenant_under_another_user_reads_nothing_even_knowing_keys_and_salt() -> None:
    """The set-up that docs/security.md names for tenants who do not trust each other."""
    keys = make_keys(2)
    with public_directory() as folder:
        root = folder / "tenant-one"
        root.mkdir()
        os.chmod(root, 0o777)  # even where the administrator has forgotten about the directory itself
        with open_pool(root, namespace=tenant("one")) as store:
            save(store, keys)
        segment = next((root / "writers").glob("*/*.seg"))
        assert as_user(lambda: open_pool(root, namespace=tenant("one"))).startswith("StorageError: cannot read")
        assert as_user(segment.read_bytes).startswith("PermissionError")
        assert as_user(lambda: os.listdir(root / "writers"), NOBODY).startswith("PermissionError")


# Files that are not what they seem.


def _to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _to_link(path: Path) -> None:
    elsewhere = path.parent.parent / f"moved-{path.name}"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("turn", [_to_fifo, _to_link, _to_device, _to_directory])
@pytest.mark.parametrize("pattern", ["writers/*/*.log", "writers/*/*.seg", "pool.json"])
def test_links_and_special_files_are_refused_and_not_waited_for(
    tmp_path: Path, turn: Callable[[Path], None], pattern: str
) -> None:
    keys = make_keys(3)
    with open_pool(tmp_path) as store:
        save(store, keys)
    turn(next(tmp_path.glob(pattern)))
    if pattern == "pool.json":
        with pytest.raises((StorageError, FormatError, ConfigError)):
            open_pool(tmp_path)
        return
    with open_pool(tmp_path) as store:
        assert set(load(store, keys)) == {MISSING}
        assert save(store, keys) == [STORED] * 3
        assert load(store, keys) == [HIT] * 3


@pytest.mark.parametrize("name", ["writers", "namespaces"])
def test_a_directory_that_is_a_link_is_not_written_through(tmp_path: Path, name: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "pool"
    outside.mkdir()
    root.mkdir()
    open_pool(root).close()
    (root / name).symlink_to(outside)
    if name == "writers":
        with pytest.raises(StorageError, match="not a directory"):
            open_pool(root)
    else:
        with open_pool(root) as store:
            assert save(store, make_keys(1)) == [Outcome.LOST_MEDIUM]
    assert os.listdir(outside) == []


def test_no_name_in_a_pool_leads_out_of_it(tmp_path: Path) -> None:
    """Paths are made of hex digits and numbers alone, so nothing that a log says can be one."""
    outside, root = tmp_path / "00000001.seg", tmp_path / "pool"
    outside.write_bytes(bytes(PAGE) + payload(make_keys(1)[0], SIZE))
    root.mkdir()
    with open_pool(root) as store:
        forger = Forger(root)
        for name in ("A" * 32, "é" * 32, "0" * 31, "-" * 32, "0" * 32 + "\n"):
            (root / "writers" / name).mkdir()
            assert store.pool.writer_ids() == [forger.id], "no writer's name, and left alone"
        forger.refer(Kind.EVICTED, 1, layout.SEGMENT_GONE, b"../../../../../../".hex()[:32])
        forger.entry(make_keys(1)[0], 0xFFFFFFFF, PAGE, SIZE, payload(make_keys(1)[0], SIZE))
        store.refresh()
        assert load(store, make_keys(1)) == [MISSING]
        store.check(fix=True)
        store.evict(0)
    assert outside.exists()


# Lengths that cannot be.


def _hostile_pool(root: Path) -> None:
    open_pool(root).close()
    forger = Forger(root)
    forger.segment(1, b"x" * 3 * PAGE)
    places = [(PAGE, 1 << 30), (PAGE, (1 << 32) - 1), ((1 << 44) - PAGE, 1 << 30), (2 * PAGE, 1 << 29), (PAGE + 8, 9)]
    places += [(PAGE * (1 + i % 3), (1 << 30) - i) for i in range(2000)]
    entries = np.zeros(len(places), layout.entry_dtype(8))
    keys = np.arange(len(places), dtype="<u8")
    entries["key"] = np.frombuffer(keys.tobytes(), "V8")
    entries["segment"] = 1
    entries["offset"], entries["length"] = zip(*places, strict=True)
    forger.frame(Kind.ENTRIES, entries.tobytes(), len(entries), namespace=EMPTY_NAMESPACE, key_bytes=8)
    references = b"".join(layout.encode_reference(os.urandom(16), i, 1 << 63) for i in range(20_000))
    forger.frame(Kind.DROPPED, references, 20_000)
    with open(forger.folder / "00000001.log", "r+b") as log:  # a sparse end of 8 TiB, and a frame behind it
        log.truncate(8 << 40)
    os.truncate(forger.folder / "00000001.seg", 8 << 40)


CHILD = """
import resource, sys
from pathlib import Path
from tests.store.test_tailing import open_pool
root, limit = Path(sys.argv[1]), int(sys.argv[2])
open_pool(root).close()
used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
keys = [number.to_bytes(8, 'little') for number in range(2005)]
with open_pool(root) as store:
    outcomes = store.load(keys, [bytearray(100) for _ in keys])
    outcomes.wait(60)
    print(sorted(set(map(str, outcomes.outcomes))))
    report = store.check(fix=True)
    print(report.clean, report.blocks, sorted({found.kind for found in report.findings}))
    print(all(store.save(keys[:2], [bytes(100)] * 2).wait(60)))
"""


def test_absurd_lengths_cost_no_memory(tmp_path: Path) -> None:
    """A pool whose log claims terabytes is opened, read, checked and mended within so many bytes of memory."""
    _hostile_pool(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(MEMORY_BYTES)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['missing', 'wrong_size']",
        "True 0 ['damaged_block', 'impossible_entry', 'overlapping_entry', 'wrong_access']",
        "True",
    ]
    assert resource.getrlimit(resource.RLIMIT_AS)[0] < 0, "the limit was the child's"
    shutil.rmtree(tmp_path / "writers")
    open_store(f"file://{tmp_path}?capacity={CAPACITY}").close()
