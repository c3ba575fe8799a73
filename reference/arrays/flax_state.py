"""`Quantized` and `Scales` in flax's state dictionaries, so that `flax.serialization.to_bytes` and its relatives take them.

The state has the arrays by name, and "record", the other fields as JSON in uint8: arrays alone, as what maps over a state
expects. Restoring needs a target with the same record, so that codes of one scheme are never read as those of another.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np


def register(serialization: Any, cls: type, arrays: tuple[str, ...]) -> None:
    """Make a class of `array_container` known to `flax.serialization`, if it is not."""
    static = tuple(field.name for field in fields(cls) if field.name not in arrays)

    def to_state(value: Any) -> dict[str, Any]:
        parts = {name: getattr(value, name) for name in arrays if getattr(value, name) is not None}
        state = {name: serialization.to_state_dict(part) for name, part in parts.items()}
        return {**state, "record": _encoded(value, static)} if static else state

    def from_state(target: Any, state: dict[str, Any]) -> Any:
        parts = [name for name in arrays if getattr(target, name) is not None]
        wanted = {*parts, *(["record"] if static else [])}
        if static and "record" in state:
            _check_record(cls, _encoded(target, static), np.asarray(state["record"]))
        if set(state) != wanted:
            raise ValueError(
                f"the state of a {cls.__name__} like the target has {', '.join(sorted(wanted))}, got {', '.join(sorted(state))}"
            )
        restored = {
            name: serialization.from_state_dict(getattr(target, name), state[name], name=name)
            for name in parts
        }
        return replace(target, **restored)

    serialization.register_serialization_state(cls, to_state, from_state, override=True)


def _encoded(value: Any, static: tuple[str, ...]) -> Any:
    """The static fields as JSON, in uint8; a scheme by its key."""
    known = {name: getattr(value, name) for name in static}
    text = json.dumps(known, default=lambda one: one.__index__() if hasattr(one, "__index__") else one.key)
    return np.frombuffer(text.encode(), np.uint8)


def _check_record(cls: type, target: Any, state: Any) -> None:
    """ValueError where the state is that of another record."""
    if np.array_equal(target, state):
        return
    want, got = (json.loads(bytes(one.astype(np.uint8))) for one in (target, state))
    wrong = [
        f"{name} {got.get(name)!r} (target: {value!r})"
        for name, value in want.items()
        if got.get(name) != value
    ]
    raise ValueError(
        f"the state is that of another {cls.__name__}: {', '.join(wrong)}; give a target that was quantized in the same way"
    )


__all__ = ["register"]
