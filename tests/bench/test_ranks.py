"""One process for each rank: what they restore together, how their counters add up, and that none of them stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rewarm.bench.cold import FAILED, PROVEN, Claim, Counting, judge
from rewarm.bench.counters import take_snapshot
from rewarm.bench.rank import RankRestore, RankWave
from rewarm.bench.ranks import RankReaders, merged
from rewarm.bench.replay import run_job
from rewarm.errors import StorageError
from rewarm.geometry.presets import load_model
from rewarm.geometry.sizes import bytes_total
from rewarm.workload.job import Job, make_job
from rewarm.workload.sessions import Sessions, block_lengths, block_ranks, of_rank

MIB = 1 << 20


def job(folder: Path, **changes: Any) -> Job:
    values = {
        "model": "Llama-3.1-8B", "tokens": 48, "block_tokens": 16, "tp": 2, "concurrency": [3], "repeats": 1,
        "targets": {"disk": f"file://{folder}"}, **changes,
    }  # fmt: skip
    return make_job(values, "test")


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.parametrize(
    ("model", "tp", "ranks"), [("Llama-3.1-8B", 8, 8), ("DeepSeek-V3", 8, 1), ("gpt-oss-120b", 2, 2)]
)
def test_ranks_share_out_every_block_of_a_session_once(model: str, tp: int, ranks: int) -> None:
    """Sizes are those that each rank's engine sends; MLA is alike on all ranks and stored by one."""
    lengths = block_lengths(load_model(model), 1024, 64, tp, None)
    owners = block_ranks(load_model(model), 1024, 64, tp, None)
    sessions = Sessions(seed=1, count=2, lengths=tuple(lengths))
    parts = [of_rank(sessions, owners, rank) for rank in sorted(set(owners))]
    assert len(parts) == ranks
    assert sum(part.bytes_per_session for part in parts) == bytes_total(load_model(model), 1024)
    for session in range(2):
        keys = [key for part in parts for key in part.keys(session)]
        assert sorted(keys) == sorted(sessions.keys(session))
        for part in parts:
            assert [sessions.lengths[number % len(lengths)] for number in part.numbers(session)] == list(part.lengths)


def test_a_run_of_several_ranks_is_proven_cold_by_the_sum_of_their_counters(counted: Path, stage: Any) -> None:
    before = children()
    targets = {"disk": f"file://{counted}", "slow": {"url": f"file://{counted}", "rate": "100MB/s"}}
    result = run_job(job(counted, targets=targets), stage, lambda text: None)
    for cell in result.cells:
        assert (cell.cold, cell.misses, cell.wrong_blocks, cell.compared) == (PROVEN, 0, 0, "every byte")
        assert cell.bytes.payload == 3 * 48 * 131072
        assert cell.bytes.kernel is not None
        assert abs(cell.bytes.kernel - cell.bytes.payload - cell.bytes.padding - cell.bytes.log) <= 0.01 * 18 * MIB
        assert len(cell.requests) == 3
    assert result.cells[1].read_bytes_per_s is not None
    assert result.cells[1].read_bytes_per_s <= 100e6, "one emulated medium, however many processes read it"
    assert any(note.startswith("2 processes, one for each rank") for note in result.notes)
    assert result.failures == []
    assert children() == before
    assert list(counted.iterdir()) == []


def wave(kernel: int | None, last_byte_s: float, missing: int = 0) -> RankWave:
    return RankWave(
        restores=[
            RankRestore(
                session=0, outcomes={"hit": 2 - missing} | ({"missing": missing} if missing else {}), hit_bytes=MIB,
                wrong_blocks=0, intended_s=0.0, submitted_s=0.0, first_byte_s=last_byte_s / 2, last_byte_s=last_byte_s,
            )
        ],
        seconds=last_byte_s, counted=msgspec.structs.replace(take_snapshot(), process_read_bytes=kernel, cpu_s=0.5),
        client_cpu_s=0.1, whole=True, padding_bytes=0, log_bytes=0, device="uring",
    )  # fmt: skip


def test_a_request_ends_with_its_last_rank_and_one_rank_that_read_warm_fails_the_run() -> None:
    clock = take_snapshot()
    cold = merged([wave(MIB, 1.0), wave(MIB, 2.0, missing=1)], clock)
    assert (cold.seconds, cold.restores[0].last_byte_s, cold.restores[0].first_byte_s) == (2.0, 2.0, 0.5)
    assert (cold.restores[0].hits, cold.restores[0].outcomes.total(), cold.counted.cpu_s) == (3, 4, 1.0)
    claim, counting = Claim(payload=2 * MIB, padding=0, log=0), Counting(process=True, device=False)
    assert judge(claim, cold.counted, counting)[0] == PROVEN
    warm = merged([wave(MIB, 1.0), wave(MIB - 32768, 1.0)], clock)
    assert judge(claim, warm.counted, counting)[0] == FAILED
    assert merged([wave(MIB, 1.0), wave(None, 1.0)], clock).counted.process_read_bytes is None


@pytest.mark.crash
def test_a_rank_that_dies_ends_the_run_and_leaves_nothing(
    tmp_path: Path, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    start = RankReaders.wave

    def shot(self: RankReaders, *arguments: Any) -> Any:
        os.kill(self._processes[0].pid, signal.SIGKILL)
        return start(self, *arguments)

    monkeypatch.setattr(RankReaders, "wave", shot)
    with pytest.raises(StorageError, match="rank process"):
        run_job(job(tmp_path), stage, lambda text: None)
    assert children() == before
    assert list(tmp_path.iterdir()) == []
