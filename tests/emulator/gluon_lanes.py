"""Kernels in Gluon as NumPy, lane by lane: their own bodies and their own assembly, the tensor core by the layout of PTX's
fragments. A read beyond an array fails. Layouts of the compiler are not looked at, nor what runs at the same time.

The sparse tensor core: m16n8k32 of 16-bit floats by the layout of PTX's fragments, exact sums.
"""

from types import FunctionType, SimpleNamespace

import ml_dtypes
import numpy as np
import torch
from triton.runtime.jit import JITFunction

from fast.kernels import bits
from fast.kernels.layers import swiglu
from fast.kernels.sm90 import bf16x2 as halves
from fast.kernels.triton_gemv import gluon as lane_swiglu
from fast.kernels.triton_gemv import gluon as lanes
from fast.kernels.triton_sparse24_small_m import weight_reads
from tests.emulator.ptx_opcodes import OPCODES, OPERAND, fused, immediate, parsed, run


class Tensor(np.ndarray):
    """What the kernel's body asks of a tensor."""

    type = SimpleNamespace(layout=None)

    def to(self, kind, bitcast=False):
        return self.view(kind) if bitcast else self.astype(kind)


class Pointer:
    """Paths in an array."""

    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def to(self, kind, bitcast):
        return Pointer(self.memory.view(kind))

    def __add__(self, offset):
        return Pointer(self.memory, self.at + np.asarray(offset))


class Either:
    """Paths in two arrays, each element in one of them."""

    def __init__(self, which, one, other):
        self.which, self.one, self.other = which, one, other

    def __add__(self, offset):
        return Either(self.which, self.one + offset, self.other + offset)


def where(which, one, other):
    if isinstance(one, Pointer):
        return Either(np.asarray(which), one, other)
    return np.where(which, one, other).view(Tensor)


def load(pointer, mask=True, other=0, eviction_policy=""):
    if isinstance(pointer, Either):
        halves_of = (pointer.one, pointer.which), (pointer.other, ~pointer.which)
        one, other = (load(part, mask & mine, other) for part, mine in halves_of)
        return where(pointer.which, one, other)
    at = np.broadcast_to(pointer.at, np.broadcast_shapes(np.shape(pointer.at), np.shape(mask)))
    asked = np.broadcast_to(mask, at.shape)
    assert ((at >= 0) & (at < pointer.memory.size))[asked].all()
    return np.where(asked, pointer.memory[at * asked], pointer.memory.dtype.type(other)).view(Tensor)


def store(pointer, value, mask=True):
    at = np.broadcast_to(pointer.at, np.shape(value))
    asked = np.broadcast_to(mask, at.shape)
    assert ((at >= 0) & (at < pointer.memory.size))[asked].all()
    pointer.memory[at[asked]] = value[asked]


def multiplied(a, b, c, kind):
    """m16n8k16, registers (warps, 32): PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type"."""
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    # Lane 4 g + t has k = 2 t and 2 t + 1 of row (of B, column) g; the next registers: row + 8, then k + 8.
    a, b = (
        [np.ascontiguousarray(v).view(dtype).reshape(-1, 8, 8).astype(float) for v in part] for part in (a, b)
    )
    left = np.concatenate([np.concatenate(a[:2], 1), np.concatenate(a[2:], 1)], 2)
    c = [np.stack(pair, -1).view(np.float32).reshape(-1, 8, 8) for pair in (c[:2], c[2:])]
    made = (left @ np.concatenate(b, 2).swapaxes(1, 2) + np.concatenate(c, 1)).astype(np.float32)
    halves = [rows.reshape(-1, 32, 2) for rows in (made[:, :8], made[:, 8:])]
    return [np.ascontiguousarray(rows[..., i]).view(np.uint32) for rows in halves for i in (0, 1)]


def assembly(text, constraints, given, dtype, is_pure, pack):
    """`inline_asm_elementwise`: `pack` elements of the last axis are registers of a lane."""
    outputs = constraints.count("=")
    given = [np.ascontiguousarray(v).view(np.uint32) for v in given]
    words = given if pack == 1 else [v[..., i] for v in given for i in range(pack)]
    if not words:
        return None
    made = on_tensor_cores(text, outputs, words) if "mma" in text else run(text, constraints, words)
    if isinstance(dtype, tuple):
        return tuple(v.view(kind).view(Tensor) for v, kind in zip(made, dtype, strict=True))
    return (made[0] if pack == 1 else np.stack(made, -1)).view(dtype).view(Tensor)


def on_tensor_cores(text, outputs, words):
    """The outputs of assembly with products of the tensor core."""
    held = {f"${outputs + i}": word for i, word in enumerate(words)}

    def read(name):
        return np.broadcast_to(immediate(name), words[0].shape) if name[0].isdigit() else held[name]

    for opcode, target, sources in parsed(text)[1]:
        if opcode.startswith("mma"):
            a, b, c = ([read(name) for name in OPERAND.findall(group[1:-1])] for group in sources)
            held.update(
                zip(OPERAND.findall(target[1:-1]), multiplied(a, b, c, opcode.split(".")[-2]), strict=True)
            )
        else:
            held[target] = OPCODES[opcode](*map(read, sources))
    return [held[f"${i}"] for i in range(outputs)]


def fma(a, b, c):
    """a * b + c of float32, rounded once."""
    return fused(*(np.asarray(v, np.float32) for v in (a, b, c))).view(Tensor)


def body(module, kernel, program, *homes):
    """A kernel of a module as a Python function, for one program. homes: modules of functions that it calls."""
    gl = SimpleNamespace(
        int16=np.int16, int32=np.int32, int64=np.int64, float16=np.float16, bfloat16=ml_dtypes.bfloat16, float32=np.float32,
        pointer_type=lambda kind: kind, BlockedLayout=lambda *_: None, convert_layout=lambda v, *_, **__: v, load=load,
        store=store, inline_asm_elementwise=assembly, static_range=range, program_id=lambda _: program,
        where=where, cast=lambda v, kind: np.asarray(v).astype(kind).view(Tensor),
        minimum=lambda a, b: np.asarray(np.minimum(a, b)).view(Tensor),
        maximum=lambda a, b: np.asarray(np.maximum(a, b)).view(Tensor),
        to_tensor=lambda v: np.asarray(v, np.int32).view(Tensor), sum=lambda v, axis: np.sum(v, axis, v.dtype),
        arange=lambda low, high, layout: np.arange(low, high, dtype=np.int32).view(Tensor),
        expand_dims=np.expand_dims, reshape=np.reshape, permute=np.transpose,
        split=lambda v: (v[..., 0], v[..., 1]), zeros=lambda s, kind, _: np.zeros(s, kind).view(Tensor),
        full=lambda s, v, kind, _: np.full(s, v, kind).view(Tensor),
        fma=fma,
    )  # fmt: skip
    gl.broadcast = lambda *v: [part.view(Tensor) for part in np.broadcast_arrays(*v)]
    names = {"gl": gl, "tl": gl, "_axis_layout": lambda *_: None}
    for home in (bits, halves, swiglu, lane_swiglu, lanes, *homes, module):
        for name, value in vars(home).items():
            if isinstance(value, JITFunction):
                names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            elif name.isupper():
                names[name] = getattr(value, "value", value)
    return names[kernel]


def host(v):
    """A tensor's memory."""
    if v is not None and v.dtype == torch.bfloat16:
        return v.view(torch.int16).numpy().view(ml_dtypes.bfloat16).ravel()
    return None if v is None else v.numpy().ravel()


SPARSE_KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def sparse_halves(words, dtype):
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
                    group,
                    index[..., None].astype(int),
                    sparse_halves(words, dtype)[:, :, t, element, None],
                    2,
                )
    return made


def sparse_multiplied(a, b, c, e, selector, dtype):
    """m16n8k32 with a sparse A, registers (warps, 32): PTX ISA, "Matrix fragments for sparse mma.m16n8k32"."""
    right = np.concatenate([sparse_halves(words, dtype).reshape(-1, 8, 8) for words in b], 2).swapaxes(1, 2)
    made = dense(a, e, selector, dtype) @ right
    for register, words in enumerate(c):
        sums = words.view(np.float32).reshape(-1, 8, 4)
        made[:, register // 2 * 8 : register // 2 * 8 + 8, register % 2 :: 2] += sums
    made = made.astype(np.float32)
    parts = [made[:, i // 2 * 8 : i // 2 * 8 + 8, i % 2 :: 2].reshape(-1, 32) for i in range(4)]
    return [np.ascontiguousarray(part).view(np.uint32) for part in parts]


def sparse_on_tensor_cores(text, outputs, words):
    """The outputs of assembly that moves words and multiplies."""
    held = {f"${outputs + i}": word for i, word in enumerate(words)}

    def read(name):
        return np.broadcast_to(immediate(name), words[0].shape) if name[0].isdigit() else held[name]

    for opcode, target, sources in parsed(text)[1]:
        if opcode.startswith("mma"):
            a, b, c = ([read(name) for name in OPERAND.findall(group[1:-1])] for group in sources[:3])
            made = sparse_multiplied(
                a, b, c, read(sources[3]), int(sources[4], 16), SPARSE_KINDS[opcode.split(".")[-2]]
            )
            held.update(zip(OPERAND.findall(target[1:-1]), made, strict=True))
        else:
            assert opcode.startswith("mov")
            held[target] = read(*sources)
    return [held[f"${i}"] for i in range(outputs)]


def sparse_assembly(text, constraints, given, dtype, is_pure, pack):
    """`inline_asm_elementwise`: of each tensor the `pack` elements of the last axis are registers of a lane, in and out."""
    outputs = constraints.count("=")
    if pack == 1:
        return assembly(text, constraints, given, dtype, is_pure, pack)
    shape = np.broadcast_shapes(*(np.shape(v) for v in given))
    words = [np.broadcast_to(v, shape)[..., i] for v in given for i in range(pack)]
    words = [np.ascontiguousarray(v).view(np.uint32) for v in words]
    made = sparse_on_tensor_cores(text, outputs, words) if "mma" in text else run(text, constraints, words)
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    made = [np.ascontiguousarray(np.stack(made[pack * i : pack * i + pack], -1)) for i in range(len(kinds))]
    results = tuple(v.view(kind).view(Tensor) for v, kind in zip(made, kinds, strict=True))
    return results if isinstance(dtype, tuple) else results[0]


def sparse_where(which, one, other):
    """Two numbers are int32 on a GPU."""
    made = where(which, one, other)
    return made.astype(np.int32) if made.dtype == np.int64 else made


def sparse_body(module, kernel, *program):
    """`gluon_lanes.body` of one program, by its places on the axes of the grid."""
    made = body(module, kernel, None, weight_reads)
    gl: SimpleNamespace = made.__globals__["gl"]
    gl.program_id = lambda axis: np.asarray(program[axis]).view(Tensor)
    gl.inline_asm_elementwise, gl.where = sparse_assembly, sparse_where
    return made
