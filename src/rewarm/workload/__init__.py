"""What is asked of a cache: requests, their arrivals, traces and what a trace would hit at every capacity.

Shared by `bench` and `plan`. Readers stream; nothing here knows a store, a medium or an engine.
"""

from rewarm.workload.hitcurve import HitCurve, HitCurveBuilder
from rewarm.workload.reading import open_trace
from rewarm.workload.requests import Requests, Trace

__all__ = ["HitCurve", "HitCurveBuilder", "Requests", "Trace", "open_trace"]
