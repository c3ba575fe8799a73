"""Registers that a product still uses, in machine code: whether other instructions name them before its wait.

`wgmma` is asynchronous: until a wait for its group, the tensor core writes the sums and reads metadata from registers (PTX ISA,
9.7.15.7.3). PTX gives each value a register of its own, and the assembler, which knows sums but not metadata to be in use, may
give two values the same one: so this looks at what it made. In sm_90's code, `GMMA` begins a product, `gsb0` on the last one of
a group is its commit, and `WARPGROUP.DEPBAR.LE gsb0, N` waits until N groups are left.
"""

from __future__ import annotations

import re
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import pytest

from fast.launch import nvrtc
from tests.fast.kernels.sm90.products import require_nvrtc

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?PT?\w*)\s+)?([^;]*?)\s*;")
LABEL = re.compile(r"^(\.L\w+):")
PRODUCT = re.compile(
    r"(\w)GMMA\.SP\.64x(\d+)x\d+\S* R(\d+), gdesc\[UR\d+\], .*?R(\d+)(?:, 0x\d)?(?:, gsb0)?$"
)
#: One whose first operand is four registers.
FRAGMENT = re.compile(
    r"(?:HGMMA\.64x(?=\d+x16)|QGMMA\.64x(?=\d+x32))(\d+)x\d+\S* R(\d+), R(\d+), gdesc\[UR\d+\], .*?$"
)
#: One with both operands in shared memory.
SHARED = re.compile(r"GMMA\.64x(\d+)x\d+\S* R(\d+), gdesc\[UR\d+\], R(?:\d|Z)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
TARGET = re.compile(r"`\((\.L\w+)\)")
REGISTER = re.compile(r"(?<!\w)R(\d+)(?!\w)")
#: Behind what else a thread goes on; how the last four do nobody reads.
LEAVES = ("EXIT", "BRA", "BRX", "CALL", "RET", "JMP")

#: Registers of a thread of a warp group from here on, which gives others back to its program or waits for them.
POOL = re.compile(r"USETMAXREG\S*(?: \w+,)? (0x[0-9a-f]+)")
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
#: Groups of products that are not waited for, the last one open: of each product, the registers of its sums and its metadata.
Pending = tuple[tuple[frozenset[int], ...], ...]


class Line(NamedTuple):
    """An instruction; conditional: whether it may not happen."""

    text: str
    conditional: bool


class Code(NamedTuple):
    """Instructions, and where labels stand among them."""

    lines: list[Line]
    labels: dict[str, int]


def disassembled(cubin: bytes) -> Code:
    """The instructions of a cubin with one kernel, by the disassembler that comes with Triton."""
    tool = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        pytest.skip(f"no {tool}")
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return read(
            subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
        )


def read(text: str) -> Code:
    """The instructions of what the disassembler wrote."""
    code = Code([], {})
    for line in text.splitlines():
        if label := LABEL.match(line):
            code.labels[label[1]] = len(code.lines)
        elif found := INSTRUCTION.search(line):
            code.lines.append(Line(found[2], found[1] is not None))
    return code


def uses_in_flight(code: Code) -> list[str]:
    """Instructions that name a register of a product before its wait, on any way through the code."""
    seen, waiting, found = set[tuple[int, Pending]](), [(0, ((),))], dict[int, str]()
    while waiting:
        at, pending = waiting.pop()
        if (at, pending) in seen or at >= len(code.lines):
            continue
        seen.add((at, pending))
        line = code.lines[at]
        if _begins(line.text):
            pending = _with(pending, line.text)
        elif (held := _held(pending)) and not held.isdisjoint(named(line.text)):
            found[at] = line.text
        if "DEPBAR" in line.text and (wait := WAIT.search(line.text)):
            kept = int(wait[1])
            pending = (*(pending[:-1][-kept:] if kept else ()), pending[-1])
        waiting += [(one, pending) for one in _next(code, at)]
    return [found[at] for at in sorted(found)]


def _begins(text: str) -> bool:
    return "GMMA." in text


@lru_cache(1024)
def _held(pending: Pending) -> frozenset[int]:
    """Registers of all products that are not waited for."""
    return frozenset(one for group in pending for part in group for one in part)


def _with(pending: Pending, text: str) -> Pending:
    """Groups with one more product."""
    if product := PRODUCT.search(text):
        first, sums, others = int(product[3]), int(product[2]) // 2, [int(product[4])]
    elif product := FRAGMENT.search(text):
        first, sums, others = int(product[2]), int(product[1]) // 2, [int(product[3]) + i for i in range(4)]
    elif product := SHARED.search(text):
        first, sums, others = int(product[2]), int(product[1]) // 2, []
    else:
        raise NotImplementedError(text)
    group = (*pending[-1], frozenset((*range(first, first + sums), *others)))
    return (*pending[:-1], group, ()) if "gsb0" in text else (*pending[:-1], group)


@lru_cache(1 << 14)
def named(text: str) -> frozenset[int]:
    """Registers of an instruction that is no product; those of wide ones all."""
    opcode = text.split()[0]
    width = (
        4
        if ".128" in opcode
        else 2
        if ".64" in opcode or "WIDE" in opcode or opcode.startswith("CS2R")
        else 1
    )
    if opcode.startswith("SYNCS"):
        width = 1
    numbers = [int(one) for one in REGISTER.findall(text)]
    # Of a load only what it loads is wide, of a store what it stores: the other register is an address.
    wide = numbers
    if opcode.startswith(("LDS", "LDG", "CS2R", "IMAD.WIDE")):
        wide = numbers[:1]
    elif opcode.startswith(("STS", "STG")):
        wide = numbers[-1:]
    return frozenset(numbers).union(one + i for one in wide for i in range(width))


def _next(code: Code, at: int) -> list[int]:
    """Where a thread goes from an instruction."""
    text, conditional = code.lines[at]
    if not text.startswith(LEAVES):
        return [at + 1]
    opcode = text.split()[0]
    if opcode.startswith(LEAVES[2:]):
        raise NotImplementedError(text)
    if opcode == "EXIT":
        return [at + 1] if conditional else []
    target = TARGET.search(text)
    assert target is not None, text
    ways = [code.labels[target[1]]]
    return [*ways, at + 1] if conditional or ".U" in opcode or ".DIV" in opcode else ways


def compiled(kernel, variant, problem):
    """(cubin, the assembler's report) of a variant."""
    require_nvrtc()
    source, headers, options = kernel.sources(variant, problem)
    return nvrtc.compile_source(source, headers, (*options, "--ptxas-options=-v"), name=kernel.name)


def complaints(log, threads):
    """What of a report makes a kernel slow or impossible."""
    spilled = [found.group() for found in SPILLS.finditer(log) if any(map(int, found.groups()))]
    registers = int(REGISTERS.search(log)[1])
    crowded = [] if registers * threads <= 65536 else [f"{registers} registers of {threads} threads"]
    return spilled + crowded + [line for line in log.splitlines() if "(C75" in line or "warning" in line]


def waits_for_registers(code, log, threads):
    """Where a warp group would wait for ever: all but the last one ask for more registers than a program begins with."""
    numbers = [int(found[1], 16) for line in code.lines if (found := POOL.search(line.text))]
    if not numbers:
        return []
    given, taken, groups = min(numbers), max(numbers), threads // 128
    wanted, there = given + (groups - 1) * taken, groups * int(REGISTERS.search(log)[1])
    return [f"{groups - 1} x {taken} and {given} registers of {there}"] if wanted > there else []


__all__ = [
    "Code",
    "compiled",
    "complaints",
    "disassembled",
    "named",
    "read",
    "uses_in_flight",
    "waits_for_registers",
]
