"""dW = dY^T X with the sums of dY's columns, the bias's gradient, from the same read: cuBLASLt's epilogue BGRADB.

To the library, whose matrices lie by columns, the row-major dW (N, K) is K x N, the product of X as K x M with dY as N x M
transposed. The sums go over M, in float32, and are rounded once.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from functools import lru_cache

import torch

from fast.kernels.cublaslt.library import (
    ALIGNMENT,
    BGRADB,
    BIAS_POINTER,
    EPILOGUE,
    TRANSB,
    TRANSPOSED,
    LibraryError,
    Pointer,
    best,
    check,
    descriptor,
    destroy,
    handle,
    layout,
    library,
    set_attribute,
)

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
        made = plan(device, *g.shape, x.shape[1], g.dtype)
        if made.algorithm is None:
            return None
        with torch.cuda.device(device):
            return made(g, x, (stream or torch.cuda.current_stream(device)).cuda_stream)
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


__all__ = ["FAILED", "STEP", "Plan", "plan", "refused", "weight_and_bias_gradients"]
