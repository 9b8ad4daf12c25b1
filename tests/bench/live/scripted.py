"""A scripted OpenAI-compatible server, in a process of its own, and the handle that tests start and ask it by.

It answers from a timetable: the first piece `ttft_s` (and `token_s` for each token not cached) after the request came,
then one every `tpot_s`. It has a memory of `cache_tokens`, a tier that forgets nothing, a record of when it wrote what,
and ways to misbehave. Run as a script it serves; imported it is `Scripted`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections import OrderedDict
from types import TracebackType
from typing import Any, Self

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODEL = "scripted"
FIRST_WORDS = 8
"""Words of a prompt that the record keeps, to tell whose it was."""


class Server:
    """What it was told, what it remembers, what it did."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.script: dict[str, Any] = {"ttft_s": 0.01, "tpot_s": 0.005, "token_s": 0.0, "tier_token_s": 0.0}
        self.memory: OrderedDict[str, int] = OrderedDict()
        self.tier: set[str] = set()
        self.record: list[dict[str, Any]] = []
        self.stalled_until = 0.0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                sizes = [line for line in head if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(sizes[0].split(":")[1]) if sizes else 0)
                method, path, _ = head[0].split(" ")
                if not await self.answer(method, path, body, writer):
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection goes on."""
        if path.endswith("/completions"):
            return await self.complete(json.loads(body), writer)
        page: Any = {"data": [{"id": MODEL}]}
        status = 200 if self.script.get("lists_models", True) else 404
        if path == "/control":
            page, status = self.control(json.loads(body)), 200
        elif path == "/metrics":
            blocks = self.script.get("cache_tokens", 0) // 16
            text = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n' if blocks else "up 1\n"
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            return True
        send_json(writer, status, page)
        return True

    def control(self, order: dict[str, Any]) -> Any:
        if order.get("reset"):
            self.reset()
        self.script |= order.get("script", {})
        if order.get("forget"):
            self.memory.clear()
        return self.record

    def cached(self, prompt: str) -> tuple[int, bool]:
        """Tokens of the longest start of a prompt that is remembered, and whether memory had it."""
        for place, known in ((True, self.memory), (False, self.tier if self.script.get("tier") else ())):
            found = max((len(text.split()) for text in known if prompt.startswith(text)), default=0)
            if found:
                return found, place
        return 0, True

    def remember(self, prompt: str) -> None:
        self.tier.add(prompt)
        self.memory[prompt] = len(prompt.split())
        self.memory.move_to_end(prompt)
        while sum(self.memory.values()) > self.script.get("cache_tokens", 1 << 40):
            self.memory.popitem(last=False)

    async def complete(self, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        came = time.monotonic()
        prompt = request["prompt"] if "prompt" in request else request["messages"][0]["content"]
        script, number = self.script, len(self.record)
        tokens, wanted = len(prompt.split()), request["max_tokens"]
        cached, in_memory = self.cached(prompt)
        entry: dict[str, Any] = {
            "start": " ".join(prompt.split()[:FIRST_WORDS]), "tokens": tokens, "cached": cached, "came": came,
            "wanted": wanted, "body": {key: request[key] for key in request if key not in ("messages", "prompt")},
        }  # fmt: skip
        self.record.append(entry)
        if request["model"] != MODEL:
            send_json(writer, 404, {"error": {"message": f"The model `{request['model']}` does not exist."}})
            return True
        fault = script.get("fault") if wanted > 2 and number % script.get("fault_every", 1) == 0 else None
        if fault == "500":
            send_json(writer, 500, {"error": {"message": "out of memory"}})
            return True
        if fault == "die":
            sys.exit(1)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "stall":
            self.stalled_until = max(self.stalled_until, came + script["stall_s"])
        self.remember(prompt)
        restore_s = 0.0 if in_memory else cached * script["tier_token_s"]
        at = max(came, self.stalled_until) + script["ttft_s"] + script["token_s"] * (tokens - cached) + restore_s
        return await self.stream(writer, entry, wanted, at, fault)

    async def stream(
        self, writer: asyncio.StreamWriter, entry: dict[str, Any], wanted: int, at: float, fault: str | None
    ) -> bool:
        await asyncio.sleep(at - time.monotonic())
        writer.write(HEAD)
        chunk(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for piece in range(wanted):
            await asyncio.sleep(at + piece * self.script["tpot_s"] - time.monotonic())
            if piece == 2 and fault == "close":
                return False
            if piece == 2 and fault == "malformed":
                write(writer, b'data: {"choices": [{"delta": \n\n')
            if piece == 2 and fault == "garbage":
                write(writer, b"\x00\xff nothing like an event\n")
            if piece == 2 and fault == "error":
                write(writer, b'data: {"error": {"message": "engine died"}}\n\n')
            if piece == 2 and fault == "silent":
                await asyncio.sleep(3600)
            chunk(writer, {"choices": [{"delta": {"content": "tok "}}]})
            entry["last"] = time.monotonic()
            entry.setdefault("first", entry["last"])
        chunk(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        if not self.script.get("no_usage"):
            details = {"cached_tokens": entry["cached"]}
            usage = {"prompt_tokens": entry["tokens"], "completion_tokens": wanted, "prompt_tokens_details": details}
            chunk(writer, {"choices": [], "usage": usage})
        write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True


def chunk(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    write(writer, b"data: %s\n\n" % json.dumps(event).encode())


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def send_json(writer: asyncio.StreamWriter, status: int, page: Any) -> None:
    data = json.dumps(page).encode()
    writer.write(
        b"HTTP/1.1 %d Told\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(data))
    )
    writer.write(data)


async def serve(port: int) -> None:
    server = await asyncio.start_server(Server().handle, "127.0.0.1", port, backlog=1024, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Scripted:
    """The server as a process; `with Scripted(ttft_s=..) as server`."""

    def __init__(self, **script: Any) -> None:
        self._script = script

    def __enter__(self) -> Self:
        self.process = subprocess.Popen([sys.executable, __file__, "0"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.root = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.url = f"{self.root}/v1"
        self.tell(**self._script)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)

    def tell(self, **script: Any) -> None:
        """Change the script."""
        self._control({"script": script})

    def reset(self) -> None:
        """Forget everything, and the script."""
        self._control({"reset": True})

    def record(self) -> list[dict[str, Any]]:
        """What it did, in the order in which requests came."""
        found: list[dict[str, Any]] = self._control({})
        return found

    def forget_command(self) -> str:
        """A restart hook: what a restart does to a memory."""
        code = (
            f"import urllib.request as u; u.urlopen(u.Request('{self.root}/control', data=b'{{\\\"forget\\\": true}}'))"
        )
        return f'{sys.executable} -S -c "{code}"'

    def _control(self, order: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.root}/control", data=json.dumps(order).encode())
        with urllib.request.urlopen(request, timeout=30) as page:
            return json.load(page)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
