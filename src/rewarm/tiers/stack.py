"""A stack: DRAM over the drives of a pool over a store that many hosts share, as one store.

A block is looked for in DRAM, on the drives, in the shared store, and one request reads all of them at once, in the
pool's order. What is read below is kept in DRAM, and what only the shared store had is written to the drives
(promotion). A save goes to the drives, as far as it is admitted, and has its verdict from them; it is kept in DRAM, and
copied from there to the shared store when it comes to it (write-behind), within a budget of bytes: beyond it a block is
not copied, and counted. A drive that is lost, hangs or is full costs what nobody else has.

DRAM offers only what flash holds too, or what admission has kept off flash: what any host erases or evicts is gone
here as soon as the index says so. A copy that another process has under way when a namespace is erased may come after
the erasure: erase again, or when nobody saves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError
from rewarm.store.contract import CheckReport, Outcome, Stats, Store, TierStats, check_keys
from rewarm.store.transfer import BatchTransfer, Counters
from rewarm.tiers.admission import Admission, Policy
from rewarm.tiers.hot import HotStore
from rewarm.tiers.lane import Lane
from rewarm.tiers.pool import PoolSettings, PoolStore, within_budget
from rewarm.tiers.requests import Part, Request
from rewarm.tiers.summing import drive_notes, merged_report, merged_stats
from rewarm.units import format_size

WRITE_BEHIND_BYTES = 1 << 30
"""Copies that wait at most; never more than half of the DRAM, because they wait there."""


class StackSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a stack has beside a pool. `write_behind_bytes` None is the default for the size of the DRAM."""

    dram_bytes: int
    admission: Policy = Policy()
    write_behind_bytes: int | None = None

    def behind_bytes(self) -> int:
        """The budget of copies. Raises `ConfigError` where it does not fit, with the number to set."""
        half = self.dram_bytes // 2
        if self.write_behind_bytes is None:
            return min(WRITE_BEHIND_BYTES, half)
        if self.write_behind_bytes > half:
            raise ConfigError(
                f"write_behind={self.write_behind_bytes} ({format_size(self.write_behind_bytes)}) waits in DRAM, of "
                f"which it may take half: set dram to {2 * self.write_behind_bytes} or more, or write_behind to {half}"
            )
        return self.write_behind_bytes


class StackStore(PoolStore):
    """A pool with DRAM above and, if given, a shared store below; it closes all of them. See the module."""

    _hops = 3  # a save, its copy to the drives, its copy to the shared store

    def __init__(
        self,
        drives: Sequence[tuple[str, Store]],
        stack: StackSettings,
        settings: PoolSettings | None = None,
        shared: tuple[str, Store] | None = None,
    ) -> None:
        self._behind_limit = stack.behind_bytes()
        self._hot = HotStore(stack.dram_bytes)
        self._admission = Admission(stack.admission)
        self._behind = Counters()
        self._behind_refused_bytes = 0
        super().__init__(drives, settings)
        self._hot_lane = Lane("dram", self._hot, self._settings.ageing)
        self._shared_lane = None if shared is None else Lane(*shared, self._settings.ageing)
        self._below = () if self._shared_lane is None else (self._shared_lane,)
        self._dispatcher.lanes = (self._hot_lane, *self._below, *self._drives)
        self.register(self._hot.memory)

    # Where blocks are.

    @property
    def _persistent(self) -> tuple[Lane, ...]:
        return tuple(lane for lane in self._lanes if lane is not self._hot_lane)

    def __contains__(self, key: bytes) -> bool:
        self._usable()
        check_keys((key,))
        for lane in self._persistent:
            if key in lane.store and (lane.reading.reason is None or key in self._hot):
                return True
        return self._hot.only_here(key)

    def _places(self, keys: Sequence[bytes], lanes: Sequence[Lane] | None = None) -> npt.NDArray[np.int64]:
        """DRAM first, then drives, then the shared store. A lost drive's copies in DRAM are still good."""
        every = self._lanes if lanes is None else lanes
        places = np.full(len(keys), -1, np.int64)
        below = np.zeros(len(keys), np.bool_)
        for number in self._search(every):
            mask = every[number].store.lookup(keys).mask
            below |= mask
            if every[number].reading.reason is None:
                places[mask & (places < 0)] = number
        places[self._hot.offers(keys, below)] = every.index(self._hot_lane)
        return places

    def _search(self, lanes: Sequence[Lane]) -> list[int]:
        """Numbers of the persistent lanes, the shared one last."""
        numbers = [number for number, lane in enumerate(lanes) if lane not in (self._hot_lane, self._shared_lane)]
        return numbers + [number for number, lane in enumerate(lanes) if lane is self._shared_lane]

    def _kept(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        known = np.zeros(len(keys), np.bool_)
        for lane in self._persistent:
            if lane.reading.reason is None:
                known |= lane.store.lookup(keys).mask
        return known

    # Where blocks go.

    def _start(self, request: Request) -> BatchTransfer:
        request.epoch = self._hot.epoch
        return super()._start(request)

    def _placed(self, request: Request, positions: list[int]) -> dict[Lane, list[int]]:
        if request.copy:
            return super()._placed(request, positions)
        admitted = self._admission.admit(request.keys, request.lengths, positions)
        now_s = time.monotonic()
        if any(lane.usable_for_saves(now_s) for lane in self._drives) or not self._below or not admitted:
            placed = super()._placed(request, admitted)
        else:
            placed = {self._below[0]: admitted}
        if len(admitted) < len(positions):
            taken = set(admitted)
            placed[self._hot_lane] = [position for position in positions if position not in taken]
        return placed

    def _others(self, request: Request) -> Sequence[Lane]:
        if request.copy:
            return ()
        return (self._hot_lane, *self._drives, *self._below) if request.loading else (*self._drives, *self._below)

    def _moved(self, request: Request, lane: Lane, found: dict[Outcome, list[int]]) -> None:
        """Promote what was read, keep what was saved, and copy it on. On the pool's thread."""
        good = found.get(Outcome.HIT if request.loading else Outcome.STORED, [])
        keys = [request.keys[position] for position in good]
        if lane is self._hot_lane:
            again = [key for key in keys if self._hot.only_here(key) and self._admission.seen_again(key)]
            self._copy(again, self._drives)
            return
        if request.copy:
            self._hot.published(keys)
        elif good:
            self._hot.keep(keys, request.memory(good), epoch=request.epoch)
        if request.loading and lane is self._shared_lane:
            self._copy(keys, self._drives)
        elif not request.loading and lane is not self._shared_lane:
            self._copy(keys, self._below)

    def _copy(self, keys: list[bytes], to: Sequence[Lane]) -> None:
        """Queue blocks for a tier that has not got them, from DRAM and within the budget."""
        wanted = [key for key in keys if not any(lane.holds(key) for lane in to)] if to else []
        if not wanted:
            return
        there, views, let_go = self._hot.borrow(wanted)
        sizes = [len(view) for view in views]
        count = within_budget(self._behind, sizes, self._behind_limit)
        self._behind_refused_bytes += sum(sizes[count:])
        if not count:
            let_go()
            return
        transfer = BatchTransfer(count, self._behind, loading=False, wake=self._dispatcher.given_up)
        request = Request(transfer, self._behind, there[:count], views[:count], sizes[:count], loading=False)
        request.copy, request.ended, request.queued_bytes = True, let_go, sum(sizes[:count])
        placed = self._placed(request, list(range(count))) if to is self._drives else {to[0]: list(range(count))}
        for lane, positions in placed.items():
            Part(request, lane, positions)
        self._start(request)

    # Keeping and dropping.

    def evict(self, to_bytes: int) -> int:
        """Drop the oldest until the drives use at most `to_bytes`, and of the other tiers the same share."""
        self._usable()
        used = max(sum(lane.store.stats().used_bytes for lane in self._drives), 1)
        freed = super().evict(to_bytes)
        for store in [self._hot, *(lane.store for lane in self._below)] if to_bytes < used else []:
            freed += store.evict(store.stats().used_bytes * to_bytes // used)
        return freed

    def check(self, *, fix: bool = False) -> CheckReport:
        """Verify every file and block of drives and shared store; `blocks` counts those of the drives."""
        self._usable()
        reports = [(lane.name, lane.store.check(fix=fix)) for lane in self._persistent]
        blocks = sum(report.blocks for _, report in reports[len(self._below) :])
        return msgspec.structs.replace(merged_report(reports), blocks=blocks)

    def stats(self) -> Stats:
        """As of the pool, without what is in other tiers; reads are of all tiers, which `tiers` lists."""
        tiers = [
            ("dram", self._hot_lane),
            *[("local", lane) for lane in self._drives],
            *[("shared", lane) for lane in self._below],
        ]
        figures = [(tier, lane.name, lane.store.stats()) for tier, lane in tiers]
        local = [stats for tier, _, stats in figures if tier == "local"]
        summed = merged_stats(self._counters, local, self.drives(), self._dispatcher.broken)
        notes = [note for lane in self._below for note in drive_notes([lane.drive_stats(0.0)])]
        if self._behind_refused_bytes:
            notes.append(f"write-behind: {format_size(self._behind_refused_bytes)} were not copied on, over its budget")
        return msgspec.structs.replace(
            summed,
            device=f"stack of {format_size(self._hot.capacity_bytes)} dram over {summed.device}",
            bytes_read=sum(stats.bytes_read for _, _, stats in figures),
            notes=[*summed.notes, *notes],
            tiers=[_figures(*each) for each in figures],
            writes_saved_bytes=self._admission.saved_bytes,
            hits_lost=self._admission.lost_blocks,
            behind_refused_bytes=self._behind_refused_bytes,
        )


def _figures(tier: str, medium: str, stats: Stats) -> TierStats:
    return TierStats(
        tier=tier,
        medium=medium,
        hits=stats.hits,
        bytes_read=stats.bytes_read,
        bytes_written=stats.bytes_written,
        capacity_bytes=stats.capacity_bytes,
        used_bytes=stats.used_bytes,
    )
