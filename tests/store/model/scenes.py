"""The scenes of the model that need no lease: publishing, verification, damage, names, eviction, capacity, compaction.

Each is a function from the rules in force to a scene. The rest is in `lives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.store.model.explorer import END, Actor, Blocked, Check, Scene, State, Step
from tests.store.model.world import (
    append,
    fresh_reader,
    holders,
    load,
    poll,
    segment,
    segments,
    served_at_last,
    write_page,
    write_slot,
)

Rules = frozenset[str]


def begin(rules: Rules, *readers: str, **facts: object) -> State:
    """A first state."""
    state: State = {"rules": rules, "told": frozenset(), **{name.replace("__", "/"): v for name, v in facts.items()}}
    for reader in readers:
        fresh_reader(state, reader)
    return state


def no_fault(state: State) -> str | None:
    """What an actor itself found wrong."""
    fault: str | None = state.get("fault")
    return fault


def right_bytes(state: State) -> str | None:
    """No hit has other bytes than the block's."""
    wrong = [pair for pair in state.get("served", ()) if pair[0] != pair[1]]
    return f"wrong bytes were served: {wrong}" if wrong else None


def sound(state: State) -> str | None:
    """Nobody meets a mismatch while the medium is sound."""
    names = [name for name in state if name.endswith(".mismatched")]
    return f"a mismatch on a sound medium: {names}" if names else None


def kept(*readers: str) -> Check:
    """What a caller was told is stored is served at last, to these readers and to a new one."""

    def check(state: State) -> str | None:
        for after in holders(state, "new", *readers):
            for key in sorted(state["told"]):
                if not served_at_last(after, after["who"], key):
                    return f"{key} was promised, and {after['who']} cannot load it"
        return None

    return check


def tell(key: str) -> Step:
    """Tell the caller that a block is stored."""

    def step(state: State) -> None:
        state["told"] |= {key}

    return step


def polls(reader: str, writer: str, rules: Rules, *keys: str) -> list[Step]:
    """Read a log, then load keys."""

    def look(state: State) -> None:
        poll(state, reader, writer, rules)

    def get(state: State) -> None:
        for key in keys:
            load(state, reader, key, rules)

    return [look, get] if keys else [look]


def publishing(rules: Rules) -> Scene:
    """A writer publishes two blocks, each frame lands in two halves, a write may fail half-way; a reader watches."""
    keys = ("a", "b")

    def payload(i: int) -> Step:
        def write(state: State) -> None:
            write_page(state, "W", 1, 1 + i, keys[i])

        return write

    def submit(i: int) -> Step:
        def begin_frame(state: State) -> None:
            state["submitted"] = i + 1

        return begin_frame

    def landed(i: int) -> Step:
        def wait_frame(state: State) -> None:
            if state[f"ring{i}.pc"] < 2:
                raise Blocked

        return wait_frame

    def finish(i: int) -> Step:
        def tell_if_good(state: State) -> None:
            if state[f"ring{i}.pc"] == 2:
                state["told"] |= {keys[i]}

        return tell_if_good

    def halves(i: int) -> list[Step]:
        frame = ("entry", keys[i], 1, 1 + i)

        def first_half(state: State) -> None:
            if state["submitted"] <= i:
                raise Blocked
            write_slot(state, "W", 1, i, ("half", frame))

        def second_half(state: State) -> None:
            write_slot(state, "W", 1, i, frame)

        return [first_half, second_half]

    def one(i: int) -> list[Step]:
        order = [payload(i), submit(i), landed(i)] if "2" in rules else [submit(i), landed(i), payload(i)]
        return [*order, finish(i)]

    steps = [*one(0), *one(1)]
    if "4" not in rules:
        steps = [payload(0), payload(1), submit(1), landed(0), landed(1), finish(0), finish(1)]
    watch = [*polls("R", "W", rules, *keys)] * 3
    actors = [Actor("W", steps, may_die=True), Actor("R", watch)]
    actors += [Actor(f"ring{i}", halves(i), may_die=i == 0 and "4" in rules) for i in (0, 1)]
    start = begin(rules, "R", seg__W__1=("head",), log__W__1=(), submitted=0)
    return Scene(actors, start, [no_fault, right_bytes, sound], [kept("R")])


def weak_mount(rules: Rules) -> Scene:
    """A mount that shows the frame before the payload: a reader meets zeros in a segment that is not sealed."""

    def show_frame(state: State) -> None:
        append(state, "W", ("entry", "a", 1, 1))
        state["told"] |= {"a"}

    def show_payload(state: State) -> None:
        write_page(state, "W", 1, 1, "a")

    actors = [Actor("W", [show_frame, show_payload]), Actor("R", polls("R", "W", rules, "a") * 2)]
    return Scene(actors, begin(rules, "R", seg__W__1=("head",), log__W__1=()), [no_fault, right_bytes], [kept()])


def trouble(rules: Rules) -> Scene:
    """A mount in trouble answers every read with an error for a while."""

    def begins(state: State) -> None:
        state["trouble"] = True

    def ends(state: State) -> None:
        state["trouble"] = False

    log = (("entry", "a", 1, 1), ("sealed", 1))
    start = begin(rules, "R", seg__W__1=("head", "a"), log__W__1=log, told=frozenset("a"))
    actors = [Actor("mount", [begins, ends]), Actor("R", polls("R", "W", rules, "a") * 2)]
    return Scene(actors, start, [no_fault, right_bytes], [kept("R")])


def damage(rules: Rules) -> Scene:
    """A sealed block is damaged; one reader says so, another reads what was said before or after the block's frame."""

    def strike(state: State) -> None:
        write_page(state, "W", 1, 1, "x")

    def not_offered(state: State) -> str | None:
        for reader in ("R", "S"):
            if ("W", 1, 1) in state.get(f"{reader}.heard", ()) and any(p[1] == "W" for p in state[f"{reader}.entries"]):
                return f"{reader} has read that the copy is damaged, and offers it"
        return None

    log = (("entry", "a", 1, 1), ("sealed", 1))
    start = begin(rules, "R", "S", seg__W__1=("head", "a"), log__W__1=log)
    other = [*polls("S", "R", rules), *polls("S", "W", rules), *polls("S", "R", rules, "a")]
    actors = [Actor("medium", [strike]), Actor("R", polls("R", "W", rules, "a") * 2), Actor("S", other)]
    return Scene(actors, start, [no_fault, right_bytes, not_offered])


def names(rules: Rules) -> Scene:
    """A segment is evicted and its writer goes on; a late reader still knows the old one."""
    number = 2 if "1" in rules else 1

    def evict(state: State) -> None:
        append(state, "E", ("evicted", "W", 1))
        state["seg/W/1"] = None

    def refill(state: State) -> None:
        if state["seg/W/1"] is not None:
            raise Blocked
        state[f"seg/W/{number}"] = ("head", "b")

    def publish(state: State) -> None:
        append(state, "W", ("entry", "b", number, 1))
        append(state, "W", ("sealed", number))
        state["told"] |= {"b"}

    start = begin(rules, "R", seg__W__1=("head", "a"), log__W__1=(("entry", "a", 1, 1), ("sealed", 1)))
    actors = [
        Actor("E", [evict]),
        Actor("W", [refill, publish], may_die=True),
        Actor("R", polls("R", "W", rules, "a") * 2),
    ]
    return Scene(actors, start, [no_fault, right_bytes], [kept("R")])


def probing(rules: Rules) -> Scene:
    """A mount remembers for a minute that a name was not there; a reader comes before the writer does."""

    def look(state: State) -> None:
        if "6" not in rules:
            if "log/W/1" not in state:
                state["remembered missing"] = True
            if state.get("remembered missing"):
                return
        poll(state, "R", "W", rules)

    def publish(state: State) -> None:
        state["seg/W/1"] = ("head", "a")
        append(state, "W", ("entry", "a", 1, 1))
        state["told"] |= {"a"}

    def due(state: State) -> str | None:
        after = dict(state)
        look(after)
        return None if served_at_last(after, "R", "a") else "a poll after the frame was written does not show it"

    return Scene([Actor("W", [publish]), Actor("R", [look, look])], begin(rules, "R"), [no_fault], [due])


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
            state[f"{name}.list"] = tuple(p for p in segments(state) if "12" not in rules or p[0] == "W")
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

    def fill(state: State) -> None:
        write_page(state, "V", 0, 1, "v")

    def publish(state: State) -> None:
        append(state, "V", ("entry", "v", 0, 1))
        if segment(state, "V", 0) is None:
            state["fault"] = "a living writer publishes into a file that was removed"

    start = begin(rules, **{k.replace("/", "__"): v for k, v in files.items()}, log__W__1=log, removed=0, credited=0)
    for name in ("E", "F"):
        start |= {f"{name}.used": 0, f"{name}.list": ()}
    actors = [
        Actor("E", evictor("E"), may_die=True),
        Actor("F", evictor("F")),
        Actor("V", [fill, publish]),
    ]
    return Scene(actors, start, [no_fault, announced, books])


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


def compaction(rules: Rules) -> Scene:
    """A writer rolls its log while one reader polls in time, another sleeps, and the writer may die at every step.

    `b` was dropped by the writer without a word; what it said of V's segment is not in the new log.
    """

    def snapshot_half(state: State) -> None:
        write_slot(state, "W", 2, 0, ("half", ("entry", "a", 1, 1)))

    def snapshot_whole(state: State) -> None:
        write_slot(state, "W", 2, 0, ("entry", "a", 1, 1))

    def rolled(state: State) -> None:
        append(state, "W", ("rolled", 2))
        state["rolled_at"] = state["now"]

    def remove_old(state: State) -> None:
        if "20b" in rules and state["now"] - state["rolled_at"] < 2:
            raise Blocked
        state["log/W/1"] = None

    def publish(state: State) -> None:
        write_page(state, "W", 1, 3, "c")
        append(state, "W", ("entry", "c", 1, 3), 2)
        state["told"] |= {"c"}

    def tick(state: State) -> None:
        if not state["R.polled"]:  # it polls more often than a log is kept
            raise Blocked
        state["now"] += 1
        state["R.polled"] = False

    def in_time(state: State) -> None:
        poll(state, "R", "W", rules)
        state["R.polled"] = True

    def woken(state: State) -> None:
        poll(state, "P", "W", rules)

    def up_to_date(state: State) -> str | None:
        finished = state["W.pc"] < END
        for after in holders(state, "R"):
            if after["who"] == "R" and any(place[1] == "V" for place in after["R.entries"]):
                return "R polled in time and keeps an entry of a segment that was announced as evicted"
            if finished and any(place[0] == "b" for place in after[f"{after['who']}.entries"]):
                return f"{after['who']} keeps an entry that the snapshot does not have"
        return None

    order = [snapshot_half, snapshot_whole, rolled] if "20a" in rules else [rolled, snapshot_half, snapshot_whole]
    log = (("entry", "a", 1, 1), ("entry", "b", 1, 2), ("evicted", "V", 1))
    start = begin(rules, "R", "P", seg__W__1=("head", "a", "b"), log__W__1=log, told=frozenset("a"), now=0)
    start |= {"rolled_at": 0, "R.polled": False}
    start["R.entries"] = frozenset({("v", "V", 1, 1)})
    actors = [
        Actor("W", [*order, remove_old, publish], may_die=True),
        Actor("R", [in_time] * 4),
        Actor("P", [woken] * 2),
        Actor("time", [tick] * 3),
    ]
    return Scene(actors, start, [no_fault, right_bytes], [kept("R", "P"), up_to_date])


SCENES: Sequence[Callable[[Rules], Scene]] = (
    publishing,
    weak_mount,
    trouble,
    damage,
    names,
    probing,
    eviction,
    quota,
    compaction,
)
