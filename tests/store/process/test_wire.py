"""Messages and tables: what goes in comes out, and no two loads have the same memory."""

from __future__ import annotations

import ctypes
import itertools
import random

import numpy as np
import pytest

from rewarm.store.process import wire
from rewarm.store.process.wire import Message, Table, table_bytes
from rewarm.store.space import Space


def test_a_message_survives_the_channel_and_the_end_is_seen() -> None:
    here, there = wire.pair()
    room = ctypes.create_string_buffer(wire.PAYLOAD_MAX)
    message = Message(wire.LOAD, 7, 1, 2**40, 3, -4, b"last")
    with here:
        assert wire.receive_now(here.fileno(), room) is None
        with there:
            assert wire.send_now(there.fileno(), message.packed())
            datagram = wire.receive_now(here.fileno(), room)
            assert datagram is not None
            assert wire.unpack(datagram) == message
        assert wire.receive_now(here.fileno(), room) == b""
        with pytest.raises(BrokenPipeError):
            wire.send_now(here.fileno(), b"x")


def test_a_full_channel_says_so_and_does_not_wait() -> None:
    here, there = wire.pair()
    with here, there:
        while wire.send_now(here.fileno(), b"x" * 1000):
            pass
        assert not wire.send_now(here.fileno(), b"x" * 1000)


def test_the_columns_of_a_table_do_not_overlap() -> None:
    memory = np.zeros(table_bytes(5) + table_bytes(3), np.uint8)
    table, other = Table(memory, 0, 5), Table(memory, table_bytes(5), 3)
    columns = [table.first_verdict_s, table.segment, table.offset, table.address, table.length]
    for number, column in enumerate(columns, start=1):
        column[:] = number
    table.checksum[:] = np.void(b"c" * 16)
    table.code[:] = 9
    assert [column.tolist() for column in columns[1:]] == [[number] * 5 for number in (2, 3, 4, 5)]
    assert table.first_verdict_s.tolist() == [1.0]
    assert table.checksum.tolist() == [b"c" * 16] * 5
    assert not any(column.any() for column in (other.segment, other.offset, other.address, other.length, other.code))


def test_space_is_given_once_and_comes_back_whole() -> None:
    space, dice = Space(1 << 16), random.Random(5)
    held: list[tuple[int, int]] = []
    for _ in range(2000):
        if held and dice.random() < 0.5:
            at, rows = held.pop(dice.randrange(len(held)))
            space.give(at, table_bytes(rows))
        else:
            rows = dice.randrange(1, 100)
            at = space.take(table_bytes(rows))
            if at is not None:
                held.append((at, rows))
        parts = sorted((at, at + table_bytes(rows)) for at, rows in held)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(parts))
    for at, rows in held:
        space.give(at, table_bytes(rows))
    whole = (1 << 16) // 64 * 64
    assert space.take(table_bytes((whole - 64) // 49)) == 0
