"""Blocks that are damaged, gone, evicted or stuck while an engine runs are recomputed, and the answer is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.answers import same
from tests.engine.engines import Engine, prompt, rewarm_kv, whole_blocks

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(host, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:  # type: ignore[no-untyped-def]
    """One engine whose medium can be made to hang, and its pool; requests wait one second at most."""
    pool = tmp_path_factory.mktemp("pool")
    made = host.engine().start(model, rewarm_kv(pool, deadline="1s"), stall=True)
    yield made, pool
    made.close()


def store(engine: Engine, context: list[int]) -> None:
    """Have a context stored and forgotten by the engine itself."""
    engine.generate(context)
    engine.ask("settle")
    engine.ask("forget")


def segments(pool: Path) -> list[Path]:
    """The files that hold blocks."""
    return sorted(pool.glob("writers/*/*.seg"))


def test_flipped_bits(engine: tuple[Engine, Path], recompute: Engine) -> None:
    running, pool = engine
    context = prompt(20)
    store(running, context)
    for path in segments(pool):
        with path.open("r+b") as file:
            content = file.read()
            file.seek(0)
            file.write(bytes(byte ^ 1 for byte in content))
    answer = running.generate(context)
    assert same(answer, recompute.generate(context))
    assert answer["cached"] == [0]
    assert running.ask("counters")["failures"]["load corrupt"] > 0
    # Saved anew while it was recomputed: the next one is whole.
    running.ask("settle")
    running.ask("forget")
    assert running.generate(context)["cached"] == [whole_blocks(1000)]


def test_files_removed_by_somebody(
    engine: tuple[Engine, Path], recompute: Engine, new_engine: Callable[[], Engine], model: Path
) -> None:
    running, pool = engine
    context = prompt(21)
    store(running, context)
    other = new_engine().start(model, rewarm_kv(pool))  # knows the blocks from the logs, has no file open yet
    for path in segments(pool):
        path.unlink()
    answer = other.generate(context)
    assert same(answer, recompute.generate(context))
    assert answer["cached"] == [0]
    assert other.ask("counters")["failures"]["load missing"] > 0


def test_evicted(engine: tuple[Engine, Path], recompute: Engine) -> None:
    running, _ = engine
    context = prompt(22)
    store(running, context)
    running.ask("evict")
    answer = running.generate(context)
    assert same(answer, recompute.generate(context))
    assert answer["cached"][0] in (0, whole_blocks(1000)), "a segment still open is not evicted"


def test_a_medium_that_hangs(engine: tuple[Engine, Path], recompute: Engine) -> None:
    running, _ = engine
    context = prompt(23)
    store(running, context)
    running.ask("hang", on=True)
    answer = running.generate(context)
    assert same(answer, recompute.generate(context))
    assert answer["cached"] == [0]
    running.ask("hang", on=False)
    running.ask("settle")
    assert running.ask("counters")["failures"]["load timed_out"] > 0
    other = prompt(24)
    store(running, other)
    assert running.generate(other)["cached"] == [whole_blocks(1000)], "the medium works again"
