"""The conformance kit: every promise of `rewarm.store.contract`, as tests that any store inherits.

A store passes when a subclass of `StoreTests` that only says how to open it has no failure. The kit promises to rely
on the contract alone; it does not measure speed and does not damage media: that is up to the store's own tests.
"""

from __future__ import annotations

from rewarm.testing.kit.batches import BatchTests
from rewarm.testing.kit.buffers import BufferTests
from rewarm.testing.kit.counters import CounterTests
from rewarm.testing.kit.lifecycle import LifecycleTests
from rewarm.testing.kit.space import SpaceTests
from rewarm.testing.kit.threads import ThreadTests
from rewarm.testing.kit.transfers import TransferTests


class StoreTests(BatchTests, BufferTests, TransferTests, LifecycleTests, SpaceTests, CounterTests, ThreadTests):
    """Inherit from it in a test module, under a name that begins with `Test`, and override `open_store`."""
