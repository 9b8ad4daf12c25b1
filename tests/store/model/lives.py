"""The scenes of the model in which writers pause, are taken for dead, and wake.

Time is counted in ticks; a lease is two, half of it one. A writer that pauses may do so between any two steps, so also
between its look at the lease and the frame that follows.
"""

from __future__ import annotations

from typing import Any

from tests.store.model.explorer import END, Actor, Blocked, Scene, State, Step
from tests.store.model.scenes import Rules, begin, kept, no_fault, right_bytes
from tests.store.model.world import append, poll, segments, write_page, write_slot

LEASE, HALF = 2, 1
SKEW = 3
"""By so many ticks the clock of the writer's host is behind that of the others."""


def ticks(count: int) -> Actor:
    """Time."""

    def tick(state: State) -> None:
        state["now"] += 1

    return Actor("time", [tick] * count)


def writer(name: str, keys: tuple[str, ...], rules: Rules) -> list[Step]:
    """Publishes each key under its lease; starts over as another when it is late. Epoch 1, segment 1, both there."""
    heir = f"{name}2"

    def place_of(key: str) -> int:
        return 1 + keys.index(key)

    def one(key: str, first: int) -> list[Step]:
        def look(state: State) -> int | None:
            state[f"{name}.adopted"] = f"adopted/{name}" in state
            late = state["now"] - state[f"{name}.sign"] >= HALF
            return start_over_at if late and "16a" in rules else None

        def payload(state: State) -> None:
            write_page(state, home(state, name), 1, place_of(key), key)

        def clock(state: State) -> None:
            state[f"{name}.began"] = state["now"]

        def frame(state: State) -> None:
            _land(state, name, key, place_of(key))

        def say(state: State) -> int | None:
            if "16b" in rules and state["now"] - state[f"{name}.sign"] >= HALF:
                return start_over_at
            state[f"{name}.sign"] = state[f"{name}.began"]
            state["told"] |= {key}
            return first + 5 if key != keys[-1] else END

        return [look, payload, clock, frame, say]

    def start_over(state: State) -> None:
        if "17" not in rules:  # it takes the log for its own, still
            state[f"{name}.sign"] = state["now"]
            return
        state[f"seg/{heir}/1"] = ("head",)
        state[f"log/{heir}/1"] = ()

    def go_on(state: State) -> int:
        who = heir if "17" in rules else name
        key = keys[-1] if keys[-1] not in state["told"] else f"{name}-more"
        write_page(state, who, 1, 7, key)
        append(state, who, ("entry", key, 1, 7))
        state["told"] |= {key}
        return END

    steps = [step for i, key in enumerate(keys) for step in one(key, 5 * i)]
    start_over_at = len(steps)
    return [*steps, start_over, go_on]


def home(state: State, name: str) -> str:
    """The directory in which a writer's open descriptors lie now."""
    found: str = state.get(f"{name}.home", name)
    return found


def _land(state: State, name: str, key: str, page: int) -> None:
    at = state[f"{name}.offset"]
    write_slot(state, home(state, name), 1, at, ("entry", key, 1, page))
    state[f"{name}.offset"] = at + 1
    state[f"{name}.landed"] = state["now"]
    if f"adopted/{name}" in state:
        state["late"] |= {(key, home(state, name))}
        if state[f"{name}.adopted"]:
            state["fault"] = f"{name} publishes into files that were adopted before it began"


def adopter(name: str, of: str, rules: Rules) -> list[Step]:
    """Watches a writer's log and takes it over when it has not changed for a lease."""

    def observe(state: State) -> None:
        state[f"{name}.seen"] = (len(state[f"log/{home(state, of)}/1"]), state["now"])

    def decide(state: State) -> int | None:
        if f"adopted/{of}" in state:
            return END
        length, since = state[f"{name}.seen"]
        now_length = len(state[f"log/{home(state, of)}/1"])
        if "15" in rules:
            if now_length != length:
                return 0
            if state["now"] - since < LEASE:
                raise Blocked
        elif state["now"] - (state[f"{of}.landed"] - SKEW) < LEASE:
            raise Blocked
        if state["now"] - state[f"{of}.landed"] < LEASE:
            state["fault"] = (
                f"{name} takes {of}, which counted {state['now'] - state[f'{of}.landed']} ticks ago, for dead"
            )
        state[f"{name}.end"] = (1, now_length)
        return None

    def link(state: State) -> int | None:
        marker = state.get(f"adopted/{of}")
        if marker is not None and "18a" in rules:
            return END
        if marker is not None and marker != state[f"{name}.end"]:
            state["fault"] = "two adopters named two ends"
        state[f"adopted/{of}"] = state[f"{name}.end"]
        if "18b" not in rules and home(state, of) == of:  # to a directory of the adopter's, which has no marker
            state[f"{of}.home"] = name
            for file in ("log", "seg"):
                state[f"{file}/{name}/1"], state[f"{file}/{of}/1"] = state[f"{file}/{of}/1"], None
        return None

    def append_to_it(state: State) -> None:
        write_slot(state, of, 1, state[f"{name}.end"][1], ("evicted", "V", 1))

    return [observe, decide, link] if "19a" in rules else [observe, decide, link, append_to_it]


def reader(name: str, of: tuple[str, ...], rules: Rules, times: int) -> list[Step]:
    """Reads a log, then looks for the marker, then takes what it read: three moments."""

    def one(writer: str) -> list[Step]:
        def fetch(state: State) -> None:
            state[f"{name}.from"] = home(state, writer)
            state[f"{name}.log"] = state.get(f"log/{home(state, writer)}/1", ())

        def look(state: State) -> None:
            state[f"{name}.end"] = state.get(f"adopted/{home(state, writer)}")

        def take(state: State) -> None:
            view = dict(state)
            source = state[f"{name}.from"]
            view.pop(f"adopted/{source}", None)
            if state[f"{name}.end"] is not None:
                view[f"adopted/{source}"] = state[f"{name}.end"]
            if state[f"{name}.log"]:
                poll(view, name, source, rules, log=state[f"{name}.log"])
            for field in ("entries", "void", "sealed", f"at/{source}", "heard"):
                if f"{name}.{field}" in view:
                    state[f"{name}.{field}"] = view[f"{name}.{field}"]
            state[f"{name}.log"] = ()

        return [fetch, look, take] if "19c" in rules else [look, fetch, take]

    return [step for writer in of for step in one(writer)] * times


def nothing_late(state: State) -> str | None:
    """What a writer appended to adopted files is offered by nobody."""
    for name, entries in state.items():
        if name.endswith(".entries"):
            late = {place[:2] for place in entries} & state["late"]
            if late:
                return f"{name.removesuffix('.entries')} offers what was appended to an adopted log: {sorted(late)}"
    return None


def living(name: str) -> dict[str, Any]:
    """A writer that has just counted: its log with one frame, its open segment."""
    return {
        f"seg/{name}/1": ("head",),
        f"log/{name}/1": (("counter", 0),),
        f"{name}.sign": 0,
        f"{name}.began": 0,
        f"{name}.adopted": False,
        f"{name}.landed": 0,
        f"{name}.offset": 1,
    }


def lease(rules: Rules) -> Scene:
    """A writer pauses at any step, another takes it for dead, it wakes; a reader watches."""
    start = begin(rules, "R", now=0, late=frozenset()) | living("W")
    start |= {"R.log": (), "R.end": None, "A.seen": (0, 0)}
    actors = [
        Actor("W", writer("W", ("a",), rules), may_die=True),
        Actor("A", adopter("A", "W", rules), may_die=True),
        Actor("R", reader("R", ("W",), rules, 1)),
        ticks(3),
    ]
    return Scene(actors, start, [no_fault, right_bytes, nothing_late], [kept("R")])


def adoption(rules: Rules) -> Scene:
    """Two take the same paused writer for dead, and one of them may end at any step."""
    start = begin(rules, now=0, late=frozenset()) | living("W") | {"A.seen": (0, 0), "B.seen": (0, 0)}
    actors = [
        Actor("W", writer("W", ("a",), rules)),
        Actor("A", adopter("A", "W", rules), may_die=True),
        Actor("B", adopter("B", "W", rules)),
        ticks(4),
    ]
    return Scene(actors, start, [no_fault], [kept()])


def whole(rules: Rules) -> Scene:
    """Two writers, one of which pauses, an evictor that adopts, a reader: leases, adoption and eviction together."""
    start = begin(rules, "R", now=0, late=frozenset(), removed=0, credited=0) | living("W") | living("V")
    start |= {"R.log": (), "R.end": None, "E.seen": (0, 0)}

    def payload(state: State) -> None:
        write_page(state, "V", 1, 1, "b")

    def publish(state: State) -> None:
        append(state, "V", ("entry", "b", 1, 1))
        state["told"] |= {"b"}

    def announce(state: State) -> int | None:
        if "adopted/W" not in state:
            return END
        append(state, "E", ("evicted", "W", 1))
        return None

    def unlink(state: State) -> None:
        if state["seg/W/1"] is not None:
            state["seg/W/1"] = None
            state["removed"] += 1
            state["credited"] += 1

    def announced(state: State) -> str | None:
        said = {slot[1:] for slot in state.get("log/E/1", ())}
        if ("W", 1) not in segments(state) and ("W", 1) not in said:
            return "a segment is gone and not announced"
        return None

    def promises(state: State) -> str | None:
        # What lay in the segment that was announced as evicted may be gone; everything else is there.
        gone = {"a"} if "log/E/1" in state and "seg/W2/1" not in state else set()
        return kept("R")({**state, "told": state["told"] - gone})

    actors = [
        Actor("W", writer("W", ("a",), rules), may_die=True),
        Actor("V", [payload, publish], may_die=True),
        Actor("E", [*adopter("E", "W", rules), announce, unlink], may_die=True),
        Actor("R", reader("R", ("W", "V"), rules, 1)),
        ticks(3),
    ]
    return Scene(actors, start, [no_fault, right_bytes, nothing_late, announced], [promises])
