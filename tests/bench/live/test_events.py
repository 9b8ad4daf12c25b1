"""Streams of events: cut anywhere they say the same, and whatever is no completion is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarm.bench.live.events import EVENT_BYTES_MAX, BadStream, Events

ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
PIECE = {"choices": [{"delta": {"content": "ü"}}]}
THOUGHT = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
PLAIN = {"choices": [{"text": "old api", "finish_reason": None}]}
END = {"choices": [{"delta": {}, "finish_reason": "length"}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
}


def stream(*events: object, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
    return (": comment\nevent: message\n" + "".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


def whole(data: bytes) -> None:
    events = Events()
    events.feed(data)
    events.close()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
@settings(max_examples=20)
def test_a_stream_cut_anywhere_says_the_same(cuts: list[int]) -> None:
    data, events, at = stream(ROLE, PIECE, THOUGHT, PLAIN, END, USAGE), Events(), 0
    for cut in [*cuts, len(data)]:
        events.feed(data[at : at + cut])
        at += cut
    events.close()
    assert (events.pieces, events.finished) == (3, True)
    assert events.usage is not None
    assert (events.usage.prompt_tokens, events.usage.completion_tokens, events.usage.cached_tokens) == (9, 3, 8)


def test_the_event_that_names_the_role_is_no_content() -> None:
    events = Events()
    assert events.feed(stream(ROLE, done=False)) == 0
    assert events.feed(stream(PIECE, PIECE, done=False)) == 2


def test_an_answer_that_needs_no_text_may_have_none() -> None:
    events = Events()
    events.feed(stream(ROLE, END))
    events.close(needs_text=False)


def test_lines_may_end_as_windows_ends_them_and_a_reason_is_an_end() -> None:
    events = Events()
    events.feed(stream(PIECE, END, done=False).replace(b"\n", b"\r\n"))
    events.close()
    assert events.usage is None


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b'data: {"choices": [{"delta": \n', "malformed event"),
        (b'data: {"choices": 5}\n', "malformed event"),
        (b"\x00\xff what is this\n", "malformed event"),
        (b"<html>\n", "malformed event"),
        (b"data: " + b"x" * (EVENT_BYTES_MAX + 1), "malformed event"),
        (b'data: {"error": {"message": "engine died"}}\n', "error in the stream"),
        (stream(PIECE, done=False), "closed early"),
        (b"", "closed early"),
        (stream(ROLE, END), "no content"),
    ],
)
def test_what_is_no_completion_is_named(data: bytes, cause: str) -> None:
    with pytest.raises(BadStream) as caught:
        whole(data)
    assert caught.value.cause == cause
    assert len(str(caught.value)) < 300
