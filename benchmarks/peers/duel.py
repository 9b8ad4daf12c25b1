"""Rewarm against what a user would pick instead: one run, one table, interleaved rounds.

    benchmarks/peers/environment.sh
    python benchmarks/peers/duel.py --bed /mnt/xfs-on-ram [--bed /mnt/disk] [--quick] [-o duel.json]

For each bed: cold reads of 192 MiB at 64 KiB, 1 MiB and 8 MiB, as one request and as 16 at once, each quiet and beside
one busy Python thread in the process (beside a busy Python process where the peer is a process: fio, the C ring), by
every peer in turn, in rounds whose order changes. Then 256 KiB, reads and durable writes, by the best of each family.
Each peer lives in a process of its own, stopped while it is not measured. A peer too slow for a cell reads a quarter or
a sixteenth of it. A peer that cannot run is reported with its error. --quick: one round, 64 KiB and 1 MiB.
Needs fio, a C compiler and liburing for the references. About 1.8 GB on each bed, 4 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from table import HEADER, Pass, Row, against, best_of_families, line, ratio, summarise

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KIB = 1024
BLOCKS = (64 * KIB, 1024 * KIB, 8192 * KIB)
SET_BYTES = 192 << 20
LEAST_S = 0.1
LIMIT_S = 1.0
ANSWER_S = 120.0
C_RING = "C ring, registered"

FAMILIES = {
    C_RING: "C",
    "fio": "fio",
    "uring": "Rewarm",
    "aio": "Rewarm",
    "threads": "Rewarm",
    "uring, checksum left out": "Rewarm, unverified",
    "LMCache LocalDisk, serial": "LMCache, a file a block",
    "LMCache LocalDisk, 8 threads": "LMCache, a file a block",
    "LMCache FSConnector": "LMCache, a file a block",
    "LMCache MP fs": "LMCache, a file a block",
    "LMCache MP fs_native": "LMCache, a file a block",
    "LMCache MP raw_block, io_uring": "LMCache, one file",
    "vLLM fs_io_C": "vLLM",
    "NIXL POSIX": "NIXL",
}
OURS = ("uring", "aio", "threads", "uring, checksum left out")
COMPARED = ("uring", "uring, checksum left out")
"""What a user gets without choosing, not whichever rung was fastest."""
FILE_A_BLOCK = (*(name for name, family in FAMILIES.items() if family.endswith("a file a block")), "vLLM fs_io_C")
PEERS = (*FILE_A_BLOCK, "LMCache MP raw_block, io_uring", "NIXL POSIX")


class PeerFailed(Exception):
    """A peer did not do what it was asked; the text says why."""


class Worker:
    """The process of one peer, stopped (SIGSTOP) while it is not asked."""

    def __init__(self, python: Path, log: Path, module: str, name: str, variants: tuple[str, ...]) -> None:
        self.variants = variants
        self._log = log
        self.settings: dict[str, str] = {}
        self.name = name
        self._command = [str(python), str(HERE / "worker.py"), module, name]
        self._process: subprocess.Popen[str] | None = None

    def ask(self, do: str, **arguments: object) -> dict:
        """Send a command and wait for its answer. Raises `PeerFailed`."""
        if self._process is None:
            with open(self._log, "a") as log:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                self._process = subprocess.Popen(self._command, text=True, **pipes)
        process = self._process
        process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps({"do": do, **arguments}), file=process.stdin, flush=True)
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout, selectors.EVENT_READ)
                if not waiting.select(ANSWER_S):
                    raise PeerFailed(f"no answer to {do} in {ANSWER_S:.0f} s")
            answer = process.stdout.readline()
        except (PeerFailed, BrokenPipeError) as error:
            self.end()
            raise PeerFailed(str(error)) from None
        if not answer:
            code = process.wait()
            self.end()
            raise PeerFailed(f"its process ended with exit code {code}")
        process.send_signal(signal.SIGSTOP)
        result = json.loads(answer)
        if "error" in result:
            raise PeerFailed(result["error"])
        return result

    def end(self) -> None:
        """End the process; the next command starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def workers(peers_python: Path, log: Path) -> list[Worker]:
    """A worker for each peer; those of other projects run in their own environment."""
    own, theirs, lmcache = (Path(sys.executable), log), (peers_python, log), "lmcache_peer"
    return [
        Worker(*own, "ours", "Bare", (C_RING, "fio")),
        Worker(*own, "ours", "Rewarm", OURS),
        Worker(*theirs, lmcache, "LocalDisk", ("LMCache LocalDisk, serial", "LMCache LocalDisk, 8 threads")),
        Worker(*theirs, lmcache, "FsConnector", ("LMCache FSConnector",)),
        Worker(*theirs, lmcache, "MpFs", ("LMCache MP fs",)),
        Worker(*theirs, lmcache, "MpFsNative", ("LMCache MP fs_native",)),
        Worker(*theirs, lmcache, "MpRawBlock", ("LMCache MP raw_block, io_uring",)),
        Worker(*theirs, "theirs", "VllmFiles", ("vLLM fs_io_C",)),
        Worker(*theirs, "theirs", "NixlPosix", ("NIXL POSIX",)),
    ]


@dataclass
class Cell:
    """One table: a block size, requests at once, quiet or busy; passes of each row by round, or its error."""

    bed: Path
    block: int
    parts: int
    busy: bool
    rounds: dict[str, list[list[Pass]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def measure(self, worker: Worker, variant: str) -> None:
        """One round of one row."""
        if variant in self.errors:
            return
        options = {"parts": self.parts, "busy": self.busy, "limit_s": LIMIT_S, "least_s": LEAST_S}
        try:
            found = worker.ask("load", variant=variant, **options)["passes"]
        except PeerFailed as error:
            self.errors[variant] = str(error)
            return
        passes = [Pass(**one | {"latencies_s": tuple(one["latencies_s"])}) for one in found]
        self.rounds.setdefault(variant, []).append(passes)

    def rows(self) -> dict[str, Row]:
        """What was measured."""
        return {name: summarise(rounds) for name, rounds in self.rounds.items() if name not in self.errors}

    def title(self) -> str:
        requests = "one request" if self.parts == 1 else f"{self.parts} requests at once"
        return f"{self.bed}, {self.block // KIB} KiB, {requests}, {'beside a busy thread' if self.busy else 'quiet'}"

    def as_json(self) -> dict:
        """Every pass."""
        rounds = {name: [[vars(one) for one in each] for each in of] for name, of in self.rounds.items()}
        return {"cell": self.title(), "errors": self.errors, "rounds": rounds}

    def show(self) -> None:
        """Print the table."""
        rows = self.rows()
        print(f"\n### {self.title()}\n", *HEADER, sep="\n")
        for name in FAMILIES:
            if name in rows or name in self.errors:
                label = f"**Rewarm {name}**" if name in OURS else name
                note = (
                    "" if name not in rows or rows[name].bytes >= SET_BYTES // 2 else f" ({rows[name].bytes >> 20} MiB)"
                )
                print(line(label + note, rows.get(name, self.errors.get(name, "")), rows.get(C_RING)))
        print()
        for ours in COMPARED:
            for what, theirs in (("peer", PEERS), ("peer with a file a block", FILE_A_BLOCK)):
                print(against(ours, what, theirs, rows))
        sys.stdout.flush()


def prepare(each: Worker, directory: Path, block: int) -> dict:
    """Have a worker write its blocks into a new directory."""
    target = directory / each.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    answer = each.ask("prepare", directory=str(target), block=block, count=SET_BYTES // block)
    each.settings.update(answer["settings"])
    return answer


def duel(bed: Path, block: int, rounds: int, team: list[Worker]) -> list[Cell]:
    """Every cell of one block size on one bed."""
    cells = [Cell(bed, block, parts, busy) for parts in (1, 16) for busy in (False, True)]
    directory = Path(tempfile.mkdtemp(prefix="rewarm-duel-", dir=bed))
    try:
        ready = []
        for each in team:
            try:
                prepare(each, directory, block)
                ready.append(each)
            except PeerFailed as error:
                for cell in cells:
                    cell.errors |= dict.fromkeys(each.variants, str(error))
        for number in range(rounds):
            turn = number * len(ready) // rounds
            for each in ready[turn:] + ready[:turn]:
                for variant in each.variants:
                    for cell in cells:
                        cell.measure(each, variant)
        close(team)
    finally:
        shutil.rmtree(directory)
    return cells


def best_only(
    bed: Path, block: int, rounds: int, team: list[Worker], best: list[str]
) -> tuple[list[Cell], dict[str, list[float]]]:
    """Reads, and durable writes into a new directory each round, by the best of each family."""
    cells = [Cell(bed, block, 1, busy) for busy in (False, True)]
    writes: dict[str, list[float]] = {}
    directory = Path(tempfile.mkdtemp(prefix="rewarm-duel-", dir=bed))
    chosen = [each for each in team if set(best) & set(each.variants)]
    try:
        for number in range(rounds):
            turn = number * len(chosen) // rounds
            for each in chosen[turn:] + chosen[:turn]:
                try:
                    written = prepare(each, directory, block)
                except PeerFailed as error:
                    for cell in cells:
                        cell.errors |= dict.fromkeys(set(best) & set(each.variants), str(error))
                    continue
                # The flat file is written by fio.
                name = "fio" if "fio" in each.variants else next(v for v in each.variants if v in best)
                writes.setdefault(name, []).append(SET_BYTES / written["seconds"] / 1e9)
                for variant in each.variants:
                    for cell in cells if variant in best else ():
                        cell.measure(each, variant)
                close([each])
                shutil.rmtree(directory / each.name)
    finally:
        close(team)
        shutil.rmtree(directory)
    return cells, writes


def close(team: list[Worker]) -> None:
    """Have workers free what they hold; one that cannot is ended."""
    for each in team:
        try:
            each.ask("close")
        except PeerFailed:
            each.end()


def show_writes(bed: Path, block: int, writes: dict[str, list[float]]) -> None:
    """Print the table of writes."""
    print(f"\n### {bed}, {block // KIB} KiB, durable writes of {SET_BYTES >> 20} MiB (stored, then synced)\n")
    print("| | GB/s (spread) | of fio |\n|---|---|---|")
    for name, rates in writes.items():
        label = f"**Rewarm {name}**" if name in OURS else name
        of = f"{ratio(rates, writes['fio']):.2f}" if "fio" in writes else "-"
        print(f"| {label} | {median(rates):.2f} ({min(rates):.2f} .. {max(rates):.2f}) | {of} |", flush=True)


def in_bytes(text: str) -> tuple[int, ...]:
    """Block sizes from a list in KiB."""
    return tuple(int(size) * KIB for size in text.split(","))


def run_bed(bed: Path, blocks: tuple[int, ...], rounds: int, team: list[Worker]) -> list[Cell]:
    """Measure and print everything on one bed."""
    cells: list[Cell] = []
    for block in blocks:
        found = duel(bed, block, rounds, team)
        cells += found
        for cell in found:
            cell.show()
    best = list({*best_of_families(FAMILIES, cells[0].rows()), *COMPARED})
    found, writes = best_only(bed, 256 * KIB, rounds, team, best)
    for cell in found:
        cell.show()
    show_writes(bed, 256 * KIB, writes)
    return cells + found


def main() -> None:
    """Run every bed and block size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", action="append", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", default=BLOCKS, type=in_bytes, help="in KiB: 64,1024,8192")
    parser.add_argument("--quick", action="store_true", help="one round, 64 KiB and 1 MiB")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers" / "bin" / "python")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the peers print")
    parser.add_argument("-o", "--output", type=Path, help="every pass, as JSON")
    arguments = parser.parse_args()
    rounds, blocks = (1, BLOCKS[:2]) if arguments.quick else (arguments.rounds, arguments.blocks)
    if not arguments.peers.exists():
        parser.error(f"{arguments.peers} does not exist; make it with benchmarks/peers/environment.sh")
    print(f"{platform.platform()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds")
    start_s = time.monotonic()
    team, cells = workers(arguments.peers, arguments.log), []
    try:
        for bed in arguments.bed:
            cells += run_bed(bed, blocks, rounds, team)
    finally:
        for each in team:
            each.end()
    print(f"\nSettings (the run took {time.monotonic() - start_s:.0f} s):\n")
    for name, text in {name: text for each in team for name, text in each.settings.items()}.items():
        print(f"* {'Rewarm ' if name in OURS else ''}{name}: {text}")
    if arguments.output:
        arguments.output.write_text(json.dumps([cell.as_json() for cell in cells]))


if __name__ == "__main__":
    main()
