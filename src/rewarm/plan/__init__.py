"""The planner: recompute, local drive or array, and how many. Opens no file, prints nothing."""

from rewarm.plan.calibrate import apply, calibrate
from rewarm.plan.parsing import make_spec, parse_plan
from rewarm.plan.planner import make_plan, steps_max
from rewarm.plan.probe import apply_probe
from rewarm.plan.result import Plan
from rewarm.plan.spec import PlanSpec
from rewarm.plan.traceload import TraceData

__all__ = [
    "Plan", "PlanSpec", "TraceData", "apply", "apply_probe", "calibrate", "make_plan", "make_spec", "parse_plan",
    "steps_max",
]  # fmt: skip
