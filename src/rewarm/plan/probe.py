"""Takes the measured rates of a medium from the file that `rewarm probe -o` writes."""

from __future__ import annotations

import msgspec

from rewarm.errors import ConfigError
from rewarm.plan.spec import Medium, PlanSpec


class _Probe(msgspec.Struct):
    schema: int
    read_bytes_per_s: float
    write_bytes_per_s: float | None = None


def apply_probe(spec: PlanSpec, name: str, text: str | bytes, where: str) -> PlanSpec:
    """The plan with the probed rates of the medium `name`.

    A local medium's rates are those of all its drives together; a shared one's are of the whole path from one node.
    Raises `ConfigError` for a file that is no probe, or that says the same as a field of the plan.
    """
    try:
        probe = msgspec.json.decode(text, type=_Probe)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where} is not the file of a probe (rewarm probe -o): {error}") from error
    if not probe.read_bytes_per_s > 0:
        raise ConfigError(f"{where}: read_bytes_per_s is {probe.read_bytes_per_s}; allowed: above 0")
    media = tuple(_probed(medium, probe) if medium.name == name else medium for medium in spec.medium)
    fields = ("effective_read",) if next(m for m in media if m.name == name).shared else ("drive_read", "drive_write")
    measured = dict.fromkeys([*spec.measured, *(f"medium.{name}.{field}" for field in fields)])
    return msgspec.structs.replace(spec, medium=media, measured=tuple(measured))


def _probed(medium: Medium, probe: _Probe) -> Medium:
    field = "effective_read" if medium.shared else "drive_read"
    if getattr(medium, field) is not None:
        raise ConfigError(f"medium.{medium.name}.{field}: given beside a probe file; leave one of them out")
    if medium.shared:
        return msgspec.structs.replace(medium, effective_read=probe.read_bytes_per_s)
    write = None if probe.write_bytes_per_s is None else probe.write_bytes_per_s / medium.drives
    return msgspec.structs.replace(
        medium, drive_read=probe.read_bytes_per_s / medium.drives, drive_write=write, raid_efficiency=1.0
    )
