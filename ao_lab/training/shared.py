"""One cast of an input for the linear layers that follow each other with it: query, key and value, gate and up.

In eager steps the quantized copies of the last input are given to the next layer too, where it has the same input, unchanged,
and the same operands. It holds nothing alive that backward does not: the copies go with the input, and with the copy that the
steps of the graph keep for the weight gradient; until then the copy for the output stays besides, of one input at most.

Only inputs that a graph computed are shared (a norm's output): a leaf is memory that its owner may fill again between two
layers, by ways that autograd does not count (`x.numpy()[:] = new`, `x.data.copy_(new)`, a loader that writes into a static
buffer).

Not under a tracer, a transform or a mode that sees operations (recomputation has to repeat them), not in the capture of a CUDA
graph, which may not read what was made before, and not across streams. Backward lets go of them. A write to what a graph
computed past autograd's version counter is not seen, as autograd does not see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ao_lab.training.products import is_captured
from fast.device import PLAIN, is_transformed
from reference.training.recipe import Operand

#: The copy for the output; the tensors of the copy for the weight gradient, and what else there is to say of them: None where
#: they are not to be shared.
Copies = tuple[Any, tuple[torch.Tensor | None, ...], Any]


class _Held:
    """Copies of an input, gone when it or what backward keeps of it goes."""

    def __init__(self, x: torch.Tensor, key: tuple[Any, ...], copies: Copies) -> None:
        self.key, self.rows, columns, self.settings = key, *copies  # type: Any, Any, Any, Any
        self.x = weakref.ref(x, self.forget)
        self.columns = [None if t is None else weakref.ref(t, self.forget) for t in columns]

    def forget(self, gone: Any = None) -> None:
        """Let go of the only tensors that are held."""
        self.rows = None

    def of(self, x: torch.Tensor, key: tuple[Any, ...]) -> Copies | None:
        """The copies for this input and key, or None."""
        rows = self.rows
        if rows is None or self.x() is not x or self.key != key:
            return None
        columns = tuple([None if held is None else held() for held in self.columns])
        if any(t is None and held is not None for t, held in zip(columns, self.columns, strict=True)):
            return None  # another thread let go of them
        return rows, columns, self.settings


#: The copies of the last input; others are forgotten, whatever a cycle still refers to them.
_last: list[_Held] = []


def serves(x: torch.Tensor, rows: Operand, columns: Operand) -> bool:
    """Whether copies of x may be shared; see the module text."""
    if torch.compiler.is_compiling() or type(x) not in PLAIN or columns.scheme is None:
        return False
    if is_transformed() or rows.is_stochastic or columns.is_stochastic or x.is_inference():
        return False
    return not is_captured(x)


def copies(x: torch.Tensor, asked: tuple[Any, ...], make: Callable[[], Copies]) -> Copies:
    """The copies of x: those of the layer before, if they are what is asked for, or new ones.

    asked: what decides about them beside x, compared by equality.
    """
    if x.is_leaf:
        return make()
    stream = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
    # The address: `x.data = other` counts no version.
    key = (x._version, x.data_ptr(), stream, *asked)
    for last in _last:
        found = last.of(x, key)
        if found is not None:
            return found
    forget()
    made = make()
    if made[2] is not None:
        _last[:] = [_Held(x, key, made)]
    return made


def forget() -> None:
    """Let go of the last input's copies; not where a tracer would note that as a side effect, as nothing is shared there."""
    if torch.compiler.is_compiling():
        return
    while _last:
        try:
            _last.pop().forget()
        except IndexError:  # another thread was first
            return


__all__ = ["Copies", "copies", "forget", "serves"]
