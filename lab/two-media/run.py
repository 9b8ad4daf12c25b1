"""Two throttled media in the ratio of the published readings, every restore order, one table: under five minutes.

python lab/two-media/run.py [--short] [--dir DIR] [-o result.json]        (or: make lab-two-media)

The media are XFS on loop devices whose reads the kernel throttles, one for each of the published ones: a local NVMe
drive (6.94 GB/s) and an NVMe-oF array (10.5 GB/s), both 46 times slower. The job is the published one in small:
waves of 8, 16 and 32 sessions that share nothing, made cold. Everything is real but the speed; what is checked:

* all at once: every median within 5 %, or the run's own spread, of t_0 + N S / B, with B the rate set and one t_0;
* shortest first: at most 0.6 of that at 16 and 32, t_0 apart.

t_0 is below zero here: the kernel's throttle lets the first tenth of a second or less pass. The published one is 1.25 s
of an engine's own work, and its cells at 16 read about 14 sessions: that is what the published shares differ by.

Ends with 0 when all of it holds, 1 when not, 3 where no such media can be made.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import FrameType

import media

PUBLISHED_BYTES_PER_S = {"local": 6.94e9, "array": 10.5e9}
PUBLISHED_TTFT_S = {
    "local": {8: 10.17, 16: 17.31, 32: 35.73},
    "array": {8: 7.53, 16: 11.85, 32: 26.35},
}
SLOWER = 46.0
"""150 and 228 MB/s: slow enough for any machine's store to keep up, fast enough for five minutes."""
ORDERS = ("together", "arrival", "shortest")
TOLERANCE = 0.05
MEDIAN_SHARE_MAX = 0.6
BLOCK_TOKENS, TOKEN_BYTES = 4, 131_072
TOKENS, REPEATS, WAVES = 192, 3, (8, 16, 32)
SHORT_TOKENS, SHORT_REPEATS = 128, 2

Medians = dict[tuple[str, str, int], tuple[float, float]]
"""(medium, order, wave) -> median time to the first token in s, and the spread of the repeats, 0 with one."""


def main() -> int:
    options = parse()
    if reason := media.missing():
        print(f"no lab here: {reason}", file=sys.stderr)
        return 3
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    tokens, repeats = (SHORT_TOKENS, SHORT_REPEATS) if options.short else (TOKENS, REPEATS)
    size = tokens * TOKEN_BYTES
    rates = {name: rate / SLOWER for name, rate in PUBLISHED_BYTES_PER_S.items()}
    where = options.dir or media.shared_memory(3 * max(WAVES) * size) or Path.cwd()
    try:
        with media.Lab(list(rates), 2 * max(WAVES) * size, where) as lab:
            for name, rate in rates.items():
                lab.set_rate(name, rate)
            result = measure(lab, tokens, repeats)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    return show(medians_of(result), rates, size)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--short", action="store_true", help="two thirds of the bytes, two repeats: a minute and a half"
    )
    parser.add_argument("--dir", type=Path, help="where the images go; 2 GB (default: /dev/shm, or the current one)")
    parser.add_argument("-o", dest="out", help="write the result of rewarm bench to this file")
    return parser.parse_args()


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def measure(lab: media.Lab, tokens: int, repeats: int) -> dict:
    """Run `rewarm bench` inside the lab: both media, every order, interleaved."""
    job, out = lab.base / "job.toml", lab.base / "result.json"
    lines = [
        'model = "Llama-3.1-8B"', f"tokens = {tokens}", f"block_tokens = {BLOCK_TOKENS}",
        f"concurrency = {list(WAVES)}", f"repeats = {repeats}", "[targets]",
        *(
            f'{name}-{order} = {{ url = "file://{lab.path(name)}", order = "{order}" }}'
            for name in PUBLISHED_BYTES_PER_S for order in ORDERS
        ),
    ]  # fmt: skip
    job.write_text("\n".join(lines) + "\n")
    words = [sys.executable, "-m", "rewarm", "bench", str(job), "-o", str(out)]
    process = lab.start(words, stdout=subprocess.DEVNULL)
    if process.wait():
        raise SystemExit(f"rewarm bench ended with {process.returncode}: see above")
    return json.loads(out.read_text())


def medians_of(result: dict) -> Medians:
    found: Medians = {}
    for summary in result["summary"]:
        name, order = summary["target"].split("-")
        found[name, order, summary["concurrency"]] = (summary["ttft_s"]["p50"], summary["spread"] or 0.0)
    return found


def show(medians: Medians, rates: dict[str, float], size: int) -> int:
    """Print the table and what it says; 1 when something does not hold."""
    bad = []
    print(f"sessions of {size / 1e6:.1f} MB; times are medians of the time to the first token, in s")
    print("medium  at once  all at once  t0 + N S/B    off  arrival  shortest  of all at once | published  share of 8")
    for name, rate in rates.items():
        fixed_s = fmean(medians[name, "together", wave][0] - wave * size / rate for wave in WAVES)
        for wave in WAVES:
            line, complaints = row(medians, name, wave, fixed_s, rate, size)
            print(line)
            bad += complaints
        print(f"        t0 = {fixed_s:+.3f} s at {rate / 1e6:.0f} MB/s ({PUBLISHED_BYTES_PER_S[name] / 1e9} published)")
    for wave in WAVES:
        ratio = medians["local", "together", wave][0] / medians["array", "together", wave][0]
        published = PUBLISHED_TTFT_S["local"][wave] / PUBLISHED_TTFT_S["array"][wave]
        print(f"array against local at {wave}: {ratio:.2f} times as fast here, {published:.2f} published")
    for complaint in bad:
        print(f"does not hold: {complaint}", file=sys.stderr)
    return 1 if bad else 0


def row(medians: Medians, name: str, wave: int, fixed_s: float, rate: float, size: int) -> tuple[str, list[str]]:
    """One line of the table, and what of it does not hold."""
    together, spread = medians[name, "together", wave]
    arrival, shortest = medians[name, "arrival", wave][0], medians[name, "shortest", wave][0]
    expected = fixed_s + wave * size / rate
    off, share = together / expected - 1, (shortest - fixed_s) / (together - fixed_s)
    bad = []
    if abs(off) > max(TOLERANCE, spread):
        bad.append(f"{name} at {wave}, all at once: {together:.3f} s is {off:+.1%} off {expected:.3f} s")
    if wave >= 16 and share > MEDIAN_SHARE_MAX:
        bad.append(f"{name} at {wave}, shortest first: median {share:.2f} of all at once, t0 apart")
    published = PUBLISHED_TTFT_S[name]
    line = (
        f"{name:6}  {wave:7}  {together:11.3f}  {expected:10.3f}  {off:+5.1%}  {arrival:7.3f}  {shortest:8.3f}  "
        f"{share:14.2f} | {published[wave]:9.2f}  {together / medians[name, 'together', 8][0]:.2f} "
        f"({published[wave] / published[8]:.2f} published)"
    )
    return line, bad


if __name__ == "__main__":
    sys.exit(main())
