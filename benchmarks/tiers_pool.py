"""A pool over drives that the kernel throttles: what one request gets, and when the requests of a wave end.

    sudo python benchmarks/tiers_pool.py [--images /dev/shm] [--rounds 3] [-o result.json]

Makes XFS file systems on loop devices below --images, limits their reads with cgroup v1 (blkio.throttle, which holds
for O_DIRECT reads of this process alone), and removes everything at its end. Needs root, losetup, mkfs.xfs and the
blkio controller; about 3 GB of room. Expected: one request gets 0.9 of the drives' sum (two at 100 MB/s; 100 beside 300
MB/s, after a first restore has told the pool their speeds); of a wave of 32 equal requests the median is at most 0.6 of
the last, which is no later than with all served at once; with the sizes of a conversation trace the median is at most
half of all at once; a stack gives one request 0.9 of the sum of its drives and its shared store.
"All at once" is measured: pieces of all requests are asked for in turn, in arrival order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import rewarm
from rewarm.store.contract import Store, Transfer
from rewarm.units import format_rate, parse_rate

CGROUPS = Path("/sys/fs/cgroup/blkio")
IMAGE_BYTES = 1 << 30
BLOCK = 256 << 10
REQUEST_BLOCKS = 768
WAVE = 32
WAVE_BLOCKS = 2048
HIT_TOKENS = (
    1024, 1024, 1024, 1024, 1536, 1536, 2048, 2048, 2560, 3072, 3072, 3584, 4096, 4096, 4608, 5120, 5632, 6144, 6656,
    7168, 8192, 8704, 9728, 10752, 12288, 13824, 15360, 17408, 19456, 23552, 27136, 57268,
)  # fmt: skip
"""32 quantiles of what requests of Mooncake's conversation trace (FAST'25) find beyond the first block."""


def run(*command: str) -> str:
    """Run a command; what it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def throttled(images: Path, rates: list[float], image_bytes: int = IMAGE_BYTES) -> Iterator[list[Path]]:
    """Mounted XFS file systems whose reads by this process and its children are limited to `rates`, bytes/s."""
    line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":blkio:" in line)
    home = CGROUPS / line.split(":", 2)[2].lstrip("/")
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rewarm-pool-", dir=images)))
        group = CGROUPS / root.name
        group.mkdir()
        stack.callback(group.rmdir)
        stack.callback(lambda: (home / "cgroup.procs").write_text(str(os.getpid())))
        mounts = []
        for number, rate in enumerate(rates):
            image, mount = root / f"{number}.img", root / f"drive{number}"
            mount.mkdir()
            with image.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, image_bytes)
            run("mkfs.xfs", "-q", str(image))
            loop = run("losetup", "-f", "--show", "--direct-io=on", str(image))
            stack.callback(run, "losetup", "-d", loop)
            run("mount", loop, str(mount))
            stack.callback(run, "umount", str(mount))
            device = os.stat(loop).st_rdev
            limit = f"{os.major(device)}:{os.minor(device)} {int(rate)}"
            (group / "blkio.throttle.read_bps_device").write_text(limit)
            mounts.append(mount)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield mounts


class Restores:
    """Contexts saved in a pool, and one arena that they are restored into."""

    def __init__(self, mounts: list[Path], order: str) -> None:
        drives = "&".join(f"drive={mount}" for mount in mounts)
        self.url = f"pool:?{drives}&capacity={len(mounts) * 950}MiB"
        self.order = order
        self.pool: Store = rewarm.open(f"{self.url}&order={order}")
        arena = mmap.mmap(-1, WAVE_BLOCKS * 2 * BLOCK)
        self.arena = np.frombuffer(arena, np.uint8).reshape(-1, BLOCK)
        self.arena[:] = 1  # its pages are made now, not while a restore is timed

    def reopen(self, order: str) -> None:
        """The same pool in another order."""
        if order != self.order:
            self.pool.close()
            self.order, self.pool = order, rewarm.open(f"{self.url}&order={order}")

    def save(self, tag: str, blocks: int) -> list[bytes]:
        """Save a context of fresh blocks; returns its keys."""
        keys = [f"{tag} {number:06d}".encode() for number in range(blocks)]
        for start in range(0, blocks, 256):
            batch = keys[start : start + 256]
            content = np.frombuffer(os.urandom(len(batch) * BLOCK), np.uint8).reshape(-1, BLOCK)
            assert all(self.pool.save(batch, content).wait())
        self.pool.flush()
        return keys

    def one(self, keys: list[bytes]) -> float:
        """Bytes/s of one request alone."""
        start = time.monotonic()
        assert all(self.pool.load(keys, self.arena[: len(keys)]).wait())
        return len(keys) * BLOCK / (time.monotonic() - start)

    def wave(self, contexts: list[list[bytes]], piece_blocks: int | None) -> np.ndarray:
        """Seconds to the end of each request when all start together; with pieces: all are served at once."""
        start, at = time.monotonic(), 0
        parts: list[tuple[int, Transfer]] = []
        spans = []
        for keys in contexts:
            spans.append(self.arena[at : at + len(keys)])
            at += len(keys)
        longest = max(map(len, contexts))
        for first in range(0, longest, piece_blocks or longest):
            for number, (keys, span) in enumerate(zip(contexts, spans, strict=True)):
                part = slice(first, first + (piece_blocks or longest))
                if keys[part]:
                    parts.append((number, self.pool.load(keys[part], span[part])))
        ends = np.zeros(len(contexts))
        poll = select.poll()
        waiting = {transfer.fileno(): (number, transfer) for number, transfer in parts}
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        while waiting:
            for descriptor, _ in poll.poll():
                poll.unregister(descriptor)
                number, transfer = waiting.pop(descriptor)
                assert all(transfer.wait(0)), transfer.outcomes
                ends[number] = max(ends[number], time.monotonic() - start)
        return ends


def measure_one(images: Path, rates: list[float], rounds: int) -> dict[str, object]:
    """What one request gets of the sum of the drives."""
    with throttled(images, rates) as mounts:
        restores = Restores(mounts, "shortest")
        with restores.pool:
            first = restores.one(restores.save("first", REQUEST_BLOCKS))
            keys = restores.save("second", REQUEST_BLOCKS)
            got = [restores.one(keys) for _ in range(rounds)]
            share = [round(drive.share, 3) for drive in restores.pool.drives()]  # type: ignore[attr-defined]
    result = {"rates": rates, "bytes_per_s": got, "share_of_sum": statistics.median(got) / sum(rates)}
    print(
        f"{' + '.join(map(format_rate, rates))}: {format_rate(statistics.median(got))}, "
        f"{result['share_of_sum']:.2f} of the sum, shares {share} ({first / sum(rates):.2f} with shares not yet known)"
    )
    return result


def measure_stack(images: Path, rounds: int) -> dict[str, object]:
    """One request whose blocks lie on two drives and in a shared store, 100 MB/s each; then again, from DRAM."""
    cold, warm = [], []
    with throttled(images, [100e6] * 3, IMAGE_BYTES // 2) as mounts:
        drives = f"drive={mounts[0]}&drive={mounts[1]}&capacity=800MiB"
        url = f"pool:?{drives}&shared={mounts[2]}%3Fcapacity=400MiB"
        keys = [f"stack {number:06d}".encode() for number in range(REQUEST_BLOCKS)]
        content = np.frombuffer(os.urandom(REQUEST_BLOCKS * BLOCK), np.uint8).reshape(-1, BLOCK)
        arena = np.frombuffer(mmap.mmap(-1, REQUEST_BLOCKS * BLOCK), np.uint8).reshape(-1, BLOCK)
        arena[:] = 1
        third = np.arange(REQUEST_BLOCKS) % 3 == 2
        for where, mask in ((f"pool:?{drives}", ~third), (f"{mounts[2]}?capacity=400MiB", third)):
            with rewarm.open(where) as store:
                mine = [key for key, here in zip(keys, mask, strict=True) if here]
                assert all(store.save(mine, content[mask]).wait())
        for _ in range(rounds):
            # With one byte of write-behind nothing is copied to the drives: every round finds the blocks as before.
            with rewarm.open(f"{url}&dram=400MiB&write_behind=1") as stack:
                for times in (cold, warm):
                    start = time.monotonic()
                    assert all(stack.load(keys, arena).wait())
                    times.append(REQUEST_BLOCKS * BLOCK / (time.monotonic() - start))
    result = {"bytes_per_s": cold, "share_of_sum": statistics.median(cold) / 300e6, "dram_bytes_per_s": warm}
    print(
        f"stack, drives 100 + 100 and shared 100 MB/s: {format_rate(statistics.median(cold))}, "
        f"{result['share_of_sum']:.2f} of the sum; again, from DRAM: {format_rate(statistics.median(warm))}"
    )
    return result


def measure_wave(images: Path, name: str, blocks: list[int], rounds: int) -> dict[str, object]:
    """Shortest first against all at once, on two drives at 100 MB/s, in turn."""
    with throttled(images, [100e6, 100e6]) as mounts:
        restores = Restores(mounts, "shortest")
        contexts = [restores.save(f"{name} {number}", count) for number, count in enumerate(blocks)]
        ordered, together = [], []
        for _ in range(rounds):
            restores.reopen("shortest")
            ordered.append(restores.wave(contexts, None))
            restores.reopen("arrival")
            together.append(restores.wave(contexts, 4))
        restores.pool.close()
    middle = [float(np.median(ends)) for ends in ordered]
    last = [float(ends.max()) for ends in ordered]
    result = {
        "wave": name,
        "median_s": statistics.median(middle),
        "last_s": statistics.median(last),
        "median_of_last": statistics.median(middle) / statistics.median(last),
        "together_median_s": statistics.median(float(np.median(ends)) for ends in together),
        "together_last_s": statistics.median(float(ends.max()) for ends in together),
    }
    print(
        f"wave of {len(blocks)}, {name}: median {result['median_s']:.2f} s, last {result['last_s']:.2f} s; "
        f"all at once: median {result['together_median_s']:.2f} s, last {result['together_last_s']:.2f} s"
    )
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=Path("/dev/shm"), help="where the images go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not CGROUPS.is_dir():
        sys.exit("needs root and cgroup v1 blkio")
    total = sum(HIT_TOKENS)
    sizes = [max(round(tokens * WAVE_BLOCKS / total), 1) for tokens in HIT_TOKENS]
    shuffled = np.random.default_rng(1).permutation(sizes).tolist()
    results = [
        measure_one(arguments.images, [parse_rate("100MB/s")] * 2, arguments.rounds),
        measure_one(arguments.images, [parse_rate("100MB/s"), parse_rate("300MB/s")], arguments.rounds),
        measure_stack(arguments.images, arguments.rounds),
        measure_wave(arguments.images, "equal", [WAVE_BLOCKS // WAVE] * WAVE, arguments.rounds),
        measure_wave(arguments.images, "trace sizes", shuffled, arguments.rounds),
    ]
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
