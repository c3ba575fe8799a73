"""One cast of an input for the linear layers that follow each other with it: query, key and value, gate and up.

In eager steps the quantized copies of the last input are given to the next layer too, where it has the same input, unchanged,
and the same operands. It holds nothing alive that backward does not: the copies go with the input, and with the copy that the
steps of the graph keep for the weight gradient; until then the copy for the output stays besides, of one input at most.

Not under a tracer, a transform or a mode that sees operations (recomputation has to repeat them), not in the capture of a CUDA
graph, which may not read what was made before, and not across streams. Backward lets go of them. A write past autograd's
version counter (`x.data`) between two such layers is not seen, as autograd does not see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ao_lab.training.casts import Matrix
from fast.device import PLAIN, is_transformed
from reference import Quantized
from reference.training.recipe import Operand

Pair = tuple[Matrix, Matrix]


class _Copies:
    """Copies of an input, gone when it or what backward keeps of it goes."""

    def __init__(self, x: torch.Tensor, key: tuple[Any, ...], rows: Matrix, columns: Quantized) -> None:
        self.key, self.rows = key, rows  # type: Any, Matrix | None
        self.settings = columns.shape, columns.axis, columns.scheme
        self.x = weakref.ref(x, self.forget)
        self.tensors = [None if t is None else weakref.ref(t, self.forget) for t in _tensors(columns)]

    def forget(self, gone: Any = None) -> None:
        """Let go of the only tensors that are held."""
        self.rows = None

    def of(self, x: torch.Tensor, key: tuple[Any, ...]) -> Pair | None:
        """The copies for this input and key, or None."""
        rows = self.rows
        if rows is None or self.x() is not x or self.key != key:
            return None
        tensors: list[Any] = [None if held is None else held() for held in self.tensors]
        if tensors[0] is None or tensors[1] is None:  # another thread let go of them
            return None
        codes, scale, outer, zero = tensors
        return rows, Quantized(codes, scale, outer, zero, *self.settings)


#: The copies of the last input; others are forgotten, whatever a cycle still refers to them.
_last: list[_Copies] = []


def serves(x: torch.Tensor, rows: Operand, columns: Operand) -> bool:
    """Whether copies of x may be shared; see the module text."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN or columns.scheme is None:
        return False
    if is_transformed() or rows.is_stochastic or columns.is_stochastic or x.is_inference():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def both(x: torch.Tensor, rows: Operand, columns: Operand, make: Callable[[], Pair]) -> Pair:
    """The copies of x for two operands: those of the layer before, or new ones."""
    stream = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
    # The address: `x.data = other` counts no version.
    key = (x._version, x.data_ptr(), stream, rows, columns)
    for last in _last:
        found = last.of(x, key)
        if found is not None:
            return found
    forget()
    of_rows, of_columns = make()
    if isinstance(of_columns, Quantized):
        _last[:] = [_Copies(x, key, of_rows, of_columns)]
    return of_rows, of_columns


def forget() -> None:
    """Let go of the last input's copies; not where a tracer would note that as a side effect, as nothing is shared there."""
    if torch.compiler.is_compiling():
        return
    while _last:
        try:
            _last.pop().forget()
        except IndexError:  # another thread was first
            return


def _tensors(q: Quantized) -> tuple[Any, ...]:
    return q.codes, q.scale, q.outer, q.zero


__all__ = ["both", "forget", "serves"]
