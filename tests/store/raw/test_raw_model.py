"""The raw protocol in the small, every interleaving: an owner, its heir, a reader; it breaks without any one rule.

The owner may pause between its check of the lease and its writes, and die at every step. One slot is used twice.
Who owns at all is explored in the scenes of `owning`.
"""

from __future__ import annotations

import pytest
from tests.store.model.explorer import Actor, Blocked, Scene, State, Step, explore
from tests.store.raw import owning

RULES = {
    **owning.RULES,
    "2": "only the half that the header names counts",
    "3": "a new half is complete before the header names it",
    "7": "an eviction is announced, and the slot written again only after readers have polled",
    "8": "entries of an earlier generation are ignored",
    "9": "every load verifies",
}
ALL = frozenset(RULES)


def publish(half: int, key: str, generation: int) -> list[Step]:
    """Write the payload of a block into the slot, then its frame."""

    def payload(state: State) -> None:
        state["slot"] = key

    def frame(state: State) -> None:
        state[f"half{half}"] += (("entry", key, generation),)

    return [payload, frame]


def poll_and_load(state: State, rules: frozenset[str]) -> None:
    """Read the log, then the slot; what is served is noted, and a mismatch that a poll should have prevented."""
    halves = (state["header"],) if "2" in rules else (0, 1)
    known: dict[str, int] = {}
    newest = 0
    for half in halves:
        for kind, key, generation in state[f"half{half}"]:
            if kind == "entry" and (generation >= newest or "8" not in rules):
                if generation > newest and "8" in rules:
                    known = {}
                known[key], newest = generation, max(newest, generation)
            elif kind == "evicted":
                known = {key: found for key, found in known.items() if found > generation}
                newest = max(newest, generation + 1)
    state["known"] = tuple(sorted(known))
    state["polls"] = min(state["polls"] + 1, 3)


def load(state: State, rules: frozenset[str]) -> None:
    """Load whatever the last poll has shown."""
    for key in state["known"]:
        if state["slot"] == key or "9" not in rules:
            state["served"] |= {(key, state["slot"])}
        elif state["sound"]:
            state["fault"] = f"{key} is gone from under a reader that polls"


def reader(rules: frozenset[str]) -> Actor:
    def poll(state: State) -> None:
        poll_and_load(state, rules)

    def get(state: State) -> None:
        load(state, rules)

    return Actor("R", [poll, get] * 3)


def begin(*, sound: bool) -> State:
    return {
        "header": 0, "half0": (), "half1": (), "slot": "", "known": (), "polls": 0,
        "served": frozenset(), "sound": sound, "fault": None,
    }  # fmt: skip


def right(state: State) -> str | None:
    """No hit with other bytes, no fault."""
    wrong = [pair for pair in state["served"] if pair[0] != pair[1]]
    return f"wrong bytes: {wrong}" if wrong else state["fault"]


def kept(state: State) -> str | None:
    """What the log that counts names is in it: a crash between the steps of a roll loses nothing."""
    half = state[f"half{state['header']}"]
    return "the roll lost the index" if state.get("told") and ("entry", "a", 1) not in half else None


def reuse(rules: frozenset[str]) -> Scene:
    """One owner uses a slot, evicts it, and uses it again, while a reader polls: nothing vanishes from under it."""

    def announce(state: State) -> None:
        state["half0"] += (("evicted", "a", 1),)
        state["polls"] = 0

    def grace(state: State) -> None:
        if state["R.pc"] % 2 or (state["polls"] < 1 and state["R.pc"] < 6):
            raise Blocked

    between = [announce, grace] if "7" in rules else []
    return Scene(
        [Actor("O", [*publish(0, "a", 1), *between, *publish(0, "b", 2)], may_die=True), reader(rules)],
        begin(sound=True),
        [right],
    )


def late(rules: frozenset[str]) -> Scene:
    """A former owner writes after its heir has begun: neither its frame nor its payload is ever taken for a block."""

    def take_over(state: State) -> None:
        state["header"] = 1

    owner = Actor("O", publish(0, "a", 1), may_die=True)
    heir = Actor("H", [take_over, *publish(1, "b", 1)])
    scene = Scene([owner, heir, reader(rules)], begin(sound=False), [right, foreign])
    return scene


def foreign(state: State) -> str | None:
    """After the takeover nothing that only the former owner names is known to a reader that has polled since."""
    polled = state["R.pc"] in (1, 3, 5) and state["header"] == 1 and state["H.pc"] >= 3 and state["polls"] == 3
    return "a frame of the former owner counts" if polled and len(state["known"]) > 1 else None


def stale(rules: frozenset[str]) -> Scene:
    """Damage has left an old frame behind a newer one: it must not bring the old use of the slot back."""
    start = {**begin(sound=True), "half0": (("entry", "b", 2), ("entry", "a", 1)), "slot": "b"}
    return Scene([reader(rules)], start, [right])


def rolling(rules: frozenset[str]) -> Scene:
    """The owner rolls its log and may die at every step."""

    def snapshot(state: State) -> None:
        state["half1"] = state["half0"]

    def flip(state: State) -> None:
        state["header"] = 1

    def tell(state: State) -> None:
        state["told"] = True

    steps = [snapshot, flip] if "3" in rules else [flip, snapshot]
    owner = Actor("O", [*publish(0, "a", 1), tell, *steps], may_die=True)
    return Scene([owner, reader(rules)], begin(sound=False), [right, kept])


SCENES = (reuse, late, stale, rolling, *owning.SCENES)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_nothing_goes_wrong_under_all_rules(scene: object) -> None:
    found = explore(scene(ALL))  # type: ignore[operator]
    assert found.wrong is None, found.trace
    assert found.rests > 0, "nothing ever comes to rest"


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(rule: str) -> None:
    assert any(explore(scene(ALL - {rule})).wrong for scene in SCENES), f"nothing breaks without {rule}: {RULES[rule]}"
