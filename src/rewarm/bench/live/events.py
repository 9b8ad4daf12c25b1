"""Server-sent events of a streamed completion: bytes as they arrive -> pieces of text, token counts, the end.

It promises to end: whatever a server sends is a piece, a figure, or a `BadStream` that says what was wrong. It knows
no clock and no connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

EVENT_BYTES_MAX = 4 << 20
"""A longer line is no event of a completion."""
_QUOTED_BYTES = 80
"""How much of what a server sent is quoted in an error."""


class BadStream(Exception):
    """What came was not a streamed completion; `cause` in a few words, for counting."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        """Whether the choice brings text; the first event of a chat often names the role only."""
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens as the server counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from a cache; None where the server does not say."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass
class Events:
    """The stream so far. Feed it bytes; it says how many pieces of text they brought."""

    pieces: int = 0
    usage: Usage | None = None
    finished: bool = False
    """Whether the end was seen: `[DONE]`, or a reason why the answer is over."""
    _rest: bytes = b""

    def feed(self, data: bytes) -> int:
        """Take bytes; return the pieces of text in the events they complete. Raises `BadStream`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise BadStream("malformed event", f"a line of more than {EVENT_BYTES_MAX} bytes")
        before = self.pieces
        for line in lines:
            self._line(line.strip())
        return self.pieces - before

    def close(self, *, needs_text: bool = True) -> None:
        """The connection is at its end. Raises `BadStream` when the answer is not, or has no text and needs some."""
        if self._rest.strip():
            self.feed(b"\n")
        if not self.finished:
            raise BadStream("closed early", f"the stream ended after {self.pieces} pieces without its end")
        if needs_text and not self.pieces:
            raise BadStream("no content", "the answer has no text; does the model end at once?")

    def _line(self, line: bytes) -> None:
        """One line: data is taken; comments and names of events are none of ours."""
        if not line.startswith(b"data:"):
            if line and line[:1] != b":" and not line.startswith((b"event:", b"id:", b"retry:")):
                raise BadStream("malformed event", f"not an event: {_quoted(line)}")
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            raise BadStream("malformed event", f"{error}: {_quoted(data)}") from error
        if event.error is not None:
            raise BadStream("error in the stream", _quoted(msgspec.json.encode(event.error)))
        self.usage = event.usage or self.usage
        for choice in event.choices:
            self.pieces += choice.has_text()
            self.finished = self.finished or choice.finish_reason is not None


def _quoted(data: bytes) -> str:
    text = data[:_QUOTED_BYTES].decode(errors="replace")
    return text if len(data) <= _QUOTED_BYTES else f"{text}.."
