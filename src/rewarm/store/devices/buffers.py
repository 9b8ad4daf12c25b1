"""Registered buffers of a ring: memory pinned once instead of for each operation, which spares most of its CPU.

It promises that an operation is made a fixed one only if it lies whole inside one registered slice, so registering is
never needed for correctness. Memory must be unregistered before it is unmapped: the pages stay pinned, and whatever is
mapped at the same address later would not be what the kernel writes to.
"""

from __future__ import annotations

import errno

import numpy as np
import numpy.typing as npt

from rewarm.errors import MisuseError
from rewarm.store.devices import kernel

SLICE_BYTES = 1 << 30
"""The kernel takes at most this in one buffer."""

SLOTS = 1024
"""Slices at once, 1 TiB of memory; the table costs 8 bytes a slot."""

_OP_READ_FIXED = 4
_OP_WRITE_FIXED = 5
_FIXED = np.array([_OP_READ_FIXED, _OP_WRITE_FIXED, 0], np.uint8)
"""Indexed by READ, WRITE, SYNC."""

_REGISTER_BUFFERS2 = 15
_REGISTER_BUFFERS_UPDATE = 16
_SPARSE = 1


class Buffers:
    """The buffer table of the ring `fd`. Called by the ring's owner only."""

    def __init__(self, fd: int, notes: list[str]) -> None:
        self._fd = fd
        self._number = kernel.number_of("io_uring_register")
        self._made = False
        self._slots: dict[tuple[int, int], int] = {}  # (start, end) of a slice -> its slot
        self._starts = self._ends = np.empty(0, np.uint64)
        self._indices = np.empty(0, np.uint16)
        self._notes = notes

    def register(self, address: int, length: int) -> int:
        """Pin memory; returns the bytes pinned, fewer than `length` where the kernel refuses (see `notes`)."""
        if any(start < address + length and address < end for start, end in self._slots):
            raise MisuseError(f"memory at {address:#x} is registered already; unregister it first")
        done = 0
        while done < length:
            size = min(SLICE_BYTES, length - done)
            refusal = self._pin(address + done, size)
            if refusal:
                self._notes.append(f"registered buffers: {refusal}")
                break
            done += size
        self._index()
        return done

    def unregister(self, address: int, length: int) -> None:
        """Forget every slice inside this memory; operations in flight keep it pinned until they end."""
        for start, end in list(self._slots):
            if address <= start and end <= address + length:
                self._update(self._slots.pop((start, end)), 0, 0)
        self._index()

    def assign(
        self, entries: npt.NDArray[np.void], opcodes: npt.NDArray[np.uint32], syncs: npt.NDArray[np.bool_] | None
    ) -> None:
        """Make those submission entries fixed whose memory lies inside one slice."""
        if not self._made:
            return
        entries["buffer_index"] = 0
        if not self._slots:
            return
        addresses = entries["address"]
        near = np.searchsorted(self._starts, addresses, "right") - 1
        inside = (near >= 0) & (addresses + entries["length"] <= self._ends[near])
        if syncs is not None:
            inside &= ~syncs
        entries["opcode"] = np.where(inside, _FIXED[opcodes], entries["opcode"])
        entries["buffer_index"] = np.where(inside, self._indices[near], 0)

    def _pin(self, address: int, length: int) -> str:
        """Pin one slice; why not, or empty."""
        if not self._made:
            table = np.array([SLOTS | _SPARSE << 32, 0, 0, 0], np.uint64)  # struct io_uring_rsrc_register
            result = kernel.call(self._number, self._fd, _REGISTER_BUFFERS2, table.ctypes.data, table.nbytes)
            if result < 0:
                return kernel.describe(result)
            self._made = True
        free = set(range(SLOTS)).difference(self._slots.values())
        if not free:
            return f"all {SLOTS} slots are taken"
        slot = min(free)
        result = self._update(slot, address, length)
        if result < 0:
            hint = "; raise RLIMIT_MEMLOCK" if result in (-errno.ENOMEM, -errno.EPERM) else ""
            return kernel.describe(result) + hint
        self._slots[address, address + length] = slot
        return ""

    def _update(self, slot: int, address: int, length: int) -> int:
        iovec = np.array([address, length], np.uint64)
        update = np.array([slot, iovec.ctypes.data, 0, 1], np.uint64)  # struct io_uring_rsrc_update2
        return kernel.call(self._number, self._fd, _REGISTER_BUFFERS_UPDATE, update.ctypes.data, update.nbytes)

    def _index(self) -> None:
        ordered = sorted((start, end, slot) for (start, end), slot in self._slots.items())
        self._starts = np.array([start for start, _, _ in ordered], np.uint64)
        self._ends = np.array([end for _, end, _ in ordered], np.uint64)
        self._indices = np.array([slot for _, _, slot in ordered], np.uint16)
