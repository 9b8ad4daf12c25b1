"""A process that owns a raw pool and saves until it is killed: prints each key that a flush has made safe, a line each.

Arguments: path, host, first number. Run as a script.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.store.raw.devices import open_as

from rewarm.testing.payload import make_keys, payload

BATCH = 8
SIZES = (4096, 20_000, 65_536)


def size_of(number: int) -> int:
    """Bytes of the blocks of a batch."""
    return SIZES[number % len(SIZES)]


def batch_of(number: int) -> list[bytes]:
    """Keys of a batch."""
    return make_keys(BATCH, f"batch {number}")


def main(path: str, host: str, first: str) -> None:
    """Save batch after batch."""
    with open_as(Path(path), host, "&role=owner") as store:
        print("ready", flush=True)
        number = int(first)
        while True:
            keys = batch_of(number)
            done = store.save(keys, [payload(key, size_of(number)) for key in keys]).wait(30)
            if number % 3 == 0:
                store.flush()
                if all(done):
                    print(number, flush=True)
            number += 1


if __name__ == "__main__":
    main(*sys.argv[1:])
