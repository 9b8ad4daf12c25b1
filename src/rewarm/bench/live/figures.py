"""From the answers of a cell to its figures, and to what they are worth: the server's, or the client's. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from rewarm.bench.histogram import histogram
from rewarm.bench.live.client import Answer
from rewarm.bench.live.load import LoadReading
from rewarm.bench.recompute import percentiles
from rewarm.bench.result import (
    Cell,
    ClientLoad,
    Live,
    LiveRequest,
    LiveSummary,
    Percentiles,
    Recompute,
    Request,
    Summary,
)

CPU_SHARE_MAX = 0.8
"""The client is one thread: above this share of a processor its times are its own."""
LAG_SHARE_MAX = 0.05
"""An event loop that wakes up later than this share of a median makes that median its own."""
LAG_FLOOR_S = 0.002
"""Later than this a wake-up must be before it counts: every machine has that much noise."""
_NONE = Percentiles(None, None, None)


def cell_of(
    reading: LoadReading,
    *,
    target: str,
    concurrency: int,
    repeat: int,
    reason: str,
    recompute: Recompute | None,
) -> Cell:
    """The cell of one load on one server; `reason` says how it was made cold."""
    answers = reading.answers
    failed = Counter(answer.cause for answer in answers if answer.cause is not None)
    ttft_s = percentiles([_ttft_s(answer) for answer in answers])
    cached = _cached_tokens(answers)
    firsts = [answer.first for answer in answers if answer.first is not None and answer.cause is None]
    restored_s = max(firsts, default=reading.start) - reading.start
    live = _live(reading, ttft_s, cached)
    return Cell(
        target=target,
        emulated=False,
        concurrency=concurrency,
        repeat=repeat,
        ttft_s=ttft_s,
        modelled_s=0.0,
        seconds=reading.seconds,
        restored_tokens_per_s=None if cached is None or not firsts else cached / restored_s,
        read_bytes_per_s=None,
        ceiling_share=None,
        cpu_s_per_gb=None,
        client_cpu_share=live.client.cpu_share,
        hits=len(answers) - failed.total(),
        misses=failed.total(),
        miss_causes=dict(failed),
        wrong_blocks=0,
        compared="nothing: what a server answers is its own",
        cold="not_provable",
        cold_reason=reason,
        bytes=None,
        device="server",
        recompute=recompute,
        requests=[_request(answer, reading.start) for answer in answers],
        live=live,
    )


def measured_recompute(reading: LoadReading) -> Recompute | None:
    """The load of prompts that the server had never seen; None when it failed some of them."""
    answers = reading.answers
    firsts = [answer.first for answer in answers if answer.first is not None]
    if any(answer.cause for answer in answers) or not firsts:
        return None
    tokens = sum(answer.prompt_tokens or 0 for answer in answers)
    return Recompute(
        ttft_s=percentiles([_ttft_s(answer) for answer in answers]),
        tokens_per_s=tokens / (max(firsts) - reading.start),
        break_even_bytes_per_s=None,
        gpu=None,
        gpus=None,
        mfu=None,
        source="measured",
    )


def with_live(summaries: Sequence[Summary], cells: Sequence[Cell]) -> list[Summary]:
    """The summaries with the medians of what only servers have."""
    return [
        msgspec.structs.replace(row, live=_summary([cell for cell in cells if _belongs(cell, row)]))
        for row in summaries
    ]


def _belongs(cell: Cell, row: Summary) -> bool:
    return (cell.target, cell.concurrency) == (row.target, row.concurrency)


def _summary(cells: Sequence[Cell]) -> LiveSummary:
    lives = [cell.live for cell in cells if cell.live]
    shares = [
        live.cached_tokens / live.prompt_tokens
        for live in lives
        if live.cached_tokens is not None and live.prompt_tokens
    ]
    return LiveSummary(
        tpot_s=_medians([live.tpot_s for live in lives]),
        e2e_s=_medians([live.e2e_s for live in lives]),
        output_tokens_per_s=median(live.output_tokens_per_s for live in lives),
        cached_share=median(shares) if len(shares) == len(lives) else None,
        client_limits=sorted({limit for live in lives for limit in live.client.limits}),
    )


def _medians(found: Sequence[Percentiles]) -> Percentiles:
    return Percentiles(*(_median([getattr(each, rank) for each in found]) for rank in ("p50", "p90", "p99")))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


def _ttft_s(answer: Answer) -> float:
    """Seconds from the intended start to the first text; infinite for a request that was not answered whole."""
    return float("inf") if answer.cause or answer.first is None else answer.first - answer.intended


def _cached_tokens(answers: Sequence[Answer]) -> int | None:
    """Prompt tokens from a cache, as reported; None when an answered request does not report them."""
    known = [answer.cached_tokens for answer in answers if answer.cause is None]
    return None if None in known or not known else sum(filter(None, known))


def _request(answer: Answer, start: float) -> Request:
    def since(at: float | None) -> float | None:
        return None if at is None else at - answer.intended

    whole = answer.cause is None
    return Request(
        session=answer.session,
        ttft_s=since(answer.first) if whole else None,
        hits=int(whole),
        misses=int(not whole),
        submitted_s=since(answer.sent),
        intended_s=answer.intended - start,
        live=LiveRequest(
            end_s=since(answer.end),
            tpot_s=answer.tpot_s if whole else None,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            failure=answer.failure,
        ),
    )


def _live(reading: LoadReading, ttft_s: Percentiles, cached: int | None) -> Live:
    good = [answer for answer in reading.answers if answer.cause is None]
    tpots = [answer.tpot_s for answer in good if answer.tpot_s is not None]
    ends = [answer.end - answer.intended for answer in good if answer.end is not None]
    tpot_s = percentiles(tpots) if tpots else _NONE
    return Live(
        tpot_s=tpot_s,
        e2e_s=percentiles(ends) if ends else _NONE,
        output_tokens_per_s=sum(answer.output_tokens for answer in good) / reading.seconds,
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in reading.answers),
        cached_tokens=cached,
        gaps=histogram(np.array([gap for answer in good for gap in answer.gaps])),
        client=_client(reading, ttft_s, tpot_s),
    )


def _client(reading: LoadReading, ttft_s: Percentiles, tpot_s: Percentiles) -> ClientLoad:
    lag_s = percentiles(reading.lags_s) if reading.lags_s else _NONE
    cpu_share = reading.cpu_s / reading.seconds
    sent = [answer.sent - answer.intended for answer in reading.answers if answer.sent is not None]
    limits = [f"the client used {cpu_share:.0%} of a processor"] if cpu_share > CPU_SHARE_MAX else []
    limits += _late("its event loop woke up", lag_s.p90, "first token", ttft_s.p50)
    limits += _late("its event loop woke up", lag_s.p50, "token", tpot_s.p50)
    limits += _late("requests left", percentiles(sent).p50 if sent else None, "first token", ttft_s.p50)
    return ClientLoad(cpu_share=cpu_share, lag_s=lag_s, lag_max_s=max(reading.lags_s, default=0.0), limits=limits)


def _late(what: str, late_s: float | None, figure: str, median_s: float | None) -> list[str]:
    """Whether so late a client makes a median its own."""
    if late_s is None or median_s is None or late_s <= max(LAG_FLOOR_S, LAG_SHARE_MAX * median_s):
        return []
    return [f"{what} {late_s * 1e3:.0f} ms late beside a median time to the {figure} of {median_s * 1e3:.0f} ms"]
