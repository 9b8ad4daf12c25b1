"""An interruption ends a run wherever it arrives."""

from __future__ import annotations

import signal
import time

import pytest

from rewarm.cli.measuring import interruptible
from rewarm.cli.output import Output


class Finalised:
    """What is interrupted while it is taken down, where the interpreter drops every exception."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        for _ in range(10):  # the handler runs between two steps of the interpreter
            pass


def finalise_and_go_on() -> None:
    """Half a minute of work after an object has gone."""
    Finalised()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.01)


def test_an_interruption_in_a_finaliser_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible(Output()):
        finalise_and_go_on()
    assert "Traceback" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
