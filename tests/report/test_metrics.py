"""The metrics: nothing of `Stats` is left out, names follow the conventions, dashboard, rules and pages agree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rewarm
from rewarm.cli.exporter import StoreWatch, text_of
from rewarm.connectors.vllm import metrics as vllm
from rewarm.store.contract import MISS_CAUSES, REFUSAL_CAUSES, Stats, TierStats
from rewarm.store.inspection import Inspection, inspect_pool
from rewarm.store.metrics import (
    INSPECTION_METRICS,
    METRICS,
    POOL_METRICS,
    STORE_METRICS,
    TIER_METRICS,
    Family,
    pool_families,
    store_families,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "rewarm.json"
RULES = ROOT / "deploy" / "prometheus"
NAME = re.compile(r"(?:vllm:)?rewarm_[a-z_]+")
OURS = {metric.name for metric in METRICS} | {"rewarm_build_info"}


def vllm_names() -> set[str]:
    """What vLLM's endpoint shows: its client library gives counters their suffix."""
    counters = {*vllm._COUNTERS, vllm._FAILED.removeprefix(vllm.PREFIX)}
    return {f"{vllm.PREFIX}{name}_total" for name in counters} | {vllm.PREFIX + name for name in vllm._GAUGES}


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Prometheus' own checker."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: the files are not checked by Prometheus itself (apt: prometheus)")
    return subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, timeout=60, cwd=RULES)


def value_of(families: list[Family], name: str, **labels: str) -> float:
    """One reading."""
    (family,) = [family for family in families if family.name == name]
    (value,) = [s.value for s in family.samples if labels.items() <= s.labels.items()]
    return value


def test_every_field_of_stats_is_a_metric() -> None:
    assert {metric.field for metric in (*STORE_METRICS, *POOL_METRICS)} | {"tiers"} == set(Stats.__struct_fields__)
    assert {metric.field for metric in TIER_METRICS} | {"tier", "medium"} == set(TierStats.__struct_fields__)
    assert {metric.field for metric in (*POOL_METRICS, *INSPECTION_METRICS)} <= set(Inspection.__struct_fields__)


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"rewarm_[a-z][a-z_]*[a-z]", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        assert not metric.name.endswith(("_s", "_ms", "_mb"))


def test_counters_are_those_of_the_store(tmp_path: Path) -> None:
    buffers = np.ones((4, 8192), np.uint8)
    keys = [bytes([number]) * 16 for number in range(4)]
    with rewarm.open(f"file://{tmp_path}?capacity=64MiB", namespace="n") as store:
        store.save(keys[:3], buffers[:3]).wait()
        store.save(keys[:1], buffers[:1]).wait()
        store.load(keys, buffers).wait()
        families = store_families({"disk": store.stats()})
    for name, labels, expected in (
        ("rewarm_hit_blocks_total", {}, 3),
        ("rewarm_missed_blocks_total", {"cause": "missing"}, 1),
        ("rewarm_missed_blocks_total", {"cause": "corrupt"}, 0),
        ("rewarm_stored_blocks_total", {}, 3),
        ("rewarm_already_stored_blocks_total", {}, 1),
        ("rewarm_read_bytes_total", {}, 3 * 8192),
        ("rewarm_blocks", {}, 3),
        ("rewarm_capacity_bytes", {}, 64 << 20),
    ):
        assert value_of(families, name, store="disk", **labels) == expected, name
    for name, causes in (("rewarm_missed_blocks_total", MISS_CAUSES), ("rewarm_refused_blocks_total", REFUSAL_CAUSES)):
        (family,) = [family for family in families if family.name == name]
        assert {sample.labels["cause"] for sample in family.samples} == set(map(str, causes)), "zeros are shown as well"


def test_a_pool_and_one_that_cannot_be_read(tmp_path: Path) -> None:
    with rewarm.open(f"file://{tmp_path}?capacity=64MiB", namespace="n") as store:
        store.save([b"k" * 16], [b"x" * 4096]).wait()
        families = pool_families({"a": inspect_pool(f"file://{tmp_path}"), "b": None})
    assert (value_of(families, "rewarm_pool_up", store="a"), value_of(families, "rewarm_pool_up", store="b")) == (1, 0)
    assert value_of(families, "rewarm_writers", store="a", alive="true") == 1
    assert value_of(families, "rewarm_writers", store="a", alive="false") == 0
    assert value_of(families, "rewarm_blocks", store="a") == 1
    assert all(sample.labels["store"] == "a" for family in families[1:] for sample in family.samples)


def test_a_closed_store_keeps_its_last_counters() -> None:
    watch = StoreWatch()
    with rewarm.open("memory:?capacity=1MiB", namespace="n") as store:
        watch.add("ram", store)
        store.save([b"k" * 16], [b"x" * 4096]).wait()
        before = watch.families()
    assert watch.families() == before
    assert value_of(before, "rewarm_stored_blocks_total", store="ram") == 1


def test_the_text_passes_the_checker_of_prometheus(tmp_path: Path) -> None:
    with rewarm.open(f"file://{tmp_path}?capacity=64MiB", namespace="n") as store:
        for families in (store_families({'a "b"\\': store.stats()}), pool_families({"p": inspect_pool(tmp_path)})):
            text = text_of(lambda families=families: families)  # type: ignore[misc]
            assert {n for n in NAME.findall(text) if n in OURS} == {f.name for f in families} | {"rewarm_build_info"}
            checked = promtool("check", "metrics", text=text)
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def expressions(node: Any) -> list[str]:
    """Every query of the dashboard."""
    if isinstance(node, Mapping):
        own = [node["expr"]] if "expr" in node else []
        return own + [text for child in node.values() for text in expressions(child)]
    return [text for child in node for text in expressions(child)] if isinstance(node, list) else []


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    used = {name for text in expressions(json.loads(DASHBOARD.read_text())) for name in NAME.findall(text)}
    assert used == OURS | vllm_names()


def test_the_rules_use_metrics_that_exist() -> None:
    lines = (RULES / "rewarm-alerts.yml").read_text().splitlines()
    queries = [line for line in lines if "summary:" not in line and "description:" not in line]
    used = set(NAME.findall("\n".join(queries)))
    assert len(used) > 8
    assert used <= OURS | vllm_names()


def test_the_reference_lists_every_metric() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    listed = re.findall(r"^\| `([a-z:_]+)` \| (counter|gauge)", page, re.MULTILINE)
    assert {name for name, _ in listed} == OURS | vllm_names()
    kinds = {metric.name: metric.kind for metric in METRICS}
    assert [name for name, kind in listed if kinds.get(name, kind) != kind] == []


def test_the_guide_explains_every_alert() -> None:
    guide = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    alerts = re.findall(r"alert: (\w+)", (RULES / "rewarm-alerts.yml").read_text())
    assert re.findall(r"^\| `(Rewarm\w+)`", guide, re.MULTILINE) == alerts


def test_prometheus_takes_the_rules_and_they_fire_when_they_should() -> None:
    for arguments in (
        ("check", "rules", "rewarm-alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rewarm-alerts.test.yml"),
    ):
        checked = promtool(*arguments)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_prometheus_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = expressions(json.loads(DASHBOARD.read_text()))
    rules = [
        {"record": f"dashboard:{place}", "expr": text.replace("$__rate_interval", "5m")}
        for place, text in enumerate(queries)
    ]
    path = tmp_path / "rules.yml"  # JSON is YAML, too
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = promtool("check", "rules", str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(queries)} rules found" in checked.stdout
