"""A kernel in PTX as a compiler wrote it: instructions, labels and registers, with the scopes of inline assembly resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
PARAMETER = re.compile(r"\.param \.align \d+ \.b8 (\w+)\[(\d+)\]")


@dataclass(frozen=True)
class Instruction:
    """An opcode with its operands as text; guard: the predicate's name with `!` where it is negated, or None."""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None


@dataclass
class Program:
    """labels: of instruction numbers. parameters: bytes of each, in order."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)


def parameters_of(text: str) -> dict[str, int]:
    """Bytes of the parameters of the only entry of a module."""
    head = text[text.index(".visible .entry") :].partition("\n{")[0]
    return {name: int(size) for name, size in PARAMETER.findall(head)}


def parsed(text: str) -> Program:
    """The only entry of a module."""
    body = text[text.index(".visible .entry") :].partition("\n{")[2]
    program = Program(parameters=parameters_of(text))
    lines = [line.strip() for line in re.sub(r"//[^\n]*", "", body).splitlines()]
    # Names in a scope of inline assembly get its number; the outermost has none.
    scopes: list[tuple[int, set[str]]] = [(0, set())]
    count = 0
    for at, line in enumerate(lines):
        if line == "{":
            count += 1
            scopes.append((count, _own_names(lines[at + 1 :])))
        elif line == "}":
            scopes.pop()
        elif line and not line.startswith("."):
            _add(program, line, scopes)
    return program


def _own_names(lines: list[str]) -> set[str]:
    """Labels and registers that the scope which begins here declares."""
    names: set[str] = set()
    for line in lines:
        if line == "}":
            break
        if line.endswith(":"):
            names.add(line[:-1])
        elif line.startswith(".reg"):
            names |= set(re.findall(r"[\w%$]+", line)[2:])
    return names


def _add(program: Program, line: str, scopes: list[tuple[int, set[str]]]) -> None:
    number, own = scopes[-1]

    def name(text: str) -> str:
        return re.sub(r"[\w%$]+", lambda m: f"{m[0]}@{number}" if m[0] in own else m[0], text)

    if line.endswith(":"):
        program.labels[name(line[:-1])] = len(program.instructions)
        return
    for statement in filter(None, (part.strip() for part in line.split(";"))):
        guard = None
        if statement.startswith("@"):
            guard, _, statement = statement[1:].partition(" ")
            guard = name(guard)
        opcode, _, rest = statement.strip().partition(" ")
        operands = tuple(name(operand) for operand in OPERAND.findall(rest))
        program.instructions.append(Instruction(opcode, operands, guard))


__all__ = ["Instruction", "Program", "parameters_of", "parsed"]
