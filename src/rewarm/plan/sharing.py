"""Many nodes on one array: when is it still faster than a drive in every node?

With K nodes that each restore a share d of the time (their duty), a node that restores finds X others doing so too,
X ~ binomial(K - 1, d), and gets min(its port, total / (1 + X)). The duty is that of the array as it is shared: a
slower array raises it, which these forms do not follow; the simulator does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from rewarm.plan.cost import Costs
from rewarm.plan.load import stays
from rewarm.plan.media import Source, source_of
from rewarm.plan.result import Sharing, SharingPoint
from rewarm.plan.spec import Medium, PlanSpec

NODES_CURVE_MAX = 256
"""Nodes looked at; a curve that goes on beyond says null."""
DUTIES = (0.01, 0.02, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
_STEPS = 50
"""Halvings of a bisection over [0, 1]: exact to rounding."""


def others(nodes: int, duty: float) -> NDArray[np.float64]:
    """Probability of 0, 1, .., nodes - 1 other nodes restoring at the same moment."""
    count = nodes - 1
    chances = [math.comb(count, k) * duty**k * (1 - duty) ** (count - k) for k in range(nodes)]
    return np.array(chances)


def restore_s(size: float, nodes: int, node_rate: float, total_rate: float) -> NDArray[np.float64]:
    """Seconds to restore `size` bytes with 0, 1, .., nodes - 1 others at it all the while."""
    return size / np.minimum(node_rate, total_rate / np.arange(1, nodes + 1))


def mean_s(size: float, nodes: int, duty: float, node_rate: float, total_rate: float) -> float:
    """Mean restore time."""
    return float(others(nodes, duty) @ restore_s(size, nodes, node_rate, total_rate))


def median_s(size: float, nodes: int, duty: float, node_rate: float, total_rate: float) -> float:
    """Median restore time."""
    place = int(np.searchsorted(np.cumsum(others(nodes, duty)), 0.5))
    return float(restore_s(size, nodes, node_rate, total_rate)[min(place, nodes - 1)])


Statistic = Callable[[float, int, float, float, float], float]
"""`mean_s` or `median_s`."""


def duty_limit(
    statistic: Statistic, bound_s: float, size: float, nodes: int, node_rate: float, total_rate: float
) -> float:
    """The largest duty at which `statistic` is no more than `bound_s`; 0 for none."""

    def holds(duty: float) -> bool:
        return statistic(size, nodes, duty, node_rate, total_rate) <= bound_s * (1 + 1e-12)

    if not holds(0.0):
        return 0.0
    if holds(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def nodes_limit(
    statistic: Statistic, bound_s: float, size: float, duty: float, node_rate: float, total_rate: float
) -> int | None:
    """The most nodes with `statistic` no more than `bound_s` at this duty; 0 for none, None for no limit seen."""
    low, high = 0, NODES_CURVE_MAX + 1
    while high - low > 1:
        middle = (low + high) // 2
        within = statistic(size, middle, duty, node_rate, total_rate) <= bound_s * (1 + 1e-12)
        low, high = (middle, high) if within else (low, middle)
    return None if low == NODES_CURVE_MAX else low


def sharing_of(spec: PlanSpec, costs: Costs, context_tokens: int) -> tuple[Sharing, ...]:
    """Every shared medium of a plan against every local one."""
    arrays = [source_of(medium, spec) for medium in spec.medium if medium.shared]
    locals_ = [source_of(medium, spec) for medium in spec.medium if not medium.shared]
    return tuple(_compare(spec, costs, context_tokens, array, local) for array in arrays for local in locals_)


def _compare(spec: PlanSpec, costs: Costs, context_tokens: int, array: Source, local: Source) -> Sharing:
    nodes = spec.fleet.nodes
    size = float(costs.bytes_of([context_tokens])[0])
    compute_s = float(costs.prefill_s([context_tokens], [0])[0])
    node, total = array.node_rate, array.total_rate
    bound = size / local.rate + local.fixed_s - array.fixed_s
    home = stays(spec.fleet)
    served_s = home * (size / local.rate + local.fixed_s) + (1 - home) * compute_s - array.fixed_s
    by_mean = duty_limit(mean_s, bound, size, nodes, node, total)
    with_moves = duty_limit(mean_s, served_s, size, nodes, node, total)
    medium = array.medium

    def under(changed: Medium) -> float:
        other = source_of(changed, spec)
        return duty_limit(mean_s, bound, size, nodes, other.node_rate, other.total_rate)

    fixed_rate = medium.effective_read is not None
    return Sharing(
        array=medium.name,
        local=local.medium.name,
        nodes=nodes,
        ports=medium.ports,
        drives=medium.drives,
        array_bytes_per_s=total,
        node_bytes_per_s=min(node, total),
        local_bytes_per_s=local.rate,
        duty_by_median=duty_limit(median_s, bound, size, nodes, node, total),
        duty_by_mean=by_mean,
        duty_by_mean_with_moves=with_moves,
        curve=tuple(_point(duty, bound, compute_s - array.fixed_s, size, node, total) for duty in DUTIES),
        by_ports={str(n): under(_with_ports(medium, n)) for n in (1, 2, 4, 8)},
        by_drives={} if fixed_rate else {str(n): under(_replace(medium, drives=n)) for n in (2, 4, 8, 12, 24)},
        by_link={} if fixed_rate or medium.link is None else {
            f"{gbit}": under(_replace(medium, link=gbit * 1e9 / 8)) for gbit in (25, 100, 200, 400)
        },
        verdict=_verdict(medium.name, local.medium.name, nodes, medium.ports, by_mean, with_moves, home),
    )  # fmt: skip


def _replace(medium: Medium, **fields: object) -> Medium:
    return msgspec.structs.replace(medium, **fields)


def _with_ports(medium: Medium, ports: int) -> Medium:
    """Another number of ports; a measured rate is one of the ports that it was measured with."""
    rate = medium.effective_read
    return _replace(medium, ports=ports, effective_read=rate and rate * ports / medium.ports)


def _point(duty: float, bound: float, compute_s: float, size: float, node: float, total: float) -> SharingPoint:
    return SharingPoint(
        duty=duty,
        nodes_by_median=nodes_limit(median_s, bound, size, duty, node, total),
        nodes_by_mean=nodes_limit(mean_s, bound, size, duty, node, total),
        nodes_against_recompute=nodes_limit(mean_s, compute_s, size, duty, node, total),
    )


def _verdict(array: str, local: str, nodes: int, ports: int, duty: float, with_moves: float, home: float) -> str:
    where = f"{_plural(nodes, 'node')} on {_plural(ports, 'port')} of {array}"
    if duty <= 0:
        text = f"{where}: slower than {local} in every node at any duty"
    elif duty >= 1:
        text = f"{where}: never slower than {local} in every node"
    else:
        text = f"{where}: faster than {local} in every node while each node restores less than {duty:.1%} of the time"
    if home < 1:
        moved = "at any duty" if with_moves >= 1 else f"up to a duty of {with_moves:.1%}"
        text += f"; counting the {1 - home:.0%} of turns that a local drive cannot serve and has to recompute, {moved}"
    return text


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
