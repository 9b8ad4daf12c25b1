"""`check` of a raw pool: read every block that the log names, of every namespace, and compare its checksum."""

from __future__ import annotations

from rewarm.store.contract import CheckReport, Finding
from rewarm.store.layout import digest
from rewarm.store.raw.media import Media
from rewarm.store.raw.owner import Owner
from rewarm.store.raw.slots import SlotTable
from rewarm.store.transfer import Counters


def check_slots(media: Media, table: SlotTable, counters: Counters, fixer: Owner | None) -> CheckReport:
    """Verify all blocks; `fixer` drops those that are damaged. Raises `OSError`."""
    findings, blocks, verified = [], 0, 0
    for slot in list(table.used.values()):
        for _, entries in list(table.live(slot)):
            for entry in entries.tolist():
                _, number, generation, offset, length, _, checksum = entry
                data = media.read(table.header.slot_offset(number) + offset, length)
                counters.add(bytes_read=len(data))
                if digest(data[:length]) == checksum:
                    blocks, verified = blocks + 1, verified + length
                    continue
                if table.generations.get(number) != generation:
                    continue  # Used again since: no damage.
                if fixer:
                    fixer.drop(number, generation, offset)
                what = f"the block at {offset} of slot {number}, generation {generation}, has other bytes than saved"
                findings.append(Finding("damaged_block", f"slot {number}", what, fixed=fixer is not None))
    return CheckReport(not findings or fixer is not None, findings, [], blocks, verified)
