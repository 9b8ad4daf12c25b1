"""Compute or load, against an oracle that tries every choice in a simulation of the media and their queues."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from rewarm.errors import ConfigError
from rewarm.geometry import MeasuredPrefill, ModelledPrefill, load_model
from rewarm.tiers.decide import Context, MediumState, Queue, decide
from rewarm.tiers.order import AGEING, RestoreOrder
from rewarm.tiers.prefill import PrefillCurve, PrefillLearner

BLOCK_TOKENS = 256
BLOCK_BYTES = BLOCK_TOKENS * 131_072
"""Llama-3.1-8B: 131,072 bytes per token."""

SLICE = 16 << 20
CURVE = PrefillCurve(linear_s=1 / 20_000, quadratic_s=1e-9, fixed_s=0.02)
FIXED_S = 0.03


@dataclass(eq=False)
class Part:
    """What a request wants of one medium; `whole` counts what it wants of all."""

    whole: list[int]
    size_bytes: int
    unsent_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.unsent_bytes = self.size_bytes
        self.whole[0] += self.size_bytes

    @property
    def remaining_bytes(self) -> int:
        """Of the whole request."""
        return self.whole[0]


def orders(queue: list[int], media: int) -> list[RestoreOrder[Part]]:
    """Media for which requests wait, each wanting the same bytes of every one."""
    found = [RestoreOrder[Part](AGEING) for _ in range(media)]
    for size in queue:
        whole = [0]
        for order in found:
            order.add(Part(whole, size))
    return found


def simulated_s(places: list[int], rates: list[float], queue: list[int], tokens: int, blocks: int) -> float:
    """When the prompt is there with so many leading blocks loaded: every medium serves what waits in the pool's order,
    in slices, and the rest is computed then."""
    found = orders(queue, len(rates))
    whole = [0]
    mine = [Part(whole, places[:blocks].count(number) * BLOCK_BYTES) for number in range(len(rates))]
    for order, part in zip(found, mine, strict=True):
        if part.size_bytes:
            order.add(part)
    now = [0.0] * len(rates)
    while any(part.unsent_bytes for part in mine):
        number = min((n for n, part in enumerate(mine) if part.unsent_bytes), key=now.__getitem__)
        chosen = found[number].next(SLICE)
        assert chosen is not None
        count = min(SLICE, chosen.unsent_bytes)
        found[number].served(chosen, count)
        chosen.unsent_bytes -= count
        chosen.whole[0] -= count
        now[number] += count / rates[number]
        if not chosen.unsent_bytes:
            found[number].remove(chosen)
    loaded = blocks * BLOCK_TOKENS
    return max(now) + (FIXED_S if blocks else 0.0) + float(CURVE.seconds(tokens - loaded, loaded))


QUEUES = {"idle": [], "one equal": [4 << 30], "eight small": [256 << 20] * 8, "four large": [16 << 30] * 4}
LENGTHS = (512, 2048, 8192, 32_768, 100_000)
RATES = (0.2e9, 1e9, 2e9, 3e9, 5e9, 7e9, 14e9)


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("skew", [1.0, 0.98, 1.02])
def test_against_the_oracle(queue: str, skew: float) -> None:
    """`skew`: the true bandwidth differs from the measured one."""
    for tokens, rate in itertools.product(LENGTHS, RATES):
        blocks = tokens // BLOCK_TOKENS
        places = [number % 2 for number in range(blocks)]  # two drives, the second three times as fast
        rates = [rate / 4, 3 * rate / 4]
        media = [
            MediumState(bytes_per_s=r, queue=Queue.of(0, order.queue()))
            for r, order in zip(rates, orders(QUEUES[queue], 2), strict=True)
        ]
        context = Context(
            places=np.array(places, np.int64), block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, tokens=tokens
        )
        decision = decide(context, media, CURVE, fixed_s=FIXED_S)
        true_rates = [r * skew for r in rates]
        usable = (tokens - 1) // BLOCK_TOKENS
        tried = sorted({0, usable, decision.blocks, *range(0, usable, max(usable // 16, 1))})
        ends = {x: simulated_s(places, true_rates, QUEUES[queue], tokens, x) for x in tried}
        cell = f"{tokens} tokens, {rate:g} B/s, {queue}: {decision}"
        assert ends[decision.blocks] <= 1.05 * min(ends.values()), cell
        assert ends[decision.blocks] <= 1.02 * ends[0], cell


def context(places: list[int], tokens: int) -> Context:
    return Context(places=np.array(places, np.int64), block_bytes=BLOCK_BYTES, block_tokens=BLOCK_TOKENS, tokens=tokens)


def test_a_fast_medium_loads_all_and_a_slow_one_nothing() -> None:
    fast, slow = MediumState(bytes_per_s=10e9), MediumState(bytes_per_s=0.1e9)
    assert decide(context([0] * 32, 8193), [fast], CURVE).tokens == 8192
    assert decide(context([0] * 32, 8193), [slow], CURVE).tokens == 0
    decision = decide(context([0] * 32, 8193), [slow], CURVE)
    assert decision.expected_s == decision.recompute_s == pytest.approx(CURVE.seconds(8193))


def test_loading_is_cut_where_it_stops_paying() -> None:
    fast, slow = MediumState(bytes_per_s=10e9), MediumState(bytes_per_s=0.1e9)
    assert decide(context([0] * 20 + [1] * 12, 8193), [fast, slow], CURVE).blocks == 20


def test_a_queue_changes_the_answer() -> None:
    idle, busy = MediumState(bytes_per_s=10e9), MediumState(bytes_per_s=10e9, queue=Queue.of(100 << 30))
    assert decide(context([0] * 32, 8193), [idle], CURVE).blocks == 32
    assert decide(context([0] * 32, 8193), [busy], CURVE).blocks == 0


def test_a_part_small_enough_to_go_before_the_queue_is_still_loaded() -> None:
    busy = MediumState(bytes_per_s=20e9, queue=Queue.of(0, [(16 * BLOCK_BYTES + 1, 100 << 30)]))
    assert decide(context([0] * 32, 8193), [busy], CURVE).blocks == 16


def test_a_hole_ends_the_prefix_and_the_last_token_is_computed() -> None:
    fast = MediumState(bytes_per_s=100e9)
    assert decide(context([0] * 5 + [-1] + [0] * 26, 9000), [fast], CURVE).blocks == 5
    assert decide(context([0] * 32, 8192), [fast], CURVE).blocks == 31
    assert decide(context([], 8192), [fast], CURVE).blocks == 0
    assert decide(context([-1], 8192), [fast], CURVE).blocks == 0


def test_a_medium_that_nobody_measured_is_tried() -> None:
    assert decide(context([0] * 32, 8193), [MediumState(bytes_per_s=math.inf)], CURVE).blocks == 32


def test_a_fixed_cost_rules_out_short_contexts() -> None:
    fast = MediumState(bytes_per_s=10e9)
    assert decide(context([0, 0], 513), [fast], CURVE, fixed_s=0.2).blocks == 0
    assert decide(context([0] * 64, 16_385), [fast], CURVE, fixed_s=0.2).blocks == 64


def test_the_curve_of_a_model_follows_its_formula() -> None:
    model, formula = load_model("Llama-3.1-8B"), ModelledPrefill(gpus=1, peak_flops_per_s=989e12, fixed_s=0.01)
    curve = PrefillCurve.of_model(model, formula)
    for tokens, cached in [(700, 0), (5000, 0), (20_000, 60_000), (120_000, 0)]:
        assert curve.seconds(tokens, cached) == pytest.approx(formula.seconds(model, tokens, cached), rel=0.01)
    rate = PrefillCurve.of_model(model, MeasuredPrefill(tokens_per_s=5000))
    assert rate.seconds(30_000, 10_000) == pytest.approx(6.0, rel=1e-6)


def test_a_curve_is_learned_from_noisy_readings_and_follows_a_change() -> None:
    rng = np.random.default_rng(3)
    learner = PrefillLearner()
    assert learner.curve() is None
    learner.note(8192, 0, 2.0)
    first = learner.curve()
    assert first is not None
    assert first.seconds(4096) == pytest.approx(1.0)
    for speed in (1.0, 2.0):
        for _ in range(300):
            tokens, cached = int(rng.integers(100, 30_000)), int(rng.integers(0, 60_000))
            learner.note(tokens, cached, speed * CURVE.seconds(tokens, cached) * rng.normal(1, 0.03))
        learner.note(100, 0, 0.0)  # no reading at all
        curve = learner.curve()
        assert curve is not None
        for tokens, cached in [(1000, 0), (10_000, 0), (20_000, 50_000)]:
            assert curve.seconds(tokens, cached) == pytest.approx(speed * CURVE.seconds(tokens, cached), rel=0.05)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="bandwidth"):
        MediumState(bytes_per_s=0.0)
    with pytest.raises(ConfigError, match="tokens/s"):
        PrefillCurve.of_rate(0.0)
    with pytest.raises(ConfigError, match="linear_s"):
        PrefillCurve(linear_s=-1.0)
    with pytest.raises(ConfigError, match="a context has"):
        Context(places=np.zeros(1, np.int64), block_bytes=0, block_tokens=1, tokens=1)
