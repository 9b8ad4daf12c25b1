"""Pages of SGLang's real host pools come back byte for byte, in place, in another process; damage is a miss."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.remote import Remote, damage
from tests.sglang.conftest import keys

pytestmark = pytest.mark.sglang

ALL = list(range(16))


def test_importing_the_connector_imports_no_engine(worker: Remote) -> None:
    assert worker.ask("eager") == []


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("mha", "page_first"),
        ("mha", "page_first_direct"),
        ("mha", "page_head"),
        ("mla", "page_first"),
        ("mla", "page_first_direct"),
    ],
)
def test_a_second_process_gets_the_same_bytes(worker: Remote, second: Remote, url: str, kind: str, layout: str) -> None:
    page_bytes = worker.ask("pool", name="p", kind=kind, layout=layout)
    worker.ask("fill", pool="p", seed=1)
    digests = worker.ask("digests", pool="p")
    assert len(set(digests)) == 16
    options = {"is_mla_model": kind == "mla"}
    worker.ask("attach", backend="b", pool="p", url=url, **options)
    assert worker.ask("exists", backend="b", keys=keys(16)) == 0
    assert worker.ask("set", backend="b", keys=keys(16), pages=ALL) == [True] * 16
    worker.ask("close", backend="b")

    second.ask("pool", name="p", kind=kind, layout=layout)
    second.ask("attach", backend="b", pool="p", url=url, **options)
    assert second.ask("exists", backend="b", keys=keys(16)) == 16
    places = random.Random(2).sample(ALL, 16)  # other pages of the pool than they came from
    assert second.ask("get", backend="b", keys=keys(16), pages=places) == [True] * 16
    found = second.ask("digests", pool="p")
    assert [found[place] for place in places] == digests
    stats = second.ask("stats", backend="b")
    assert stats["read"] >= 16 * page_bytes
    assert (stats["restored"], stats["failed"], stats["unreleased"]) == (16, {}, 0)
    second.ask("close", backend="b")


def test_pages_up_to_the_first_gap(worker: Remote, url: str) -> None:
    worker.ask("pool", name="p", kind="mha", layout="page_first_direct")
    worker.ask("attach", backend="b", pool="p", url=url)
    every = keys(16)
    worker.ask("set", backend="b", keys=[*every[:3], *every[4:8]], pages=[0, 1, 2, 4, 5, 6, 7])
    assert worker.ask("exists", backend="b", keys=every) == 3
    assert worker.ask("exists", backend="b", keys=every[4:]) == 4
    assert worker.ask("exists", backend="b", keys=[]) == 0
    assert worker.ask("get", backend="b", keys=every, pages=ALL) == [n != 3 and n < 8 for n in range(16)]
    assert worker.ask("controller", backend="b", keys=every[:8], pages=ALL[:8]) == [True, 8]
    worker.ask("close", backend="b")


def test_what_a_page_held_before_is_kept_out_of_a_miss(worker: Remote, url: str) -> None:
    worker.ask("pool", name="p", kind="mha", layout="page_head")
    worker.ask("attach", backend="b", pool="p", url=url)
    worker.ask("fill", pool="p", seed=3)
    before = worker.ask("digests", pool="p")
    assert worker.ask("get", backend="b", keys=keys(16, "unknown"), pages=ALL) == [False] * 16
    assert worker.ask("digests", pool="p") == before
    worker.ask("close", backend="b")


@pytest.mark.parametrize("how", ["flipped", "truncated", "removed"])
def test_damaged_pages_are_misses_and_can_be_stored_again(worker: Remote, tmp_path: Path, url: str, how: str) -> None:
    worker.ask("pool", name="p", kind="mha", layout="page_first_direct")
    worker.ask("fill", pool="p", seed=4)
    right = worker.ask("digests", pool="p")
    worker.ask("attach", backend="b", pool="p", url=url)
    assert all(worker.ask("set", backend="b", keys=keys(16), pages=ALL))
    worker.ask("close", backend="b")
    damage(tmp_path / "pool", how)
    worker.ask("attach", backend="b", pool="p", url=url)
    good = worker.ask("get", backend="b", keys=keys(16), pages=ALL)
    assert good == sorted(good, reverse=True), "pages are stored in order"
    assert 0 < sum(good) < 16 if how == "truncated" else not any(good)
    assert worker.ask("exists", backend="b", keys=keys(16)) == sum(good)
    worker.ask("fill", pool="p", seed=4)
    assert all(worker.ask("set", backend="b", keys=keys(16), pages=ALL))
    worker.ask("fill", pool="p", seed=5)
    assert all(worker.ask("get", backend="b", keys=keys(16), pages=ALL))
    assert worker.ask("digests", pool="p") == right
    worker.ask("close", backend="b")


def test_killed_while_it_writes(start: Callable[[], Remote], worker: Remote, url: str) -> None:
    victim = start()
    victim.ask("pool", name="p", kind="mha", layout="page_first_direct")
    victim.ask("fill", pool="p", seed=6)
    right = victim.ask("digests", pool="p")
    victim.ask("attach", backend="b", pool="p", url=url)
    assert all(victim.ask("set", backend="b", keys=keys(16), pages=ALL))
    victim.kill()
    worker.ask("pool", name="p", kind="mha", layout="page_first_direct")
    worker.ask("attach", backend="b", pool="p", url=url)
    assert worker.ask("exists", backend="b", keys=keys(16)) == 16, "what set answered True is there"
    assert all(worker.ask("get", backend="b", keys=keys(16), pages=ALL))
    assert worker.ask("digests", pool="p") == right
    worker.ask("close", backend="b")


def test_a_pool_smaller_than_what_is_stored(worker: Remote, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    page_bytes = worker.ask("pool", name="p", kind="mha", layout="page_first_direct", pages=256, page=64)
    assert 256 * page_bytes > 16 << 20
    worker.ask("fill", pool="p", seed=10)
    right = worker.ask("digests", pool="p")
    worker.ask("attach", backend="b", pool="p", url=f"file://{tmp_path / 'small'}?capacity=16MiB")
    pages = list(range(256))
    worker.ask("set", backend="b", keys=keys(256), pages=pages, tokens=64)
    assert worker.ask("stats", backend="b")["used"] <= 16 << 20
    worker.ask("fill", pool="p", seed=11)
    good = worker.ask("get", backend="b", keys=keys(256), pages=pages, tokens=64)
    assert 0 < sum(good) < 256
    found = worker.ask("digests", pool="p")
    assert [found[page] == right[page] for page in pages] == good
    worker.ask("close", backend="b")


def test_memory_goes_back_only_when_the_medium_has_let_go_of_it(worker: Remote, url: str) -> None:
    worker.ask("make_faulty")
    worker.ask("pool", name="p", kind="mha", layout="page_first_direct")
    worker.ask("attach", backend="b", pool="p", url=f"{url}&io_deadline=30s", deadline="100ms")
    worker.ask("set", backend="b", keys=keys(4), pages=[0, 1, 2, 3])
    good, waited = worker.ask("hanging_reads", backend="b", keys=keys(4), pages=[0, 1, 2, 3], release_after_s=1.0)
    assert good == [False] * 4
    assert waited, "the pages were SGLang's again while the medium could still write to them"
    assert worker.ask("stats", backend="b")["failed"] == {"load timed_out": 8}
    assert all(worker.ask("get", backend="b", keys=keys(4), pages=[0, 1, 2, 3]))
    worker.ask("close", backend="b")


def test_what_is_no_page_of_the_pool_is_refused_without_raising(worker: Remote, url: str) -> None:
    worker.ask("pool", name="p", kind="mha", layout="page_first_direct")
    worker.ask("attach", backend="b", pool="p", url=url)
    assert worker.ask("set", backend="b", keys=keys(3), pages=[0, 1]) == [False] * 3
    assert worker.ask("get", backend="b", keys=keys(1), pages=[1 << 20]) == [False]
    assert worker.ask("get", backend="b", keys=[], pages=[]) == []
    worker.ask("close", backend="b")
    worker.ask("close", backend="b")
    assert worker.ask("get", backend="b", keys=keys(2), pages=[0, 1]) == [False] * 2
    assert worker.ask("exists", backend="b", keys=keys(2)) == 0
    assert worker.ask("clear", backend="b") is False


def test_clear_and_figures(worker: Remote, url: str) -> None:
    worker.ask("pool", name="p", kind="mha", layout="page_first_direct")
    worker.ask("attach", backend="b", pool="p", url=url)
    worker.ask("again", backend="b", pool="p")
    worker.ask("set", backend="b", keys=keys(16), pages=ALL)
    worker.ask("get", backend="b", keys=keys(4), pages=ALL[:4])
    found = worker.ask("stats", backend="b")
    assert (found["kept"], found["restored"]) == (16, 4)
    assert (found["backup_pgs"], found["prefetch_pgs"]) == ([16], [4])
    assert all(rate > 0 for rate in found["rates"])
    assert worker.ask("stats", backend="b")["prefetch_pgs"] == [], "each figure is reported once"
    assert worker.ask("clear", backend="b") is True
    assert worker.ask("exists", backend="b", keys=keys(16)) == 0
    worker.ask("close", backend="b")
