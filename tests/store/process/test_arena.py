"""Which memory another process can map is found out from the kernel, whoever made it."""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest

from rewarm.errors import MisuseError
from rewarm.store.buffers import address_of
from rewarm.store.process.arena import SharedPart, find_shared, map_part, shared_arena

SIZE = 1 << 20


def found(memory: np.ndarray) -> SharedPart:
    part = find_shared(address_of(memory), memory.nbytes)
    assert isinstance(part, SharedPart), part
    return part


def same_pages(memory: np.ndarray) -> bool:
    """Map what was found, and see whether it is the same memory."""
    part = found(memory)
    seen, _ = map_part(part.descriptor, part.offset, memory.nbytes)
    os.close(part.descriptor)
    memory[0], memory[-1] = 17, 23
    seen[1] = 42
    return (int(seen[0]), int(seen[-1]), int(memory[1])) == (17, 23, 42)


def test_an_arena_of_ours_and_any_part_of_it_can_be_shared() -> None:
    memory = np.frombuffer(shared_arena(SIZE), np.uint8)
    assert same_pages(memory)
    assert same_pages(memory[5000:70_001])
    with pytest.raises(MisuseError, match="at least one byte"):
        shared_arena(0)


def test_so_can_shared_memory_of_others() -> None:
    block = SharedMemory(create=True, size=SIZE)
    memory = np.frombuffer(block.buf, np.uint8)
    assert same_pages(memory)
    del memory
    block.unlink()
    block.close()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(SIZE)
        mapping = mmap.mmap(file.fileno(), SIZE)
        file.close()
        reason = find_shared(address_of(np.frombuffer(mapping, np.uint8)), SIZE)
        assert isinstance(reason, SharedPart), "the mapping keeps a descriptor of its own"
        os.close(reason.descriptor)


def test_a_file_that_only_its_path_leads_to_is_opened_by_it(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(bytes(SIZE))
    memory = np.memmap(path, np.uint8, "r+")
    assert same_pages(np.frombuffer(memory, np.uint8))


def test_private_memory_gives_the_reason() -> None:
    private = np.frombuffer(mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    assert "private" in str(find_shared(address_of(private), SIZE))
    nameless = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    assert "nothing leads" in str(find_shared(address_of(nameless), SIZE))
    assert "not mapped" in str(find_shared(4096, 4096))
