"""Explores every interleaving of a few actors, with a pause or a death at every step.

A state is a dictionary of immutable values. An actor is a list of steps; a step changes a state and says where the
actor goes on. Between any two steps any other actor may run any number of its own (a pause), and an actor that may die
can end at every step. States that were met before are not explored again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

State = dict[str, Any]
Step = Callable[[State], int | None]
"""Changes the state in place; returns the number of the next step, or None for the one that follows."""

Check = Callable[[State], str | None]
"""What is wrong with a state, or None."""

END = 1_000_000
STATES_MAX = 3_000_000


class Blocked(Exception):
    """Raised by a step that cannot run now."""


@dataclass(frozen=True)
class Actor:
    """One process or host, or the medium, or time."""

    name: str
    steps: Sequence[Step]
    may_die: bool = False


@dataclass
class Scene:
    """A small configuration: who acts, from where, and what must hold in every state and in the last ones."""

    actors: Sequence[Actor]
    start: State
    always: Sequence[Check] = ()
    at_rest: Sequence[Check] = ()


@dataclass
class Found:
    """Result of an exploration; `wrong` is the first violation, `trace` the steps that led to it."""

    states: int = 0
    rests: int = 0
    wrong: str | None = None
    trace: list[str] = field(default_factory=list)


def explore(scene: Scene) -> Found:
    """Visit every reachable state, depth first, until one is wrong."""
    found = Found()
    start = {**scene.start, **{f"{actor.name}.pc": 0 for actor in scene.actors}}
    seen: set[Hashable] = {_key(start)}
    stack: list[tuple[State, tuple[str, Any]]] = [(start, ("", None))]
    while stack:
        state, path = stack.pop()
        found.states += 1
        assert found.states <= STATES_MAX, "the scene is too large"
        following = _following(scene, state)
        checks = scene.always if following else (*scene.always, *scene.at_rest)
        found.rests += not following
        for check in checks:
            found.wrong = check(state)
            if found.wrong:
                found.trace = _unroll(path)
                return found
        for name, after in following:
            key = _key(after)
            if key not in seen:
                seen.add(key)
                stack.append((after, (name, path)))
    return found


def _following(scene: Scene, state: State) -> list[tuple[str, State]]:
    """Every state that one step leads to. Deaths lead nowhere new where nobody else can move: those are rests, too."""
    following = []
    for actor in scene.actors:
        pc = state[f"{actor.name}.pc"]
        if pc >= len(actor.steps):
            continue
        after = dict(state)
        try:
            goto = actor.steps[pc](after)
        except Blocked:
            pass
        else:
            after[f"{actor.name}.pc"] = pc + 1 if goto is None else goto
            following.append((f"{actor.name}:{actor.steps[pc].__name__}", after))
        if actor.may_die:
            dead = dict(state)
            dead[f"{actor.name}.pc"] = END
            following.append((f"{actor.name}:dies", dead))
    return following


def _key(state: State) -> Hashable:
    """64 bits stand for a state: among a million states two share them once in 30 million explorations."""
    return hash(frozenset(state.items()))


def _unroll(path: tuple[str, Any]) -> list[str]:
    steps = []
    while path[1] is not None:
        steps.append(path[0])
        path = path[1]
    return steps[::-1]
