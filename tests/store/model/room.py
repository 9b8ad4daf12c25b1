"""The scenes of the model about room: eviction by several at once, and the capacity over a restart."""

from __future__ import annotations

from tests.store.model.explorer import END, Actor, Scene, State, Step
from tests.store.model.scenes import Rules, begin, no_fault
from tests.store.model.world import append, holders, segment, segments, served_at_last, write_page

SEGMENTS, LOW = 5, 3


def eviction(rules: Rules) -> Scene:
    """Two evictors find the pool full at once, one may end at any step; a slow writer fills the oldest segment."""
    # One open segment, the oldest of all, and five sealed ones.
    files = {f"seg/W/{i}": ("head", f"k{i}") for i in range(SEGMENTS)} | {"seg/V/0": ("head",)}
    log = tuple(slot for i in range(SEGMENTS) for slot in (("entry", f"k{i}", i, 1), ("sealed", i)))

    def used(state: State) -> int:
        return len(segments(state))

    def evictor(name: str) -> list[Step]:
        def measure(state: State) -> int | None:
            state[f"{name}.used"] = used(state)
            state[f"{name}.list"] = tuple(p for p in segments(state) if "12a" not in rules or p[0] == "W")
            return choose_at

        def choose(state: State) -> int | None:
            if not state[f"{name}.list"] or ("14" in rules and state[f"{name}.used"] <= LOW):
                return END
            return None

        def announce(state: State) -> None:
            append(state, name, ("evicted", *state[f"{name}.list"][0]))

        def unlink(state: State) -> int | None:
            (owner, number), *rest = state[f"{name}.list"]
            gone = state[f"seg/{owner}/{number}"] is not None
            state[f"seg/{owner}/{number}"] = None
            state[f"{name}.list"] = tuple(rest)
            state["removed"] += gone
            if gone or "11b" not in rules:
                state["credited"] += 1
                state[f"{name}.used"] -= 1
            return 0 if "11c" in rules else choose_at

        choose_at = 1
        acts = [announce, unlink] if "11a" in rules else [unlink_first(unlink), announce_last(name)]
        return [measure, choose, *acts]

    def announced(state: State) -> str | None:
        said = {slot[1:] for name in ("E", "F") for slot in state.get(f"log/{name}/1", ())}
        gone = {("W", i) for i in range(SEGMENTS) if state[f"seg/W/{i}"] is None}
        return f"gone and not announced: {gone - said}" if gone - said else None

    def books(state: State) -> str | None:
        if state["credited"] > state["removed"]:
            return "more was credited than was removed"
        least = LOW + 1 - 2
        return f"evicted down to {used(state)}" if used(state) < least else None

    start = begin(rules, **{k.replace("/", "__"): v for k, v in files.items()}, log__W__1=log, removed=0, credited=0)
    for name in ("E", "F"):
        start |= {f"{name}.used": 0, f"{name}.list": ()}
    actors = [
        Actor("E", evictor("E"), may_die=True),
        Actor("F", evictor("F")),
        Actor("V", slow_writer()),
    ]
    return Scene(actors, start, [no_fault, announced, books])


def slow_writer() -> list[Step]:
    """Fills the oldest segment, and publishes what it wrote."""

    def fill(state: State) -> None:
        write_page(state, "V", 0, 1, "v")

    def publish(state: State) -> None:
        append(state, "V", ("entry", "v", 0, 1))
        if segment(state, "V", 0) is None:
            state["fault"] = "a living writer publishes into a file that was removed"

    return [fill, publish]


def unlink_first(unlink: Step) -> Step:
    """An evictor that forgets to announce first."""

    def unlink_unsaid(state: State) -> None:
        unlink(state)

    return unlink_unsaid


def announce_last(name: str) -> Step:
    """And does so afterwards."""

    def announce(state: State) -> int:
        return 0

    return announce


def erasing(rules: Rules) -> Scene:
    """Somebody erases, by order, the segment that a living writer fills; from its next poll on its saves count."""

    def announce(state: State) -> None:
        append(state, "E", ("evicted", "W", 1))

    def unlink(state: State) -> None:
        state["seg/W/1"] = None

    def look(state: State) -> None:
        state["noticed"] = ("evicted", "W", 1) in state.get("log/E/1", ())
        if state["noticed"] and "12b" in rules and state["number"] == 1:
            state["number"] = 2
            state["seg/W/2"] = ("head",)

    def fill(state: State) -> None:
        write_page(state, "W", state["number"], 1, "b")

    def publish(state: State) -> None:
        append(state, "W", ("entry", "b", state["number"], 1))
        state["told"] |= {"b"} if state["noticed"] else set()

    def promised(state: State) -> str | None:
        for after in holders(state, "new"):
            if "b" in state["told"] and not served_at_last(after, "new", "b"):
                return "what was saved after the poll that showed the eviction is lost"
        return None

    start = begin(rules, seg__W__1=("head", "a"), log__W__1=(("entry", "a", 1, 1),), number=1, noticed=False)
    actors = [Actor("E", [announce, unlink], may_die=True), Actor("W", [look, fill, publish] * 2, may_die=True)]
    return Scene(actors, start, [no_fault], [promised])


def quota(rules: Rules) -> Scene:
    """A pool is full of what a dead writer left; another process starts and goes on saving."""
    capacity = 4

    def make_room(state: State) -> int | None:
        files = segments(state)
        mine = [place for place in files if place[0] == "N"]
        counted = files if "13" in rules else mine
        if len(counted) + 1 > capacity:
            owner, number = files[0]
            state[f"seg/{owner}/{number}"] = None
            return state["N.pc"]  # type: ignore[no-any-return]
        return None

    def create(number: int) -> Step:
        def new_segment(state: State) -> None:
            state[f"seg/N/{number}"] = ("head",)

        return new_segment

    def bounded(state: State) -> str | None:
        return f"{len(segments(state))} of {capacity} used" if len(segments(state)) > capacity else None

    start = begin(rules, **{f"seg__W__{i}": ("head",) for i in range(capacity)})
    steps = [step for i in range(10, 13) for step in (make_room, create(i))]
    return Scene([Actor("N", steps, may_die=True)], start, [bounded])
