"""Rewarm in the duel, and the two references that read the same way: fio and the bare C ring.

Rewarm's three rungs share one pool; the references share one flat file of the same bytes.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from time import perf_counter

import numpy as np
from peer import Loaded, Peer, Requests, arena

from _unchecked import checksum_left_out

QUEUE = 32
UNCHECKED = "uring, checksum left out"
RING = Path(__file__).parent.parent / "bare_ring.c"


class Rewarm(Peer):
    """`Store.load` of every rung; every block is verified, as always.

    The last row leaves the checksum out, as every peer does: what it costs us, not what a user can have.
    """

    variants = ("uring", "aio", "threads", UNCHECKED)

    def write(self, rows: np.ndarray) -> float:
        import rewarm

        self._keys = [i.to_bytes(32, "big") for i in range(self.count)]
        self._memory = arena(self.count, self.block)
        url = f"file://{self.directory}?capacity=1TiB&device="
        self._stores = {}
        for name in ("uring", "aio", "threads"):
            self._stores[name] = rewarm.open(url + name)
            pinned = self._stores[name].register(self._memory)
            self.settings[name] = f"device={name}, {pinned >> 20} MiB registered, blocks verified"
        self.settings[UNCHECKED] = "as uring, for comparison only"
        self._memory[:] = rows
        start_s = perf_counter()
        assert all(self._stores["uring"].save(self._keys, self._memory).wait())
        self._stores["uring"].flush()
        seconds = perf_counter() - start_s
        for store in self._stores.values():
            store.refresh()
        return seconds

    def poison(self) -> None:
        self._memory[:] = 1

    def load(self, variant: str, requests: Requests) -> Loaded:
        if variant != UNCHECKED:
            return self._load(variant, requests)
        with checksum_left_out():
            return self._load("uring", requests)

    def _load(self, device: str, requests: Requests) -> Loaded:
        store, latencies_s, start_s = self._stores[device], [], perf_counter()
        transfers = [store.load([self._keys[i] for i in r], self._memory[r[0] : r[-1] + 1]) for r in requests]
        for transfer in transfers:
            assert all(transfer.wait())
            latencies_s.append(perf_counter() - start_s)
        return Loaded(latencies_s)

    def payload(self, block: int) -> object:
        return self._memory[block]

    def close(self) -> None:
        for store in self._stores.values():
            store.close()


class Bare(Peer):
    """The references, each a child process that reads the flat file."""

    variants = ("C ring, registered", "fio")
    busy_beside = True

    def write(self, rows: np.ndarray) -> float:
        self._file = self.directory / "flat"
        self._dump, self._shown = None, False
        self._ring = self.directory / "bare_ring"
        subprocess.run(["cc", "-O2", str(RING), "-o", str(self._ring), "-luring"], check=True, capture_output=True)
        version = subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True).stdout.strip()
        self.settings["C ring, registered"] = f"{QUEUE} in flight, registered buffers; requests in their order"
        self.settings["fio"] = f"{version}: io_uring, direct=1, iodepth={QUEUE}; one job a request"
        seconds = self._fio("write", [list(range(self.count))], "--fallocate=none", "--create_on_open=1").seconds
        rows.tofile(self._file)
        assert seconds is not None
        return seconds

    def load(self, variant: str, requests: Requests) -> Loaded:
        return self._fio("read", requests, "--readonly") if variant == "fio" else self._c_ring(requests)

    def _c_ring(self, requests: Requests) -> Loaded:
        lines = "\n".join(f"{self._file} {r[0] * self.block} {len(r) * self.block}" for r in requests)
        command = [str(self._ring), str(QUEUE), "1", str(self.block)]
        whole = sum(map(len, requests)) == self.count
        self._dump = self.directory / "read" if whole and not self._shown else None
        if self._dump:  # once: it costs more than the reads
            command.append(str(self._dump))
            self._shown = True
        done = subprocess.run(command, input=lines, text=True, check=True, capture_output=True)
        result = json.loads(done.stdout)
        return Loaded(result["latencies_s"], result["seconds"], result["cpu_s"])

    def _fio(self, direction: str, requests: Requests, *more: str) -> Loaded:
        self._dump = None
        command = ["fio", f"--rw={direction}", f"--bs={self.block}", f"--filename={self._file}", "--direct=1"]
        command += ["--ioengine=io_uring", f"--iodepth={QUEUE}", "--invalidate=0", "--output-format=json", *more]
        for number, request in enumerate(requests):
            offset, size = request[0] * self.block, len(request) * self.block
            command += [f"--name=r{number}", f"--offset={offset}", f"--size={size}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        jobs = json.loads(done.stdout)["jobs"]
        latencies_s = [job[direction]["io_bytes"] / job[direction]["bw_bytes"] for job in jobs]
        cpu_s = sum(
            (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds for job, seconds in zip(jobs, latencies_s, strict=True)
        )
        return Loaded(latencies_s, max(latencies_s), cpu_s)

    def payload(self, block: int) -> object | None:
        if self._dump is None:
            return None  # fio shows nobody what it read
        return np.fromfile(self._dump, np.uint8, self.block, offset=block * self.block)

    def release(self) -> None:
        if self._dump is not None:
            self._dump.unlink(missing_ok=True)
