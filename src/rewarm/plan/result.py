"""A finished plan, as data: what `rewarm plan --json` prints. Seconds, bytes, tokens, US dollars; names carry units."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = "rewarm.plan/1"


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """One input of the plan and where its value comes from. `source` says more where there is more to say."""

    name: str
    value: str | float | int | bool | None
    origin: Literal["measured", "given", "assumed"]
    source: str = ""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles."""

    p50: float
    p90: float
    p99: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate at one point of the load. `concurrency` is per node and null for open loads and traces;
    `requests_per_s` is of the fleet. `restoring_share` is the share of time a node's busiest medium restores: its
    duty."""

    medium: str
    concurrency: int | None
    requests_per_s: float
    ttft_s: Percentiles
    tpot_s: float | None
    output_tokens_per_s: float
    hit_tokens_share: float
    restoring_share: float
    saturated: bool
    reason: str


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate's figures at the heaviest point do when one input is 10 % larger (a share: 0.1 larger, at most
    1): relative changes, so -0.09 is 9 % less. From a sample of the load with the same seed."""

    medium: str
    input: str
    ttft_p90: float
    output_tokens_per_s: float
    saturation_requests_per_s: float
    usd_per_million_tokens: float


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a candidate's fleet ends: requests/s per resource, the first of them, and the concurrency per node from
    which more clients only wait (N* of the closed loop's bounds)."""

    medium: str
    requests_per_s: float
    limit: str
    ends: dict[str, float]
    knee_concurrency: float
    gpu_s_per_request: float
    reason: str


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """Loading against computing on one medium, one request alone. `length_tokens`: shortest context worth loading
    (null: none up to a million tokens). `bandwidth_bytes_per_s`: what the workload's context needs (null: no bandwidth
    makes up for the fixed time)."""

    medium: str
    length_tokens: int | None
    context_tokens: int
    bandwidth_bytes_per_s: float | None
    medium_bytes_per_s: float
    load_s: float
    compute_s: float
    both_s: float
    """Loading from the back while computing from the front."""
    reason: str


class SharingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes one array serves better than their own local drives at a duty. Null: any number."""

    duty: float
    nodes_by_median: int | None
    nodes_by_mean: int | None
    nodes_against_recompute: int | None


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """A shared medium against a local one. The duties are those above which the array is slower with the plan's
    nodes: by its median and by its mean restore. 0: it never is faster; 1: it always is."""

    array: str
    local: str
    nodes: int
    ports: int
    drives: int
    array_bytes_per_s: float
    node_bytes_per_s: float
    local_bytes_per_s: float
    duty_by_median: float
    duty_by_mean: float
    duty_by_mean_with_moves: float
    """The same when turns that move to another node are recomputed with local drives."""
    curve: tuple[SharingPoint, ...]
    by_ports: dict[str, float]
    """Duty by the mean for other numbers of ports."""
    by_drives: dict[str, float]
    by_link: dict[str, float]
    """Duty by the mean for other rates of one port, in Gb/s."""
    verdict: str


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Cache size against token hit rate, from the trace of one node. `bytes` is tokens x bytes per token."""

    token_hit_rate: float
    cached_tokens: int
    cached_bytes: float
    share_of_possible: float


class Writes(msgspec.Struct, frozen=True, kw_only=True):
    """What an admission rule writes to one medium: bytes per day over all its drives, drive writes per day needed, and
    the years until the rated endurance (five years of `dwpd`) is used up. Null where the plan does not say."""

    medium: str
    admission: str
    bytes_per_day: float
    drive_writes_per_day: float | None
    rated_drive_writes_per_day: float | None
    years: float | None
    write_rate_share: float | None
    """Mean write rate over what the drives write at."""
    token_hit_rate: float | None
    written_share: float
    """Bytes written against admitting everything."""
    reason: str


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one candidate at a point of the load: the GPU time that requests take, and the storage that has to be
    there, over the tokens served (input and output). `break_even_interval_s`: keeping a token is cheaper than computing
    it again while it is asked for at least this often; null without a capacity or price."""

    medium: str
    requests_per_s: float
    gpu_usd_per_hour: float
    storage_usd_per_hour: float
    usd_per_million_tokens: float
    break_even_interval_s: float | None
    reason: str


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """An input that changes the verdict when it moves from `value` to `turns_at`."""

    input: str
    value: float
    turns_at: float
    verdict: str
    text: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: one sentence, the kind of the choice, and the inputs nearest to changing it."""

    sentence: str
    choice: str
    kind: str
    met: bool
    changes: tuple[Change, ...]


class Residual(msgspec.Struct, frozen=True, kw_only=True):
    """A measured cell against the calibrated model: `error` is model / measured - 1."""

    target: str
    concurrency: int
    measured_s: float
    model_s: float
    error: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed time and effective bandwidth fitted to one target of a benchmark's result."""

    target: str
    order: str
    fixed_s: float
    bytes_per_s: float
    probed_bytes_per_s: float | None
    at_peak: bool
    residuals: tuple[Residual, ...]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan answers, with the inputs it was made from."""

    schema: str
    version: str
    model: str
    bytes_per_token: int
    context_tokens: int
    context_bytes: int
    inputs: tuple[Input, ...]
    verdict: Verdict
    cells: tuple[Cell, ...]
    effects: tuple[Effect, ...]
    saturation: tuple[Saturation, ...]
    break_even: tuple[BreakEven, ...]
    sharing: tuple[Sharing, ...]
    capacity: tuple[Capacity, ...]
    writes: tuple[Writes, ...]
    money: tuple[Money, ...]
    calibration: tuple[Calibration, ...]
    notes: tuple[str, ...]
