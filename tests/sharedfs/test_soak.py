"""Twenty-four processes on three hosts share a pool on a distributed file system while everything fails at random.

Processes are killed and stopped, hosts cut off, mounts hang, media lie and fill up, segments are evicted under readers.
Nothing wrong may be served, nothing may hang beyond the documented bounds or raise, the pool keeps its capacity, and
what is visible is there. `make soak` runs thirty minutes; the figures are printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.sharedfs.filesystems import Gluster, SharedFileSystem
from tests.sharedfs.soaker import WAIT_S

from rewarm.store.opening import FILE_OPTIONS

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("REWARM_SOAK_S", "150"))
SEED = int(os.environ.get("REWARM_SOAK_SEED", "1"))
HOSTS = ("a", "b", "c")
PROCESSES = 24
CAPACITY = 48 << 20
POLL_S = 2.0
DEADLINE_S = 8
LEASE_S = 24
CLOSE_S = 15
END_S = 90.0
CALL_S = 5.0
"""`save` and `load` return at once; on two cores that twenty-four processes share, within this."""

SLACK_S = 5.0
"""By how much a caller's own time-out, which bounds every verdict, may be late."""

AFTERMATH_S = 15.0
"""After a cut or a hang, a mount needs some time until it serves again."""

HITS_MIN = 0.95
FINDINGS_SHOWN = 20


@dataclass
class Trouble:
    """A span in which a host or a process could not work as usual."""

    where: str
    start: float
    end: float = float("inf")

    def touches(self, start: float, end: float) -> bool:
        """True when it overlaps."""
        return self.start <= end and start <= self.end


@dataclass
class Tally:
    """What came of it all."""

    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    due: Counter[str] = field(default_factory=Counter)
    in_trouble: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    timed_out: Counter[str] = field(default_factory=Counter)
    evicted_segments: int = 0
    failures: list[str] = field(default_factory=list)
    wrong: int = 0
    evicted_meanwhile: int = 0
    longest_s: dict[str, float] = field(default_factory=lambda: {"save": 0.0, "load": 0.0})
    left_behind: int = 0
    used_bytes_max: int = 0

    def share(self) -> float:
        """Hits among blocks that were due."""
        return self.due["hit"] / max(self.due.total(), 1)


class Soak:
    """The processes, and what is done to them."""

    def __init__(self, system: SharedFileSystem, folder: Path) -> None:
        self.system, self.folder = system, folder
        self.root = system.where / "pool"
        system.host("a").run("mkdir", str(self.root))
        self.board = folder / "board"
        self.board.touch()
        self.dice = random.Random(SEED)
        self.troubles: list[Trouble] = []
        self.tally = Tally()
        self.children: dict[int, subprocess.Popen[str]] = {}
        self.lives: Counter[int] = Counter()
        lease = f"&lease={LEASE_S}s" if "lease" in FILE_OPTIONS else ""
        self.url = f"file://{self.root}?capacity={CAPACITY}&poll={POLL_S}s&io_deadline={DEADLINE_S}s"
        self.url += f"&close_timeout={CLOSE_S}s{lease}"
        self.end = time.monotonic() + SECONDS

    def host_of(self, process: int) -> str:
        """Eight processes to a host."""
        return HOSTS[process % len(HOSTS)]

    def start(self, process: int) -> None:
        """Start a process, or start it again after its death."""
        life = self.lives[process]
        self.lives[process] += 1
        facts = [self.url, self.board, self.folder / f"{process}-{life}.jsonl", process, life, self.end, POLL_S]
        command = [sys.executable, "-m", "tests.sharedfs.soaker", *map(str, facts)]
        self.children[process] = self.system.host(self.host_of(process)).start(*command)

    def pid_of(self, process: int) -> int | None:
        """The process itself, below the one that entered its host."""
        pid = self.children[process].pid
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return None

    def run(self) -> None:
        """Let things happen until the time is over."""
        due: list[tuple[float, Any]] = []
        while (now := time.monotonic()) < self.end:
            for moment, undo in [one for one in due if one[0] <= now]:
                due.remove((moment, undo))
                undo()
            if now < self.end - AFTERMATH_S:
                (what,) = self.dice.choices([self.kill, self.stop, self.cut, self.hang], [5, 5, 1, 1])
                done = what()
                if done:
                    due.append(done)
            self.measure()
            for process, child in self.children.items():
                if child.poll() is not None and now < self.end - AFTERMATH_S:
                    self.start(process)
            time.sleep(self.dice.uniform(1.0, 3.0))
        for _, undo in due:
            undo()

    def kill(self) -> None:
        """SIGKILL of one process."""
        process = self.dice.randrange(PROCESSES)
        pid = self.pid_of(process)
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.tally.faults["SIGKILL"] += 1

    def stop(self) -> tuple[float, Any] | None:
        """SIGSTOP of one process, for less than its lease or for more."""
        process = self.dice.randrange(PROCESSES)
        pid = self.pid_of(process)
        if not pid:
            return None
        trouble = Trouble(f"{process}", time.monotonic())

        entered = self.children[process].pid

        def go_on() -> None:
            for one in (entered, pid):  # what entered the host for it has stopped with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGCONT)
            trouble.end = time.monotonic() + 1.0

        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.tally.faults["SIGSTOP"] += 1
        self.troubles.append(trouble)
        return time.monotonic() + self.dice.uniform(1.0, 1.5 * LEASE_S), go_on

    def cut(self) -> tuple[float, Any] | None:
        """Cut a host off."""
        return self._on_a_host("cut", self.system.network.cut, self.system.network.heal)

    def hang(self) -> tuple[float, Any] | None:
        """Stop the client of a host: its mount hangs."""
        program = self.system.client_program

        def stop(name: str) -> None:
            self.system.host(name).signal(program, signal.SIGSTOP)

        def go_on(name: str) -> None:
            self.system.host(name).signal(program, signal.SIGCONT)

        return self._on_a_host("hung mount", stop, go_on)

    def _on_a_host(self, name: str, begin: Any, end: Any) -> tuple[float, Any] | None:
        host, now = self.dice.choice(HOSTS), time.monotonic()
        if any(trouble.where in HOSTS and trouble.end > now for trouble in self.troubles):
            return None  # One host at a time: three that are cut off find out nothing.
        trouble = Trouble(host, now)
        self.troubles.append(trouble)
        begin(host)
        self.tally.faults[name] += 1

        def undo() -> None:
            end(host)
            trouble.end = time.monotonic() + AFTERMATH_S

        return now + self.dice.uniform(2.0, 6.0), undo

    def measure(self) -> None:
        """What the pool takes on disk, as another host sees it."""
        well = [host for host in HOSTS if not any(t.where == host and t.end > time.monotonic() for t in self.troubles)]
        words = ["find", str(self.root / "writers"), "-type", "f", "-printf", "%b\\n"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            blocks = self.system.host(well[0]).run(*words, check=False, timeout=20.0)
            self.tally.used_bytes_max = max(self.tally.used_bytes_max, sum(map(int, blocks.split())) * 512)

    def finish(self) -> None:
        """Every process ends by itself, in time."""
        deadline = time.monotonic() + END_S
        for process, child in self.children.items():
            try:
                child.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.tally.failures.append(f"process {process} does not end within {END_S} s")
                child.kill()

    def read_records(self) -> None:
        """Add everything up."""
        for path in sorted(self.folder.glob("*.jsonl")):
            process = path.name.split("-")[0]
            evicted = 0
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed process
                    one = json.loads(line)
                    self._add(process, one)
                    evicted = one.get("evicted_segments", evicted)
            self.tally.evicted_segments += evicted

    def _add(self, process: str, one: dict[str, Any]) -> None:
        tally, verb = self.tally, one["verb"]
        where = (process, self.host_of(int(process)))
        trouble = any(t.where in where and t.touches(one["start"], one["end"]) for t in self.troubles)
        tally.operations[verb] += 1
        if verb == "fault":
            tally.faults[one["what"]] += 1
        elif verb == "failure":
            tally.failures.append(f"process {process}: {one['what']}")
        elif verb in ("save", "load"):
            took_s = one.get("verdict", one["end"]) - one["start"]
            if not trouble:
                tally.longest_s[verb] = max(tally.longest_s[verb], took_s)
                called_s = one["called"] - one["start"]
                if took_s > called_s + WAIT_S + SLACK_S or called_s > CALL_S:
                    tally.failures.append(
                        f"process {process}: {verb} took {called_s:.1f} s, its verdict {took_s:.1f} s"
                    )
        if verb == "save":
            tally.saves.update(one["outcomes"])
            why = "in trouble" if trouble else "stalled" if one["stalled"] else "late" if one["late"] else "busy"
            tally.timed_out[why] += one["outcomes"].get("timed_out", 0)
        elif verb == "load":
            tally.wrong += one["wrong"]
            tally.evicted_meanwhile += one["evicted"]
            (tally.in_trouble if trouble else tally.due).update(one["outcomes"])
            if not trouble:
                tally.due.subtract({"missing": min(one["evicted"], one["outcomes"].get("missing", 0))})
        elif verb == "close" and not trouble:
            tally.left_behind += bool(one["unreleased"])
            if one["end"] - one["start"] > 2 * CLOSE_S + SLACK_S or [n for n in one["notes"] if "defect" in n]:
                tally.failures.append(f"process {process}: closed with {one}")

    def report(self) -> str:
        """The figures."""
        tally = self.tally
        lines = [
            f"{PROCESSES} processes, {len(HOSTS)} hosts, {SECONDS:.0f} s, seed {SEED}, {self.lives.total()} lives",
            f"operations {dict(tally.operations)}",
            f"faults injected {tally.faults.total()}: {dict(tally.faults)}",
            f"blocks due {tally.due.total()}: {dict(+tally.due)}, {tally.share():.2%} hits; wrong bytes {tally.wrong}",
            f"blocks asked for while cut off, hung or stopped: {dict(tally.in_trouble)}",
            f"blocks evicted between look-up and load {tally.evicted_meanwhile}; saves {dict(tally.saves)}",
            f"saves timed out, by why: {dict(+tally.timed_out)}; {tally.evicted_segments} segments evicted by savers",
            f"longest load {tally.longest_s['load']:.1f} s, save {tally.longest_s['save']:.1f} s; "
            f"{tally.left_behind} closed with requests left in the kernel",
            f"at most {tally.used_bytes_max >> 20} MiB used of {CAPACITY >> 20}",
        ]
        return "\n".join(lines)


def _in_short(word: str) -> str:
    """What a check says: how often each kind, and the first findings in full."""
    try:
        report = json.loads(word)
    except json.JSONDecodeError:
        return f"no report, but {word[-300:]!r}"
    lines = [f"clean {report['clean']}, {report['blocks']} blocks"]
    for name in ("findings", "notes"):
        lines.append(f"{name} {dict(Counter(one['kind'] for one in report[name]))}")
    return "\n".join([*lines, *map(str, report["findings"][:FINDINGS_SHOWN])])


def test_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Gluster(tmp_path, HOSTS) as system:
        records = tmp_path / "records"
        records.mkdir()
        soak = Soak(system, records)
        for process in range(PROCESSES):
            soak.start(process)
        soak.run()
        soak.finish()
        soak.measure()
        soak.read_records()
        clean = system.host("a").run(
            sys.executable, "-m", "rewarm", "check", str(soak.root), "--json", check=False, timeout=120
        )
    tally = soak.tally
    with capsys.disabled():
        print(f"\n{soak.report()}\ncheck afterwards: {_in_short(clean)}")
    assert tally.wrong == 0, "wrong bytes were served"
    assert not tally.failures, f"{len(tally.failures)} failures, among them: {tally.failures[:5]}"
    assert tally.due.total() > SECONDS, "hardly anything was due"
    assert tally.share() >= HITS_MIN, f"{tally.share():.2%} hits"
    segment_bytes = CAPACITY // 64
    assert tally.used_bytes_max <= CAPACITY + PROCESSES * segment_bytes, "the pool has outgrown its capacity"
