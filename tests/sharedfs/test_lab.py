"""A pool on real distributed file systems, three hosts, and what happens to hosts: killed, cut off, hung, server gone.

Every answer must come within the documented bounds, every hit must have the right bytes, and what was acknowledged must
be there for everybody once the trouble is over. A medium that stalls may cost a time-out, never a block: what is asked
again must be stored, and found, before the bound of healing of the file system is over. Each test has its own servers.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sharedfs.filesystems import SYSTEMS, SharedFileSystem
from tests.sharedfs.remote import Ended, Remote

pytestmark = pytest.mark.lab

DEADLINE_S = 6
POLL_S = 0.5
OPTIONS = f"?capacity=1GiB&poll={POLL_S}s&io_deadline={DEADLINE_S}s&close_timeout=10s"
BLOCKS, SIZE = 24, 65536
WAIT_S = 2 * DEADLINE_S
"""What a caller waits while the medium is gone: files cannot even be opened then."""

SLACK_S = 10.0

BLOCKS_LONG = 4000
"""A save that is under way for long enough to be interrupted: 250 MiB."""

STALLED = {"timed_out", "lost_medium"}
"""What a save or load may end as on a medium that does not answer."""


@pytest.fixture(params=sorted(SYSTEMS))
def system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedFileSystem]:
    with SYSTEMS[request.param](tmp_path, ("a", "b", "c")) as mounted:
        yield mounted


class User(Remote):
    """A process on a host that uses the pool."""

    def __init__(self, system: SharedFileSystem, host: str, url: str) -> None:
        self._heals_s = system.heals_s
        super().__init__(system.host(host), url)

    def _until(self, tag: str, verb: str, good: set[str], bad: set[str]) -> None:
        """Ask again until all blocks end well; any outcome that is neither good nor bad fails at once."""
        deadline = time.monotonic() + self._heals_s
        while True:
            found = self.ask(f"{verb} {tag} {BLOCKS} {SIZE}")
            outcomes = {word.split("=")[0] for word in found.split()}
            assert outcomes <= good | bad, found
            if outcomes <= good:
                return
            assert time.monotonic() < deadline, f"after {self._heals_s} s still: {found}"
            time.sleep(POLL_S)
            self.ask("refresh")

    def saves(self, tag: str) -> None:
        """Save these blocks: each is stored, at once or when asked again.

        A MooseFS master that has just started knows of no space yet, and says that the file system is full.
        """
        self._until(tag, "save", {"stored", "already"}, STALLED | {"refused_full"})

    def hits(self, tag: str) -> None:
        """Load these blocks, which were acknowledged somewhere: each is a hit, at once or when asked again."""
        self.ask("refresh")
        self._until(tag, "load", {"hit"}, STALLED | {"missing", "corrupt"})

    def in_time(self, line: str) -> str:
        """An answer while something is broken: by the caller's own time-out at the latest, and never wrong."""
        found = self.ask(f"{line} {WAIT_S}", WAIT_S + SLACK_S)
        assert "WRONG" not in found, found
        return found


class Pool:
    """A fresh pool on the file system, and processes that use it."""

    def __init__(self, system: SharedFileSystem) -> None:
        self.system, self.root = system, system.where / "pool"
        system.host("c").run("mkdir", str(self.root))
        self._users: list[User] = []

    def open(self, host: str) -> User:
        """A process on a host."""
        self._users.append(User(self.system, host, f"file://{self.root}{OPTIONS}"))
        return self._users[-1]

    def open_when_healed(self, host: str) -> User:
        """A process on a host whose mount was in trouble: a medium that does not answer is not opened."""
        deadline = time.monotonic() + self.system.heals_s
        while True:
            try:
                return self.open(host)
            except Ended:
                assert time.monotonic() < deadline, f"after {self.system.heals_s} s still not to be opened"
                time.sleep(POLL_S)

    def close(self) -> None:
        """End every process that is left."""
        for user in self._users:
            if user.process.poll() is None:
                user.kill()

    def begin_a_long_save(self, user: User, segments: int) -> str:
        """Its tag, once it is under way: the pool has so many more segments, and so some of it is on the medium."""
        enough, deadline = self._segments() + segments, time.monotonic() + self.system.heals_s
        turn = 0
        while True:
            user.begin(f"save midway{turn} {BLOCKS_LONG} {SIZE} {WAIT_S}")
            while self._segments() < enough and not user.answered():
                time.sleep(0.02)
            if self._segments() >= enough:
                return f"midway{turn}"
            found = user.answer()  # A slow medium has ended it before.
            assert time.monotonic() < deadline, found
            turn += 1

    def _segments(self) -> int:
        return len(self.system.host("c").run("find", str(self.root), "-name", "*.seg").split())


@pytest.fixture
def pool(system: SharedFileSystem) -> Iterator[Pool]:
    made = Pool(system)
    yield made
    made.close()


def must_be_sound(pool: Pool, host: str) -> None:
    """A check finds no damage, and a mount with the recommended settings has no advice."""
    command = [sys.executable, "-m", "rewarm", "check", str(pool.root), "--json"]
    word = pool.system.host(host).run(*command, check=False, timeout=120)
    assert '"clean":true' in word.replace(" ", ""), word
    assert "mount_setting" not in word, word


def test_three_hosts_share_a_pool(pool: Pool) -> None:
    users = [pool.open(name) for name in "abc"]
    for turn, writer in enumerate(users):
        writer.saves(f"turn{turn}")
        for reader in users:
            reader.hits(f"turn{turn}")
            assert reader.ask(f"save turn{turn} {BLOCKS} {SIZE}") == f"already={BLOCKS}"
    for user in users:
        user.close()
    must_be_sound(pool, "a")


def test_a_host_loses_power_in_mid_write(pool: Pool) -> None:
    """Others go on at once; what the lost host had acknowledged is there, at the latest when its locks are gone."""
    system = pool.system
    a, b = pool.open("a"), pool.open("b")
    a.saves("before")
    midway = pool.begin_a_long_save(a, segments=1)
    system.host("a").kill()
    b.saves("after")
    c = pool.open("c")
    c.saves("fresh")
    for one, other in itertools.permutations((("after", b), ("fresh", c))):
        other[1].hits(one[0])
    found = b.in_time(f"load {midway} {BLOCKS_LONG} {SIZE}")
    assert {word.split("=")[0] for word in found.split()} <= {"hit", "missing", "corrupt", *STALLED}, found
    host = system.network.plug_in("a", system.host("a").address)
    system.mount(host)
    again = pool.open("a")
    again.saves("again")
    for tag, user in itertools.product(("before", "after", "fresh", "again"), (b, c, again)):
        user.hits(tag)


def test_a_host_is_cut_off_in_mid_write(pool: Pool) -> None:
    system = pool.system
    a, b = pool.open("a"), pool.open("b")
    a.saves("before")
    b.hits("before")
    pool.begin_a_long_save(a, segments=3)  # "before" is not in the file that is written to now
    system.network.cut("a")
    try:
        b.hits("before")
        b.saves("meanwhile")
        first = a.answer(WAIT_S + SLACK_S)
        assert {word.split("=")[0] for word in first.split()} <= {"stored", *STALLED}, first
        a.in_time(f"load before {BLOCKS} {SIZE}")
        a.in_time(f"save cut {BLOCKS} {SIZE}")
    finally:
        system.network.heal("a")
    again = pool.open_when_healed("a")
    again.saves("healed")
    for tag, user in itertools.product(("before", "meanwhile", "healed"), (a, b, again)):
        user.hits(tag)


def test_the_server_goes_and_comes_back(pool: Pool) -> None:
    a, b = pool.open("a"), pool.open("b")
    a.saves("before")
    b.hits("before")
    pool.system.stop_server()
    try:
        for user in (a, b):
            user.in_time(f"load before {BLOCKS} {SIZE}")
            user.in_time(f"save meanwhile {BLOCKS} {SIZE}")
            assert int(user.ask(f"held before {BLOCKS}", 5.0)) <= BLOCKS, "a look-up asks no medium"
    finally:
        pool.system.start_server()
    fresh = pool.open_when_healed("c")
    fresh.saves("after")
    for tag, user in itertools.product(("before", "after"), (a, b, fresh)):
        user.hits(tag)


def test_a_mount_hangs(pool: Pool) -> None:
    """The client of one host stops: its calls never end, and the store on it still answers; other hosts go on."""
    a, b = pool.open("a"), pool.open("b")
    a.saves("before")
    b.hits("before")
    host = pool.system.host("b")
    assert host.signal(pool.system.client_program, signal.SIGSTOP)
    try:
        assert "timed_out" in b.in_time(f"load before {BLOCKS} {SIZE}")
        assert int(b.ask(f"held before {BLOCKS}", 5.0)) == BLOCKS
        assert "stored" not in b.in_time(f"save hung {BLOCKS} {SIZE}"), "the caller's own time-out holds"
        a.saves("meanwhile")
        a.hits("before")
    finally:
        host.signal(pool.system.client_program, signal.SIGCONT)
    b.hits("before")
    b.hits("meanwhile")
