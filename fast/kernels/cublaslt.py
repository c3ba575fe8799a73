"""cuBLASLt by ctypes: the library that torch itself has loaded, never another one; its descriptors, and what heuristics choose.

Numbers are those of `cublasLt.h` and `library_types.h`, the same since CUDA 11.

dW = dY^T X with the sums of dY's columns, the bias's gradient, from the same read: cuBLASLt's epilogue BGRADB.

To the library, whose matrices lie by columns, the row-major dW (N, K) is K x N, the product of X as K x M with dY as N x M
transposed. The sums go over M, in float32, and are rounded once.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
import weakref
from functools import lru_cache
from typing import Any

import torch

#: What the lengths of rows are multiples of.
STEP = 8
#: What the library said: nothing more is tried in this process then.
FAILED: list[str] = []
Pair = tuple[torch.Tensor, torch.Tensor]


class Plan:
    """A product of one shape and dtype on a device. algorithm: None where the library has none."""

    def __init__(self, device: int, rows: int, n: int, k: int, dtype: torch.dtype) -> None:
        self.device, self.shape, self.lock = device, (n, k), threading.Lock()
        self.product = descriptor(
            {
                TRANSB: ctypes.c_int32(TRANSPOSED),
                EPILOGUE: ctypes.c_int32(BGRADB),
                # Of the address the heuristic reads the alignment alone.
                BIAS_POINTER: ctypes.c_uint64(ALIGNMENT),
            }
        )
        self.x, self.g, self.dw = layout(dtype, k, rows), layout(dtype, n, rows), layout(dtype, k, n)
        # Shapes come and go: the cache of plans forgets the oldest.
        weakref.finalize(self, destroy, self.product, (self.x, self.g, self.dw)).atexit = False
        self.algorithm = best(device, self.product, (self.x, self.g, self.dw))

    def __call__(self, g: torch.Tensor, x: torch.Tensor, stream: int) -> Pair:
        """(dW, db) on a stream of the device, which is the current one."""
        dw, db = g.new_empty(self.shape), g.new_empty(self.shape[0])
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        to = Pointer(dw.data_ptr())
        # The bias's address is a part of the descriptor, which the call reads before it returns.
        with self.lock:
            set_attribute(self.product, BIAS_POINTER, ctypes.c_uint64(db.data_ptr()))
            status = library().cublasLtMatmul(
                handle(self.device), self.product, ctypes.byref(one), x.data_ptr(), self.x, g.data_ptr(), self.g,
                ctypes.byref(zero), to, self.dw, to, self.dw, ctypes.byref(self.algorithm), None, 0, stream,
            )  # fmt: skip
        check(status, f"a weight's gradient {self.shape} with its bias's")
        return dw, db


@lru_cache(maxsize=256)
def plan(device: int, rows: int, n: int, k: int, dtype: torch.dtype) -> Plan:
    """The plan of a shape, made once; LibraryError as `library` says. The host waits for nothing."""
    with torch.cuda.device(device):
        return Plan(device, rows, n, k, dtype)


def weight_and_bias_gradients(
    g: torch.Tensor, x: torch.Tensor, stream: torch.cuda.Stream | None = None
) -> Pair | None:
    """(dW (N, K), db (N)) of g (M, N) and x (M, K), CUDA tensors of one 16-bit dtype; None where `refused` says why, or the
    library has no such product: what failed once is not tried again, a warning says so.

    stream: which the product is launched on, by default the current one, whose memory the results have in either case.
    """
    if refused(g, x) is not None:
        return None
    device = g.get_device()
    try:
        result = plan(device, *g.shape, x.shape[1], g.dtype)
        if result.algorithm is None:
            return None
        with torch.cuda.device(device):
            return result(g, x, (stream or torch.cuda.current_stream(device)).cuda_stream)
    except LibraryError as error:
        FAILED.append(f"it failed before: {error}")
        warnings.warn(
            f"cuBLASLt's gradient of a bias is left out, a kernel sums: {error}", RuntimeWarning, stacklevel=2
        )
        return None


def refused(g: torch.Tensor, x: torch.Tensor) -> str | None:
    """Why matrices are not taken; None where they are."""
    if FAILED:
        return FAILED[0]
    if g.dtype not in (torch.float16, torch.bfloat16) or x.dtype != g.dtype:
        return f"both are float16 or both bfloat16, got {g.dtype} and {x.dtype}"
    if not (g.numel() and x.numel()):
        return f"sizes are at least 1, got {tuple(g.shape)} and {tuple(x.shape)}"
    for t in (g, x):
        if not t.is_contiguous() or t.is_neg() or t.data_ptr() % ALIGNMENT or t.shape[1] % STEP:
            return (
                f"rows of multiples of {STEP} elements lie one behind the other, the first at a multiple of {ALIGNMENT} bytes, "
                f"got {tuple(t.shape)} with strides {t.stride()} at {t.data_ptr():#x}"
            )
    return None


#: Of `library_types.h` and `cublas_api.h`: element types, sums in float32, CUBLAS_OP_T, and 'nothing was found'.
TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
COMPUTE_32F, TRANSPOSED, NOT_SUPPORTED = 68, 1, 15
#: Attributes of a product's descriptor, and an epilogue: the sums of the second operand over K are written to the bias.
TRANSB, EPILOGUE, BIAS_POINTER = 4, 7, 8
BGRADB = 512
#: Attribute of what heuristics are asked for: the most bytes of workspace.
MOST_WORKSPACE = 1
#: Bytes of workspace that are offered: with none heuristics put slower algorithms first, though the best one needs none either
#: (times: reports/LOG.md).
OFFERED = 32 << 20
#: Bytes of alignment of addresses that heuristics take as given.
ALIGNMENT = 256

Pointer = ctypes.c_void_p


class Algorithm(ctypes.Structure):
    """A `cublasLtMatmulAlgo_t`."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Found(ctypes.Structure):
    """A `cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", Algorithm), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class LibraryError(RuntimeError):
    """There is no library, or it answered with an error; the message says which."""


@lru_cache(maxsize=1)
def library() -> Any:
    """torch's cuBLASLt; LibraryError where torch has none, or has it within itself."""
    if torch.version.cuda is None:
        raise LibraryError("this torch is built without CUDA, so it has no cuBLASLt")
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        result = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"torch has not loaded {name}, so its cuBLASLt cannot be called: {error}"
        ) from error
    return declared(result)


def declared(found: Any) -> Any:
    """The library with types of arguments, by which Python's numbers are passed as they have to be."""
    size, number = ctypes.c_size_t, ctypes.c_int
    for name, types in (
        ("cublasLtCreate", (Pointer,)),
        ("cublasLtMatmulDescCreate", (Pointer, number, number)),
        ("cublasLtMatmulDescSetAttribute", (Pointer, number, Pointer, size)),
        ("cublasLtMatrixLayoutCreate", (Pointer, number, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)),
        ("cublasLtMatmulDescDestroy", (Pointer,)),
        ("cublasLtMatrixLayoutDestroy", (Pointer,)),
        ("cublasLtMatmulPreferenceCreate", (Pointer,)),
        ("cublasLtMatmulPreferenceDestroy", (Pointer,)),
        ("cublasLtMatmulPreferenceSetAttribute", (Pointer, number, Pointer, size)),
        ("cublasLtMatmulAlgoGetHeuristic", (*[Pointer] * 7, number, Pointer, Pointer)),
        ("cublasLtMatmul", (*[Pointer] * 14, size, Pointer)),
    ):
        getattr(found, name).argtypes = types
    return found


def check(status: int, what: str) -> None:
    """Raise LibraryError for a status that is no success."""
    if status:
        raise LibraryError(f"cuBLASLt: status {status} of {what}")


@lru_cache(maxsize=64)
def handle(device: int) -> Pointer:
    """The library's handle of a CUDA device, kept as long as the process."""
    result = Pointer()
    with torch.cuda.device(device):
        check(library().cublasLtCreate(ctypes.byref(result)), f"a handle of device {device}")
    return result


def descriptor(attributes: dict[int, ctypes.c_int32 | ctypes.c_uint64]) -> Pointer:
    """The descriptor of a product with sums and factors in float32."""
    result = Pointer()
    status = library().cublasLtMatmulDescCreate(ctypes.byref(result), COMPUTE_32F, TYPES[torch.float32])
    check(status, "a product's descriptor")
    for attribute, value in attributes.items():
        set_attribute(result, attribute, value)
    return result


def set_attribute(made: Pointer, attribute: int, value: ctypes.c_int32 | ctypes.c_uint64) -> None:
    """Of a product's descriptor."""
    status = library().cublasLtMatmulDescSetAttribute(
        made, attribute, ctypes.byref(value), ctypes.sizeof(value)
    )
    check(status, f"attribute {attribute} of a product")


def layout(dtype: torch.dtype, rows: int, columns: int) -> Pointer:
    """Of a matrix whose columns lie one behind the other: the transpose of a contiguous (columns, rows)."""
    result = Pointer()
    status = library().cublasLtMatrixLayoutCreate(ctypes.byref(result), TYPES[dtype], rows, columns, rows)
    check(status, f"the layout of {rows} x {columns}")
    return result


def destroy(product: Pointer, layouts: tuple[Pointer, ...]) -> None:
    """A product's descriptor and its layouts, which nothing launched reads any more: a call reads them before it returns."""
    library().cublasLtMatmulDescDestroy(product)
    for one in layouts:
        library().cublasLtMatrixLayoutDestroy(one)


def best(device: int, product: Pointer, layouts: tuple[Pointer, Pointer, Pointer]) -> Any:
    """The algorithm that the library's heuristic puts first; None where there is none, or it needs workspace.

    layouts: of A, B and D, which begin at multiples of ALIGNMENT bytes.
    """
    asked, result, count = Pointer(), Found(), ctypes.c_int()
    check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(asked)), "a preference")
    try:
        most = ctypes.c_uint64(OFFERED)
        status = library().cublasLtMatmulPreferenceSetAttribute(
            asked, MOST_WORKSPACE, ctypes.byref(most), ctypes.sizeof(most)
        )
        check(status, "the workspace of a preference")
        status = library().cublasLtMatmulAlgoGetHeuristic(
            handle(device), product, *layouts, layouts[2], asked, 1, ctypes.byref(result), ctypes.byref(count)
        )
    finally:
        library().cublasLtMatmulPreferenceDestroy(asked)
    if status == NOT_SUPPORTED or (not status and not count.value):
        return None
    check(status, "the heuristic")
    check(result.state, "the algorithm that the heuristic puts first")
    return None if result.workspace else result.algorithm


__all__ = [
    "ALIGNMENT",
    "BGRADB",
    "BIAS_POINTER",
    "EPILOGUE",
    "FAILED",
    "TRANSB",
    "TRANSPOSED",
    "Algorithm",
    "Found",
    "LibraryError",
    "Plan",
    "Pointer",
    "best",
    "check",
    "declared",
    "descriptor",
    "destroy",
    "handle",
    "layout",
    "library",
    "plan",
    "refused",
    "set_attribute",
    "weight_and_bias_gradients",
]
