"""Straight runs of instructions as functions of Python, made from text: a thread goes through a whole run at once.

An instruction that has an expression here is written out; another one is its step (`opcodes`, `warp_opcodes`,
`shared_opcodes`), called. A run ends before what other threads jump to, and at what may wait. What is computed, and the order
of what threads do, is as instruction by instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tests.emulator.device import floats
from tests.emulator.device.floats import KINDS, pair_of
from tests.emulator.device.opcodes import COMPARISONS, WIDTHS, Operands, Step, permuted
from tests.emulator.device.program import Instruction
from tests.emulator.device.warp_opcodes import PAIRS, fused

#: Instructions that may wait for other threads, or end their own.
MEETINGS = (
    "ldmatrix",
    "stmatrix",
    "mma",
    "movmatrix",
    "shfl",
    "vote",
    "bar.sync",
    "bar.warp",
    "barrier.cluster.wait",
    "mbarrier.try",
    "ret",
)
SIGNS = {"add": "+", "sub": "-", "mul.lo": "*", "and": "&", "or": "|", "xor": "^"}
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
assert COMPARED.keys() == COMPARISONS.keys()
#: Functions that the text names.
NAMES = {
    "real": floats.real, "pattern": floats.pattern, "to_bf16": floats.to_bfloat16, "to_f16": floats.to_float16,
    "fused": fused, "permuted": permuted,
    **{f"{name}_{kind}": pair_of(make, KINDS[kind]) for name, make in PAIRS.items() for kind in KINDS},
}  # fmt: skip


def may_wait(opcode: str) -> bool:
    """Whether a thread may have to try an instruction again; also what ends it."""
    if opcode.startswith("wgmma"):
        return "fence" not in opcode
    return opcode.startswith(MEETINGS) or "acquire" in opcode or ".try_wait" in opcode


def runs(
    instructions: list[Instruction], steps: list[Step], operands: Operands
) -> list[Callable[[Any], Any]]:
    """Of each instruction what a thread does that comes to it: its step, or where a run begins the whole run."""
    starts = {0, *operands.labels.values(), *(at + 1 for at, one in enumerate(instructions) if _ends(one))}
    names: dict[str, Any] = {**NAMES, **{f"s{at}": step for at, step in enumerate(steps)}}
    text: list[str] = []
    for start in sorted(one for one in starts if one < len(steps) and not may_wait(instructions[one].opcode)):
        text += _function(instructions, operands, start, starts)
    exec(compile("\n".join(text), "a kernel", "exec"), names)
    return [names.get(f"run{at}", step) for at, step in enumerate(steps)]


def _ends(one: Instruction) -> bool:
    """Whether nothing of a run follows."""
    return may_wait(one.opcode) or (one.opcode.startswith("bra") and one.guard is None)


def _function(instructions: list[Instruction], operands: Operands, start: int, starts: set[int]) -> list[str]:
    """The text of a run."""
    lines, at = [f"def run{start}(th):", " r = th.registers"], start
    while at < len(instructions) and not may_wait(instructions[at].opcode):
        lines += _lines(instructions[at], operands, at)
        at += 1
        if at in starts:
            break
    return [*lines, f" return {at}"]


def _lines(one: Instruction, o: Operands, at: int) -> list[str]:
    """The text of an instruction."""
    made = statement(one.opcode, one.operands, o)
    if made is None:
        return [f" s{at}(th)"]
    if one.guard is None:
        return [f" {made}"]
    return [f" if r[{o.at(one.guard.lstrip('!'))}] == {not one.guard.startswith('!')}: {made}"]


def statement(opcode: str, operands: tuple[str, ...], o: Operands) -> str | None:
    """The text of an instruction without its guard, or None."""
    if opcode in ("bra", "bra.uni"):
        return f"return {o.labels[operands[0]]}"
    if opcode in ("mov.b64", "mov.b32") and "{" in "".join(operands):
        return _pair(int(opcode[-2:]) // 2, operands, o)
    if not operands or operands[0][0] in "[{" or any(one[0] in "[{" for one in operands):
        return None
    made = expression(opcode, opcode.split("."), [o.text(one) for one in operands[1:]])
    return None if made is None else f"r[{o.at(operands[0])}] = {made}"


def _pair(half: int, operands: tuple[str, ...], o: Operands) -> str:
    """mov between a register and its halves."""
    if operands[0].startswith("{"):
        low, high = (o.at(name) for name in o.list(operands[0]))
        whole = o.text(operands[1])
        mask = (1 << half) - 1
        return f"r[{low}], r[{high}] = {whole} & {mask}, {whole} >> {half} & {mask}"
    low, high = (o.text(name) for name in o.list(operands[1]))
    return f"r[{o.at(operands[0])}] = {low} | {high} << {half}"


def expression(opcode: str, parts: list[str], a: list[str]) -> str | None:
    """What an instruction with one result makes of the texts of its operands, or None."""
    kind = parts[-1]
    for make in (_float, _logic):
        if (made := make(opcode, parts, a)) is not None:
            return made
    if parts[0] in ("mov", "cvta"):
        return f"{a[0]} & {(1 << WIDTHS.get(kind, 64)) - 1}"
    if kind not in WIDTHS or "f32" in parts:
        return None
    if parts[0] == "setp":
        return f"{number(a[0], kind)} {COMPARED[parts[1]]} {number(a[1], kind)}"
    return _integer(parts, kind, a)


def number(text: str, kind: str) -> str:
    """A pattern as an integer of a type."""
    half = 1 << WIDTHS[kind] - 1
    return (
        f"(({text} & {2 * half - 1} ^ {half}) - {half})" if kind[0] == "s" else f"({text} & {2 * half - 1})"
    )


def _integer(parts: list[str], kind: str, a: list[str]) -> str | None:
    """Integers modulo their width."""
    mask, name = (1 << WIDTHS[kind]) - 1, ".".join(parts[:-1])
    if parts[0] == "cvt" and len(parts) == 3 and parts[1] in WIDTHS:
        return f"{number(a[0], kind)} & {(1 << WIDTHS[parts[1]]) - 1}"
    if name in ("mul.wide", "mul.hi"):
        product = f"{number(a[0], kind)} * {number(a[1], kind)}"
        wide = f"{product} & {(mask + 1) ** 2 - 1}"
        return wide if name == "mul.wide" else f"({product} >> {WIDTHS[kind]}) & {mask}"
    if name in SIGNS:
        return f"({a[0]} {SIGNS[name]} {a[1]}) & {mask}"
    if name in ("shl", "shr") and WIDTHS[kind] >= 32:
        given = f"{a[0]} & {mask}" if name == "shl" else number(a[0], kind)
        by = f"({a[1]} & {0xFFFFFFFF})"
        return (
            f"(({given}) << {by} & {mask} if {by} < 64 else 0)"
            if name == "shl"
            else f"({given} >> {by}) & {mask}"
        )
    made = {
        "mad.lo": lambda: f"({a[0]} * {a[1]} + {a[2]}) & {mask}", "neg": lambda: f"-{a[0]} & {mask}",
        "not": lambda: f"~{a[0]} & {mask}",
    }.get(name)  # fmt: skip
    return None if made is None else made()


def _float(opcode: str, parts: list[str], a: list[str]) -> str | None:
    """Arithmetic of float32, and conversions of it to pairs."""
    if opcode in ("add.f32", "add.rn.f32", "sub.f32", "sub.rn.f32", "mul.f32", "mul.rn.f32"):
        sign = {"add": "+", "sub": "-", "mul": "*"}[parts[0]]
        return f"pattern(real({a[0]}) {sign} real({a[1]}))"
    if opcode == "fma.rn.f32":
        return f"pattern(fused(real({a[0]}), real({a[1]}), real({a[2]})))"
    if parts[0] in PAIRS and parts[-1] in KINDS:
        return f"{parts[0]}_{parts[-1]}({', '.join(a)})"
    if opcode in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        to = f"to_{parts[2].removesuffix('x2')}"
        return f"{to}({a[1]}) | {to}({a[0]}) << 16"
    return None


def _logic(opcode: str, parts: list[str], a: list[str]) -> str | None:
    """Predicates, choices, bits and bytes."""
    if parts[-1] == "pred":
        signs = {"and": "and", "or": "or", "xor": "!="}
        if parts[0] in signs:
            return f"{a[0]} {signs[parts[0]]} {a[1]}"
        return f"not {a[0]}" if parts[0] == "not" else f"bool({a[0]})"
    if parts[0] == "selp":
        return f"{a[0]} if {a[2]} else {a[1]}"
    if opcode == "lop3.b32" and a[3].isdigit():
        found = tables().get(int(a[3]))
        return None if found is None else f"({found.format(a=a[0], b=a[1], c=a[2])}) & {0xFFFFFFFF}"
    if opcode == "prmt.b32":
        known = a[2].isdigit() and not int(a[2]) & 0x8888
        return _permuted(a[0], a[1], int(a[2])) if known else f"permuted({', '.join(a)})"
    return None


def _permuted(first: str, second: str, selector: int) -> str:
    """Bytes of two words by their numbers, neighbours together."""
    numbers = [selector >> 4 * at & 7 for at in range(4)]
    terms, at = [], 0
    while at < 4:
        end = at + 1
        while end < 4 and numbers[end] == numbers[end - 1] + 1 and numbers[end] != 4:
            end += 1
        source, shift = (second, numbers[at] - 4) if numbers[at] >= 4 else (first, numbers[at])
        terms.append(f"({source} >> {8 * shift} & {(1 << 8 * (end - at)) - 1}) << {8 * at}")
        at = end
    return " | ".join(terms)


@cache
def tables() -> dict[int, str]:
    """Logic of three operands by its table of bits: combinations of one operand after the other."""
    leaves = {0xF0: "{a}", 0xCC: "{b}", 0xAA: "{c}", 0x0F: "~{a}", 0x33: "~{b}", 0x55: "~{c}"}
    found, last = dict(leaves), dict(leaves)
    while last:
        new: dict[int, str] = {}
        for table, text in last.items():
            for other, leaf in leaves.items():
                for value, sign in ((table & other, "&"), (table | other, "|"), (table ^ other, "^")):
                    if value not in found:
                        new.setdefault(value, f"({text} {sign} {leaf})")
        found |= new
        last = new
    return found


__all__ = ["expression", "may_wait", "runs", "statement", "tables"]
