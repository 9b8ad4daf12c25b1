"""Reading logs: every frame that is whole is taken, whatever lies between; what may still come is waited for."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rewarm.store import layout
from rewarm.store.layout import FRAME_BYTES_MAX, PAGE, Kind
from rewarm.store.log import READ_BYTES, LogReader, LogTail, LogWriter
from rewarm.store.pool import Pool, PoolFacts

WRITER = bytes.fromhex("ab" * 16)
NAMESPACE = bytes(range(32))


def frame(
    sequence: int, *, size: int = PAGE, writer: bytes = WRITER, epoch: int = 1, kind: int = Kind.ENTRIES
) -> bytes:
    """One frame of `size` bytes in all."""
    room = size - layout.HEADER_BYTES - layout.TRAILER_BYTES
    records = random.Random(sequence).randbytes(room - room % 48 - (48 if size > PAGE else 0))
    raw = layout.encode_frame(
        kind, epoch, sequence, writer, records, len(records) // 48, namespace=NAMESPACE, key_bytes=8
    )
    assert len(raw) == size
    return raw


class Log:
    """A log file that a test writes and a reader tails."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.descriptor = os.open(path, os.O_RDWR)
        self.tail = LogTail(WRITER.hex())
        self.reader = LogReader()

    def put(self, content: bytes, at: int) -> None:
        os.pwrite(self.descriptor, content, at)

    def read(self) -> list[int]:
        """Sequences of the new frames; each frame must be usable when it is handed out."""
        found = []
        for one in self.reader.frames(self.descriptor, self.tail):
            assert one.writer == WRITER
            assert len(one.entries() if one.kind == Kind.ENTRIES else []) == (one.count if one.kind == 2 else 0)
            found.append(one.sequence)
        return found


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "00000001.log")
    yield log
    os.close(log.descriptor)


def test_what_is_appended_is_read_once(log: Log) -> None:
    assert log.read() == []
    log.put(frame(1), 0)
    assert log.read() == [1]
    log.put(frame(2, size=3 * PAGE) + frame(3), PAGE)
    assert log.read() == [2, 3]
    assert log.read() == []
    assert log.tail.offset == 5 * PAGE
    assert log.tail.skips == []


def test_a_torn_frame_is_waited_for(log: Log) -> None:
    whole = frame(2, size=4 * PAGE)
    log.put(frame(1) + whole[: 2 * PAGE], 0)
    assert log.read() == [1]
    log.put(whole[: 3 * PAGE + 100], PAGE)
    assert log.read() == []
    assert log.tail.offset == PAGE, "the reader comes back to where the frame begins"
    log.put(whole, PAGE)
    assert log.read() == [2]
    assert log.tail.skips == []


def test_damage_is_skipped_once_a_later_frame_is_there(log: Log) -> None:
    log.put(frame(1) + b"\xdd" * (3 * PAGE), 0)
    assert log.read() == [1]
    log.put(frame(3), 4 * PAGE)
    assert log.read() == [3]
    assert log.tail.skips == [(PAGE, 4 * PAGE)]


def test_a_hole_of_zeros_is_skipped(log: Log) -> None:
    log.put(frame(1), 0)
    log.put(frame(2), 50 * PAGE)
    assert log.read() == [1, 2]


def test_a_hole_of_a_gibibyte_is_skipped(log: Log) -> None:
    log.put(frame(1), 0)
    log.put(frame(2) + frame(3), 1 << 30)
    assert log.read() == [1, 2, 3]


@pytest.mark.parametrize(
    "before", [READ_BYTES - PAGE, READ_BYTES - 3 * PAGE, READ_BYTES, 2 * READ_BYTES - FRAME_BYTES_MAX]
)
def test_frames_that_straddle_two_reads(log: Log, before: int) -> None:
    log.put(frame(7, size=FRAME_BYTES_MAX) + frame(8), before)
    assert log.read() == [7, 8], "behind a hole"
    log.tail.rewind()
    log.put(b"\x55" * before, 0)
    assert log.read() == [7, 8], "behind damage"
    log.tail.rewind()
    at, number = 0, 100
    while at < before:
        size = min(5 * PAGE, before - at)
        log.put(frame(number, size=size), at)
        at, number = at + size, number + 1
    assert log.read() == [*range(100, number), 7, 8], "behind frames"


def test_what_is_of_another_writer_or_log_is_damage(log: Log) -> None:
    log.put(frame(1) + frame(2, writer=bytes(16)) + frame(3, epoch=2) + frame(4), 0)
    assert log.read() == [1, 4]
    assert log.tail.skips == [(PAGE, 3 * PAGE)]


def test_frames_out_of_order_are_taken_where_they_lie(log: Log) -> None:
    log.put(frame(1) + frame(3) + frame(2) + frame(4), 0)
    assert log.read() == [1, 3, 2, 4]


def test_unknown_kinds_are_passed_on(log: Log) -> None:
    log.put(frame(1) + frame(2, kind=99) + frame(3), 0)
    assert log.read() == [1, 2, 3]


def test_a_part_of_a_page_at_the_end_is_not_there_yet(log: Log) -> None:
    log.put(frame(1) + b"\0" * 17, 0)
    assert log.read() == [1]
    assert log.read() == []
    log.put(frame(2), PAGE)
    assert log.read() == [2]


def test_bytes_read_are_counted(log: Log) -> None:
    log.put(frame(1), 0)
    log.read()
    assert log.reader.take_bytes() == PAGE
    assert log.reader.take_bytes() == 0


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.one_of(
            st.sampled_from(["frame", "frame", "large", "stranger", "torn"]),
            st.integers(1, 5),
        ),
        max_size=12,
    ),
    stops=st.sets(st.integers(0, 11)),
)
def test_whatever_lies_between_every_whole_frame_is_read(log: Log, pieces: list[str | int], stops: set[int]) -> None:
    os.ftruncate(log.descriptor, 0)
    log.tail = LogTail(WRITER.hex())
    at, wanted, found = 0, [], []
    for number, piece in enumerate(pieces, start=1):
        if isinstance(piece, int):
            content = (b"\0" if piece % 2 else b"\x77") * (piece * PAGE)
        elif piece == "stranger":
            content = frame(number, writer=b"s" * 16)
        elif piece == "torn":
            content = frame(number, size=3 * PAGE)[: 2 * PAGE] + bytes(PAGE)
        else:
            content = frame(number, size=9 * PAGE if piece == "large" else PAGE)
            wanted.append(number)
        log.put(content, at)
        at += len(content)
        if number in stops:
            found += log.read()
    assert found + log.read() == wanted


# Writing.


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    (tmp_path / "writers" / WRITER.hex()).mkdir(parents=True)
    return Pool(tmp_path, PoolFacts(1, "00" * 16, 4 << 20, 64 << 10))


def test_what_is_written_is_read_back(pool: Pool) -> None:
    writer = LogWriter(pool, WRITER.hex(), direct=True)
    assert writer.append(Kind.COUNTER, b"", 0) == PAGE
    assert writer.append(Kind.EVICTED, layout.encode_reference(WRITER, 3, layout.SEGMENT_GONE), 1) == PAGE
    tail = LogTail(WRITER.hex())
    read = [(one.kind, one.sequence, one.references()) for one in LogReader().frames(writer.descriptor, tail)]
    assert read == [(Kind.COUNTER, 1, []), (Kind.EVICTED, 2, [(WRITER, 3, layout.SEGMENT_GONE)])]
    assert tail.offset == writer.offset == 2 * PAGE
    writer.close()


def test_after_a_failed_write_the_log_goes_on_behind_it(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter(pool, WRITER.hex(), direct=False)
    writer.append(Kind.COUNTER, b"", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda descriptor, views, at: 100)
        with pytest.raises(OSError, match="short write"):
            writer.append(Kind.COUNTER, b"", 0)
    writer.append(Kind.COUNTER, b"", 0)
    frames = LogReader().frames(writer.descriptor, tail := LogTail(WRITER.hex()))
    assert [one.sequence for one in frames] == [1, 3]
    assert tail.skips == [(PAGE, 2 * PAGE)]
    writer.close()


def test_a_log_is_never_opened_twice(pool: Pool) -> None:
    LogWriter(pool, WRITER.hex(), direct=False).close()
    with pytest.raises(FileExistsError):
        LogWriter(pool, WRITER.hex(), direct=False)
