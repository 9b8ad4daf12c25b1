"""Runs the cases one after another and prints a line for each: CASE name ok|FAILED|skipped seconds what was seen."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable

from lab.nvmeof.guest import fabric, faults, fence, raw, sharing, working
from lab.nvmeof.guest.bench import Bench

Case = Callable[[Bench, bool], str]

CASES: dict[str, Case] = {
    "array": working.array_over_tcp,
    "kit": working.kit,
    "kills": working.kills,
    "cold-recovery": working.cold_recovery,
    "rdma": working.array_over_rdma,
    "link-down": faults.link_down_in_a_wave,
    "reset": faults.controller_reset,
    "target-killed": faults.target_killed,
    "path-gone": faults.path_gone,
    "nfs": sharing.nfs_from_one_host,
    "raw-hosts": raw.two_hosts,
    "raw-faults": raw.faults,
    "raw-gone": raw.gone,
    "fence": fence.late_owner_is_kept_out,
    "drive-failed": faults.drive_failed,
    "xfs-twice": sharing.xfs_mounted_twice,
}
"""In this order: each leaves the fabric as the next expects it, the last ones broken."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    wanted = {name for name in arguments.only.split(",") if name}
    start_s = time.monotonic()
    fabric.load_modules()
    fabric.make_links()
    bench = Bench()
    say("boot", "ok", start_s, f"{fabric.run('uname', '-r').strip()}")
    failed = 0
    for name, case in CASES.items():
        if wanted and name not in wanted:
            continue
        start_s = time.monotonic()
        try:
            say(name, "ok", start_s, case(bench, arguments.short))
        except Exception as error:  # noqa: BLE001  one case must not take the others with it
            traceback.print_exc()
            failed += 1
            say(name, "FAILED", start_s, f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
        finally:
            bench.end_case()
    say("end", "ok", start_s, "")
    return 1 if failed else 0


def say(name: str, result: str, start_s: float, what: str) -> None:
    print(f"CASE {name} {result} {time.monotonic() - start_s:.0f} {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
