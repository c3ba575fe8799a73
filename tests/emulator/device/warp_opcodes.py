"""Instructions on pairs of 16-bit floats, logic of three operands, and the tensor core of a warp, written from the PTX ISA.

`mma.m16n8k16` (9.7.14.5.8): lane l = 4 g + t has of the first operand rows g, g + 8, g, g + 8 at columns 2 t, 2 t, 2 t + 8,
2 t + 8, two each; of the second rows (K) 2 t and 2 t + 8, two each, at column g; of sums rows g, g, g + 8, g + 8, columns 2 t
and 2 t + 1 of both. `ldmatrix.x4`: lane 8 i + r has the address of row r, 16 bytes, of matrix i; register i of lane l is
elements 2 t, 2 t + 1 of its row g. `movmatrix.trans`: of the columns instead of the rows of such a matrix.

The sparse tensor core of a warp, `mma.sp.m16n8k32` of 16-bit floats with ordered metadata: registers as `gluon_lanes`
reads them, which has the layout of the PTX ISA (9.7.14.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.device.floats import KINDS, halves_of_bytes, pair_of, pattern, real, values_of
from tests.emulator.device.opcodes import Operands, Step, signed
from tests.emulator.gluon_lanes import SPARSE_KINDS, sparse_multiplied

#: Sums and products of 16-bit floats are exact in float64, so that one rounding follows.
PAIRS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


def of_warp(opcode: str, operands: tuple[str, ...], o: Operands, at: int, meet: Any) -> Step | None:
    """The function of an instruction, or None where it is not known. meet: `shared_opcodes.meet`."""
    parts = opcode.split(".")
    if opcode == "griddepcontrol.wait":
        return lambda th: th.cta.cluster.machine.wait_for_front()
    if parts[0] in ("griddepcontrol", "prefetch") or ".prefetch." in opcode:
        return lambda th: None
    if opcode.startswith("cp.async."):
        return _copy_own(opcode, operands, o)
    if parts[0] == "ldmatrix":
        return _load_matrices(operands, o, at, meet)
    if opcode == "vote.sync.any.pred":
        return _vote(operands, o, at, meet)
    if opcode == "movmatrix.sync.aligned.m8n8.trans.b16":
        return _transpose(operands, o, at, meet)
    if opcode.startswith("mma.sp"):
        return sparse_product(opcode, operands, o, at, meet)
    if parts[0] == "mma":
        return _multiply(opcode, operands, o, at, meet)
    make = _value(opcode, parts, [o.reader(text) for text in operands[1:]])
    if make is None:
        return None
    target = o.at(operands[0])

    def step(th: Any) -> None:
        th.registers[target] = make(th)

    return step


def _value(opcode: str, parts: list[str], reads: list[Step]) -> Step | None:
    """What an instruction of one thread makes."""
    if opcode == "lop3.b32":
        return lambda th: table(*(read(th) for read in reads))
    if opcode == "min.s16x2":
        return lambda th: smaller(reads[0](th), reads[1](th))
    if opcode == "mul.hi.s32":
        return lambda th: signed(reads[0](th), 32) * signed(reads[1](th) & 0xFFFFFFFF, 32) >> 32 & 0xFFFFFFFF
    if opcode == "fma.rn.f32":
        return lambda th: pattern(fused(*(real(read(th)) for read in reads)))
    if opcode in ("sub.f32", "mul.f32", "neg.f32"):
        make = {"sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "neg": lambda a: -a}[parts[0]]
        return lambda th: pattern(make(*(real(read(th)) for read in reads)))
    if opcode == "cvt.rn.f16x2.e4m3x2":
        halves = halves_of_bytes()
        return lambda th: halves[reads[0](th) & 255] | halves[reads[0](th) >> 8 & 255] << 16
    if parts[-1] in KINDS and parts[0] in PAIRS:
        together = pair_of(PAIRS[parts[0]], KINDS[parts[-1]])
        return lambda th: together(*(read(th) for read in reads))
    return None


def fused(a: Any, b: Any, c: Any) -> float:
    """a b + c rounded to odd in float64, so that rounding it to float32 is the only one: the product is exact there."""
    product, wide = float(a) * float(b), float(c)
    total = product + wide
    lost = (product - (total - wide)) + (wide - (total - (total - wide)))
    if lost and math.isfinite(total) and not np.float64(total).view(np.uint64) & 1:
        total = float(np.nextafter(total, np.inf if lost > 0 else -np.inf))
    return total


def table(a: int, b: int, c: int, chosen: int) -> int:
    """lop3: bit by bit the entry of the table."""
    made = 0
    for entry in range(8):
        if chosen >> entry & 1:
            made |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return made & 0xFFFFFFFF


def smaller(a: int, b: int) -> int:
    """Of two pairs of 16-bit integers."""
    first, second = (np.array([one & 0xFFFFFFFF], np.uint32).view(np.int16) for one in (a, b))
    return int(np.minimum(first, second).view(np.uint32)[0])


def _copy_own(opcode: str, operands: tuple[str, ...], o: Operands) -> Step | None:
    """A thread's own copies: what they bring is there at once (`early`), so that what is still read is lost, or when it has
    waited for their group, or for all, and not before."""
    if "bulk" in opcode:
        return None
    if opcode == "cp.async.commit_group":
        return lambda th: _groups(th).append([])
    if opcode == "cp.async.wait_all":
        return lambda th: _arrive(th, 0)
    if opcode == "cp.async.wait_group":
        pending = int(operands[0])
        # The last group is not committed, and not waited for.
        return lambda th: _arrive(th, pending + 1)
    if opcode == "cp.async.mbarrier.arrive.noinc.shared::cta.b64":
        return _arrive_late(o.address(operands[0]))
    size = int(operands[2])
    if not (opcode == "cp.async.cg.shared.global" and size == 16) and not (
        opcode == "cp.async.ca.shared.global" and size in (4, 8, 16)
    ):
        raise NotImplementedError(f"{opcode} {operands}")
    to, source = o.address(operands[0]), o.address(operands[1])
    read = o.reader(operands[3]) if len(operands) > 3 else lambda th: size

    def copy(th: Any) -> None:
        # Of bytes that are not read, zeros are written.
        data, count = np.zeros(size, np.uint8), int(read(th))
        if count:
            data[:count] = th.cta.cluster.machine.memory.view(source(th), count)
        if th.cta.cluster.machine.early:
            th.cta.shared.view(to(th), size)[:] = data
        else:
            _groups(th)[-1].append((to(th), data.copy()))

    return copy


def _groups(th: Any) -> list[list[tuple[int, Any]]]:
    """A thread's groups of copies, the last not committed yet."""
    found: list[list[tuple[int, Any]]] = th.__dict__.setdefault("late", [[]])
    return found


def _arrive(th: Any, rest: int) -> None:
    """Bring what all groups but the last ones copy."""
    groups = _groups(th)
    while len(groups) > rest:
        for to, data in groups.pop(0):
            th.cta.shared.view(to, len(data))[:] = data
    if not groups:
        groups.append([])


def _arrive_late(address: Step) -> Step:
    """A thread's copies so far arrive some time, all before its arrival at a barrier, which counts it."""

    def arrive(th: Any) -> None:
        copies = [one for group in th.__dict__.pop("late", []) for one in group]
        cta, place = th.cta, address(th)

        def make() -> None:
            for to, data in copies:
                cta.shared.view(to, len(data))[:] = data
            cta.shared.barriers[place].change(1, 0)

        cta.cluster.copy(make)

    return arrive


def _load_matrices(operands: tuple[str, ...], o: Operands, at: int, meet: Any) -> Step:
    names, address = [o.at(name) for name in o.list(operands[0])], o.address(operands[1])

    def together(group: list[Any]) -> None:
        rows = [th.cta.shared.view(address(th), 16).view(np.uint32).tolist() for th in group]
        for lane, th in enumerate(group):
            for matrix, place in enumerate(names):
                th.registers[place] = rows[8 * matrix + lane // 4][lane % 4]

    return lambda th: meet(th, ("matrices", at, th.tid_x // 32), 32, together)


def _vote(operands: tuple[str, ...], o: Operands, at: int, meet: Any) -> Step:
    target, read = o.at(operands[0]), o.reader(operands[1])

    def together(group: list[Any]) -> None:
        found = any(bool(read(th)) for th in group)
        for th in group:
            th.registers[target] = found

    return lambda th: meet(th, ("vote", at, th.tid_x // 32), 32, together)


def _transpose(operands: tuple[str, ...], o: Operands, at: int, meet: Any) -> Step:
    target, read = o.at(operands[0]), o.reader(operands[1])

    def together(group: list[Any]) -> None:
        rows = np.array([read(th) & 0xFFFFFFFF for th in group], np.uint32).view(np.uint16).reshape(8, 8)
        for th, word in zip(
            group, np.ascontiguousarray(rows.T).view(np.uint32).ravel().tolist(), strict=True
        ):
            th.registers[target] = word

    return lambda th: meet(th, ("transpose", at, th.tid_x // 32), 32, together)


#: Rows and columns of both operands' registers and of the sums: (32, registers, 2), and of sums (32, registers).
LANE = np.arange(32)[:, None]
PART = np.arange(2)
FIRST = (
    (LANE // 4 + np.arange(4) % 2 * 8)[..., None],
    (2 * (LANE % 4) + np.arange(4) // 2 * 8)[..., None] + PART,
)
SECOND = (2 * (LANE % 4) + 8 * np.arange(2))[..., None] + PART, (LANE // 4)[..., None]
SUMS = LANE // 4 + np.arange(4) // 2 * 8, 2 * (LANE % 4) + np.arange(4) % 2


def _multiply(opcode: str, operands: tuple[str, ...], o: Operands, at: int, meet: Any) -> Step:
    if ".m16n8k16.row.col.f32." not in opcode:
        raise NotImplementedError(opcode)
    values = np.array(values_of(KINDS[opcode.split(".")[-2]]))
    sums, (a, b, c) = [o.at(name) for name in o.list(operands[0])], (
        [o.reader(name) for name in o.list(text)] for text in operands[1:]
    )  # fmt: skip

    def together(group: list[Any]) -> None:
        first, second = np.zeros((16, 16)), np.zeros((16, 8))
        first[FIRST] = _halves(a, group, values)
        second[SECOND] = _halves(b, group, values)
        made = (first @ second)[SUMS].tolist()
        for th, own in zip(group, made, strict=True):
            for place, read, value in zip(sums, c, own, strict=True):
                th.registers[place] = pattern(real(read(th)) + value)

    return lambda th: meet(th, ("mma", at, th.tid_x // 32), 32, together)


def _halves(reads: list[Step], group: list[Any], values: Any) -> Any:
    """The numbers in registers of pairs: (threads, registers, 2)."""
    words = np.array([[read(th) & 0xFFFFFFFF for read in reads] for th in group], np.int64)
    return values[np.stack([words & 0xFFFF, words >> 16], -1)]


SHAPE = "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32."


def sparse_product(opcode: str, operands: tuple[str, ...], o: Operands, at: int, meet: Any) -> Step:
    """The function of the instruction; ValueError where metadata are none that it defines. meet: `shared_opcodes.meet`."""
    if not opcode.startswith(SHAPE):
        raise NotImplementedError(opcode)
    kind, selector = SPARSE_KINDS[opcode.split(".")[-2]], int(operands[5], 0)
    sums = [o.at(name) for name in o.list(operands[0])]
    a, b, c = ([o.reader(name) for name in o.list(text)] for text in operands[1:4])
    told = o.reader(operands[4])

    def together(group: list[Any]) -> None:
        first, second, third = (_words(reads, group) for reads in (a, b, c))
        (metadata,) = _words([told], group)
        try:
            made = sparse_multiplied(first, second, third, metadata, selector, kind)
        except AssertionError as error:
            raise ValueError(f"metadata that the instruction does not define: {error}") from error
        for place, words in zip(sums, made, strict=True):
            for th, word in zip(group, words[0], strict=True):
                th.registers[place] = int(word)

    return lambda th: meet(th, ("mma.sp", at, th.tid_x // 32), 32, together)


def _words(reads: list[Step], group: list[Any]) -> list[np.ndarray]:
    """Registers (1, 32)."""
    return [np.array([[read(th) & 0xFFFFFFFF for th in group]], np.uint32) for read in reads]


__all__ = ["fused", "of_warp"]
