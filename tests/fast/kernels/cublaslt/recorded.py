"""A cuBLASLt that computes with torch on the host what it is asked for, and is strict about how."""

from __future__ import annotations

import ctypes
import itertools

import torch

from fast.kernels import cublaslt

NAMES = {number: dtype for dtype, number in cublaslt.TYPES.items()}


class Function:
    """A function of the library, which may be given argument types."""

    def __init__(self, call):
        self.call, self.argtypes = call, ()

    def __call__(self, *args):
        assert len(args) == len(self.argtypes)
        return self.call(*args)


class Recorded:
    """Descriptors are numbers. status: what the product answers; count: how many algorithms the heuristic has; workspace: what
    the first one needs."""

    def __init__(self):
        self.made, self.calls, self.status, self.count, self.workspace = {}, [], 0, 1, 0
        self.next = itertools.count(1000)
        for name in dir(type(self)):
            if name.startswith("_cublasLt"):
                setattr(self, name[1:], Function(getattr(self, name)))

    def _new(self, where, value):
        address = next(self.next)
        self.made[address] = value
        where._obj.value = address
        return 0

    def _cublasLtCreate(self, where):
        return self._new(where, "handle")

    def _cublasLtMatmulDescCreate(self, where, compute, scale):
        assert (compute, scale) == (68, 0)
        return self._new(where, {})

    def _cublasLtMatmulPreferenceCreate(self, where):
        return self._new(where, {})

    def _destroy(self, made):
        del self.made[made.value]
        return 0

    _cublasLtMatmulPreferenceDestroy = _cublasLtMatmulDescDestroy = _cublasLtMatrixLayoutDestroy = _destroy

    def _cublasLtMatrixLayoutCreate(self, where, dtype, rows, columns, leading):
        assert leading == rows
        return self._new(where, (NAMES[dtype], rows, columns))

    def _set(self, made, attribute, value, size):
        assert ctypes.sizeof(value._obj) == size
        self.made[made.value][attribute] = value._obj.value
        return 0

    _cublasLtMatmulDescSetAttribute = _cublasLtMatmulPreferenceSetAttribute = _set

    def _cublasLtMatmulAlgoGetHeuristic(self, handle, product, a, b, c, d, asked, most, found, count):
        assert self.made[asked.value] == {1: 32 << 20}
        assert self.made[product.value][8] % 256 == 0
        assert self.made[handle.value] == "handle"
        found._obj.algorithm.data[0], found._obj.workspace = 77, self.workspace
        count._obj.value = self.count
        return 0 if self.count else cublaslt.NOT_SUPPORTED

    def _cublasLtMatmul(
        self, handle, product, one, a, la, b, lb, zero, c, lc, d, ld, algorithm, space, size, stream
    ):
        asked = self.made[product.value]
        assert (one._obj.value, zero._obj.value, algorithm._obj.data[0], space, size) == (1, 0, 77, None, 0)
        assert (c.value, lc.value) == (d.value, ld.value)
        assert set(asked) == {4, 7, 8}
        assert (asked[4], asked[7]) == (1, 512)
        self.calls.append(stream)
        if not self.status:
            x, g = self._matrix(a, la), self._matrix(b, lb)
            self._matrix(d.value, ld).copy_((x.float() @ g.float().t()).to(x.dtype))
            self._memory(asked[8], g.dtype, len(g)).copy_(g.float().sum(1).to(g.dtype))
        return self.status

    def _matrix(self, address, layout):
        dtype, rows, columns = self.made[layout.value]
        return self._memory(address, dtype, rows * columns).view(columns, rows).t()

    def _memory(self, address, dtype, count):
        held = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(held, dtype=dtype)
