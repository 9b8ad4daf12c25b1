"""Charts of a result of live servers: what storage has no word for, and a timeline that ends with the last token."""

from __future__ import annotations

from typing import Any

from rewarm.report import traces
from rewarm.report.bench_charts import MODELLED_END, PERCENTILES, BenchCharts
from rewarm.report.model import Chart, Entry


class LiveCharts(BenchCharts):
    """The charts of a result whose targets are servers."""

    phases = (
        (("live", "end_s"), "decode", "p3"),
        (MODELLED_END, "server: queue, restore and prefill", "p2"),
        (("submitted_s",), "queued in the client", "p0"),
    )
    timeline_text = (
        "Every request starts at 0. A bar is a request: queued in the client until it had left, then in the server "
        "until the first token (its queue, what it restored and the prefill of the rest, which cannot be told apart "
        "from outside), then decode until the end of the answer. First repeat."
    )
    missed = "failed requests"

    def all(self) -> tuple[Chart, ...]:
        """Every chart that a server has figures for."""
        return (
            self.ttft(),
            self._times("tpot", "Time per output token", "TPOT, seconds", "tpot_s"),
            self._times("e2e", "Time to the end of the answer", "E2E, seconds", "e2e_s"),
            self.tokens(),
            self.distribution(),
            self.cached(),
            self.timeline(),
        )

    def _times(self, name: str, title: str, axis: str, field: str) -> Chart:
        """Percentiles of one time against concurrency, with every repeat."""
        drawn: list[dict[str, Any]] = []
        choices: dict[str, list[int]] = {}
        for label, percentile in PERCENTILES.items():
            first = len(drawn)
            for target, entry in self.entries.items():
                drawn += self._line_and_repeats(target, entry, "seconds", ("live", field, percentile), label)
            choices[label] = list(range(first, len(drawn)))
        layout = traces.layout(_AT_ONCE, traces.CATEGORY, axis, {})
        return Chart(
            id=f"{name}-{self.source.document}",
            title=title,
            text="Lower is better. Over the requests that were answered whole; lines join the medians over the "
            "repeats, small marks are the single repeats. The vertical axis is logarithmic.",
            layout=layout,
            traces=tuple(drawn),
            legend=tuple(self.entries.values()),
            table=self._summary_table(
                title, {p: ("seconds", "live", field, p) for p in ("p50", "p90", "p99")}
            ),
            choice_label="Percentile",
            choices=choices,
            axes=traces.axis_of_each(choices.values(), drawn, "y", "seconds", layout),
        )  # fmt: skip

    def tokens(self) -> Chart:
        """Tokens per second against concurrency: written, and restored."""
        drawn: list[dict[str, Any]] = []
        choices: dict[str, list[int]] = {}
        for label, path in _RATES.items():
            first = len(drawn)
            for name, entry in self.entries.items():
                drawn += self._line_and_repeats(name, entry, "count", path, label)
            choices[label] = list(range(first, len(drawn)))
        return Chart(
            id=f"tokens-{self.source.document}",
            title="Tokens per second by concurrency",
            text="Higher is better. Output tokens of all requests over the time of the cell; restored are the prompt "
            "tokens that the server says came from a cache, over the time to the last first token.",
            layout=traces.layout(
                _AT_ONCE, traces.CATEGORY, "tokens per second", {"tickformat": "~s", **traces.FROM_ZERO}
            ),
            traces=tuple(drawn),
            legend=tuple(self.entries.values()),
            table=self._summary_table("Tokens per second", {label: ("count", *path) for label, path in _RATES.items()}),
            choice_label="Tokens",
            choices=choices,
        )

    def cached(self) -> Chart:
        """Share of the prompt tokens that came from a cache."""
        drawn = []
        for place, (name, entry) in enumerate(self.entries.items()):
            rows = self._rows(name)
            values = [self.source.at("share", "summary", row, "live", "cached_share") for row in rows]
            waves = [str(self.result.summary[row].concurrency) for row in rows]
            texts = [f"{entry.name}, {wave} at once: {v.text}" for wave, v in zip(waves, values, strict=True)]
            drawn.append(traces.bars(entry, place, waves, values, texts))
        return Chart(
            id=f"cached-{self.source.document}",
            title="Prompt tokens from a cache",
            text="As the server reported them, over all prompt tokens of the cell. After a restart they can only come "
            "from below the server. Without a bar the server does not report them, or there were none.",
            layout=traces.layout(
                _AT_ONCE, traces.CATEGORY, "share of the prompt tokens",
                {**traces.PERCENT, **traces.FROM_ZERO}, barmode="group", bargap=0.3,
            ),
            traces=tuple(drawn),
            legend=tuple(Entry(entry.name, entry.series) for entry in self.entries.values()),
            table=self._summary_table("Prompt tokens from a cache", {"cached": ("share", "live", "cached_share")}),
        )  # fmt: skip


_AT_ONCE = "requests of the cell"
_RATES: dict[str, tuple[str, ...]] = {
    "output": ("live", "output_tokens_per_s"),
    "restored": ("restored_tokens_per_s",),
}
