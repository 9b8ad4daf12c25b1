"""A pool on real distributed file systems, three hosts, and what happens to hosts: killed, cut off, hung, server gone.

Every answer must come within the documented bounds, every hit must have the right bytes, and what was acknowledged must
be there for everybody once the trouble is over.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import pytest
from tests.sharedfs.filesystems import SYSTEMS, SharedFileSystem
from tests.sharedfs.remote import Remote

pytestmark = pytest.mark.lab

DEADLINE_S = 6
POLL_S = 0.5
OPTIONS = f"?capacity=1GiB&poll={POLL_S}s&io_deadline={DEADLINE_S}s&close_timeout=10s"
BLOCKS, SIZE = 24, 65536
WAIT_S = 2 * DEADLINE_S
"""What a caller waits while the medium is gone: files cannot even be opened then."""

SLACK_S = 10.0

HEALED_S = 60.0


@pytest.fixture(scope="module", params=sorted(SYSTEMS))
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedFileSystem]:
    with SYSTEMS[request.param](tmp_path_factory.mktemp(request.param), ("a", "b", "c")) as mounted:
        yield mounted


class Pool:
    """A fresh pool on the file system, and processes that use it."""

    def __init__(self, system: SharedFileSystem, name: str) -> None:
        self.system, self.root = system, system.where / name
        system.host("c").run("mkdir", str(self.root))
        self.remotes: list[Remote] = []

    def open(self, host: str) -> Remote:
        """A process on a host."""
        self.remotes.append(Remote(self.system.host(host), f"file://{self.root}{OPTIONS}"))
        return self.remotes[-1]

    def close(self) -> None:
        """End every process that is left."""
        for remote in self.remotes:
            if remote.process.poll() is None:
                remote.kill()


@pytest.fixture
def pool(system: SharedFileSystem, request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(system, request.node.originalname)
    yield made
    made.close()


def all_hit(remote: Remote, tag: str, count: int = BLOCKS) -> None:
    """Ask until everything is a hit; a wrong byte fails at once."""
    deadline = time.monotonic() + HEALED_S
    while True:
        remote.ask("refresh")
        found = remote.ask(f"load {tag} {count} {SIZE}")
        assert "WRONG" not in found
        if found == f"hit={count}":
            return
        assert time.monotonic() < deadline, f"after {HEALED_S} s still: {found}"
        time.sleep(POLL_S)


def in_time(remote: Remote, line: str) -> str:
    """An answer while something is broken: by the caller's own time-out at the latest, and never wrong."""
    found = remote.ask(f"{line} {WAIT_S}", WAIT_S + SLACK_S)
    assert "WRONG" not in found, found
    return found


def saved(remote: Remote, tag: str) -> None:
    assert remote.ask(f"save {tag} {BLOCKS} {SIZE}") == f"stored={BLOCKS}"


def save_for_a_while(remote: Remote) -> None:
    """Have something under way when the trouble begins."""
    remote.begin(f"save midway 1500 {SIZE} {WAIT_S}")
    time.sleep(0.4)


def must_be_sound(pool: Pool, host: str) -> None:
    """A check finds no damage, and a mount with the recommended settings has no advice."""
    command = [sys.executable, "-m", "rewarm", "check", str(pool.root), "--json"]
    word = pool.system.host(host).run(*command, check=False, timeout=120)
    assert '"clean":true' in word.replace(" ", ""), word
    assert "mount_setting" not in word, word


def test_three_hosts_share_a_pool(pool: Pool) -> None:
    a, b, c = (pool.open(name) for name in "abc")
    for number, (writer, readers) in enumerate(((a, (b, c)), (b, (a, c)), (c, (a, b)))):
        saved(writer, f"turn{number}")
        for reader in readers:
            all_hit(reader, f"turn{number}")
            assert reader.ask(f"save turn{number} {BLOCKS} {SIZE}") == f"already={BLOCKS}"
    for remote in (a, b, c):
        remote.close()
    must_be_sound(pool, "a")


def test_a_host_loses_power_in_mid_write(pool: Pool) -> None:
    system = pool.system
    a, b = pool.open("a"), pool.open("b")
    saved(a, "before")
    save_for_a_while(a)
    system.host("a").kill()
    all_hit(b, "before")
    found = in_time(b, f"load midway 1500 {SIZE}")
    assert {word.split("=")[0] for word in found.split()} <= {"hit", "missing", "corrupt"}, found
    saved(b, "after")
    host = system.network.plug_in("a", system.host("a").address)
    system.mount(host)
    again = pool.open("a")
    all_hit(again, "before")
    all_hit(again, "after")
    saved(again, "again")
    all_hit(b, "again")


def test_a_host_is_cut_off_in_mid_write(pool: Pool) -> None:
    system = pool.system
    a, b = pool.open("a"), pool.open("b")
    saved(a, "before")
    all_hit(b, "before")
    save_for_a_while(a)
    system.network.cut("a")
    try:
        all_hit(b, "before")
        saved(b, "meanwhile")
        first = a.answer(WAIT_S + SLACK_S)
        assert "stored" in first or "lost_medium" in first or "timed_out" in first, first
        in_time(a, f"load before {BLOCKS} {SIZE}")
        in_time(a, f"save cut {BLOCKS} {SIZE}")
    finally:
        system.network.heal("a")
    for remote in (a, b):
        all_hit(remote, "before")
        all_hit(remote, "meanwhile")
    again = pool.open("a")
    saved(again, "healed")
    all_hit(b, "healed")


def test_the_server_goes_and_comes_back(pool: Pool) -> None:
    a, b = pool.open("a"), pool.open("b")
    saved(a, "before")
    all_hit(b, "before")
    pool.system.stop_server()
    try:
        for remote in (a, b):
            in_time(remote, f"load before {BLOCKS} {SIZE}")
            in_time(remote, f"save meanwhile {BLOCKS} {SIZE}")
            assert int(remote.ask(f"held before {BLOCKS}", 5.0)) <= BLOCKS, "a look-up asks no medium"
    finally:
        pool.system.start_server()
    for remote in (a, b):
        all_hit(remote, "before")
    fresh = pool.open("c")
    all_hit(fresh, "before")
    saved(fresh, "after")
    all_hit(b, "after")


def test_a_mount_hangs(pool: Pool) -> None:
    """The client of one host stops: its calls never end, and the store on it still answers; other hosts go on."""
    a, b = pool.open("a"), pool.open("b")
    saved(a, "before")
    all_hit(b, "before")
    host = pool.system.host("b")
    assert host.signal(pool.system.client_program, signal.SIGSTOP)
    try:
        assert "timed_out" in in_time(b, f"load before {BLOCKS} {SIZE}")
        assert int(b.ask(f"held before {BLOCKS}", 5.0)) == BLOCKS
        assert "stored" not in in_time(b, f"save hung {BLOCKS} {SIZE}"), "the caller's own time-out holds"
        saved(a, "meanwhile")
        all_hit(a, "before")
    finally:
        host.signal(pool.system.client_program, signal.SIGCONT)
    all_hit(b, "before")
    all_hit(b, "meanwhile")
