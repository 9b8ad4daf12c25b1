"""Charts of a plan: everything in a plan is modelled, so every line is dotted; calibration puts readings beside it."""

from __future__ import annotations

from typing import Any

from rewarm.plan.result import Plan
from rewarm.report import traces
from rewarm.report.model import Chart, Entry, Row, Source, Table, Value

PERCENTILES = ("p90", "p50", "p99")


class PlanCharts:
    """The charts of one plan. `source` is the same plan as plain JSON."""

    def __init__(self, plan: Plan, source: Source) -> None:
        self.plan = plan
        self.source = source
        media = list(dict.fromkeys(cell.medium for cell in plan.cells))
        others = [medium for medium in media if medium != "recompute"]
        self.entries = {
            medium: traces.entry(f"{medium} ({traces.MODELLED})", place, traces.MODELLED)
            for place, medium in enumerate(others)
        }
        if "recompute" in media:
            self.entries["recompute"] = traces.recompute_entry()

    def all(self) -> tuple[Chart, ...]:
        """Every chart that this plan has figures for."""
        found = [self.ttft(), self.cost()]
        found += [self.nodes(place) for place in range(len(self.plan.sharing))]
        found += [self.hits()] if self.plan.capacity else []
        found += [self.fit(place) for place in range(len(self.plan.calibration))]
        return tuple(found)

    def ttft(self) -> Chart:
        """Time to first token against the load."""
        drawn: list[dict[str, Any]] = []
        choices: dict[str, list[int]] = {}
        unit = self._unit()
        for percentile in PERCENTILES:
            first = len(drawn)
            for medium, entry in self.entries.items():
                places = [place for place, cell in enumerate(self.plan.cells) if cell.medium == medium]
                values = [self.source.at("seconds", "cells", place, "ttft_s", percentile) for place in places]
                loads = [self._load(place).text for place in places]
                texts = [
                    f"{entry.name}, {load} {unit}: {percentile} {value.text}{self._saturated(place)}"
                    for load, value, place in zip(loads, values, places, strict=True)
                ]
                drawn.append(traces.line(entry, loads, values, texts))
            choices[percentile] = list(range(first, len(drawn)))
        layout = traces.layout(f"load, {unit}", traces.CATEGORY, "TTFT, seconds", {})
        return Chart(
            id=f"load-{self.source.document}",
            title="Time to first token by load",
            text="Lower is better. Simulated for each candidate at each point of the load. The vertical axis is "
            "logarithmic. A saturated candidate falls behind for as long as the load lasts.",
            layout=layout,
            traces=tuple(drawn),
            legend=tuple(self.entries.values()),
            table=self._load_table(),
            choice_label="Percentile",
            choices=choices,
            axes=traces.axis_of_each(choices.values(), drawn, "y", "seconds", layout),
        )  # fmt: skip

    def _load(self, place: int) -> Value:
        """The load of a cell."""
        kind, field = self._load_of(place)
        return self.source.at(kind, "cells", place, field)

    def _load_of(self, place: int) -> tuple[str, str]:
        closed = self.plan.cells[place].concurrency is not None
        return ("count", "concurrency") if closed else ("number", "requests_per_s")

    def _unit(self) -> str:
        """What the load is counted in: the same for every cell of a plan."""
        return _LOADS[self._load_of(0)[1]] if self.plan.cells else ""

    def _saturated(self, place: int) -> str:
        return ", saturated" if self.plan.cells[place].saturated else ""

    def _load_table(self) -> Table:
        rows: list[Row] = []
        for place, cell in enumerate(self.plan.cells):
            at = self.source.at
            rows.append(
                (
                    cell.medium,
                    self._load(place),
                    *(at("seconds", "cells", place, "ttft_s", name) for name in ("p50", "p90", "p99")),
                    at("seconds", "cells", place, "tpot_s"),
                    at("number", "cells", place, "output_tokens_per_s"),
                    at("share", "cells", place, "hit_tokens_share"),
                    at("share", "cells", place, "restoring_share"),
                    at("answer", "cells", place, "saturated"),
                    at("text", "cells", place, "reason"),
                )
            )
        columns = (
            "medium",
            self._unit(),
            "TTFT p50",
            "p90",
            "p99",
            "TPOT",
            "output tokens/s",
            "hits",
            "duty",
            "saturated",
            "why",
        )
        return Table("Times and throughput (modelled)", columns, tuple(rows))

    def cost(self) -> Chart:
        """Money of each candidate, at the heaviest load."""
        drawn: list[dict[str, Any]] = []
        choices: dict[str, list[int]] = {}
        for label, field in _COSTS.items():
            first = len(drawn)
            for place, row in enumerate(self.plan.money):
                entry = self.entries[row.medium]
                value = self.source.at("usd", "money", place, field)
                drawn.append(traces.marks(entry, [value], [row.medium], [f"{entry.name}: {value.text} {label}"]))
            choices[label] = list(range(first, len(drawn)))
        rows: tuple[Row, ...] = tuple(
            (
                row.medium,
                *(self.source.at("usd", "money", place, field) for field in _COSTS.values()),
                self.source.at("days", "money", place, "break_even_interval_s"),
            )
            for place, row in enumerate(self.plan.money)
        )
        candidates = {**traces.CATEGORY, "title": {"text": ""}, "autorange": "reversed"}
        layout = traces.layout("US dollars", {}, "candidate", candidates)
        return Chart(
            id=f"cost-{self.source.document}",
            title="Cost at the heaviest load",
            text="Further left is cheaper. GPU time that the requests take and storage that has to be there, in US "
            "dollars. The axis is logarithmic; what costs nothing is not drawn.",
            layout=layout,
            traces=tuple(drawn),
            legend=tuple(self.entries[row.medium] for row in self.plan.money),
            table=Table("Cost (modelled)", ("medium", *_COSTS, "worth keeping if asked for within"), rows),
            choice_label="Cost",
            choices=choices,
            axes=traces.axis_of_each(choices.values(), drawn, "x", "usd", layout),
        )  # fmt: skip

    def nodes(self, place: int) -> Chart:
        """How many nodes an array serves better than local drives, by duty."""
        row = self.plan.sharing[place]
        duties = [self.source.at("share", "sharing", place, "curve", n, "duty") for n in range(len(row.curve))]
        x = [duty.raw for duty in duties]
        entries = [traces.entry(name, number, traces.MODELLED) for number, name in enumerate(_NODES)]
        drawn = []
        for entry, field in zip(entries, _NODES.values(), strict=True):
            values = [
                self.source.at("nodes", "sharing", place, "curve", n, field, missing="any") for n in range(len(x))
            ]
            texts = [f"duty {d.text}: {v.text} nodes {entry.name}" for d, v in zip(duties, values, strict=True)]
            drawn.append(traces.line(entry, x, values, texts))
        ours = self.source.at("nodes", "sharing", place, "nodes")
        mine = Entry("nodes of this plan", traces.RECOMPUTE)
        drawn.append(traces.level(mine, x, ours, f"this plan: {ours.text} nodes"))
        return Chart(
            id=f"nodes-{self.source.document}-{place}",
            title=f"Nodes per array: {row.array} against {row.local}",
            text=f"{row.verdict}. Duty is the share of time that a node restores. Below a line the array is faster "
            "than what the line is named after; where any number of nodes is, nothing is drawn. Both axes are "
            "logarithmic.",
            layout=traces.layout(
                "duty of a node", traces.log_axis(drawn, "x", "share"), "nodes on one array",
                traces.log_axis(drawn, "y", "nodes"),
            ),
            traces=tuple(drawn),
            legend=(*entries, mine),
            table=Table(
                "Nodes per array (modelled)", ("duty", *_NODES),
                tuple(
                    (duties[n], *(self._nodes(place, n, field) for field in _NODES.values()))
                    for n in range(len(x))
                ),
            ),
        )  # fmt: skip

    def _nodes(self, place: int, number: int, field: str) -> Value:
        return self.source.at("nodes", "sharing", place, "curve", number, field, missing="any")

    def hits(self) -> Chart:
        """Hit rate against cache size."""
        count = len(self.plan.capacity)
        sizes = [self.source.at("size", "capacity", place, "cached_bytes") for place in range(count)]
        rates = [self.source.at("share", "capacity", place, "token_hit_rate") for place in range(count)]
        entry = traces.entry("trace of one node", 0, traces.MEASURED)
        texts = [f"{size.text} hit {rate.text} of the tokens" for size, rate in zip(sizes, rates, strict=True)]
        curve = traces.line(entry, [size.raw for size in sizes], rates, texts)
        return Chart(
            id=f"hits-{self.source.document}",
            title="Hit curve of the trace",
            text="Higher is better. Share of the input tokens that a cache of a size would have held, least recently "
            "used blocks evicted first. The horizontal axis is logarithmic.",
            layout=traces.layout(
                "cache of one node, bytes", traces.log_axis([curve], "x", "bytes"), "share of input tokens hit",
                {**traces.PERCENT, **traces.FROM_ZERO},
            ),
            traces=(curve,),
            legend=(entry,),
            table=Table(
                "Cache for a hit rate", ("size", "tokens", "tokens hit", "of what is possible"),
                tuple(
                    (sizes[n], self.source.at("count", "capacity", n, "cached_tokens"), rates[n],
                     self.source.at("share", "capacity", n, "share_of_possible"))
                    for n in range(count)
                ),
            ),
        )  # fmt: skip

    def fit(self, place: int) -> Chart:
        """A benchmark's readings beside the model that was fitted to them."""
        row = self.plan.calibration[place]
        waves = [str(residual.concurrency) for residual in row.residuals]
        entries = {
            "measured_s": traces.entry("measured", 0, traces.MEASURED),
            "model_s": traces.entry("modelled", 1, traces.MODELLED),
        }
        values = {
            field: [self._residual(place, number, "seconds", field) for number in range(len(waves))]
            for field in entries
        }
        drawn = [
            traces.line(
                entry, waves, values[field],
                [f"{entry.name}, {w} at once: {v.text}" for w, v in zip(waves, values[field], strict=True)],
            )
            for field, entry in entries.items()
        ]  # fmt: skip
        return Chart(
            id=f"fit-{self.source.document}-{place}",
            title=f"Calibration of {row.target}",
            text=f"Median restore time of the benchmark that this plan was calibrated with, and what the model says "
            f"for it. Restores are served {row.order}.",
            layout=traces.layout(
                "requests restored together", traces.CATEGORY, "median, seconds",
                {**traces.SECONDS, **traces.FROM_ZERO},
            ),
            traces=tuple(drawn),
            legend=tuple(entries.values()),
            table=Table(
                f"Calibration of {row.target}", ("at once", "measured", "modelled", "error"),
                tuple(
                    (self._residual(place, n, "count", "concurrency"), values["measured_s"][n], values["model_s"][n],
                     self._residual(place, n, "share", "error"))
                    for n in range(len(waves))
                ),
            ),
        )  # fmt: skip

    def _residual(self, place: int, number: int, kind: str, field: str) -> Value:
        return self.source.at(kind, "calibration", place, "residuals", number, field)


_LOADS = {"concurrency": "at once per node", "requests_per_s": "requests/s of the fleet"}
_COSTS = {
    "per million tokens": "usd_per_million_tokens",
    "GPU per hour": "gpu_usd_per_hour",
    "storage per hour": "storage_usd_per_hour",
}
_NODES = {
    "by the median restore": "nodes_by_median",
    "by the mean restore": "nodes_by_mean",
    "against recompute": "nodes_against_recompute",
}
"""What an array is compared by -> the field; the first two are against a drive in every node."""
