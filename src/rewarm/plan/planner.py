"""Makes a plan: every candidate at every point of the load, and what follows from it. The Python API of the planner.

spec = parse_plan(text)
plan = make_plan(spec, given=tomllib.loads(text))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rewarm.errors import ConfigError
from rewarm.geometry import Model, load_model
from rewarm.plan.assess import Assessment, assess
from rewarm.plan.breakeven import break_evens
from rewarm.plan.capacity import capacities, writes_of
from rewarm.plan.choose import Choice, choose, heaviest, objective_of
from rewarm.plan.cost import Costs, costs_of
from rewarm.plan.effects import effects_of
from rewarm.plan.inputs import inputs_of
from rewarm.plan.load import Load, SyntheticLoad
from rewarm.plan.media import candidates_of
from rewarm.plan.money import money_of
from rewarm.plan.result import SCHEMA, Calibration, Change, Plan, Verdict, Writes
from rewarm.plan.sensitivity import FACTORS, changes_of, tries_max
from rewarm.plan.sharing import sharing_of
from rewarm.plan.spec import PlanSpec
from rewarm.plan.traceload import TraceData, TraceLoad
from rewarm.units import format_duration

SENSITIVITY_REQUESTS = 1500
"""Requests of a sample while inputs are moved: hundreds of simulations have to fit in seconds."""


def make_plan(
    spec: PlanSpec,
    *,
    version: str = "",
    model: Model | None = None,
    trace: TraceData | None = None,
    given: Mapping[str, Any] | None = None,
    sources: Mapping[str, str] | None = None,
    calibration: tuple[Calibration, ...] = (),
    progress: Callable[[str], None] = lambda step: None,
) -> Plan:
    """The whole plan.

    `trace` is needed for the shape `trace`. `given` is the plan file's table, to tell given from assumed; `sources` say
    from which file a measured value is. `progress` is called with the name of each step. Raises `ConfigError`.
    """
    model = load_model(spec.model) if model is None else model
    context = _context(spec, trace)
    costs = costs_of(spec, model, context)
    load: Load = SyntheticLoad(spec, costs) if trace is None else TraceLoad(spec, costs, trace)
    assessed = []
    for candidate in candidates_of(spec):
        for point in load.points:
            progress(f"{candidate.name} at {point:g}")
            assessed.append(assess(spec, costs, load, candidate, point))
    progress("capacity and writes")
    writes = writes_of(spec, costs, trace)
    heaviest_of_each = [one for one in assessed if _at(one, load)]
    verdict = _verdict(spec, costs, load, writes, heaviest_of_each, progress)
    progress("effects of the inputs")
    effects = effects_of(spec, load.sample(SENSITIVITY_REQUESTS))
    return Plan(
        schema=SCHEMA,
        version=version,
        model=model.name,
        bytes_per_token=costs.bytes_per_token,
        context_tokens=context,
        context_bytes=int(costs.bytes_of([context])[0]),
        inputs=inputs_of(spec, given or {}, model, costs, sources or {}),
        verdict=verdict,
        cells=tuple(one.cell for one in assessed),
        effects=effects,
        saturation=tuple(one.saturation for one in heaviest_of_each),
        break_even=break_evens(spec, costs, context),
        sharing=sharing_of(spec, costs, context),
        capacity=() if trace is None else capacities(costs, trace),
        writes=writes,
        money=tuple(money_of(spec, costs, one, context) for one in heaviest_of_each),
        calibration=calibration,
        notes=_notes(spec, costs, load),
    )


def steps_max(spec: PlanSpec) -> int:
    """The most times that `make_plan` reports progress."""
    points = max(len(spec.workload.concurrency) + len(spec.workload.requests_per_s), 1)
    return len(candidates_of(spec)) * points + _FIXED_STEPS + tries_max(spec)


_FIXED_STEPS = 3
"""Capacity and writes, the verdict, effects of the inputs."""


def _context(spec: PlanSpec, trace: TraceData | None) -> int:
    if spec.workload.shape == "trace":
        if trace is None:
            raise ConfigError("workload.trace: the trace has to be read by the caller and passed as `trace`")
        return int(trace.requests.input_tokens.mean())
    return int(spec.workload.context_tokens or 0)


def _at(one: Assessment, load: Load) -> bool:
    cell = one.cell
    return (cell.concurrency if cell.concurrency is not None else cell.requests_per_s) == heaviest(load)


def _verdict(
    spec: PlanSpec,
    costs: Costs,
    load: Load,
    writes: tuple[Writes, ...],
    known: Sequence[Assessment],
    progress: Callable[[str], None],
) -> Verdict:
    daily = {row.medium: row.bytes_per_day for row in writes if row.admission == spec.fleet.admission}
    progress("verdict")
    choice = choose(spec, costs, load, daily, known)
    sample = load.sample(SENSITIVITY_REQUESTS)
    base = choose(spec, costs, sample, daily)
    if base.candidate.kind == choice.candidate.kind:
        changes = changes_of(sample, spec, base, daily, lambda name: progress(f"sensitivity, {name}"))
        outlook = _outlook(changes)
    else:
        changes = ()
        outlook = f"a sample of the load says {base.candidate.kind}, so this is on the edge."
    return Verdict(
        sentence=f"{_sentence(spec, choice)}; {outlook}",
        choice=choice.candidate.name,
        kind=choice.candidate.kind,
        met=choice.met,
        changes=changes,
    )


_PHRASES = {
    "recompute": "Recompute",
    "one local drive": "One local drive is enough",
    "several local drives": "Several local drives",
    "shared array": "A shared array",
    "tiers": "Local drives and an array together",
}


def _sentence(spec: PlanSpec, choice: Choice) -> str:
    phrase, cell = _PHRASES[choice.candidate.kind], choice.assessment.cell
    detail = "" if choice.candidate.name == choice.candidate.kind else f" ({choice.candidate.name})"
    goal = "the objective of" if objective_of(spec) else "recompute's"
    bound = f"{goal} {', '.join(format_duration(value) for value in choice.bounds_s.values())}"
    reach = f"within {bound}" if choice.met else f"although nothing keeps to {bound} and nothing is faster"
    times = ", ".join(f"{name} {format_duration(getattr(cell.ttft_s, name))}" for name in choice.bounds_s)
    cost = f"{choice.usd_per_million_tokens:.3g} USD per million tokens"
    return f"{phrase}{detail}: TTFT {times}, {reach}, at {cost}"


def _outlook(changes: tuple[Change, ...]) -> str:
    if not changes:
        return f"no single input moved by a factor of {FACTORS[-1]:g} changes that."
    return f"it would change with {'; '.join(change.text for change in changes)}."


def _notes(spec: PlanSpec, costs: Costs, load: Load) -> tuple[str, ...]:
    notes = [
        "prefill and decode of one instance do not slow each other in the simulated times; saturation and cost count "
        "both on the same GPUs",
        "saves are written behind and take no read bandwidth",
    ]
    if costs.prefill.source == "modelled":
        notes.append("prefill is modelled from FLOPs and MFU; a measured rate would replace it")
    if costs.tpot_source == "modelled":
        notes.append("TPOT is modelled from memory traffic; a measured one would replace it")
    if any(medium.effective_read is not None and not medium.shared for medium in spec.medium):
        notes.append("a measured rate of local drives is taken to grow with their number in the verdict")
    if not all(medium.drive_price is not None or medium.capacity is not None for medium in spec.medium):
        notes.append("media without price and capacity cost nothing here")
    if isinstance(load, TraceLoad):
        notes.append(
            f"the inputs that change the verdict come from a sample of about {SENSITIVITY_REQUESTS} requests in whole "
            "sessions, with capacities and time scaled alike"
        )
    return tuple(notes)
