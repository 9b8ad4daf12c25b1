"""The scenes of the model that need no lease: publishing, verification, damage, names, compaction.

Each is a function from the rules in force to a scene. The others are in `room.py` and `lives.py`.
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
    read,
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

    def at(state: State, i: int) -> int:
        """The slot of a frame: behind the last, and that also where the last has failed."""
        return 0 if "4b" not in rules and state["ring0.pc"] == END else i

    def halves(i: int) -> list[Step]:
        frame = ("entry", keys[i], 1, 1 + i)

        def first_half(state: State) -> None:
            if state["submitted"] <= i:
                raise Blocked
            write_slot(state, "W", 1, at(state, i), ("half", frame))

        def second_half(state: State) -> None:
            write_slot(state, "W", 1, at(state, i), frame)

        return [first_half, second_half]

    def one(i: int) -> list[Step]:
        order = [payload(i), submit(i), landed(i)] if "2" in rules else [submit(i), landed(i), payload(i)]
        return [*order, finish(i)]

    steps = [*one(0), *one(1)]
    if "4a" not in rules:
        steps = [payload(0), payload(1), submit(1), landed(0), landed(1), finish(0), finish(1)]
    watch = [*polls("R", "W", rules, *keys)] * 3
    actors = [Actor("W", steps, may_die=True), Actor("R", watch)]
    actors += [Actor(f"ring{i}", halves(i), may_die=i == 0 and "4a" in rules) for i in (0, 1)]
    start = begin(rules, "R", seg__W__1=("head",), log__W__1=(), submitted=0)
    return Scene(actors, start, [no_fault, right_bytes, sound], [kept("R")])


def weak_mount(rules: Rules) -> Scene:
    """A mount that shows the frame before the payload: a reader meets zeros in a segment that is not sealed."""

    def show_frame(state: State) -> None:
        append(state, "W", ("entry", "a", 1, 1))
        state["told"] |= {"a"}

    def show_payload(state: State) -> None:
        write_page(state, "W", 1, 1, "a")

    def read_again(state: State) -> None:
        """The second look, and the verdict with it: a miss only where there is nothing to be had."""
        if not state["R.entries"] or ("a", "a") in state.get("served", ()):
            return
        if "8a" in rules:
            poll(state, "R", "W", rules)
            load(state, "R", "a", rules)
        if ("a", "a") not in state.get("served", ()) and read(state, ("a", "W", 1, 1)) == "a":
            state["fault"] = "a block is missed that is there"

    actors = [Actor("W", [show_frame, show_payload]), Actor("R", [*polls("R", "W", rules, "a"), read_again] * 2)]
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
    """A segment is evicted and its writer goes on; late readers still know the old one, or hear of its end first."""
    number = 2 if "1a" in rules and "1b" in rules else 1

    def evict(state: State) -> None:
        append(state, "E", ("evicted", "W", 1))
        state["seg/W/1"] = None

    def refill(state: State) -> None:
        if "1b" not in rules:  # in the old one, over what was there
            write_page(state, "W", 1, 1, "b")
            return
        if state["seg/W/1"] is not None:
            raise Blocked
        state[f"seg/W/{number}"] = ("head", "b")

    def publish(state: State) -> None:
        append(state, "W", ("entry", "b", number, 1))
        append(state, "W", ("sealed", number))
        state["told"] |= {"b"}

    def not_offered(state: State) -> str | None:
        if ("W", 1) in state.get("S.heard", ()) and any(place[:3] == ("a", "W", 1) for place in state["S.entries"]):
            return "S has read that the segment is evicted, and offers what was in it"
        return None

    start = begin(rules, "R", "S", seg__W__1=("head", "a"), log__W__1=(("entry", "a", 1, 1), ("sealed", 1)))
    actors = [
        *([Actor("E", [evict])] if "1b" in rules else []),
        Actor("W", [refill, publish], may_die=True),
        Actor("R", polls("R", "W", rules, "a") * 2),
        Actor("S", [*polls("S", "E", rules), *polls("S", "W", rules)]),
    ]
    return Scene(actors, start, [no_fault, right_bytes, not_offered], [kept("R")])


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
    compaction,
)
