"""From what a wave of restores was seen to do to the cell of the result: one host's, or its share of a cell of several.

The one place where bytes are judged cold, misses are counted and the modelled prefill is added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rewarm.bench.cold import Claim, judge
from rewarm.bench.pools import Pool
from rewarm.bench.recompute import Prefiller, percentiles
from rewarm.bench.result import Cell, CellBytes, Request
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
    """The cell of a wave on target `name`; `lengths` are the blocks of a session in bytes. Its ceiling share and its
    decode are left open. A request that missed a block, or got a wrong one, has an infinite time to first token."""
    restores = wave.restores
    bytes_per_session = sum(lengths)
    restored_tokens = job.tokens // job.block_tokens * job.block_tokens
    payload_bytes = sum(restore.hit_bytes for restore in restores)
    claim = Claim(payload=payload_bytes, padding=wave.padding_bytes, log=wave.log_bytes)
    cold, reason = judge(claim, wave.counted, pool.counting)
    modelled_s = prefiller.seconds(job.new_tokens, restored_tokens) or 0.0
    requests = [_request(restore, modelled_s, len(lengths), host) for restore in restores]
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
    )


def times_to_first_token(requests: Sequence[Request]) -> list[float]:
    """Seconds; infinite for a request that was not restored."""
    return [float("inf") if request.ttft_s is None else request.ttft_s for request in requests]


def _request(restore: Restore, modelled_s: float, blocks: int, host: str | None) -> Request:
    whole = restore.hits == restore.outcomes.total() and not restore.wrong_blocks
    return Request(
        session=restore.session,
        ttft_s=restore.last_byte_s + modelled_s if whole else None,
        hits=restore.hits,
        misses=blocks - restore.hits,
        submitted_s=restore.submitted_s,
        first_byte_s=restore.first_byte_s,
        last_byte_s=restore.last_byte_s if restore.hits else None,
        intended_s=restore.intended_s,
        host=host,
    )
