"""The demo: what it plans for a machine, and a small one from end to end."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from rewarm.bench import demo
from rewarm.bench.demo import Trial, disk_room, plan_demo
from rewarm.bench.medium import Medium
from rewarm.bench.pools import needed_bytes
from rewarm.bench.result import Result
from rewarm.cli import exits, main
from rewarm.errors import StorageError

GB = 10**9
FAST = Trial(write_bytes_per_s=2e9, read_bytes_per_s=5e9)
MEDIUM = Medium(
    path="/mnt/disk", file_system="ext4", source="/dev/nvme0n1", device="nvme0n1", device_number=(259, 0),
    device_model=None, rotational=False, backing=None, size_bytes=1000 * GB, free_bytes=500 * GB,
)  # fmt: skip
TOKEN_BYTES = 131072


def seconds_of(tokens: int, repeats: int, trial: Trial, rates: list[float]) -> float:
    """How long filling and all waves take at half of the trial's rates, the emulated ones at theirs."""
    size = tokens * TOKEN_BYTES
    reads = 1 / (0.5 * trial.read_bytes_per_s) + sum(1 / rate for rate in rates)
    return 32 * size / (0.5 * trial.write_bytes_per_s) + repeats * (8 + 16 + 32) * size * reads


@pytest.mark.parametrize("room", [240 * 2**20, GB, 3 * GB])
@pytest.mark.parametrize("read", [20e6, 100e6, 300e6, 1e9, 7e9])
def test_the_plan_fits_disk_and_time(room: int, read: float) -> None:
    trial = Trial(write_bytes_per_s=read / 2, read_bytes_per_s=read)
    job = plan_demo(MEDIUM, room, trial).job
    assert needed_bytes(32 * job.tokens * TOKEN_BYTES) <= room
    assert job.tokens % job.block_tokens == 0
    assert job.tokens >= demo.BLOCKS_MIN * demo.BLOCK_TOKENS
    rates = [t.emulated_bytes_per_s for t in job.targets.values() if t.emulated_bytes_per_s is not None]
    smallest = job.tokens == demo.BLOCKS_MIN * demo.BLOCK_TOKENS and job.repeats == 1
    assert seconds_of(job.tokens, job.repeats, trial, rates) <= demo.SECONDS or smallest


def test_a_fast_medium_gets_the_whole_demo_and_a_slow_one_less_and_it_is_said() -> None:
    plan = plan_demo(MEDIUM, 3 * GB, FAST)
    assert (plan.job.tokens, plan.job.repeats, plan.job.concurrency) == (512, 3, (8, 16, 32))
    assert not any("shorter" in note or "two minutes" in note for note in plan.notes)
    slow = plan_demo(MEDIUM, 3 * GB, Trial(write_bytes_per_s=50e6, read_bytes_per_s=100e6))
    assert slow.job.tokens < 512
    assert any("to end in two minutes" in note for note in slow.notes)
    small = plan_demo(MEDIUM, GB, FAST)
    assert any("sessions were made shorter: /mnt/disk has" in note for note in small.notes)


def test_the_emulated_media_have_the_published_ratio_and_room_above_them() -> None:
    targets = plan_demo(MEDIUM, 3 * GB, FAST).job.targets
    local, array = targets["local"].emulated_bytes_per_s, targets["array"].emulated_bytes_per_s
    assert local is not None
    assert array is not None
    assert array / local == pytest.approx(10.5 / 6.94)
    assert array <= 0.6 * FAST.read_bytes_per_s
    assert targets["flash"].emulated_bytes_per_s is None
    assert len({target.url for target in targets.values()}) == 1, "one disk, one pool"


@pytest.mark.parametrize(("kind", "name"), [("tmpfs", "tmpfs"), ("nfs4", "nfs4"), ("xfs", "flash")])
def test_only_what_may_be_flash_is_called_flash(kind: str, name: str) -> None:
    medium = msgspec.structs.replace(MEDIUM, file_system=kind)
    assert next(iter(plan_demo(medium, 3 * GB, FAST).job.targets)) == name


def test_the_room_is_bounded_and_too_little_is_an_error() -> None:
    assert disk_room(MEDIUM) == 3 * GB
    assert disk_room(msgspec.structs.replace(MEDIUM, size_bytes=10 * GB, free_bytes=2 * GB)) == int(1.8 * GB)
    with pytest.raises(StorageError, match=r"/mnt/disk has .* to give and the smallest demo needs 224.0 MiB"):
        disk_room(msgspec.structs.replace(MEDIUM, size_bytes=10 * GB, free_bytes=GB // 4))


def test_a_small_demo_from_end_to_end(
    counted: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TOKENS_MAX", 32)
    monkeypatch.setattr(demo, "REPEATS", 1)
    monkeypatch.setattr(demo, "_TRIAL_BYTES", 32 << 20)
    out = tmp_path_factory.mktemp("out") / "result.json"
    page = out.with_name("report.html")
    shown = CliRunner().invoke(main, ["demo", "--dir", str(counted), "-o", str(out), "--report", str(page)])
    result = msgspec.json.decode(out.read_bytes(), type=Result)
    assert [cell.target for cell in result.cells] == ["flash", "local", "array"] * 3
    assert {cell.cold for cell in result.cells} == {"proven"}
    assert shown.exit_code == exits.OK, shown.stderr
    assert list(counted.iterdir()) == []
    assert result.verdicts[0].split(":")[0] in page.read_text()
    lines = shown.stdout.splitlines()
    assert [line for line in lines if ("local" in line or "array" in line) and "emulated" not in line] == []
    assert any(line.startswith("flash: against recompute on 1 x L4 (modelled") for line in lines)
    assert "removed" in shown.stderr
    rows = {tuple(line.split("  ")[1:2]) for line in lines if "TTFT p50" in line}
    assert rows == {("flash (measured)",), ("recompute (modelled)",), ("local (emulated)",), ("array (emulated)",)}
