"""Inline PTX on vectors of 32-bit registers: what the kernels' instruction sequences make, bit for bit, without a GPU.

Only the opcodes that `fast/kernels` writes are known (`ptx_opcodes`); another one is refused by name. `run` also refuses what a
compiler may silently spoil: registers that are read before they are written or not declared, inputs that are written, and
inputs that are read after an output of their class was, unless that output is early-clobbered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.ptx_opcodes import OPCODES

Words = npt.NDArray[np.uint32]
Instruction = tuple[str, str, tuple[str, ...]]
OPERAND = re.compile(r"\{[^}]*\}|[^,\s]+")


@lru_cache(maxsize=64)
def parsed(asm: str) -> tuple[dict[str, int], tuple[Instruction, ...]]:
    """(width of each declared register, (opcode, destination, sources) of each instruction)."""
    widths, instructions = {}, []
    for statement in re.sub(r"//[^\n]*", "", asm).split(";"):
        # No instruction starts with a brace: those are of scopes.
        opcode, _, rest = statement.lstrip("{} \n\t").rstrip().partition(" ")
        operands = OPERAND.findall(rest)
        if opcode == ".reg":
            widths.update({name: int(operands[0][2:]) for text in operands[1:] for name in declared(text)})
        elif opcode:
            instructions.append((opcode, operands[0], tuple(operands[1:])))
    return widths, tuple(instructions)


def declared(text: str) -> list[str]:
    """Names that a declaration stands for: a<2> is a0 and a1."""
    name, _, count = text.rstrip(">").partition("<")
    return [f"{name}{i}" for i in range(int(count))] if count else [name]


@dataclass
class Registers:
    """Named registers and the operands $0, $1, ... of one piece of assembly."""

    widths: dict[str, int]
    constraints: list[str]
    values: dict[str, Words]
    # Classes of outputs that are written and may share a register with an input.
    spoiled: set[str] = field(default_factory=set)

    def read(self, operand: str) -> Words:
        """A register, an immediate, or a pair of 16-bit registers, the first in the low half."""
        if operand.startswith("{"):
            low, high = OPERAND.findall(operand[1:-1])
            return self.read(low) | self.read(high) << np.uint32(16)
        if operand[0].isdigit():
            return immediate(operand)
        if operand.startswith("$"):
            kind = self.constraints[int(operand[1:])]
            if kind in self.spoiled:
                raise ValueError(f"{operand} is read after an output that may be in the same register")
        if operand not in self.values:
            raise ValueError(f"{operand} is read before it is written")
        return self.values[operand]

    def write(self, operand: str, value: Words) -> None:
        """The inverse of `read`."""
        if operand.startswith("{"):
            low, high = OPERAND.findall(operand[1:-1])
            self.write(low, value & np.uint32(0xFFFF))
            self.write(high, value >> np.uint32(16))
            return
        if operand.startswith("$"):
            self.spoil(operand)
        elif operand not in self.widths:
            raise ValueError(f"{operand} is not declared")
        self.values[operand] = value

    def spoil(self, operand: str) -> None:
        """Note that an output is written."""
        kind = self.constraints[int(operand[1:])]
        if not kind.startswith("="):
            raise ValueError(f"{operand} is an input and written")
        if "&" not in kind:
            self.spoiled.add(kind[1:])


def immediate(text: str) -> Words:
    """A constant: 0f and a float32 pattern, hexadecimal, or decimal."""
    number = int(text[2:], 16) if text[:2] in ("0f", "0F") else int(text, 0)
    return np.array(number, np.uint32)


@np.errstate(all="ignore")
def run(asm: str, constraints: str, inputs: list[Any]) -> list[Words]:
    """The output registers, as patterns, for patterns of the input registers; one element for each thread."""
    kinds = [kind.strip() for kind in constraints.split(",")]
    outputs = sum(kind.startswith("=") for kind in kinds)
    if len(kinds) != outputs + len(inputs):
        raise ValueError(f"{len(inputs)} input registers for {constraints}")
    widths, instructions = parsed(asm)
    held = {f"${outputs + i}": np.asarray(value, np.uint32) for i, value in enumerate(inputs)}
    registers = Registers(widths, kinds, held)
    for opcode, target, sources in instructions:
        if opcode not in OPCODES:
            raise NotImplementedError(f"PTX instruction {opcode}")
        made = OPCODES[opcode](*(registers.read(source) for source in sources))
        registers.write(target, made)
    return [registers.values[f"${i}"] for i in range(outputs)]
