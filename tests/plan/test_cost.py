"""Costs of whole arrays against the formulas of `geometry`, one request at a time."""

from __future__ import annotations

import numpy as np
import pytest

from rewarm.geometry import ModelledPrefill, bytes_total, load_model, preset_names
from rewarm.plan import make_spec
from rewarm.plan.cost import Costs, costs_of

TOKENS = [0, 1, 2, 127, 128, 129, 1023, 1024, 5000, 131_072]
CACHED = [0, 5000, 0, 1, 100_000, 128, 7, 4096, 0, 2048]


def costs_for(model: str, **engine: object) -> Costs:
    spec = make_spec(
        {
            "model": model,
            "engine": {"gpu": "H100", "gpus": 4, **engine},
            "medium": [{"name": "local", "drive_read": 1e9}],
            "workload": {"shape": "wave", "concurrency": [1], "context_tokens": 1000},
        }
    )
    return costs_of(spec, load_model(model), 1000)


@pytest.mark.parametrize("name", preset_names())
def test_arrays_equal_single_values(name: str) -> None:
    costs, model = costs_for(name), load_model(name)
    prefill = ModelledPrefill(gpus=4, peak_flops_per_s=989e12)
    assert costs.bytes_of(TOKENS) == pytest.approx([bytes_total(model, n) for n in TOKENS])
    expected = [prefill.seconds(model, m, p) for m, p in zip(TOKENS, CACHED, strict=True)]
    assert costs.prefill_s(TOKENS, CACHED) == pytest.approx(expected, rel=1e-12)


def test_a_measured_rate_replaces_the_formula() -> None:
    costs = costs_for("Llama-3.1-8B", prefill_tokens_per_s=500)
    assert costs.prefill_s([1000, 0], [0, 10]).tolist() == [2.0, 0.0]


def test_tpot_between_and_beyond_the_measured_points() -> None:
    costs = costs_for("Llama-3.1-8B", tpot={"8": 0.0175, "16": 0.023, "32": 0.0295})
    assert [costs.tpot_s(n) for n in (1, 8, 12, 16, 32)] == pytest.approx([0.0175, 0.0175, 0.02025, 0.023, 0.0295])
    assert costs.tpot_s(64) == pytest.approx(0.0295 + 32 * (0.0295 - 0.023) / 16)
    assert costs.tpot_source == "measured"


def test_modelled_tpot_reads_weights_once_and_every_cache() -> None:
    costs = costs_for("Llama-3.1-8B", weight_bits=16)
    model = load_model("Llama-3.1-8B")
    bandwidth = 4 * 3.35e12 * 0.6
    weights = (model.active_parameters or 0) * 2
    for n in (1, 8, 100):
        assert costs.tpot_s(n) == pytest.approx((weights + n * 1000 * 131_072) / bandwidth)
    assert np.isfinite(costs.tpot_s(10_000))
