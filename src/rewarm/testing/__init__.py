"""What a store has to pass, shipped to whoever writes one: the conformance kit, a state machine, blocks, a bad device.

Needs pytest and hypothesis (`pip install 'rewarm[testing]'`). It promises to rely on the contract alone, so that any
implementation can be held to it. It does not measure speed.
"""

from __future__ import annotations

import pytest

# The kit's own asserts must explain themselves like those of a test module; this has to come before its import.
pytest.register_assert_rewrite("rewarm.testing.kit", "rewarm.testing.machine")

from rewarm.testing.faulty import FaultyDevice  # noqa: E402
from rewarm.testing.kit import StoreTests  # noqa: E402
from rewarm.testing.machine import StoreMachine  # noqa: E402
from rewarm.testing.payload import make_keys, payload  # noqa: E402

__all__ = ["FaultyDevice", "StoreMachine", "StoreTests", "make_keys", "payload"]
