"""What a benchmark measured, as data: the shape of `rewarm bench -o`, schema 1. `docs/reference/bench.md` explains it.

Names carry their units. A number that could not be had is null, never zero. Whatever a formula made says `modelled`.
"""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA = 1


class Percentiles(msgspec.Struct, frozen=True):
    """Nearest-rank percentiles over the requests of a wave; null where that request never got its bytes."""

    p50: float | None
    p90: float | None
    p99: float | None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a wave: the full sample behind the percentiles. `ttft_s` is null when a block was missing.

    Seconds count from the request's own intended start, which is `intended_s` after the cell's: when the client had
    submitted it, when its first blocks had come back verified, when its last had, and when, by the cell's modelled
    decode, its last output token would have come (null where decode is not modelled). The first two and the last are
    null in results of versions that did not keep them. A server adds `live`; its blocks are not seen, so `hits` and
    `misses` count the request itself.
    """

    session: int
    ttft_s: float | None
    hits: int
    misses: int
    submitted_s: float | None = None
    first_byte_s: float | None = None
    last_byte_s: float | None = None
    modelled_end_s: float | None = None
    intended_s: float = 0.0
    host: str | None = None
    """The node that asked, in a run on several."""
    live: LiveRequest | None = None


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a server did with one request. `end_s` counts as the other times of the request do; tokens are those that
    the server reported. `failure` says why there is no answer; null: it was answered whole."""

    end_s: float | None
    tpot_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    failure: str | None = None


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the load client itself was: CPU time of its process over the time of the cell, and how late its event
    loop woke up. `limits` says where its share of a number is too large for that to be the server's; empty: nowhere."""

    cpu_share: float
    lag_s: Percentiles
    lag_max_s: float
    limits: list[str]


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's cell has beside `ttft_s`: time per output token after the first, intended start to the end of
    the answer, output tokens of all requests over the time of the cell, and prompt tokens, in all and from a cache as
    the server reported it (null: it reports none). `gaps` counts the waits between pieces of text of one answer:
    [upper bound in s, waits], 20 buckets a decade."""

    tpot_s: Percentiles
    e2e_s: Percentiles
    output_tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int | None
    gaps: list[tuple[float, int]]
    client: ClientLoad


class CellBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one cell: what the run claims (payload, padding, log), what the kernel counted for the process, and
    what the block device delivered to everybody."""

    payload: int
    padding: int
    log: int
    kernel: int | None
    device: int | None


class Recompute(msgspec.Struct, frozen=True, kw_only=True):
    """Computing the same prefixes anew: on the named GPUs, one request after another from the same start, or, with the
    source `measured`, on the server itself with as many prompts that it had never seen; then there are no GPUs to name.
    """

    ttft_s: Percentiles
    tokens_per_s: float
    break_even_bytes_per_s: float | None
    gpu: str | None
    gpus: int | None
    mfu: float | None
    source: str


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding after a restore, by a formula: seconds per output token while all requests of the cell decode together,
    and from the intended start to the last of `output_tokens`."""

    tpot_s: float
    e2e_s: Percentiles
    output_tokens: int
    source: str


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One wave: `concurrency` restores started at one moment on one target. `restored_tokens_per_s` and
    `read_bytes_per_s` divide everything that came back right by the time to the last byte of it."""

    target: str
    emulated: bool
    concurrency: int
    repeat: int
    ttft_s: Percentiles
    modelled_s: float
    """The modelled part of every `ttft_s`: prefill of the job's new tokens. 0: `ttft_s` is measured throughout."""
    seconds: float
    restored_tokens_per_s: float | None
    read_bytes_per_s: float | None
    ceiling_share: float | None
    cpu_s_per_gb: float | None
    client_cpu_share: float
    """CPU time of the client's thread over the time of the wave; near 1 the client is what was measured."""
    hits: int
    misses: int
    miss_causes: dict[str, int]
    wrong_blocks: int
    compared: str
    """How much of what came back was compared: `every byte`, or `8 bytes of every 4096`."""
    cold: str
    cold_reason: str
    bytes: CellBytes | None
    device: str
    recompute: Recompute | None
    requests: list[Request]
    live: Live | None = None
    decode: Decode | None = None


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """Raw O_DIRECT reads of the same files in the same run, without a store. For an emulated target the smaller of
    that and its rate."""

    target: str
    emulated: bool
    repeat: int
    block_bytes: int
    in_flight_bytes: int
    read_bytes_per_s: float
    cpu_s_per_gb: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one target and concurrency over the repeats. `spread` is (largest - smallest) / median of the p50."""

    target: str
    emulated: bool
    concurrency: int
    repeats: int
    ttft_s: Percentiles
    restored_tokens_per_s: float | None
    read_bytes_per_s: float | None
    ceiling_share: float | None
    cpu_s_per_gb: float | None
    spread: float | None
    misses: int
    cold: str
    recompute: Recompute | None
    live: LiveSummary | None = None


class LiveSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of what only a server has. `cached_share` is that of its prompt tokens; `client_limits` of any repeat."""

    tpot_s: Percentiles
    e2e_s: Percentiles
    output_tokens_per_s: float
    cached_share: float | None
    client_limits: list[str]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Two medians (p50 of `ttft_s`) at one concurrency. `ratio` is that of `against` over that of `target`: above 1
    the target is faster. `noise` is the larger spread of the two; null with one repeat. `claimed` says whether the
    difference is larger than the noise; against recompute, which is modelled, the noise is the target's alone."""

    target: str
    against: str
    concurrency: int
    emulated: bool
    ratio: float | None
    noise: float | None
    claimed: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `job` is the job as it was run, defaults included."""

    schema: int
    version: str
    host: dict[str, Any]
    seed: int
    job: dict[str, Any]
    sizes: dict[str, int]
    media: dict[str, Any]
    ceiling: list[Ceiling]
    cells: list[Cell]
    summary: list[Summary]
    verdicts: list[str]
    notes: list[str]
    differences: list[Difference] = []

    @property
    def failures(self) -> list[str]:
        """Why this result must not be believed or is bad news; empty for a clean run."""
        return [line for cell in self.cells for line in _failures(cell)]


def _failures(cell: Cell) -> list[str]:
    where = f"{cell.target}, concurrency {cell.concurrency}, repeat {cell.repeat}"
    found = []
    if cell.cold == "failed":
        found.append(f"{where}: not cold: {cell.cold_reason}")
    if cell.wrong_blocks:
        found.append(f"{where}: {cell.wrong_blocks} blocks came back with other bytes than were stored")
    if cell.misses:
        causes = ", ".join(f"{count} {cause}" for cause, count in cell.miss_causes.items())
        what = "blocks missed" if cell.live is None else "requests failed"
        found.append(f"{where}: {cell.misses} of {cell.hits + cell.misses} {what}: {causes}")
    return found
