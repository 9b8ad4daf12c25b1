"""Charts of a benchmark's result. They order and label what the result holds; no figure is computed here.

The one coordinate that the JSON does not hold is the height of a cumulative distribution: the rank of a reading.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rewarm.bench.result import Result
from rewarm.report import traces
from rewarm.report.model import Chart, Entry, Row, Source, Table, Value

PERCENTILES = {"median (p50)": "p50", "p90": "p90", "p99": "p99"}


MODELLED_END = ("ttft_s",)
MODELLED_DECODE = "decode (modelled)"

Phase = tuple[tuple[str, ...], str, str]
"""Where a request's time stands, what the request is in until then, and the series of it."""


class BenchCharts:
    """The charts of one result. `source` is the same result as plain JSON."""

    phases: tuple[Phase, ...] = (
        (("modelled_end_s",), MODELLED_DECODE, "p4"),
        (MODELLED_END, "prefill of new tokens (modelled)", "p3"),
        (("last_byte_s",), "reading", "p2"),
        (("first_byte_s",), "waiting for the first blocks", "p1"),
        (("submitted_s",), "queued in the client", "p0"),
    )
    """What a request is in until each of its times, the last first: an earlier end covers a later one."""
    timeline_text = (
        "Every request starts at 0. A bar is a request: submitted, then waiting until its first blocks were read and "
        "verified, then reading to its last block, then the prefill of new tokens, which is modelled and absent when "
        "the job has none, then, in the views with decode, decode to the last output token, modelled too and absent "
        "where the GPU or the model has no figures for it. First repeat."
    )
    missed = "missed blocks"

    def __init__(self, result: Result, source: Source) -> None:
        self.result = result
        self.source = source
        self.names = list(dict.fromkeys(cell.target for cell in result.cells))
        self.waves = list(dict.fromkeys(cell.concurrency for cell in result.cells))
        emulated = {cell.target for cell in result.cells if cell.emulated}
        self.entries = {
            name: traces.entry(self.label(name, name in emulated), place, _origin(name in emulated))
            for place, name in enumerate(self.names)
        }
        self.recompute = self._recompute_entries()

    @staticmethod
    def label(name: str, emulated: bool) -> str:
        """A target's name with where its figures come from."""
        return f"{name} ({_origin(emulated)})"

    def all(self) -> tuple[Chart, ...]:
        """Every chart that this result has figures for."""
        return (self.ttft(), self.throughput(), self.distribution(), self.ceiling(), self.timeline())

    def ttft(self) -> Chart:
        """Time to first token against concurrency, for each percentile, with every repeat."""
        drawn: list[dict[str, Any]] = []
        choices: dict[str, list[int]] = {}
        for label, percentile in PERCENTILES.items():
            first = len(drawn)
            for name, entry in self.entries.items():
                drawn += self._line_and_repeats(name, entry, "seconds", ("ttft_s", percentile), label)
            drawn += self._recompute(percentile, label)
            choices[label] = list(range(first, len(drawn)))
        layout = traces.layout("requests restored together", traces.CATEGORY, "TTFT, seconds", {})
        return Chart(
            id=f"ttft-{self.source.document}",
            title="Time to first token by concurrency",
            text="Lower is better. Lines join the medians over the repeats; small marks are the single repeats, so "
            "their distance shows the noise. The vertical axis is logarithmic.",
            layout=layout,
            traces=tuple(drawn),
            legend=(*self.entries.values(), *self.recompute.values()),
            table=self._summary_table(
                "Time to first token", {"p50": ("seconds", "ttft_s", "p50"), "p90": ("seconds", "ttft_s", "p90"),
                "p99": ("seconds", "ttft_s", "p99"), "spread of the repeats": ("share", "spread"),
                "recompute p50": ("seconds", "recompute", "ttft_s", "p50")},
            ),
            choice_label="Percentile",
            choices=choices,
            axes=traces.axis_of_each(choices.values(), drawn, "y", "seconds", layout),
        )  # fmt: skip

    def throughput(self) -> Chart:
        """Bytes per second against concurrency, below the best raw reading."""
        drawn: list[dict[str, Any]] = []
        for name, entry in self.entries.items():
            drawn += self._line_and_repeats(name, entry, "rate", ("read_bytes_per_s",), "restored")
            drawn += self._best_ceiling(name, entry)
        return Chart(
            id=f"throughput-{self.source.document}",
            title="Read throughput by concurrency",
            text="Higher is better. Bytes that came back verified, over the time to the last of them. The thin line "
            "of a target is its fastest raw read in this run, without a store.",
            layout=traces.layout(
                "requests restored together", traces.CATEGORY, "read, bytes per second",
                {**traces.BYTES_PER_S, **traces.FROM_ZERO},
            ),
            traces=tuple(drawn),
            legend=tuple(self.entries.values()),
            table=self._summary_table(
                "Throughput", {"read": ("rate", "read_bytes_per_s"),
                "restored tokens/s": ("count", "restored_tokens_per_s"), "CPU s per GB": ("number", "cpu_s_per_gb")},
            ),
        )  # fmt: skip

    def distribution(self) -> Chart:
        """The cumulative distribution of the time to first token, for each concurrency."""
        drawn: list[dict[str, Any]] = []
        choices: dict[str, list[int]] = {}
        for wave in self.waves:
            first = len(drawn)
            drawn += [self._steps(name, entry, wave) for name, entry in self.entries.items()]
            choices[f"{wave} at once"] = list(range(first, len(drawn)))
        return Chart(
            id=f"distribution-{self.source.document}",
            title="Distribution of time to first token",
            text="Further left is better. The height is the share of requests that had their first token by then, all "
            "repeats together; a request that failed never has it, so its curve ends below 100%.",
            layout=traces.layout(
                "TTFT, seconds", {**traces.SECONDS, **traces.FROM_ZERO}, "share of requests",
                {**traces.PERCENT, "range": [0, 1.03]},
            ),
            traces=tuple(drawn),
            legend=tuple(self.entries.values()),
            table=self._summary_table(
                "Percentiles over the requests of a wave, medians over the repeats",
                {"p50": ("seconds", "ttft_s", "p50"), "p90": ("seconds", "ttft_s", "p90"),
                 "p99": ("seconds", "ttft_s", "p99")},
            ),
            choice_label="Wave",
            choices=choices,
        )  # fmt: skip

    def ceiling(self) -> Chart:
        """How much of the raw ceiling each target reached."""
        drawn = []
        for place, (name, entry) in enumerate(self.entries.items()):
            rows = self._rows(name)
            values = [self.source.at("share", "summary", row, "ceiling_share") for row in rows]
            waves = [str(self.result.summary[row].concurrency) for row in rows]
            texts = [f"{entry.name}, {wave} at once: {v.text}" for wave, v in zip(waves, values, strict=True)]
            drawn.append(traces.bars(entry, place, waves, values, texts))
        return Chart(
            id=f"ceiling-{self.source.document}",
            title="Share of the medium's ceiling",
            text="Read throughput over that of the fastest raw reads of the same files in this run. Above 100% the "
            "medium was faster while it restored than while its ceiling was read.",
            layout=traces.layout(
                "requests restored together", traces.CATEGORY, "share of the ceiling",
                {**traces.PERCENT, **traces.FROM_ZERO}, barmode="group", bargap=0.3,
            ),
            traces=tuple(drawn),
            legend=tuple(Entry(entry.name, entry.series) for entry in self.entries.values()),
            table=self._summary_table(
                "Share of the ceiling",
                {"share of ceiling": ("share", "ceiling_share"), "read": ("rate", "read_bytes_per_s")},
            ),
        )  # fmt: skip

    def timeline(self) -> Chart:
        """Each request of a wave as a bar, for every wave of the first repeat."""
        drawn: list[dict[str, Any]] = []
        choices: dict[str, list[int]] = {}
        first_repeat = [place for place, cell in enumerate(self.result.cells) if cell.repeat == 0]
        for place in first_repeat:
            cell, first = self.result.cells[place], len(drawn)
            drawn += [self._phase(place, number) for number in range(len(self.phases))]
            label = f"{self.label(cell.target, cell.emulated)}, {cell.concurrency} at once"
            whole = list(range(first, len(drawn)))
            if cell.decode is not None:  # seconds beside milliseconds: the restore is to be seen first
                choices[label] = [each for each in whole if drawn[each]["name"] != MODELLED_DECODE]
                label += ", with decode"
            choices[label] = whole
        waves = sorted(choices, key=lambda label: label.startswith(self.names[0]), reverse=True)
        return Chart(
            id=f"timeline-{self.source.document}",
            title="Restore timeline of a wave",
            text=self.timeline_text,
            layout=traces.layout(
                "seconds since the request's intended start", {**traces.SECONDS, **traces.FROM_ZERO}, "request",
                {**traces.CATEGORY, "autorange": "reversed"}, barmode="overlay", bargap=0.25,
            ),
            traces=tuple(drawn),
            legend=tuple(Entry(name, series) for _, name, series in reversed(self.phases)),
            table=Table(
                "Waves of the first repeat", ("wave", "p50", "p90", "p99", "last byte", self.missed),
                tuple(self._wave_row(place) for place in first_repeat),
            ),
            choice_label="Wave",
            choices={label: choices[label] for label in waves},
            wide=True,
            height=420,
        )  # fmt: skip

    def _rows(self, name: str) -> list[int]:
        """Places of a target's summaries."""
        return [place for place, row in enumerate(self.result.summary) if row.target == name]

    def _line_and_repeats(
        self, name: str, entry: Entry, kind: str, path: tuple[str, ...], label: str
    ) -> list[dict[str, Any]]:
        rows = self._rows(name)
        medians = [self.source.at(kind, "summary", row, *path, missing="failed") for row in rows]
        waves = [str(self.result.summary[row].concurrency) for row in rows]
        cells = [place for place, cell in enumerate(self.result.cells) if cell.target == name]
        single = [self.source.at(kind, "cells", place, *path, missing="failed") for place in cells]
        at = [str(self.result.cells[place].concurrency) for place in cells]
        repeats = [self.result.cells[place].repeat for place in cells]
        return [
            traces.line(entry, waves, medians, _texts(entry, label, waves, medians)),
            traces.dots(
                entry, at, single,
                [f"{text}, repeat {n + 1}" for text, n in zip(_texts(entry, label, at, single), repeats, strict=True)],
            ),
        ]  # fmt: skip

    def _recompute_entries(self) -> dict[str, Entry]:
        """Recompute that is modelled is the same beside every target; measured, every server has its own."""
        found: dict[str, Entry] = {}
        for name, entry in self.entries.items():
            known = [row.recompute for row in self.result.summary if row.target == name and row.recompute]
            if known and known[0].mfu is None:
                grey = traces.recompute_entry(traces.MEASURED)
                found[name] = replace(grey, name=f"{name}: {grey.name}", symbol=entry.symbol)
            elif known and not found:
                found[name] = traces.recompute_entry()
        return found

    def _recompute(self, percentile: str, label: str) -> list[dict[str, Any]]:
        drawn = []
        for name, entry in self.recompute.items():
            rows = [row for row in self._rows(name) if self.result.summary[row].recompute]
            values = [self.source.at("seconds", "summary", r, "recompute", "ttft_s", percentile) for r in rows]
            waves = [str(self.result.summary[row].concurrency) for row in rows]
            drawn.append(traces.line(entry, waves, values, _texts(entry, label, waves, values)))
        return drawn

    def _best_ceiling(self, name: str, entry: Entry) -> list[dict[str, Any]]:
        places = [place for place, row in enumerate(self.result.ceiling) if row.target == name]
        if not places:
            return []
        best = max(places, key=lambda place: self.result.ceiling[place].read_bytes_per_s)
        value = self.source.at("rate", "ceiling", best, "read_bytes_per_s")
        waves = [str(wave) for wave in self.waves]
        return [traces.level(entry, waves, value, f"{entry.name}: fastest raw read {value.text}")]

    def _steps(self, name: str, entry: Entry, wave: int) -> dict[str, Any]:
        cells = [p for p, c in enumerate(self.result.cells) if (c.target, c.concurrency) == (name, wave)]
        values = [
            self.source.at("seconds", "cells", place, "requests", number, "ttft_s")
            for place in cells
            for number in range(len(self.result.cells[place].requests))
        ]
        known = sorted((value for value in values if value.raw is not None), key=lambda value: float(value.raw))
        shares = [(rank + 1) / len(values) for rank in range(len(known))]
        texts = [f"{entry.name}: {share:.0%} within {v.text}" for share, v in zip(shares, known, strict=True)]
        return traces.steps(entry, known, shares, texts)

    def _phase(self, place: int, number: int) -> dict[str, Any]:
        path, name, series = self.phases[number]
        cell = self.result.cells[place]
        found = [
            (n, self.source.at("seconds", "cells", place, "requests", n, *path)) for n in range(len(cell.requests))
        ]
        kept = [(n, value) for n, value in found if value.raw is not None]
        if path == MODELLED_END and not cell.modelled_s and cell.live is None:
            kept = []
        texts = [f"request {n + 1}: {name}, until {value.text}" for n, value in kept]
        values = [value for _, value in kept]
        return traces.lying_bars(Entry(name, series), number, [str(n + 1) for n, _ in kept], values, texts)

    def _wave_row(self, place: int) -> Row:
        cell, at = self.result.cells[place], self.source.at
        return (
            f"{self.label(cell.target, cell.emulated)}, {cell.concurrency} at once",
            *(at("seconds", "cells", place, "ttft_s", p, missing="failed") for p in ("p50", "p90", "p99")),
            at("seconds", "cells", place, "seconds"),
            at("count", "cells", place, "misses"),
        )

    def _summary_table(self, title: str, columns: dict[str, tuple[str, ...]]) -> Table:
        rows: tuple[Row, ...] = tuple(
            (
                self.label(row.target, row.emulated),
                self.source.at("count", "summary", place, "concurrency"),
                *(self.source.at(kind, "summary", place, *path) for kind, *path in columns.values()),
            )
            for place, row in enumerate(self.result.summary)
        )
        return Table(title, ("target", "at once", *columns), rows)


def _origin(emulated: bool) -> str:
    return traces.EMULATED if emulated else traces.MEASURED


def _texts(entry: Entry, label: str, waves: list[str], values: list[Value]) -> list[str]:
    return [f"{entry.name}, {wave} at once: {label} {value.text}" for wave, value in zip(waves, values, strict=True)]
