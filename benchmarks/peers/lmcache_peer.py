"""LMCache 0.5.6 in the duel: its in-process disk backends and the adapters of its multiprocess mode, on CPU tensors."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import select
import threading
from time import perf_counter

import numpy as np
from peer import Loaded, Peer, Requests, in_threads

THREADS = 8
TIMEOUT_S = 300
MODEL = "duel/model"


def quiet_lmcache() -> None:
    """No usage reports, no banners, no log lines."""
    os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR", LMCACHE_DISABLE_BANNER="1")


class InProcess(Peer):
    """A backend of the in-process engine, filled and asked as that engine does."""

    kind = ""

    def _configure(self, options: dict[str, object], extra: dict[str, object]) -> None:
        raise NotImplementedError

    def _backend(self) -> object:
        raise NotImplementedError

    def write(self, rows: np.ndarray) -> float:
        quiet_lmcache()
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.pin_monitor import PinMonitor
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        width = self.block // 2 // 512  # bf16; keys and values of 256 tokens
        heads, head = (8, 128) if width >= 1024 else (1, width)
        layers = width // (heads * head)
        extra: dict[str, object] = {"disk_io_threads": THREADS}
        options: dict[str, object] = {"chunk_size": 256, "local_cpu": False, "lmcache_instance_id": "duel"}
        options |= {"extra_config": extra, "blocking_timeout_secs": TIMEOUT_S}
        options["max_local_cpu_size"] = (self.block * self.count * 2.3 + (64 << 20)) / 2**30
        self._configure(options, extra)
        self.config = LMCacheEngineConfig.from_defaults(**options)
        PinMonitor.GetOrCreate(self.config)
        facts = {"world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0, "role": "worker"}
        shape = (layers, 2, 256, heads, head)
        self.metadata = LMCacheMetadata(model_name=MODEL, kv_dtype=torch.bfloat16, kv_shape=shape, **facts)
        self.loop = asyncio.new_event_loop()
        self._runner = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._runner.start()
        self.cpu = LocalCPUBackend(self.config, self.metadata, "cpu")
        self.backend = self._backend()
        self._keys = [CacheEngineKey(MODEL, 1, 0, i + 1, torch.bfloat16) for i in range(self.count)]
        self._objects: dict[int, object] = {}
        objects = []
        for row in rows:
            tensor = self.cpu.allocate(torch.Size([2, layers, 256, heads * head]), torch.bfloat16, MemoryFormat.KV_2LTD)
            tensor.raw_data[: self.block].copy_(torch.from_numpy(row))
            objects.append(tensor)
        return self._store(objects)

    def _store(self, objects: list) -> float:
        done, lock, left = threading.Event(), threading.Lock(), len(objects)

        def stored(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                if not left:
                    done.set()

        start_s = perf_counter()
        self.backend.batched_submit_put_task(self._keys, objects, on_complete_callback=stored)
        assert done.wait(TIMEOUT_S), "storing timed out"
        seconds = perf_counter() - start_s
        for tensor in objects:
            tensor.ref_count_down()
        return seconds

    def _get(self, variant: str, keys: list) -> list:
        return self.backend.batched_get_blocking(keys)

    def load(self, variant: str, requests: Requests) -> Loaded:
        answers, latencies_s = in_threads(lambda r: self._get(variant, [self._keys[i] for i in r]), requests)
        for request, objects in zip(requests, answers, strict=True):
            self._objects |= {i: found for i, found in zip(request, objects, strict=True) if found is not None}
        return Loaded(latencies_s)

    def payload(self, block: int) -> object | None:
        found = self._objects.get(block)
        return None if found is None else found.byte_array

    def release(self) -> None:
        for found in self._objects.values():
            found.ref_count_down()
        self._objects = {}

    def close(self) -> None:
        self.backend.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._runner.join(5)
        self.cpu.memory_allocator.close()
        self.backend = self.cpu = None
        gc.collect()


class LocalDisk(InProcess):
    """`LocalDiskBackend`: a file per block, read by a thread pool, or one after the other as before its pool."""

    variants = ("LMCache LocalDisk, serial", "LMCache LocalDisk, 8 threads")

    def _configure(self, options: dict[str, object], extra: dict[str, object]) -> None:
        options.update(local_disk=str(self.directory), max_local_disk_size=64.0)
        self.settings[self.variants[0]] = "lmcache 0.5.6: base-class loop of get_blocking, buffered"
        self.settings[self.variants[1]] = f"lmcache 0.5.6: batched_get_blocking, disk_io_threads={THREADS}, buffered"

    def _backend(self) -> object:
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        return LocalDiskBackend(self.config, self.loop, self.cpu, "cpu", None, self.metadata)

    def _get(self, variant: str, keys: list) -> list:
        if variant == self.variants[0]:
            from lmcache.v1.storage_backend.abstract_backend import StorageBackendInterface

            return StorageBackendInterface.batched_get_blocking(self.backend, keys)
        return self.backend.batched_get_blocking(keys)


class FsConnector(InProcess):
    """`FSConnector` behind `RemoteBackend`: a file per block with a header, through aiofiles."""

    variants = ("LMCache FSConnector",)

    def _configure(self, options: dict[str, object], extra: dict[str, object]) -> None:
        options.update(remote_storage_plugins=["fs"], remote_serde="naive")
        extra["remote_storage_plugin.fs.base_path"] = str(self.directory)
        self.settings[self.variants[0]] = "lmcache 0.5.6: remote_storage_plugins=[fs], serde naive, buffered"

    def _backend(self) -> object:
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        return RemoteBackend(self.config, self.metadata, self.loop, self.cpu, "cpu", plugin_name="fs")


class Adapter(Peer):
    """An L2 adapter of the multiprocess mode, driven as its controllers do: a load task a request, an eventfd."""

    def _spec(self) -> dict[str, object]:
        raise NotImplementedError

    def write(self, rows: np.ndarray) -> float:
        quiet_lmcache()
        from lmcache.cli.commands.bench.l2_adapter_bench.data import create_l1_memory_desc, make_aligned_tensor
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        self._memory = make_aligned_tensor(self.block * self.count, 4096)
        self._bytes = self._memory.numpy().view(np.uint8).reshape(self.count, self.block)
        arguments = argparse.Namespace(l2_adapter=[json.dumps(self._spec())])
        config = parse_args_to_l2_adapters_config(arguments).adapters[0]
        self.adapter = create_l2_adapter(config, l1_memory_desc=create_l1_memory_desc(self._memory, align_bytes=4096))
        self._keys = [
            ObjectKey(chunk_hash=(i + 1).to_bytes(32, "big"), model_name=MODEL, kv_rank=0x01000100)
            for i in range(self.count)
        ]
        self._bytes[:] = rows
        start_s = perf_counter()
        task = self.adapter.submit_store_task(self._keys, self._objects(range(self.count)))
        done: dict = {}
        while task not in done:
            self._wait(self.adapter.get_store_event_fd())
            done |= self.adapter.pop_completed_store_tasks()
        assert done[task].is_successful(), "storing failed"
        return perf_counter() - start_s

    def _objects(self, blocks: object) -> list:
        import torch
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        facts = {"shape": torch.Size([self.block]), "dtype": torch.uint8, "phy_size": self.block, "ref_count": 1}
        made = []
        for i in blocks:
            raw = self._memory[i * self.block : (i + 1) * self.block]
            metadata = MemoryObjMetadata(address=i * self.block, fmt=MemoryFormat.KV_2LTD, **facts)
            made.append(TensorMemoryObj(raw, metadata, parent_allocator=None))
        return made

    @staticmethod
    def _wait(fd: int) -> None:
        from lmcache.v1.platform import consume_fd

        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(TIMEOUT_S * 1000), "no answer"
        consume_fd(fd)

    def poison(self) -> None:
        self._bytes[:] = 1

    def load(self, variant: str, requests: Requests) -> Loaded:
        objects = [self._objects(request) for request in requests]
        latencies_s, start_s = [], perf_counter()
        pending = {
            self.adapter.submit_load_task([self._keys[i] for i in request], mine): len(request)
            for request, mine in zip(requests, objects, strict=True)
        }
        while pending:
            self._wait(self.adapter.get_load_event_fd())
            for task in list(pending):
                found = self.adapter.query_load_result(task)
                if found is not None:
                    latencies_s.append(perf_counter() - start_s)
                    assert found.popcount() == pending.pop(task), "blocks were not found"
        return Loaded(latencies_s)

    def payload(self, block: int) -> object:
        return self._bytes[block]

    def close(self) -> None:
        self.adapter.close()
        self.adapter = self._memory = self._bytes = None
        gc.collect()


class MpFs(Adapter):
    variants = ("LMCache MP fs",)

    def _spec(self) -> dict[str, object]:
        self.settings[self.variants[0]] = "lmcache 0.5.6: l2 adapter fs, use_odirect"
        return {"type": "fs", "base_path": str(self.directory), "use_odirect": True}


class MpFsNative(Adapter):
    variants = ("LMCache MP fs_native",)

    def _spec(self) -> dict[str, object]:
        self.settings[self.variants[0]] = f"lmcache 0.5.6: l2 adapter fs_native, num_workers={THREADS}, use_odirect"
        return {"type": "fs_native", "base_path": str(self.directory), "num_workers": THREADS, "use_odirect": True}


class MpRawBlock(Adapter):
    variants = ("LMCache MP raw_block, io_uring",)

    def _spec(self) -> dict[str, object]:
        self.settings[self.variants[0]] = (
            "lmcache 0.5.6: l2 adapter raw_block, io_uring, queue 256, on a file, O_DIRECT"
        )
        path, slot, meta = self.directory / "raw.bin", self.block + 4096, 64 << 20
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, meta + slot * (self.count + 4))
        workers = {"num_store_workers": THREADS, "num_lookup_workers": 1, "num_load_workers": THREADS}
        layout = {"slot_bytes": slot, "block_align": 4096, "header_bytes": 4096, "meta_total_bytes": meta}
        engine = {"use_odirect": True, "enable_zero_copy": True, "io_engine": "io_uring", "iouring_queue_depth": 256}
        return (
            {"type": "raw_block", "device_path": str(path), "load_checkpoint_on_init": False}
            | workers
            | layout
            | engine
        )
