"""A process of the duel: one peer, driven by lines of JSON on its standard input; answers on its standard output.

    python worker.py MODULE CLASS

{"do": "prepare", "directory", "block", "count"}    writes the blocks: settings, seconds
{"do": "load", "variant", "parts", "busy", "limit_s", "least_s"}    one cell: a list of passes
{"do": "close"}

Only this process measures: wall time around the requests, CPU seconds of the process without its busy thread, bytes
read by the kernel's count. Between the passes, untimed: the page cache is dropped, the destination is overwritten, what
came back is compared.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import xxhash
from peer import Peer, Requests, content, drop_page_cache, sync_file_system

from _busy import BusyProcess, BusyThread, Quiet

PASSES_MAX = 10


def cpu_s() -> float:
    """User and system time of this process and of its children that ended."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def bytes_read() -> int:
    """What the kernel has read from media for this process and its children that ended."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


class Worker:
    """Answers to the commands, for one peer at a time."""

    def __init__(self, kind: type[Peer]) -> None:
        self._kind = kind
        self._peer: Peer | None = None
        self._sums: list[bytes] = []

    def prepare(self, directory: str, block: int, count: int) -> dict[str, object]:
        """Write the blocks and sync the file system; seconds of both together."""
        self.close()
        peer = self._kind(Path(directory), block, count)
        rows = content(count, block)
        self._sums = [xxhash.xxh3_64_digest(row) for row in rows]
        seconds = peer.write(rows)
        start_s = time.perf_counter()
        sync_file_system(peer.directory)
        seconds += time.perf_counter() - start_s
        self._peer = peer
        return {"settings": peer.settings, "seconds": seconds}

    def load(self, variant: str, parts: int, busy: bool, limit_s: float, least_s: float) -> dict[str, object]:
        """Passes over as many blocks as `limit_s` allows a slow peer, until `least_s` seconds were measured."""
        assert self._peer is not None
        count = self._peer.count
        probe = self._pass(variant, [list(range(count // 16))], busy)
        share = 1
        while share < 16 and probe["seconds"] * 16 / share > limit_s:
            share *= 4
        each = max(count // share // parts, 1)
        requests = [list(range(i * each, (i + 1) * each)) for i in range(parts)]
        passes: list[dict] = []
        while not passes or (sum(p["seconds"] for p in passes) < least_s and len(passes) < PASSES_MAX):
            passes.append(self._pass(variant, requests, busy))
        return {"passes": passes}

    def _pass(self, variant: str, requests: Requests, busy: bool) -> dict:
        peer = self._peer
        assert peer is not None
        drop_page_cache(peer.directory)
        peer.poison()
        load = (BusyProcess() if peer.busy_beside else BusyThread()) if busy else Quiet()
        try:
            read, used_s = bytes_read(), cpu_s() - load.cpu_s()
            start_s = time.perf_counter()
            loaded = peer.load(variant, requests)
            seconds = time.perf_counter() - start_s
            used_s = cpu_s() - load.cpu_s() - used_s
            read = bytes_read() - read
        finally:
            load.stop()
        verified = self._verify(requests)
        peer.release()
        return {
            "seconds": loaded.seconds or seconds,
            "cpu_s": used_s if loaded.cpu_s is None else loaded.cpu_s,
            "bytes": sum(map(len, requests)) * peer.block,
            "kernel_bytes": read,
            "verified_bytes": verified,
            "latencies_s": loaded.latencies_s,
        }

    def _verify(self, requests: Requests) -> int:
        """Bytes that came back as they were written; what the peer cannot show is none, what differs is an error."""
        good = 0
        for i in (block for request in requests for block in request):
            payload = self._peer.payload(i)
            if payload is None:
                continue
            view = memoryview(payload).cast("B")[: self._peer.block]
            assert xxhash.xxh3_64_digest(view) == self._sums[i], f"block {i} came back with other bytes"
            good += len(view)
        return good

    def close(self) -> dict[str, object]:
        """End the peer."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        return {}


def main() -> None:
    """Serve until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    module, name = sys.argv[1:]
    worker: Worker | None = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            worker = worker or Worker(getattr(importlib.import_module(module), name))
            answer = getattr(worker, do)(**command)
        except Exception as error:  # noqa: BLE001 whatever a peer raises is what its row shows
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # threads of a peer must not keep a worker alive


if __name__ == "__main__":
    main()
