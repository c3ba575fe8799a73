"""Vectors of LLVM, in which steps of compiled loops are written that Numba does not make of simple ones: types, loads, a loop.

LLVM lowers them to whatever the processor has. Where it has AVX-512, instructions are named that LLVM has no words for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba import config

#: Numbers of a vector, and groups of codes that a step decodes.
LANES = 16

FLOAT32, INT8, INT16, INT32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
SINGLES, WORDS = ir.VectorType(FLOAT32, LANES), ir.VectorType(INT32, LANES)


class BFloat16(ir.Type):
    """LLVM's type, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat16)

    def __hash__(self) -> int:
        return hash(BFloat16)


HALVES = ir.VectorType(BFloat16(), 2 * LANES)


def _features() -> frozenset[str]:
    """What Numba compiles for."""
    if config.CPU_FEATURES is not None or config.CPU_NAME is not None or not config.ENABLE_AVX:
        return frozenset(name[1:] for name in (config.CPU_FEATURES or "").split(",") if name.startswith("+"))
    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


FEATURES = _features()
#: Whether 16 numbers of 32 bits fit a register, or 32 of 16 bits; and whether products of bfloat16 have an instruction.
WIDE, WIDE_HALVES = "avx512f" in FEATURES, {"avx512f", "avx512bw"} <= FEATURES
BFLOAT16 = {"avx512f", "avx512bw", "avx512bf16"} <= FEATURES


def words(value: int) -> ir.Constant:
    """An int32 in every lane."""
    return ir.Constant(WORDS, [value] * LANES)


def singles(value: float) -> ir.Constant:
    """A float32 in every lane."""
    return ir.Constant(SINGLES, [float(value)] * LANES)


def loaded(builder: Any, address: Any, kind: ir.Type, offset: Any = None) -> Any:
    """A vector at an address (an integer) and perhaps so many bytes behind it."""
    place = address if offset is None else builder.add(address, offset)
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=1)


def stored(builder: Any, value: Any, address: Any) -> None:
    """Write a vector to an address (an integer)."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def shuffled(builder: Any, first: Any, second: Any, order: Sequence[int]) -> Any:
    """Lanes of two vectors by their numbers."""
    mask = ir.Constant(ir.VectorType(INT32, len(order)), list(order))
    return builder.shuffle_vector(first, second, mask)


def spread(builder: Any, number: Any) -> Any:
    """A number in every lane."""
    vector = builder.insert_element(ir.Constant(SINGLES, ir.Undefined), number, ir.Constant(INT32, 0))
    return shuffled(builder, vector, vector, [0] * LANES)


@contextmanager
def loop(builder: Any, end: Any, step: int, values: Sequence[ir.Constant]) -> Iterator[tuple[Any, list[Any]]]:
    """A loop whose counter runs from 0 in steps to an end beyond 0; it carries a list of values: after it, the last."""
    before = builder.block
    body, after = builder.append_basic_block("loop"), builder.append_basic_block("end")
    builder.branch(body)
    builder.position_at_end(body)
    counter = builder.phi(end.type)
    phis = [builder.phi(value.type) for value in values]
    carried = list(phis)
    yield counter, carried
    following = builder.add(counter, end.type(step))
    for phi, first, last in zip([counter, *phis], [end.type(0), *values], [following, *carried], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", following, end), body, after)
    builder.position_at_end(after)


def called(builder: Any, name: str, result: ir.Type, *operands: Any, **flags: Any) -> Any:
    """An intrinsic function of LLVM."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.declare_intrinsic(name, fnty=kind), operands, **flags)


__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "HALVES",
    "INT8",
    "INT16",
    "INT32",
    "LANES",
    "SINGLES",
    "WIDE",
    "WIDE_HALVES",
    "WORDS",
    "BFloat16",
    "called",
    "loaded",
    "loop",
    "shuffled",
    "singles",
    "spread",
    "stored",
    "words",
]
