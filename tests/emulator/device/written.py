"""Boxes that the copy engine writes from shared memory; it reads that as late as it may: when their thread waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.device.opcodes import Operands, Step, signed
from tests.emulator.device.tensor_core import swizzled


def written(opcode: str, operands: tuple[str, ...], o: Operands) -> Step:
    """The function of an instruction of such boxes."""
    if ".commit_group" in opcode:
        return lambda th: _groups(th).append([])
    if ".wait_group" in opcode:
        left = int(operands[0])

        def wait(th: Any) -> None:
            while len(_groups(th)) > left + 1:
                for write in _groups(th).pop(0):
                    write()

        return wait
    base, _, coordinates = operands[0].strip("[]").partition(",")
    target, (x, y), source = (
        o.reader(base.strip()),
        [o.reader(one) for one in o.list(coordinates.strip())],
        o.address(operands[1]),
    )

    def begin(th: Any) -> None:
        one, place = th.cta.cluster.machine.maps[target(th)], source(th)
        rows, width = one.box
        if place % (8 * width):
            raise ValueError(f"a copy from {place:#x} does not begin at a repetition of its swizzle")
        at, corner = swizzled(place + np.arange(rows * width), width), (signed(x(th), 32), signed(y(th), 32))
        th.cta.shared.view(place, rows * width)
        _groups(th)[-1].append(lambda: one.write(*corner, th.cta.shared.data[at].reshape(rows, width)))

    return begin


def _groups(th: Any) -> list[list[Callable[[], None]]]:
    """Of a thread, the last one open."""
    if not hasattr(th, "written"):
        th.written = [[]]
    found: list[list[Callable[[], None]]] = th.written
    return found


__all__ = ["written"]
