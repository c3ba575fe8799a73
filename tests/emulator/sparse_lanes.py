"""`gluon_lanes` with the sparse tensor core: m16n8k32 of 16-bit floats by the layout of PTX's fragments, exact sums."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np

from fast.kernels.sparse_linear import weight_reads
from tests.emulator import gluon_lanes
from tests.emulator.gluon_lanes import Tensor
from tests.emulator.ptx import OPERAND, immediate, parsed, run

KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def halves(words, dtype):
    """Registers (warps, 32) as (warps, g, t, the low and the high half)."""
    return np.ascontiguousarray(words).view(dtype).astype(float).reshape(-1, 8, 4, 2)


def dense(a, e, selector, dtype):
    """A (warps, 16, 32): the kept elements where the indices of two lanes of four say. Indices have to be in order."""
    made = np.zeros((len(a[0]), 16, 32))
    told = e.reshape(-1, 8, 4)[:, :, 2 * selector : 2 * selector + 2]
    for register, words in enumerate(a):
        row, second = register % 2, register // 2
        for t in range(4):
            nibble = told[:, :, second] >> np.uint32(16 * row + 4 * t) & np.uint32(15)
            low, high = nibble & 3, nibble >> np.uint32(2)
            assert (low < high).all(), "the instruction knows no other pairs"
            for index, element in ((low, 0), (high, 1)):
                group = made[:, 8 * row : 8 * row + 8, 16 * second + 4 * t : 16 * second + 4 * t + 4]
                np.put_along_axis(
                    group, index[..., None].astype(int), halves(words, dtype)[:, :, t, element, None], 2
                )
    return made


def multiplied(a, b, c, e, selector, dtype):
    """m16n8k32 with a sparse A, registers (warps, 32): PTX ISA, "Matrix fragments for sparse mma.m16n8k32"."""
    right = np.concatenate([halves(words, dtype).reshape(-1, 8, 8) for words in b], 2).swapaxes(1, 2)
    made = dense(a, e, selector, dtype) @ right
    for register, words in enumerate(c):
        sums = words.view(np.float32).reshape(-1, 8, 4)
        made[:, register // 2 * 8 : register // 2 * 8 + 8, register % 2 :: 2] += sums
    made = made.astype(np.float32)
    parts = [made[:, i // 2 * 8 : i // 2 * 8 + 8, i % 2 :: 2].reshape(-1, 32) for i in range(4)]
    return [np.ascontiguousarray(part).view(np.uint32) for part in parts]


def on_tensor_cores(text, outputs, words):
    """The outputs of assembly that moves words and multiplies."""
    held = {f"${outputs + i}": word for i, word in enumerate(words)}

    def read(name):
        return np.broadcast_to(immediate(name), words[0].shape) if name[0].isdigit() else held[name]

    for opcode, target, sources in parsed(text)[1]:
        if opcode.startswith("mma"):
            a, b, c = ([read(name) for name in OPERAND.findall(group[1:-1])] for group in sources[:3])
            made = multiplied(a, b, c, read(sources[3]), int(sources[4], 16), KINDS[opcode.split(".")[-2]])
            held.update(zip(OPERAND.findall(target[1:-1]), made, strict=True))
        else:
            assert opcode.startswith("mov")
            held[target] = read(*sources)
    return [held[f"${i}"] for i in range(outputs)]


def assembly(text, constraints, given, dtype, is_pure, pack):
    """`inline_asm_elementwise`: of each tensor the `pack` elements of the last axis are registers of a lane, in and out."""
    outputs = constraints.count("=")
    if pack == 1:
        return gluon_lanes.assembly(text, constraints, given, dtype, is_pure, pack)
    shape = np.broadcast_shapes(*(np.shape(v) for v in given))
    words = [np.broadcast_to(v, shape)[..., i] for v in given for i in range(pack)]
    words = [np.ascontiguousarray(v).view(np.uint32) for v in words]
    made = on_tensor_cores(text, outputs, words) if "mma" in text else run(text, constraints, words)
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    made = [np.ascontiguousarray(np.stack(made[pack * i : pack * i + pack], -1)) for i in range(len(kinds))]
    results = tuple(v.view(kind).view(Tensor) for v, kind in zip(made, kinds, strict=True))
    return results if isinstance(dtype, tuple) else results[0]


def where(which, one, other):
    """Two numbers are int32 on a GPU."""
    made = gluon_lanes.where(which, one, other)
    return made.astype(np.int32) if made.dtype == np.int64 else made


def body(module, kernel, *program):
    """`gluon_lanes.body` of one program, by its places on the axes of the grid."""
    made = gluon_lanes.body(module, kernel, None, weight_reads)
    gl: SimpleNamespace = made.__globals__["gl"]
    gl.program_id = lambda axis: np.asarray(program[axis]).view(Tensor)
    gl.inline_asm_elementwise, gl.where = assembly, where
    return made
