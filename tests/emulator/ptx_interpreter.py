"""Triton's interpreter made to answer as an H200 does: inline assembly by `ptx`, casts, minima and a * b + c as the GPU's.

`install` is for programs that started with TRITON_INTERPRET=1. Elements that share a register are neighbours here; on a GPU
they are whichever a thread holds, which no kernel may depend on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

from fast.kernels import encode
from fast.kernels.layers import rms_norm as normalize
from fast.kernels.layers import swiglu
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan
from fast.kernels.scheme import constants
from tests.emulator import ptx_opcodes, quick_interpreter
from tests.emulator.ptx_opcodes import (
    OPCODES,
    bfloat16_of,
    e4m3_of,
    e5m2_of,
    float16_of,
    from_float16,
    fused,
    patterns,
)

BYTES = {tl.float8e4nv: (e4m3_of, ml_dtypes.float8_e4m3fn), tl.float8e5: (e5m2_of, ml_dtypes.float8_e5m2)}
cast_impl, dot_impl = InterpreterBuilder.cast_impl, quick_interpreter.create_dot


def registers_of(data: Any, pack: int) -> list[Any]:
    """Elements as 32-bit registers of groups of `pack`, low bits first; the last group is filled with its last element."""
    flat = np.ascontiguousarray(data).reshape(-1)
    flat = flat.view(f"u{flat.itemsize}")
    if flat.size % pack:
        flat = np.pad(flat, (0, -flat.size % pack), "edge")
    each = min(pack, max(1, 4 // flat.itemsize))
    groups = flat.astype(np.uint32).reshape(-1, pack // each, each)
    words = np.bitwise_or.reduce(groups << (np.arange(each, dtype=np.uint32) * 8 * flat.itemsize), 2)
    return list(words.T)


def elements_of(registers: list[Any], dtype: Any, pack: int, shape: tuple[int, ...]) -> Any:
    """The inverse of `registers_of`."""
    kind = np.dtype(_get_np_dtype(dtype))
    each = min(pack, max(1, 4 // kind.itemsize))
    words = np.stack(np.broadcast_arrays(*registers), 1)[:, :, None]
    groups = words >> (np.arange(each, dtype=np.uint32) * 8 * kind.itemsize)
    flat = groups.astype(f"u{kind.itemsize}").reshape(-1).view(kind)
    return flat[: int(np.prod(shape))].reshape(shape)


def create_inline_asm(
    _self: Any, asm: str, constraints: str, values: list[Any], types: list[Any], _pure: bool, pack: int
) -> Any:
    """The call whose results the language asks for."""
    data = np.broadcast_arrays(*(value.data for value in values))
    inputs = [register for part in data for register in registers_of(part, pack)]
    made, results = ptx_opcodes.run(asm, constraints, inputs), []
    for kind in types:
        count = pack // min(pack, max(1, 32 // kind.scalar.primitive_bitwidth))
        part, made = made[:count], made[count:]
        results.append(TensorHandle(elements_of(part, kind.scalar, pack, data[0].shape), kind.scalar))
    return SimpleNamespace(get_result=results.__getitem__)


def cast(self: Any, src: Any, dst_type: Any) -> Any:
    """Casts between floats; others as before."""
    before, after = src.dtype.scalar, dst_type.scalar
    if {before, after} == {tl.float32, tl.float64}:
        return TensorHandle(src.data.astype(_get_np_dtype(after)), after)
    bits = np.ascontiguousarray(src.data).view(f"u{src.data.itemsize}").astype(np.uint32)
    if before == tl.float32 and after in (tl.bfloat16, tl.float16):
        half = (bfloat16_of if after == tl.bfloat16 else float16_of)(bits).astype(np.uint16)
        return TensorHandle(half.view(_get_np_dtype(after)), after)
    if before == tl.float32 and after in BYTES:
        return TensorHandle(BYTES[after][0](bits).astype(np.uint8), after)
    if after == tl.float32 and before in (tl.bfloat16, tl.float16):
        wide = bits << np.uint32(16) if before == tl.bfloat16 else from_float16(bits)
        return TensorHandle(wide.view(np.float32), after)
    if after == tl.float32 and before in BYTES:
        values = bits.astype(np.uint8).view(BYTES[before][1]).astype(np.float32)
        return TensorHandle(patterns(values).view(np.float32), after)
    if before.is_floating() and before != after and (after.is_floating() or before != tl.float32):
        raise NotImplementedError(f"a cast from {before} to {after}")
    return cast_impl(self, src, dst_type)


def arithmetic(operation: Any) -> Any:
    """A float operation whose NaN is the GPU's."""

    def make(_self: Any, a: Any, b: Any) -> Any:
        made = operation(a.data, b.data)
        if a.dtype.scalar == tl.float32:
            made = patterns(made).view(np.float32)
        return TensorHandle(made, a.dtype.scalar)

    return make


def extremum(opcode: str) -> Any:
    """A minimum or maximum of float32."""

    def make(_self: Any, a: Any, b: Any) -> Any:
        both = [np.ascontiguousarray(v).view(np.uint32) for v in np.broadcast_arrays(a.data, b.data)]
        return TensorHandle(OPCODES[opcode](*both).view(np.float32), a.dtype.scalar)

    return make


def create_fma(_self: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once."""
    made = patterns(fused(x.data, y.data, z.data)).view(np.float32)
    return TensorHandle(made, z.dtype.scalar)


def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """A product of bfloat16 in float32, where the interpreter multiplies patterns; others as before."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = (cast(self, part, tl.float32) for part in (a, b))
    return dot_impl(self, a, b, d, *options)


def install() -> None:
    """Change the interpreter, and have rules made for hardware, as if kernels were compiled."""
    quick_interpreter.install()
    builder = InterpreterBuilder
    builder.create_inline_asm, builder.cast_impl, builder.create_fma = create_inline_asm, cast, create_fma
    builder.create_dot = create_dot
    builder.create_fp_to_fp = lambda self, src, kind, _rounding: cast(self, src, kind)
    for name, operation in (("fadd", np.add), ("fsub", np.subtract), ("fmul", np.multiply)):
        setattr(builder, f"create_{name}", arithmetic(operation))
    builder.create_fdiv = builder.create_precise_divf = arithmetic(np.divide)
    for name in ("min", "max"):
        setattr(builder, f"create_{name}numf", extremum(f"{name}.f32"))
        setattr(builder, f"create_{name}imumf", extremum(f"{name}.NaN.f32"))
    # `launch` still has to know: it runs kernels.
    for module in (normalize, plan, encode, quantizer, swiglu):
        module.interpreted = lambda: False
    # The interpreter takes constants inside constants as the objects that they are.
    for module in (constants, constants):
        module.constant_part = lambda constant, _hardware: constant
