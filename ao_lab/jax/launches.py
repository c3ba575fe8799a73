"""Triton kernels inside JAX programs: compiled by Triton, launched by the custom call that JAX's CUDA plugin registers.

JAX documents the call (`jax.ffi.ffi_call`) but not what this target takes: a zlib-compressed protocol buffer with the PTX, the
grid and the parameters. It is written here by its field numbers, which are the same in jaxlib 0.10 and 0.11, while the Python
classes that also write it changed their arguments between the two. (The library jax-triton 0.3.1 uses those classes and an
argument order with all outputs last, and it empties TRITON_CACHE_DIR for the whole process.)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fast.kernels.quantize.host import POINTERS
from fast.kernels.quantize.kernel import blocks_kernel
from fast.kernels.quantize.plan import Buffer, Pass
from fast.launch.launcher import UNFUSED

# The custom call with typed attributes, and the one of older versions with an opaque string.
TARGET, OLD_TARGET = "triton_kernel_call_ffi", "triton_kernel_call"
TYPED_SINCE = (0, 10, 2)
POINTER = {
    "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "uint8": "*u8", "int8": "*i8", "uint16": "*u16",
    "uint32": "*u32", "int32": "*i32",
}  # fmt: skip
INTEGERS = (
    "count", "columns", "rows", "length", "limit", "chunks", "lead_stride", "row_stride", "column_stride", "inner_row",
    "inner_column", "stride",
)  # fmt: skip
ALIGNED = ["tt.divisibility", 16]
Arrays = dict[str, Any]


def launch(one: Pass, inputs: Arrays, outputs: dict[str, Buffer], updated: Arrays) -> Arrays:
    """The arrays that a pass leaves behind, by kernel argument; `updated` are overwritten in place."""
    read = [name for name in POINTERS if name in inputs or name in updated]
    # The kernel meets what it updates among its inputs; as results these come last, past the kernel's own arrays.
    written = [name for name in POINTERS if name in outputs] + list(updated)
    given = {**inputs, **updated}
    wanted = {**updated, **outputs}
    types = {name: str(value.dtype) for name, value in (given | wanted).items()}
    shapes = [jax.ShapeDtypeStruct(wanted[name].shape, wanted[name].dtype) for name in written]
    aliases = {read.index(name): written.index(name) for name in updated}
    message = kernel_call(one, tuple((name, types[name]) for name in POINTERS if name in types))
    made = custom_call(message, shapes, aliases)(*(given[name] for name in read))
    return dict(zip(written, made, strict=True))


def custom_call(message: bytes, shapes: Sequence[Any], aliases: dict[int, int]) -> Any:
    """The JAX function that launches an encoded kernel."""
    common: dict[str, Any] = {"vmap_method": "sequential", "input_output_aliases": aliases}
    if jax.__version_info__ < TYPED_SINCE:
        old: dict[str, Any] = {"custom_call_api_version": 2, "legacy_backend_config": message}
        return jax.ffi.ffi_call(OLD_TARGET, shapes, **old, **common)
    call = jax.ffi.ffi_call(TARGET, shapes, **common)
    return lambda *arrays: call(*arrays, name="ao_lab", opaque=message)


def kernel_call(one: Pass, types: tuple[tuple[str, str], ...]) -> bytes:
    """The message for a pass whose arrays (name, dtype) are given in the order of `POINTERS`."""
    place = one.place
    constants = {
        "SCHEME": one.rule, "OP": one.block_op, "SHAPE": place.shape, "CHUNKED": place.chunked, "MASKED": place.masked,
        "WIDE": place.wide, "SIZE": place.size, "INNER": place.inner, "P": place.p,
    }  # fmt: skip
    integers = (*place.integers, place.blocks)
    return encoded(types, integers, tuple(constants.items()), place.programs, place.warps, capability())


def capability() -> int:
    """Compute capability of the GPU, 90 for 9.0; where there is none (lowering for another machine) Hopper's."""
    try:
        return int(str(jax.local_devices(backend="cuda")[0].compute_capability).replace(".", ""))
    except RuntimeError:
        return 90


@lru_cache(maxsize=4096)
def encoded(
    types: tuple[tuple[str, str], ...], integers: tuple[int, ...], constants: tuple[tuple[str, Any], ...], programs: int,
    warps: int, target: int,
) -> bytes:  # fmt: skip
    """A compiled kernel, its grid and its integers, as the custom call reads them."""
    kernel = compiled(types, tuple(kind_of(value) for value in integers), constants, warps, target)
    passed = [value for value in integers if value != 1]
    image = kernel_message(kernel.metadata.name, kernel.asm["ptx"], kernel.metadata.shared, warps, target)
    return zlib.compress(launch_message(image, programs, len(types), passed))


def kind_of(value: int) -> str:
    """How Triton specialises an integer: "1", or its type with "!" where 16 divides it."""
    if value == 1:
        return "1"
    return ("i32" if value < 2**31 else "i64") + ("!" if value % 16 == 0 else "")


@lru_cache(maxsize=1024)
def compiled(
    types: tuple[tuple[str, str], ...], kinds: tuple[str, ...], constants: tuple[tuple[str, Any], ...], warps: int, target: int
) -> Any:  # fmt: skip
    """The kernel as Triton compiles it, specialised as its own launcher does: absent arrays, ones, multiples of 16."""
    signature = {name: POINTER[dtype] for name, dtype in types} | {
        name: kind.rstrip("!") for name, kind in zip(INTEGERS, kinds, strict=True) if kind != "1"
    }
    ones = {name: 1 for name, kind in zip(INTEGERS, kinds, strict=True) if kind == "1"}
    fixed = {name: None for name in POINTERS if name not in signature} | ones | dict(constants)
    aligned = {name for name, _ in types} | {
        name for name, kind in zip(INTEGERS, kinds, strict=True) if kind.endswith("!")
    }
    names = blocks_kernel.arg_names
    source = ASTSource(
        blocks_kernel,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in fixed.items()},
        {(names.index(name),): [ALIGNED] for name in aligned},
    )
    options = {"num_warps": warps, **UNFUSED}
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    if getattr(made.metadata, "global_scratch_size", 0):
        raise NotImplementedError("the kernel needs scratch memory, which this custom call does not allocate")
    return made


def kernel_message(name: str, ptx: str, shared: int, warps: int, target: int) -> bytes:
    """`TritonKernel`: kernel_name 1, num_warps 2, shared_mem_bytes 3, ptx 4, compute_capability 6, num_ctas 10."""
    sizes = number(2, warps) + number(3, shared)
    return text(1, name) + sizes + text(4, ptx) + number(6, target) + number(10, 1)


def launch_message(kernel: bytes, programs: int, arrays: int, integers: Sequence[int]) -> bytes:
    """`TritonAnyKernelCall`, name 4, of `TritonKernelCall` 1: kernel 1, grid 2 to 4, parameters 5 (array 1, i32 3, i64 5)."""
    array = text(1, number(2, 16))  # aligned to 16 bytes, nothing to be zeroed
    scalars = [number(3 if value < 2**31 else 5, value) for value in integers]
    grid = number(2, programs) + number(3, 1) + number(4, 1)
    call = text(1, kernel) + grid + b"".join(text(5, one) for one in [array] * arrays + scalars)
    return text(1, call) + text(4, "ao_lab")


def number(tag: int, value: int) -> bytes:
    """A protocol buffer's field with a non-negative integer."""
    return bytes([tag << 3]) + bytes(_varint(value))


def text(tag: int, value: str | bytes) -> bytes:
    """A protocol buffer's field with a string, bytes or a message."""
    value = value.encode() if isinstance(value, str) else value
    return bytes([tag << 3 | 2]) + bytes(_varint(len(value))) + value


def _varint(value: int) -> Iterator[int]:
    while value > 127:
        yield value & 127 | 128
        value >>= 7
    yield value
