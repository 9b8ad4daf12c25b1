"""What computing costs: seconds of prefill as a curve of three numbers, given, fitted to a model, or learned.

T_pre(m | p) = fixed + linear m + quadratic (p m + m^2 / 2) for m tokens after p that are there: the form that matrix
products (per token) and causal attention (per pair) give, Kaplan et al. 2020. Models whose window layers bend the curve
are fitted over the lengths that matter. It measures nothing itself: whoever watches the engine calls `note`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError
from rewarm.geometry.model import Model
from rewarm.geometry.prefill import Prefill

FloatArray = npt.NDArray[np.float64]

FIT_TOKENS = (512, 2048, 8192, 32_768, 131_072)
"""Lengths a model's curve is fitted to, computed and already cached alike."""

FORGET = 0.98
"""Weight of what was learned before each new reading: about the last fifty count."""

READINGS_MIN = 8
"""Below that the curve is only the mean rate of the readings."""


class PrefillCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per token, per pair of tokens, and per prefill. Raises `ConfigError` unless all are 0 or positive."""

    linear_s: float
    quadratic_s: float = 0.0
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in zip(self.__struct_fields__, msgspec.structs.astuple(self), strict=True):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} must be zero or a positive number of seconds, got {value!r}")

    @classmethod
    def of_rate(cls, tokens_per_s: float, fixed_s: float = 0.0) -> PrefillCurve:
        """A measured rate, at about the lengths it will be asked for."""
        if not 0 < tokens_per_s < math.inf:
            raise ConfigError(f"the prefill rate must be above 0 tokens/s, got {tokens_per_s!r}")
        return cls(linear_s=1 / tokens_per_s, fixed_s=fixed_s)

    @classmethod
    def of_model(cls, model: Model, prefill: Prefill) -> PrefillCurve:
        """The curve nearest to what `prefill` says of a model, by relative error."""
        grid = [(tokens, cached) for tokens in FIT_TOKENS for cached in (0, *FIT_TOKENS)]
        learner = PrefillLearner(forget=1.0)
        for tokens, cached in grid:
            learner.note(tokens, cached, prefill.seconds(model, tokens, cached))
        curve = learner.curve()
        assert curve is not None
        return curve

    def seconds(self, tokens: Any, cached: Any = 0) -> Any:
        """Seconds to compute `tokens` after `cached`; numbers or arrays of one shape. 0 for no tokens."""
        work = self.fixed_s + self.linear_s * tokens + self.quadratic_s * (cached * tokens + tokens * tokens / 2)
        return np.where(np.asarray(tokens) > 0, work, 0.0) if isinstance(tokens, np.ndarray) else work * (tokens > 0)


class PrefillLearner:
    """Learns the curve from prefills that were measured, by weighted least squares of the relative error."""

    def __init__(self, *, forget: float = FORGET) -> None:
        self._forget = forget
        self._normal = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._readings = 0

    def note(self, tokens: int, cached: int, seconds: float) -> None:
        """One prefill took so long. What cannot be a reading is left out."""
        if tokens < 1 or cached < 0 or not 0 < seconds < math.inf:
            return
        features = np.array([tokens, cached * tokens + tokens * tokens / 2, 1.0]) / seconds
        self._normal = self._forget * self._normal + np.outer(features, features)
        self._target = self._forget * self._target + features
        self._readings += 1

    def curve(self) -> PrefillCurve | None:
        """What was learned; None before the first reading."""
        if not self._readings:
            return None
        used = [0, 1, 2] if self._readings >= READINGS_MIN else [0]
        while True:
            found = self._solve(used)
            negative = [feature for feature in used if found[feature] < 0]
            if not negative:
                return PrefillCurve(linear_s=found[0], quadratic_s=found[1], fixed_s=found[2])
            # Too little variety to tell the parts apart: do without the one that makes least sense.
            used.remove(max(negative))

    def _solve(self, used: list[int]) -> list[float]:
        # Columns differ by many orders of magnitude: solve for scaled unknowns.
        scale = np.sqrt(np.diag(self._normal)[used])
        solution = np.linalg.lstsq(
            self._normal[np.ix_(used, used)] / np.outer(scale, scale), self._target[used] / scale, rcond=1e-12
        )[0]
        found = [0.0, 0.0, 0.0]
        for feature, value in zip(used, (solution / scale).tolist(), strict=True):
            found[feature] = value
        return found
