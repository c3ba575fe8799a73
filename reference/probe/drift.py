"""Whether an error has moved: a two-sample test between estimates, with hysteresis, so that a choice is not remade at each one.

What reacts to a drift (another kernel, a recompiled program) costs, so one that has been told of is told of again only after it
was calm in between, and at most once in so many steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, sqrt

from reference.probe.estimates import Estimate


def difference(before: Estimate, after: Estimate) -> float:
    """after - before in standard errors of both; infinite where they differ and neither has one."""
    apart, spread = after.value - before.value, sqrt(before.error**2 + after.error**2)
    if not apart or apart != apart:
        return 0.0
    return apart / spread if spread > 0 else inf if apart > 0 else -inf


@dataclass
class Hysteresis:
    """enter: standard errors beyond which an estimate has moved; leave: below which it is calm again; share: the least change
    that counts, of the value before; interval: steps between two changes at least."""

    enter: float = 5.0
    leave: float = 2.0
    share: float = 0.1
    interval: int = 1000
    base: dict[str, Estimate] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)
    last: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.leave <= self.enter or self.interval < 0 or self.share < 0:
            raise ValueError(
                f"leave is between 0 and enter, share and interval 0 at least, got {self.leave}, {self.enter}, {self.share} "
                f"and {self.interval}"
            )

    def update(self, estimates: Mapping[str, Estimate], step: int) -> tuple[str, ...]:
        """Names of estimates that have moved since they were last told of; these are what later ones are compared with then."""
        found = []
        for name, now in estimates.items():
            before = self.base.setdefault(name, now)
            size = abs(difference(before, now))
            if size < self.leave:
                self.moving.discard(name)
            large = abs(now.value - before.value) > self.share * abs(before.value)
            if size > self.enter and large and name not in self.moving:
                found.append(name)
        if not found or (self.last is not None and step - self.last < self.interval):
            return ()
        self.moving.update(found)
        self.base.update({name: estimates[name] for name in found})
        self.last = step
        return tuple(found)


__all__ = ["Hysteresis", "difference"]
