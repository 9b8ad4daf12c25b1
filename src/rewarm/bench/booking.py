"""From what a wave of restores was seen to do to the cell of the result: one host's, or its share of a cell of several.

The one place where bytes are judged cold, misses are counted and the modelled prefill and decode are added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rewarm.bench.cold import Claim, judge
from rewarm.bench.pools import Pool
from rewarm.bench.recompute import Prefiller, percentiles
from rewarm.bench.result import Cell, CellBytes, Decode, Request
from rewarm.bench.wave import Restore, WaveReading
from rewarm.store.contract import Outcome
from rewarm.workload.job import Job


def book_wave(
    job: Job,
    name: str,
    repeat: int,
    wave: WaveReading,
    *,
    concurrency: int,
    pool: Pool,
    lengths: Sequence[int],
    prefiller: Prefiller,
    host: str | None = None,
) -> Cell:
    """The cell of a wave on target `name`; `lengths` are the blocks of a session in bytes. Its ceiling share is
    left open. A request that missed a block, or got a wrong one, has an infinite time to first token."""
    restores, bytes_per_session = wave.restores, sum(lengths)
    restored_tokens = job.tokens // job.block_tokens * job.block_tokens
    payload_bytes = sum(restore.hit_bytes for restore in restores)
    claim = Claim(payload=payload_bytes, padding=wave.padding_bytes, log=wave.log_bytes)
    cold, reason = judge(claim, wave.counted, pool.counting)
    modelled_s = prefiller.seconds(job.new_tokens, restored_tokens) or 0.0
    tpot_s = prefiller.tpot_s(len(restores), job.tokens + job.new_tokens, job.kv_dtype)
    decode_s = None if tpot_s is None else (job.output_tokens - 1) * tpot_s
    requests = [_request(restore, modelled_s, decode_s, len(lengths), host) for restore in restores]
    outcomes = sum((restore.outcomes for restore in restores), Counter[Outcome]())
    hits, blocks = outcomes.pop(Outcome.HIT, 0), len(restores) * len(lengths)
    rate = payload_bytes / wave.seconds if wave.seconds else 0.0
    return Cell(
        target=name,
        emulated=job.targets[name].emulated_bytes_per_s is not None,
        concurrency=concurrency,
        repeat=repeat,
        ttft_s=percentiles(times_to_first_token(requests)),
        modelled_s=modelled_s,
        seconds=wave.seconds,
        restored_tokens_per_s=rate / bytes_per_session * restored_tokens,
        read_bytes_per_s=rate,
        ceiling_share=None,  # known when the last ceiling is
        cpu_s_per_gb=wave.counted.cpu_s / payload_bytes * 1e9 if payload_bytes else None,
        client_cpu_share=wave.client_cpu_s / wave.counted.at_s,
        hits=hits,
        misses=blocks - hits,
        miss_causes={str(cause): count for cause, count in outcomes.items()},
        wrong_blocks=sum(restore.wrong_blocks for restore in restores),
        compared="every byte" if wave.whole else "8 bytes of every 4096",
        cold=cold,
        cold_reason=reason,
        bytes=CellBytes(
            payload=claim.payload,
            padding=claim.padding,
            log=claim.log,
            kernel=wave.counted.process_read_bytes,
            device=wave.counted.device_read_bytes,
        ),
        device=wave.device,
        recompute=prefiller.wave(len(restores), restored_tokens, job.new_tokens, bytes_per_session)
        if job.shape == "wave"
        else None,
        requests=requests,
        decode=None if tpot_s is None else modelled_decode(requests, tpot_s, job.output_tokens),
    )


def modelled_decode(requests: Sequence[Request], tpot_s: float, output_tokens: int) -> Decode:
    """The decode of a cell whose requests end as `modelled_end_s` says."""
    ends = [_or_never(request.modelled_end_s) for request in requests]
    return Decode(tpot_s=tpot_s, e2e_s=percentiles(ends), output_tokens=output_tokens, source="modelled")


def times_to_first_token(requests: Sequence[Request]) -> list[float]:
    """Seconds; infinite for a request that was not restored."""
    return [_or_never(request.ttft_s) for request in requests]


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _request(restore: Restore, modelled_s: float, decode_s: float | None, blocks: int, host: str | None) -> Request:
    whole = restore.hits == restore.outcomes.total() and not restore.wrong_blocks
    ttft_s = restore.last_byte_s + modelled_s if whole else None
    return Request(
        session=restore.session,
        ttft_s=ttft_s,
        hits=restore.hits,
        misses=blocks - restore.hits,
        submitted_s=restore.submitted_s,
        first_byte_s=restore.first_byte_s,
        last_byte_s=restore.last_byte_s if restore.hits else None,
        modelled_end_s=None if ttft_s is None or decode_s is None else ttft_s + decode_s,
        intended_s=restore.intended_s,
        host=host,
    )
