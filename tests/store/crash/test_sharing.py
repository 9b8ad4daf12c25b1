"""Eight processes append to one directory and read from each other: every hit is equal, every due key is a hit."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from tests.lengths import repeated
from tests.store.crash.sharers import BATCH_BLOCKS, BLOCK_BYTES, NAMESPACE, Tally, batch_keys, share

from rewarm.store.opening import open_store
from rewarm.testing import payload

pytestmark = pytest.mark.crash

PROCESSES = 8
SECONDS = repeated(20, 60)
START_S_MAX = 60
END_S_MAX = 60


def _run(url: str) -> list[Tally]:
    context = multiprocessing.get_context("spawn")
    inboxes = [context.Pipe(duplex=False) for _ in range(PROCESSES)]
    lines = [context.Pipe() for _ in range(PROCESSES)]
    children = []
    for process in range(PROCESSES):
        outboxes = [outbox for other, (_, outbox) in enumerate(inboxes) if other != process]
        given = (url, process, SECONDS, inboxes[process][0], outboxes, lines[process][1])
        children.append(context.Process(target=share, args=given))
        children[-1].start()
    try:
        for line, _ in lines:
            assert line.poll(START_S_MAX), "a process did not start"
            assert line.recv() == "ready"
        for line, _ in lines:
            line.send("go")
        tallies = []
        for line, _ in lines:
            assert line.poll(SECONDS + END_S_MAX), "a process hangs"
            tallies.append(line.recv())
        return tallies
    finally:
        for child in children:
            child.join(END_S_MAX)
            if child.is_alive():
                child.kill()


def test_eight_processes_share_a_directory(tmp_path: Path) -> None:
    url = f"file://{tmp_path}?capacity=8GiB"
    open_store(url, namespace=NAMESPACE).close()
    tallies = _run(url)
    failures = [failure for tally in tallies for failure in tally.failures]
    assert not failures, f"{len(failures)} failures, among them: {failures[:10]}"
    for tally in tallies:
        assert tally.hits_of_others > len(tally.saved) * BATCH_BLOCKS, "hardly anything of the others was due"
        assert tally.late < tally.due, "the polls have shown nothing in time"
        assert tally.hits_common
    with open_store(url, namespace=NAMESPACE) as store:
        for process, tally in enumerate(tallies):
            for batch in tally.saved:
                keys = batch_keys(process, batch)
                buffers = [bytearray(BLOCK_BYTES) for _ in keys]
                assert store.load(keys, buffers).wait(60) == [True] * BATCH_BLOCKS
                assert buffers == [payload(key, BLOCK_BYTES) for key in keys]
        report = store.check()
        assert report.clean, report.findings
