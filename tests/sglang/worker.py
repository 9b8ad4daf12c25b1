"""Runs in SGLang's environment: its real host pools, factory and controller functions, over Rewarm's backend."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

EAGER = sorted(name for name in ("torch", "sglang") if name in sys.modules)

import torch  # noqa: E402
from sglang.srt.managers.cache_controller import HiCacheController  # noqa: E402
from sglang.srt.mem_cache import device_pool_info as devices  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from tests.remote import serve  # noqa: E402

CPU = torch.device("cpu")
BACKEND = {
    "backend_name": "rewarm",
    "module_path": "rewarm.connectors.sglang",
    "class_name": "RewarmHiCache",
    "interface_v1": 1,
    "namespace": "test",
}


class Worker:
    """Host pools and backends by name."""

    def __init__(self) -> None:
        self.pools: dict[str, Any] = {}
        self.backends: dict[str, Any] = {}
        self.faulty: list[Any] = []

    def eager(self) -> list[str]:
        """Engine packages that importing the connector imported."""
        return EAGER

    def pool(self, name: str, kind: str, layout: str, pages: int = 16, page: int = 16, dtype: str = "bfloat16") -> int:
        """A real host pool; bytes of a page."""
        with host_memory_budget_scope(1 << 30):  # it leaves 10 GiB to others, which a small machine may not have
            made = (mha if kind == "mha" else mla)(layout, pages, page, getattr(torch, dtype))
        self.pools[name] = made
        return int(sum(made.get_page_buffer_meta(torch.arange(page))[1])) if layout != "layer_first" else 0

    def fill(self, pool: str, seed: int) -> None:
        """Distinct random bytes in every page."""
        generator = torch.Generator().manual_seed(seed)
        flat = self.pools[pool].kv_buffer.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))

    def digests(self, pool: str) -> list[str]:
        """What each page holds, as the pool itself reads it."""
        host = self.pools[pool]
        pages = [host.get_data_page(at * host.page_size, flat=True) for at in range(host.size // host.page_size)]
        return [hashlib.sha256(p.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for p in pages]

    def attach(self, backend: str, pool: str, url: str, kind: str = "rewarm", **options: Any) -> None:
        """A backend made by SGLang's factory, and introduced to a pool. Options of the storage configuration first."""
        fields = {
            name: options.pop(name) for name in list(options) if name in HiCacheStorageConfig.__dataclass_fields__
        }
        extra = {"file_storage_path": url} if kind == "file" else {**BACKEND, "url": url, **options}
        config = configuration({name: value for name, value in extra.items() if value is not None}, **fields)
        name = "file" if kind == "file" else "dynamic"
        made = StorageBackendFactory.create_backend(name, config, self.pools[pool])
        made.register_mem_pool_host(self.pools[pool])
        self.backends[backend] = made

    def side(self, backend: str, pool: str, name: str) -> None:
        """Introduce a further pool."""
        self.backends[backend].register_mem_host_pool_v2(self.pools[pool], name)

    def again(self, backend: str, pool: str) -> None:
        """Introduce the main pool once more."""
        self.backends[backend].register_mem_pool_host(self.pools[pool])

    def set(self, backend: str, keys: list[str], pages: list[int], tokens: int = 16) -> Any:
        """`batch_set_v1` of these pages of the pool."""
        return self.backends[backend].batch_set_v1(keys, indices(pages, tokens))

    def get(self, backend: str, keys: list[str], pages: list[int], tokens: int = 16) -> Any:
        """`batch_get_v1` into these pages of the pool."""
        return self.backends[backend].batch_get_v1(keys, indices(pages, tokens))

    def exists(self, backend: str, keys: list[str]) -> int:
        """`batch_exists`."""
        return int(self.backends[backend].batch_exists(keys))

    def controller(self, backend: str, keys: list[str], pages: list[int]) -> list[Any]:
        """What the controller's own functions make of the answers: all written; pages read up to a gap."""
        itself = SimpleNamespace(storage_backend=self.backends[backend])
        operation = SimpleNamespace(request_id="r")
        return [
            HiCacheController._page_set_zero_copy(itself, keys, indices(pages, 16)),
            HiCacheController._page_get_zero_copy(itself, operation, keys, indices(pages, 16)),
        ]

    def set_v2(self, backend: str, pool: str, keys: list[str], pages: list[int]) -> Any:
        """`batch_set_v2` of one pool."""
        return self.backends[backend].batch_set_v2([PoolTransfer(pool, indices(pages, 16), keys=keys)])

    def get_v2(self, backend: str, pool: str, keys: list[str], pages: list[int]) -> Any:
        """`batch_get_v2` of one pool."""
        return self.backends[backend].batch_get_v2([PoolTransfer(pool, indices(pages, 16), keys=keys)])

    def exists_v2(self, backend: str, keys: list[str], transfers: list[Any]) -> list[Any]:
        """`batch_exists_v2` for [pool, policy, trailing pages]: usable pages, hits of each pool, usable prefixes."""
        asked = [
            PoolTransfer(name, keys=keys[:count], hit_policy=PoolHitPolicy(policy)) for name, policy, count in transfers
        ]
        found = self.backends[backend].batch_exists_v2(keys, asked)
        hits = {str(name): pages for name, pages in found.extra_pool_hit_pages.items()}
        return [found.kv_hit_pages, hits, found.restorable_prefix_pages]

    def stats(self, backend: str) -> Any:
        """Counters of ours, and what SGLang's metrics get."""
        own, theirs = self.backends[backend].stats(), self.backends[backend].get_stats()
        return {
            "restored": own.restored_pages,
            "kept": own.kept_pages,
            "failed": own.failed,
            "registered": own.store.registered_bytes,
            "device": own.store.device,
            "read": own.store.bytes_read,
            "used": own.store.used_bytes,
            "unreleased": own.store.unreleased_bytes,
            "prefetch_pgs": theirs.prefetch_pgs,
            "backup_pgs": theirs.backup_pgs,
            "rates": theirs.prefetch_bandwidth + theirs.backup_bandwidth,
        }

    def clear(self, backend: str) -> Any:
        """`clear`."""
        return self.backends[backend].clear()

    def close(self, backend: str) -> None:
        """`close`; the backend stays there."""
        self.backends[backend].close()

    def publish(self, **arguments: Any) -> None:
        """Arguments of the engine, as a scheduler process has them."""
        get_context().set_server_args(ServerArgs(**arguments) if arguments else None)

    def hanging_reads(self, backend: str, keys: list[str], pages: list[int], release_after_s: float) -> Any:
        """A get while the medium does not answer: its answer, and whether it waited for the medium's release."""
        from rewarm.store.devices.base import READ
        from rewarm.testing.faulty import stall

        for device in self.faulty:
            device.chance(stall(), 1.0, opcode=READ)
        released = threading.Event()

        def release() -> None:
            released.set()
            for device in self.faulty:
                device.heal()
                device.release_stalled()

        timer = threading.Timer(release_after_s, release)
        timer.start()
        good = self.get(backend, keys, pages)
        waited = released.is_set()
        timer.join()
        return [good, waited]

    def make_faulty(self) -> None:
        """Backends attached from now on read through a device that can be made to hang."""
        from rewarm.connectors.sglang import backend
        from rewarm.testing.faulty import FaultyDevice
        from rewarm.tiers.opening import open_tier

        def wrap(device: Any) -> Any:
            self.faulty.append(FaultyDevice(device))
            return self.faulty[-1]

        backend.open_tier = functools.partial(open_tier, device_wrapper=wrap)

    def weights(self, path: str, seed: int) -> None:
        """A model's directory: a configuration and weights."""
        from safetensors.torch import save_file

        torch.manual_seed(seed)
        Path(path).mkdir(exist_ok=True)
        save_file({"w": torch.randn(64, 64)}, f"{path}/model.safetensors")
        (Path(path) / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))


def indices(pages: list[int], tokens: int) -> Any:
    """Token numbers of pages of a pool."""
    return torch.cat([torch.arange(page * tokens, (page + 1) * tokens) for page in pages] or [torch.empty(0)])


def configuration(extra: dict[str, Any], **fields: Any) -> Any:
    """SGLang's storage configuration."""
    plain = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "m",
    }
    return HiCacheStorageConfig(**{**plain, **fields}, extra_config=extra)


def mha(layout: str, pages: int, page: int, dtype: Any, layers: int = 4, heads: int = 2, width: int = 64) -> Any:
    """A host pool of multi-head attention."""
    keys = [torch.zeros(page, heads, width, dtype=dtype) for _ in range(layers)]
    pointers = torch.tensor([tensor.data_ptr() for tensor in keys], dtype=torch.uint64)
    buffers = devices.KVBuffers(
        k=tuple(keys), v=tuple(keys), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=devices.KVBufferLayout.NHD
    )
    info = devices.MHABufferInfo(
        buffers=buffers, page_size=page, head_num=heads, head_dim=width, v_head_dim=width, dtype=dtype, device=CPU
    )
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=page,
        start_layer=0,
        end_layer=layers,
        host_token_capacity=pages * page,
    )


def mla(layout: str, pages: int, page: int, dtype: Any, layers: int = 4, rank: int = 512, rope: int = 64) -> Any:
    """A host pool of multi-head latent attention."""
    rows = [torch.zeros(page, 1, rank + rope, dtype=dtype) for _ in range(layers)]
    info = devices.MLABufferInfo(
        buffers=tuple(rows),
        data_ptrs=torch.tensor([tensor.data_ptr() for tensor in rows], dtype=torch.uint64),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=dtype,
        device=CPU,
    )
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        page,
        layout,
        pin_memory=False,
        device_capacity_tokens=page,
        start_layer=0,
        end_layer=layers,
        target_layer_num=layers,
        host_token_capacity=pages * page,
    )


if __name__ == "__main__":
    serve(Worker())
