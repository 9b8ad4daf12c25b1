"""The CPU platform: the one thing vLLM does not have for it, a worker that copies between its KV cache and the region.

vLLM refuses offload workers on CPUs, although scheduler, manager, region and tiers need no device. `RewarmCpuSpec`
supplies a worker that copies memory, so that the real engine runs the real connector without a GPU: for tests, for the
example, for trying things out. Engines on GPUs use vLLM's own `TieringOffloadingSpec` and never load this module.

    "kv_connector_extra_config": {"spec_name": "RewarmCpuSpec", "spec_module_path": "rewarm.connectors.vllm_cpu", ..}
"""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from rewarm.connectors.vllm.versions import interface
from rewarm.errors import ConfigError

_base = interface().base
_OffloadingWorker: Any = _base.OffloadingWorker
_TieringOffloadingSpec: Any = importlib.import_module("vllm.v1.kv_offload.tiering.spec").TieringOffloadingSpec
_region = importlib.import_module("vllm.v1.kv_offload.cpu.shared_offload_region")


class RewarmCpuSpec(_TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not there then
    """vLLM's tiering offload with a worker for the CPU platform."""

    def __init__(self, config: Any) -> None:
        """As vLLM's; the worker comes later."""
        super().__init__(config)
        self._copy_worker: CopyWorker | None = None

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker of this rank, made once. Raises `ConfigError` for layouts it does not copy."""
        if self._copy_worker is None:
            if self.config.canonical_layout:
                raise ConfigError("RewarmCpuSpec copies vLLM's direct layout only; remove canonical_layout")
            region = _region.SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._copy_worker = CopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._copy_worker


class CopyWorker(_OffloadingWorker):  # type: ignore[misc]  # vLLM is not there then
    """Copies blocks between a rank's KV tensors and its part of the region, at once, on the calling thread."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        """Take the KV tensors of one rank, each of shape (blocks, bytes), and lay their chunks out in the region."""
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._group_refs = kv_caches.group_data_refs
        self._device = [_Memory(t.tensor) for t in kv_caches.tensors]
        self._host = [
            _Memory(region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk)) for t in kv_caches.tensors
        ]
        self._page_bytes = [t.page_size_bytes for t in kv_caches.tensors]
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks to the region."""
        return self._copy(job_id, src_spec, dst_spec, storing=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks from the region."""
        return self._copy(job_id, dst_spec, src_spec, storing=False)

    def get_finished(self) -> list[Any]:
        """Results since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Everything is over when it is submitted."""

    def shutdown(self) -> None:
        """Let go of the region."""
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, storing: bool) -> bool:
        """Copy the blocks of each group; the first chunk of a group may begin before its first block."""
        start_s, moved, block_at, chunk_at = time.monotonic(), 0, 0, 0
        per_chunk = self._blocks_per_chunk
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if not count:
                continue
            skip = first % per_chunk
            chunk_count = -(-(count + skip) // per_chunk)
            block_ids = np.asarray(blocks.block_ids[block_at : block_at + count], np.int64)
            chunk_ids = np.asarray(chunks.chunk_ids[chunk_at : chunk_at + chunk_count], np.int64)
            block_at, chunk_at = block_at + count, chunk_at + chunk_count
            place = np.arange(skip, skip + count)
            for ref in self._group_refs[group]:
                page = self._page_bytes[ref.tensor_idx]
                near = self._device[ref.tensor_idx].at(block_ids)
                far = self._host[ref.tensor_idx].at(chunk_ids[place // per_chunk]) + place % per_chunk * page
                target, source = (far, near) if storing else (near, far)
                for to, origin in zip(target.tolist(), source.tolist(), strict=True):
                    ctypes.memmove(to, origin, ref.page_size_bytes)
                moved += count * ref.page_size_bytes
        self._finished.append(_base.TransferResult(job_id, True, moved, time.monotonic() - start_s))
        return True


class _Memory:
    """Rows of a tensor by address: its first axis counts blocks or chunks, a row is contiguous. Keeps the tensor."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self._start = tensor.data_ptr()
        self._stride = tensor.stride(0) * tensor.element_size()

    def at(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Addresses of rows."""
        addresses: npt.NDArray[np.int64] = self._start + rows * self._stride
        return addresses
