"""Scenes of the raw protocol about who owns: header copies, claims, leases, and slots that a former owner has open.

Time is an actor that ticks. It may pass between any two steps, except where a scene says what it takes for granted.
It does not model clocks that run at different speeds, nor the luck in choosing a slot: see `unsealed`.
"""

from __future__ import annotations

from tests.store.model.explorer import END, Actor, Blocked, Scene, State, Step

RULES = {
    "1": "a header is written to one copy at a time, and read from both",
    "4": "a claim still stands two periods later, the header unchanged",
    "5": "dead is what has not counted for its lease, by the observer's own clock",
    "6": "an owner writes only within half its lease, and counts only while the header is its own",
    "10": "unsealed slots of a former owner are never appended to",
}
PERIOD, LEASE, SKEW = 1, 4, 5
HALF_LEASE = LEASE // 2
END_OF_TIME = 9


def fault(state: State) -> str | None:
    """What a step has found wrong."""
    found: str | None = state["fault"]
    return found


def clock(*, end: int = END_OF_TIME, waits_for: Step | None = None) -> Actor:
    """Time, up to `end`; it stands still where `waits_for` raises `Blocked`."""

    def tick(state: State) -> int:
        if state["now"] == end:
            raise Blocked
        if waits_for:
            waits_for(state)
        state["now"] += 1
        return 0

    return Actor("T", [tick])


def copies(rules: frozenset[str]) -> Scene:
    """An owner counts and loses power at every step, within a page, too: the last header that was whole is there."""

    def tear(counter: int) -> Step:
        def step(state: State) -> None:
            state[f"copy{counter % 2 if '1' in rules else 0}"] = None

        return step

    def whole(counter: int) -> Step:
        def step(state: State) -> None:
            state[f"copy{counter % 2 if '1' in rules else 0}"] = counter
            state["written"] = counter

        return step

    def readable(state: State) -> str | None:
        found = [state[copy] for copy in ("copy0", "copy1") if state[copy] is not None]
        return None if max(found, default=-1) == state["written"] else f"header {state['written']} is lost"

    steps = [step for counter in (1, 2, 3) for step in (tear(counter), whole(counter))]
    start = {"copy0": 0, "copy1": 0 if "1" in rules else None, "written": 0}
    return Scene([Actor("O", steps, may_die=True)], start, [readable])


def claimant(me: str, rules: frozenset[str]) -> Actor:
    """One that has found the owner dead. Steps: look, claim, check, decide, own."""

    def look(state: State) -> int | None:
        state[f"{me}.looked"] = state["now"]
        return None if state["header"] == "dead" else END

    def claim(state: State) -> None:
        state["claim"] = me

    def check(state: State) -> int | None:
        state[f"{me}.since"] = state["now"]
        return 0 if state["now"] - state[f"{me}.looked"] > PERIOD else None

    def decide(state: State) -> int | None:
        if "4" in rules and state["now"] < state[f"{me}.since"] + 2 * PERIOD:
            raise Blocked
        state[f"{me}.since"] = state["now"]
        return None if state["claim"] == me and state["header"] == "dead" else END

    def own(state: State) -> None:
        if state["header"] != "dead":
            state["fault"] = f"{state['header']} and {me} both own"
        state["header"] = me

    return Actor(me, [look, claim, check, decide, own], may_die=True)


def claims(rules: frozenset[str]) -> Scene:
    """Two hosts find the owner dead, and pause anywhere; granted: from the decision to the header it takes a period."""

    def deciders(state: State) -> None:
        for me in "AB":
            if state[f"{me}.pc"] == 4 and state["now"] - state[f"{me}.since"] >= PERIOD:
                raise Blocked

    start = {"now": 0, "header": "dead", "claim": "", "fault": None}
    start |= {f"{me}.{what}": 0 for me in "AB" for what in ("looked", "since")}
    return Scene([claimant("A", rules), claimant("B", rules), clock(end=6, waits_for=deciders)], start, [fault])


def observer(rules: frozenset[str], *, check_life: bool) -> Actor:
    """H looks for a lease, then takes over. Without rule 5 it compares the owner's stamp with its own, fast clock."""

    def look(state: State) -> None:
        state["seen"], state["looked"] = state["counter"], state["now"]

    def take(state: State) -> None:
        if "5" in rules:
            silent = state["now"] - state["looked"] >= LEASE and state["counter"] == state["seen"]
        else:
            silent = state["now"] + SKEW - state["stamp"] >= LEASE
        if not silent:
            raise Blocked
        if check_life and state["O.pc"] != END:
            state["fault"] = "a living owner is replaced"
        state["header"] = "H"

    return Actor("H", [look, take])


def leased() -> State:
    """An owner that has just counted."""
    return {"now": 0, "header": "O", "counter": 0, "stamp": 0, "began": 0, "seen": 0, "looked": 0, "fault": None}


def lease(rules: frozenset[str]) -> Scene:
    """An owner that counts in time, and may die; its heir's clock is ahead of its own."""

    def count(state: State) -> int:
        if state["now"] == state["stamp"]:
            raise Blocked
        state["counter"], state["stamp"] = state["counter"] + 1, state["now"]
        return 0

    def in_time(state: State) -> None:
        if state["O.pc"] != END and state["now"] - state["stamp"] >= HALF_LEASE:
            raise Blocked

    actors = [Actor("O", [count], may_die=True), observer(rules, check_life=True), clock(waits_for=in_time)]
    return Scene(actors, leased(), [fault])


def stopped(rules: frozenset[str]) -> Scene:
    """An owner saves, counts, and is stopped anywhere for any time: it begins no save once an heir has taken over."""

    def late(state: State) -> bool:
        return "6" in rules and state["now"] - state["stamp"] >= HALF_LEASE

    def save(state: State) -> int | None:
        if late(state):
            return END
        if state["header"] != "O":
            state["fault"] = "the owner saves into a log that nobody reads"
        return None

    def begin_count(state: State) -> int | None:
        if state["began"] == state["now"]:
            raise Blocked  # Once a tick, so that the counter is bounded by time.
        state["began"] = state["now"]
        return END if late(state) else None

    def look(state: State) -> int | None:
        return END if "6" in rules and state["header"] != "O" else None

    def count(state: State) -> int:
        state["counter"], state["stamp"] = state["counter"] + 1, state["began"]
        return 0

    owner = Actor("O", [save, begin_count, look, count], may_die=True)
    return Scene([owner, observer(rules, check_life=False), clock()], leased(), [fault])


def unsealed(rules: frozenset[str]) -> Scene:
    """What a former owner has in flight, into its open slot and the next free one, arrives at any time.

    The product draws the heir's slot out of all that are free; this is a draw that misses the former owner's.
    """

    def arrive(place: str) -> Step:
        def step(state: State) -> None:
            state[place] = "O"

        return step

    def write(place: str) -> Step:
        def step(state: State) -> None:
            state[place] = "H"
            state["named"] += (place,)

        return step

    def there(state: State) -> str | None:
        lost = [place for place in state["named"] if state[place] != "H"]
        return f"blocks of the heir are lost: {lost}" if lost else None

    owner = Actor("O", [arrive("open slot"), arrive("next slot")], may_die=True)
    heir = Actor("H", [write("third slot" if "10" in rules else "open slot")])
    start = {"open slot": "", "next slot": "", "third slot": "", "named": ()}
    return Scene([owner, heir], start, [there])


SCENES = (copies, unsealed, lease, stopped, claims)
"""The smallest first: what finds the break of a rule ends the search."""
