"""What the actors of the model have in common: logs of frames, segments of pages, readers, and the rules as switches.

A log is a tuple of slots: a frame (a tuple that begins with its kind), `("half", frame)` while only the first page of
it has landed, or None for a hole. A segment is a tuple of pages; a page holds the key of the block in it, so that wrong
bytes are a key that is not the one asked for. Pages count from 0, which is the header's.
"""

from __future__ import annotations

from typing import Any

from tests.store.model.explorer import State

RULES = {
    "1a": "names are never used twice",
    "1b": "bytes a reader may have seen are never rewritten",
    "2": "payload before frame",
    "3": "a frame is whole or absent",
    "4a": "frames reach the medium in sequence",
    "4b": "after a failed write the offset moves on",
    "5a": "damage is skipped once a later frame is valid",
    "5b": "and only then",
    "6": "readers list, and never probe names",
    "7": "every load verifies",
    "8a": "a mismatch in an unsealed segment is read again after a refresh",
    "8b": "and never written to a log",
    "9": "only a checksum mismatch writes a DROPPED frame",
    "10a": "DROPPED holds whenever it is read",
    "10b": "and so does EVICTED",
    "11a": "announce, then unlink",
    "11b": "credit only an unlink that succeeded",
    "11c": "measure again after each",
    "12a": "sealed segments only, of a living writer",
    "12b": "a writer whose open segment was evicted goes on in a new one",
    "13": "capacity counts real bytes of all writers",
    "14": "stop at the low mark",
    "15": "a lease is watched with the observer's own clock",
    "16a": "a writer looks at its lease before it publishes",
    "16b": "and again before it says so",
    "17": "a late writer starts over under a new id",
    "18a": "adoption is one link: who comes second has lost",
    "18b": "nothing is renamed",
    "19a": "adopted files are never appended to",
    "19b": "what lies behind the adopted end is not taken",
    "19c": "a reader looks for the marker after it has read the log",
    "20a": "the new log is complete before the old one ends",
    "20b": "the old log stays",
    "20c": "a snapshot replaces all entries of its writer",
    "21": "a reader that lost the chain lists again",
}
"""Each rule of docs/reference/protocol-1.md, in parts where it has several.

One part is left out: the random pause between two victims (rule 14). Every length of it is explored, and none is needed
for what the page promises; it makes two evictors that meet rarer, not more right.
"""

Place = tuple[str, str, int, int]
"""A copy of a block: (key, writer, segment, page)."""


def segment(state: State, writer: str, number: int) -> tuple[str, ...] | None:
    """The pages of a segment, None where there is no file."""
    found: tuple[str, ...] | None = state.get(f"seg/{writer}/{number}")
    return found


def write_page(state: State, writer: str, number: int, page: int, key: str) -> None:
    """Put a block's payload on the medium; into an unlinked file it goes nowhere."""
    pages = segment(state, writer, number)
    if pages is not None:
        pages = pages + ("",) * (page + 1 - len(pages))
        state[f"seg/{writer}/{number}"] = (*pages[:page], key, *pages[page + 1 :])


def segments(state: State) -> list[tuple[str, int]]:
    """Every segment file, oldest first: by number, then by writer."""
    names = [name.split("/")[1:] for name in state if name.startswith("seg/") and state[name] is not None]
    return sorted(((writer, int(number)) for writer, number in names), key=lambda place: (place[1], place[0]))


def write_slot(state: State, writer: str, epoch: int, at: int, slot: Any) -> None:
    """Write into a log at an explicit offset; writing over what a reader may have seen is noted."""
    name = f"log/{writer}/{epoch}"
    log = state.get(name, ())
    log = log + (None,) * (at + 1 - len(log))
    old = log[at]
    if old is not None and old != slot and not (old[0] == "half" and old[1] == slot):
        state["fault"] = f"slot {at} of {name} was written twice"
    state[name] = (*log[:at], slot, *log[at + 1 :])


def append(state: State, writer: str, frame: tuple[Any, ...], epoch: int = 1) -> None:
    """Write a whole frame behind what the log has."""
    write_slot(state, writer, epoch, len(state.get(f"log/{writer}/{epoch}", ())), frame)


def valid(slot: Any) -> bool:
    """True for a whole frame."""
    return slot is not None and slot[0] != "half"


def epochs(state: State, writer: str) -> list[int]:
    """Numbers of the logs that a listing of the writer's directory shows."""
    prefix = f"log/{writer}/"
    return sorted(int(name[len(prefix) :]) for name in state if name.startswith(prefix) and state[name] is not None)


def fresh_reader(state: State, name: str) -> None:
    """A reader that knows nothing yet."""
    state[f"{name}.entries"] = frozenset()
    state[f"{name}.void"] = frozenset()
    state[f"{name}.sealed"] = frozenset()


def poll(state: State, reader: str, writer: str, rules: frozenset[str], *, log: Any = None) -> None:
    """Read what is new in a writer's log and apply it; `log` is what was read in a step of its own before."""
    at_name = f"{reader}.at/{writer}"
    there = epochs(state, writer)
    if not there:
        return
    epoch, at = state.get(at_name, (there[0], 0))
    replaced: set[Place] | None = None
    while True:
        slots = state.get(f"log/{writer}/{epoch}") if log is None else log
        if slots is None:
            if "21" not in rules or not there or there[0] <= epoch:
                break
            epoch, at, replaced = there[0], 0, _entries_of(state, reader, writer)
            continue
        at, rolled = _apply(state, reader, writer, (epoch, at), slots, rules, replaced)
        if rolled is None or log is not None:
            break
        epoch, at, replaced = rolled, 0, _entries_of(state, reader, writer)
    state[at_name] = (epoch, at)
    if replaced and "20c" in rules:
        state[f"{reader}.entries"] -= replaced


def _entries_of(state: State, reader: str, writer: str) -> set[Place]:
    return {place for place in state[f"{reader}.entries"] if place[1] == writer}


def _apply(
    state: State,
    reader: str,
    writer: str,
    where: tuple[int, int],
    slots: tuple[Any, ...],
    rules: frozenset[str],
    replaced: set[Place] | None,
) -> tuple[int, int | None]:
    """Take frames from a position on; returns the new position, and the next log if this one has ended."""
    epoch, at = where
    end = state.get(f"adopted/{writer}")
    while at < len(slots):
        if "19b" in rules and end is not None and (epoch, at) >= end:
            break
        slot = slots[at]
        if not valid(slot):
            if slot is not None and "3" not in rules and slot[1][0] == "entry":
                _, key, number, _ = slot[1]
                state[f"{reader}.entries"] |= {(key, writer, number, 9)}  # old bytes in place of the second page
            elif "5b" in rules and not ("5a" in rules and any(map(valid, slots[at + 1 :]))):
                break
            at += 1
            continue
        at += 1
        if slot[0] == "rolled":
            return at, slot[1]
        _take(state, reader, writer, slot, rules, replaced)
    return at, None


def _take(
    state: State, reader: str, writer: str, frame: Any, rules: frozenset[str], replaced: set[Place] | None
) -> None:
    void, entries = f"{reader}.void", f"{reader}.entries"
    if frame[0] == "entry":
        place = (frame[1], writer, frame[2], frame[3])
        if replaced is not None:
            replaced.discard(place)
        if not state[void] & {place[1:3], place[1:4]}:
            state[entries] |= {place}
    elif frame[0] == "sealed":
        state[f"{reader}.sealed"] |= {(writer, frame[1])}
    elif frame[0] in ("evicted", "dropped"):
        if ("10a" if frame[0] == "dropped" else "10b") in rules:
            state[void] |= {frame[1:]}
        state[f"{reader}.heard"] = state.get(f"{reader}.heard", frozenset()) | {frame[1:]}
        state[entries] = frozenset(p for p in state[entries] if frame[1:] not in (p[1:3], p[1:4]))


def read(state: State, place: Place) -> str | None:
    """What lies at a place: a key, "" for zeros; None where there is no file."""
    pages = segment(state, place[1], place[2])
    return None if pages is None else pages[place[3]] if place[3] < len(pages) else ""


def load(state: State, reader: str, key: str, rules: frozenset[str]) -> None:
    """Load a block as a reader does: verify, serve or miss, and say what is damaged."""
    for place in sorted(p for p in state[f"{reader}.entries"] if p[0] == key):
        trouble = bool(state.get("trouble"))
        content = None if trouble else read(state, place)
        if content == key or ("7" not in rules and content is not None):
            state["served"] = state.get("served", frozenset()) | {(key, content)}
            return
        sealed = place[1:3] in state[f"{reader}.sealed"]
        mismatch = content is not None
        if mismatch:
            state[f"{reader}.mismatched"] = True
        if (mismatch or "9" not in rules) and (sealed or "8b" not in rules):
            state[f"{reader}.entries"] -= {place}
            append(state, reader, ("dropped", *place[1:]))


def holders(state: State, *readers: str) -> list[State]:
    """The readers at the end, each after a last pass over every log, in the order of the names and the other way."""
    writers = sorted({name.split("/")[1] for name in state if name.startswith("log/")})
    found = []
    for reader in readers:
        for order in (writers, writers[::-1]):
            after = dict(state)
            if f"{reader}.entries" not in after:
                fresh_reader(after, reader)
            for writer in order:
                poll(after, reader, writer, state["rules"])
            after["who"] = reader
            found.append(after)
    return found


def served_at_last(state: State, reader: str, key: str) -> bool:
    """True when this reader, as it is now, can read a good copy of the key."""
    return any(read(state, place) == key for place in state[f"{reader}.entries"] if place[0] == key)
