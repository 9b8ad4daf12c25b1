"""The corpus of the fuzzer, and a few thousand fresh inputs; `make fuzz` tries a million."""

from __future__ import annotations

import pytest
from tests.store.fuzz.mutations import seeds
from tests.store.fuzz.parsers import PARSERS
from tests.store.fuzz.run import corpus, fuzz


@pytest.mark.parametrize("parser", PARSERS)
def test_the_corpus_is_answered(parser: str) -> None:
    kept = corpus()[parser]
    assert kept
    for data in [*kept, *seeds()[parser]]:
        PARSERS[parser](data)
        for cut in range(0, len(data), 1021):
            PARSERS[parser](data[:cut])


def test_fresh_inputs_are_answered() -> None:
    ways = fuzz(3000, seed=7, keeping=False)
    assert ways["frame"] > 10, "the inputs do not get into the parser"
    assert ways["pool"] == 5
    assert ways["log"] > 5
