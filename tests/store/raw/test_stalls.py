"""A medium that keeps a read of the log for ever holds up neither look-ups nor loads."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

import rewarm
from rewarm.errors import StorageError
from rewarm.store.raw.formatting import format_device
from rewarm.store.raw.store import RawStore

KEY = b"the only key of it"
BYTES = 64 << 10
BOUND_S = 10.0


def test_a_read_of_the_log_that_hangs_holds_up_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "device"
    with open(device, "wb") as file:
        file.truncate(8 << 20)
    format_device(str(device))
    reached, over = threading.Event(), threading.Event()

    def hang(offset: int, count: int) -> None:
        reached.set()
        over.wait(3 * BOUND_S)
        raise OSError(errno.EIO, "gone")

    with rewarm.open(f"block://{device}?poll=20ms&io_deadline=300ms", namespace="stalls") as store:
        assert isinstance(store, RawStore)
        assert store.save([KEY], [bytes(range(256)) * (BYTES // 256)]).wait(BOUND_S) == [True]
        monkeypatch.setattr(store._media, "read", hang)
        try:
            assert reached.wait(BOUND_S)
            found = bytearray(BYTES)
            assert store.lookup([KEY]).leading == 1
            assert store.load([KEY], [found]).wait(BOUND_S) == [True]
            assert found == bytes(range(256)) * (BYTES // 256)
            with pytest.raises(StorageError, match="not answered"):
                store.refresh()
        finally:
            over.set()
