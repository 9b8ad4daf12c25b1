"""The probe on a real directory, with small cells: its matrix, its proof, its limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from rewarm.bench import precondition, probe
from rewarm.bench.histogram import histogram
from rewarm.bench.medium import medium_of
from rewarm.bench.probe import ProbeResult, file_bytes, run_probe
from rewarm.cli import exits, main
from rewarm.errors import ConfigError, StorageError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "FILE_BYTES_MAX", 16 * MIB)
    monkeypatch.setattr(probe, "FILE_BYTES_MIN", 16 * MIB)
    monkeypatch.setattr(probe, "CELL_S_MAX", 0.02)


def test_every_cell_is_measured_and_reads_are_proven(counted: Path, stage: Any) -> None:
    told: list[str] = []
    result = run_probe([counted], stage, told.append)
    cells = [(r.operation, r.block_bytes, r.in_flight_bytes) for r in result.readings]
    assert len(set(cells)) == len(cells) == 2 * (4 + 4 + 3 + 2) + 4
    assert all(in_flight >= block for _, block, in_flight in cells)
    for reading in result.readings:
        assert reading.cold == (None if reading.operation == "write" else "proven")
        assert 0 < reading.bytes_moved <= 16 * MIB
        assert reading.bytes_per_s == pytest.approx(reading.bytes_moved / reading.seconds)
        assert 0 < reading.latency_s.p50 <= reading.latency_s.p90 <= reading.latency_s.p99 <= reading.latency_s.max
        assert sum(count for _, count in reading.latency_histogram) == reading.bytes_moved // reading.block_bytes
    assert result.read_bytes_per_s == max(r.bytes_per_s for r in result.readings if r.operation == "read")
    assert result.failures == []
    assert list(counted.iterdir()) == []
    assert len(told) == 1
    assert told[0].startswith("removed ")


def test_the_file_fits_the_room_that_there_is(tmp_path: Path) -> None:
    medium = medium_of(tmp_path)
    plenty = msgspec.structs.replace(medium, free_bytes=1 << 40, size_bytes=1 << 40)
    assert file_bytes(plenty) == 16 * MIB
    little = msgspec.structs.replace(medium, free_bytes=31 * MIB, size_bytes=31 * MIB)
    with pytest.raises(StorageError, match=r"has 30.\d MiB to give and a probe needs 32.0 MiB"):
        file_bytes(little)


def test_a_missing_directory_is_named(tmp_path: Path, stage: Any) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        run_probe([tmp_path / "missing"], stage, lambda text: None)


def test_histograms_count_every_value_in_the_bucket_that_ends_above_it() -> None:
    step = 10 ** (1 / 20)
    assert histogram(np.array([1e-7, 1e-6])) == [(1e-6, 2)]
    for value in (1.5e-6, 5e-4, 2.0):
        ((bound, count),) = histogram(np.array([value] * 3))
        assert count == 3
        assert value <= bound < value * step * (1 + 1e-9)
    bounds = [bound for bound, _ in histogram(np.geomspace(1e-6, 10, 500))]
    assert bounds == sorted(set(bounds))


def test_the_command_answers_and_writes_the_medium_file(
    counted: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("out") / "medium.json"
    result = CliRunner().invoke(main, ["probe", str(counted), "--json", "-o", str(out)])
    assert result.exit_code == exits.OK, result.stderr
    written = json.loads(out.read_text())
    assert written == json.loads(result.stdout)
    assert msgspec.json.decode(out.read_bytes(), type=ProbeResult).schema == 1
    documented = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "bench.md").read_text()
    assert [name for name in (*written, *written["readings"][0]) if f"`{name}`" not in documented] == []


def test_the_table_has_a_line_for_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "BLOCK_BYTES", (MIB,))
    monkeypatch.setattr(probe, "IN_FLIGHT_BYTES", (0, 4 * MIB))
    result = CliRunner().invoke(main, ["probe", str(tmp_path)])
    assert result.exit_code == exits.OK, result.stderr
    assert [line.split()[1] for line in result.stdout.splitlines() if "1.0 MiB" in line] == [
        *["read"] * 2,
        *["write"] * 2,
        "mixed",
    ]
    assert "ceiling: read" in result.stdout
    assert "removed" in result.stderr


def test_several_media_are_measured_one_by_one_and_together(counted: Path, stage: Any) -> None:
    drives = [counted / "a", counted / "b"]
    for drive in drives:
        drive.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "BLOCK_BYTES", (MIB,))
        patch.setattr(probe, "IN_FLIGHT_BYTES", (0, 4 * MIB))
        result = run_probe(drives, stage, lambda text: None)
    cells = [(r.path, r.operation) for r in result.readings]
    for drive in map(str, drives):
        assert [op for path, op in cells if path == drive] == ["read", "read", "write", "write", "mixed"]
    together = {r.operation: r for r in result.readings if r.path is None}
    assert (together["read"].cold, together["write"].cold) == ("proven", None)
    assert result.read_bytes_per_s == together["read"].bytes_per_s
    assert result.write_bytes_per_s == together["write"].bytes_per_s
    assert [medium.path for medium in result.media] == list(map(str, drives))
    assert [list(drive.iterdir()) for drive in drives] == [[], []]
    with pytest.raises(ConfigError, match="twice"):
        run_probe([counted, counted / "a" / ".."], stage, lambda text: None)


def test_a_full_probe_wears_the_medium_in_until_its_rate_is_steady(
    counted: Path, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "BLOCK_BYTES", (MIB,))
    monkeypatch.setattr(probe, "IN_FLIGHT_BYTES", (0, 4 * MIB))
    monkeypatch.setattr(probe, "file_bytes", lambda medium, full: 16 * MIB)
    monkeypatch.setattr(precondition, "WINDOW_S", 0.01)
    monkeypatch.setattr(precondition, "RANGE_MAX", 1e9)
    monkeypatch.setattr(precondition, "SLOPE_MAX", 1e9)
    result = run_probe([counted], stage, lambda text: None, full=True)
    assert result.steady is not None
    assert result.steady.reached
    assert len(result.steady.windows_bytes_per_s) == 5
    assert result.steady.written_bytes > 2 * 16 * MIB
    assert msgspec.json.decode(msgspec.json.encode(result), type=ProbeResult) == result
    monkeypatch.setattr(precondition, "STEADY_S_MAX", 0.0)
    result = run_probe([counted], stage, lambda text: None, full=True)
    assert any("was not steady" in note for note in result.notes)


@pytest.mark.parametrize(
    ("rates", "steady"),
    [
        ([5.0, 1.0, 1.02, 0.98, 1.0, 1.01], True),
        ([1.0, 1.0, 1.0, 1.0], False),  # too few
        ([1.0, 1.3, 1.0, 1.0, 1.0], False),  # range
        ([1.0, 0.97, 0.94, 0.91, 0.88], False),  # slope
    ],
)
def test_steady_is_a_small_range_and_a_small_slope(rates: list[float], steady: bool) -> None:
    assert precondition.is_steady(rates) == steady
