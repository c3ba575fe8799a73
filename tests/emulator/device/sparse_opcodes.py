"""The sparse tensor core of a warp, `mma.sp.m16n8k32` of 16-bit floats with ordered metadata: registers as `sparse_lanes` reads
them, which has the layout of the PTX ISA (9.7.14.6)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.emulator.device.opcodes import Operands, Step
from tests.emulator.sparse_lanes import KINDS, multiplied

SHAPE = "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32."


def sparse_product(opcode: str, operands: tuple[str, ...], o: Operands, at: int, meet: Any) -> Step:
    """The function of the instruction; ValueError where metadata are none that it defines. meet: `shared_opcodes.meet`."""
    if not opcode.startswith(SHAPE):
        raise NotImplementedError(opcode)
    kind, selector = KINDS[opcode.split(".")[-2]], int(operands[5], 0)
    sums = [o.at(name) for name in o.list(operands[0])]
    a, b, c = ([o.reader(name) for name in o.list(text)] for text in operands[1:4])
    told = o.reader(operands[4])

    def together(group: list[Any]) -> None:
        first, second, third = (_words(reads, group) for reads in (a, b, c))
        (metadata,) = _words([told], group)
        try:
            made = multiplied(first, second, third, metadata, selector, kind)
        except AssertionError as error:
            raise ValueError(f"metadata that the instruction does not define: {error}") from error
        for place, words in zip(sums, made, strict=True):
            for th, word in zip(group, words[0], strict=True):
                th.registers[place] = int(word)

    return lambda th: meet(th, ("mma.sp", at, th.tid_x // 32), 32, together)


def _words(reads: list[Step], group: list[Any]) -> list[np.ndarray]:
    """Registers (1, 32)."""
    return [np.array([[read(th) & 0xFFFFFFFF for th in group]], np.uint32) for read in reads]


__all__ = ["sparse_product"]
