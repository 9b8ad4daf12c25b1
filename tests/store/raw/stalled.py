"""What the verbs of a raw pool do while its device answers nothing, as JSON: seconds and answer of each, a line in all.

The device is throttled to a byte a second for the control group that this process enters, which stalls it for real, and
then let go. Arguments: device, directory of the control group. Run as a script.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.store.raw.devices import open_as

from rewarm.errors import StorageError
from rewarm.store.raw.store import RawStore
from rewarm.testing.payload import make_keys, payload

BLOCK = 64 << 10
LIMITS = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")
OPTIONS = "&io_deadline=1s&close_timeout=1s"
BACK_S = 30.0


def throttle(device: Path, group: Path, bytes_per_s: int) -> None:
    """Let so many bytes a second through; 0 is no limit."""
    number = os.stat(device).st_rdev
    for limit in LIMITS:
        (group / limit).write_text(f"{os.major(number)}:{os.minor(number)} {bytes_per_s}")


def timed(action: Callable[[], object]) -> tuple[float, str]:
    began_s = time.monotonic()
    try:
        answer = str(action())
    except StorageError as error:
        answer = f"StorageError: {error}"
    return time.monotonic() - began_s, answer


def loaded(store: RawStore, keys: list[bytes]) -> list[str]:
    buffers = [bytearray(BLOCK) for _ in keys]
    transfer = store.load(keys, buffers)
    for key, buffer, hit in zip(keys, buffers, transfer.wait(60), strict=True):
        assert not hit or buffer == payload(key, BLOCK)
    return [str(outcome) for outcome in transfer.outcomes]


def saved(store: RawStore, keys: list[bytes]) -> list[str]:
    transfer = store.save(keys, [payload(key, BLOCK) for key in keys])
    transfer.wait(60)
    return [str(outcome) for outcome in transfer.outcomes]


def main(device: Path, group: Path) -> None:
    """Stall, ask everything, let go, ask again."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    keys = make_keys(8)
    with open_as(device, "b", OPTIONS) as reader, open_as(device, "a", OPTIONS) as closed:
        assert saved(closed, keys[:4]) == ["stored"] * 4
        closed.flush()
        reader.refresh()
        throttle(device, group, 1)
        found = {
            "load": timed(lambda: loaded(reader, keys[:4])),
            "lookup": timed(lambda: reader.lookup(keys[:4]).leading),
            "refresh": timed(reader.refresh),
            "check": timed(reader.check),
            "save": timed(lambda: saved(closed, keys[4:])),
            "flush": timed(closed.flush),
            "open": timed(lambda: open_as(device, "c", OPTIONS)),
            "close": timed(closed.close),
        }
        throttle(device, group, 0)
        end_s = time.monotonic() + BACK_S
        while (back := loaded(reader, keys[:4])) != ["hit"] * 4 and time.monotonic() < end_s:
            time.sleep(0.05)
        found["back"] = (0.0, str(back))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
