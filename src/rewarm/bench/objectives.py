"""Does a result meet its objectives? Judges medians over the repeats, target by target and wave by wave. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rewarm.bench.result import Summary
from rewarm.workload.objective import PERCENTILES, Objective, format_figure


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One objective beside one median. `value` is null when requests failed or the run has no such figure: missed."""

    objective: str
    target: str
    concurrency: int
    value: float | None
    met: bool

    @property
    def sentence(self) -> str:
        """What it says, for people."""
        figure = self.objective.split()[0]
        value = "no figure" if self.value is None else format_figure(figure, self.value)
        word = "met" if self.met else "missed"
        return f"objective {self.objective} {word}: {self.target} at {self.concurrency} has {value}"


def judge_objective(objective: Objective, summaries: Sequence[Summary]) -> list[Judgement]:
    """The objective beside every summary of a result, in their order."""
    return [_judgement(objective, summary) for summary in summaries]


def _judgement(objective: Objective, summary: Summary) -> Judgement:
    value = figure_of(summary, objective.figure)
    return Judgement(
        objective=str(objective),
        target=summary.target,
        concurrency=summary.concurrency,
        value=value,
        met=objective.met_by(value),
    )


def figure_of(summary: Summary, figure: str) -> float | None:
    """The median of a figure of `workload.objective.FIGURES`; None where the run has none."""
    time, _, rank = figure.rpartition("_")
    live = summary.live
    if rank in PERCENTILES:
        if time == "ttft":
            found: float | None = getattr(summary.ttft_s, rank)
        else:
            found = None if live is None else getattr(live.tpot_s if time == "tpot" else live.e2e_s, rank)
        return found
    if figure == "output_tokens_per_s":
        return None if live is None else live.output_tokens_per_s
    return summary.read_bytes_per_s if figure == "read_bytes_per_s" else summary.restored_tokens_per_s
