"""One server as a run sees it: which model it serves, how it counts tokens, how large its cache is, if it is up."""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from dataclasses import dataclass

import msgspec

from rewarm.bench.live.client import Answer, Client
from rewarm.bench.live.events import BadStream
from rewarm.bench.live.prompts import FRESH, SAMPLE_WORDS, Tokenizer, request_body, text
from rewarm.errors import ConfigError, StorageError
from rewarm.workload.job import Server

PAGE_S = 10.0
"""A page of a few kilobytes takes no longer, or the server is not up."""
READY_S = 900.0
"""How long a server may take to come up after a restart: large weights are read from disk."""
_POLL_S = 0.25
_WAKE_TOKENS = 2


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card] = []


@dataclass(frozen=True)
class Endpoint:
    """A server that answers, with what had to be found out about it."""

    name: str
    server: Server
    client: Client
    model: str
    tokenizer: Tokenizer

    def request(self, prompt: str, output_tokens: int) -> bytes:
        """A whole request for this server, ready to be sent."""
        return self.client.prepared(request_body(self.server, self.model, prompt, output_tokens))


async def find(name: str, server: Server, client: Client, seed: int) -> Endpoint:
    """Ask a server what it serves, and send two short prompts to see how it counts tokens.

    Raises `ConfigError` for a model that it does not serve, `StorageError` when it does not answer.
    """
    model = await _model(name, server, client)
    counted = []
    for place, words in enumerate(SAMPLE_WORDS):
        body = request_body(server, model, text(seed, 2 * FRESH + place, words), _WAKE_TOKENS)
        answer = await client.ask(-1, client.prepared(body), time.monotonic(), needs_text=False)
        if answer.failure:
            raise StorageError(f"server {name!r} does not answer a short prompt: {answer.failure}")
        counted.append(answer.prompt_tokens)
    return Endpoint(name, server, client, model, Tokenizer.of(SAMPLE_WORDS, counted))


async def _model(name: str, server: Server, client: Client) -> str:
    """The model to ask for: the one that was named, if the server lists it, else the first that it lists."""
    url = f"{client.url}/models"
    try:
        status, page = await client.get(f"{client.address.path}/models", PAGE_S)
    except (BadStream, OSError) as error:
        raise StorageError(f"server {name!r} does not answer at {url}: {error or type(error).__name__}") from error
    try:
        served = [card.id for card in msgspec.json.decode(page, type=_Cards).data] if status == 200 else []
    except msgspec.DecodeError:
        served = []
    if server.model is None:
        if not served:
            raise ConfigError(f"server {name!r} lists no models at {url} (HTTP {status}); name the one it serves")
        return served[0]
    if served and server.model not in served:
        near = difflib.get_close_matches(server.model, served, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it serves {', '.join(served)}"
        raise ConfigError(f"server {name!r} does not serve the model {server.model!r}; {hint}")
    return server.model


async def wait_ready(endpoint: Endpoint, limit_s: float = READY_S) -> None:
    """Wait until a server answers a short prompt, which also warms what it does at its first request only.

    Raises `StorageError` when it does not within `limit_s`.
    """
    end = time.monotonic() + limit_s
    request = endpoint.request(text(int(time.time()), 3 * FRESH, SAMPLE_WORDS[0]), _WAKE_TOKENS)
    answer: Answer | None = None
    while (left := end - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left):
                answer = await endpoint.client.ask(-1, request, time.monotonic(), needs_text=False)
        except TimeoutError:
            break
        if answer.failure is None:
            return
        await asyncio.sleep(_POLL_S)
    why = answer.failure if answer else "no answer"
    raise StorageError(f"server {endpoint.name!r} is not up {limit_s:g} s after its restart: {why}")


_VLLM = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_SGLANG = re.compile(r"^sglang:max_total_num_tokens(?:\{.*\})?\s+([0-9.e+]+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


async def cache_tokens(endpoint: Endpoint) -> int | None:
    """Tokens that a server's own cache holds, by its metrics (vLLM, SGLang); None where they do not say."""
    try:
        status, page = await endpoint.client.get(f"{endpoint.client.address.path.removesuffix('/v1')}/metrics", PAGE_S)
    except (BadStream, OSError):
        return None
    return cache_tokens_in(page.decode(errors="replace")) if status == 200 else None


def cache_tokens_in(metrics: str) -> int | None:
    """Tokens of the cache that a page of metrics names, all replicas together."""
    total = 0
    for match in _VLLM.finditer(metrics):
        labels = dict(_LABEL.findall(match[1]))
        blocks, tokens = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if not (blocks.isdigit() and tokens.isdigit()):
            return None
        total += int(blocks) * int(tokens)
    total += sum(int(float(match[1])) for match in _SGLANG.finditer(metrics))
    return total or None
