"""`weight_and_bias_gradients` for torch tensors: what the weight and the bias of a linear layer get, dY being read by both.

No name of `fast` itself: backward passes call it. On Hopper there are three ways, and `fast.gemm.choose.gradients` says which
a shape gets:

* "apart": torch's product, then `column_sums`;
* "beside": the same two, the product on a stream of its own. Of one tile a multiprocessor it leaves four idle, which add up
  meanwhile; where the product takes long enough, sums cost no time (times: reports/LOG.md);
* "epilogue": cuBLASLt adds up what its product reads (`fast.kernels.cublaslt`).

The weight's gradient has the same bits by the first two, which are those of torch's product. By the last two a caller may
have other kernels run beside the product (`beside_work`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from fast.dispatch import Function, execute, has_kernels, is_traced, run, runs_eagerly
from fast.gemm.choose import APART, BESIDE, EPILOGUE, gradients
from fast.layers.column_sums import COLUMN_SUMS, column_sums, covers
from fast.ops import register

Pair = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")
#: The compute capability whose times the choice is made of; others get "apart".
HOPPER = (9, 0)
#: Rows of dY from which other work may follow the sums: of fewer the product is over before four multiprocessors have finished.
MOST_ROWS = 1 << 14
#: Before other work of the device, so that the product's tiles are placed first.
PRIORITY = -1


def weight_and_bias_gradients(g: torch.Tensor, x: torch.Tensor) -> Pair:
    """(dW, db) = (g^T x (N, K), sums of g's columns (N)) of g (M, N) and x (M, K), in their dtype.

    dW is torch's product, under its settings, or cuBLASLt's; db of 16-bit elements sums in float32, rounded once: in whatever
    order, sums are off by at most M 2^-24 / (1 - M 2^-24) of the sum of absolute values before that. On a GPU equal inputs have
    equal bits where both are contiguous at multiples of 256 bytes and cuBLASLt does not begin to fail in between: else the
    library's order of sums may give way to the kernels'. NaN, infinities and no rows as in `column_sums`. Differentiable. A
    CUDA graph may capture it.

    TypeError where dtypes differ or are no floating-point ones, ValueError where these are no matrices of as many rows.
    """
    _check(g, x)
    if not g.is_cuda or not (is_traced(g) or covers(g)):
        return g.t().mm(x), column_sums(g)
    if not _is_plain(g, x):
        result: Pair = run(LINEAR_GRADIENTS, None, (), (g, x))
        return result
    # No call is remembered, so that dispatch would look at both anew in each: half of what such a call takes the host.
    return _kernel(None, (), (g, x), None) or apart(g, x)


def _is_plain(g: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether dispatch would come to the kernels: dense matrices of one GPU that has them, and nothing that listens."""
    return (
        runs_eagerly(g, x)
        and g.layout is x.layout is torch.strided
        and g.device == x.device
        and has_kernels(g)
    )


def _check(g: torch.Tensor, x: torch.Tensor) -> None:
    if g.dtype != x.dtype or not g.is_floating_point():
        raise TypeError(
            f"weight_and_bias_gradients takes two matrices of one floating-point dtype, got {g.dtype} and {x.dtype}; cast one"
        )
    if g.dim() != 2 or x.dim() != 2 or g.shape[0] != x.shape[0]:
        raise ValueError(
            f"weight_and_bias_gradients takes matrices of as many rows, got {tuple(g.shape)} and {tuple(x.shape)}; reshape them"
        )


def apart(g: torch.Tensor, x: torch.Tensor) -> Pair:
    """One after the other."""
    return g.t().mm(x), execute(COLUMN_SUMS, None, (g.dtype,), (g,))


def beside(g: torch.Tensor, x: torch.Tensor) -> Pair:
    """The product on a stream of its own, which the current one waits for: all memory is the current one's."""
    return _beside(g, x, _nothing)[0]


def _beside(g: torch.Tensor, x: torch.Tensor, work: Callable[[], T]) -> tuple[Pair, T]:
    """Both gradients, and what `work` gives, whose kernels follow the sums."""
    dw, product = g.new_empty((g.shape[1], x.shape[1])), product_stream(g.get_device())
    current = torch.cuda.current_stream(g.device)
    product.wait_stream(current)
    try:
        with torch.cuda.stream(product):
            torch.mm(g.t(), x, out=dw)
        return (dw, execute(COLUMN_SUMS, None, (g.dtype,), (g,))), work()
    finally:
        # Whatever fails: memory of all three goes back to the current stream, which must not be ahead of the product.
        current.wait_stream(product)


def _nothing() -> None:
    return None


def beside_work(g: torch.Tensor, x: torch.Tensor, work: Callable[[], T]) -> tuple[Pair | None, T]:
    """Both gradients where `work` is worth running beside their product, else None; and what `work` gives.

    work launches on the current stream, which waits for the product after it; it must not need the gradients.
    """
    taken = way(g, x) if covers(g) else APART
    # Of fewer rows the product is over before four multiprocessors have finished both sums and work.
    if taken == BESIDE and len(g) > MOST_ROWS:
        return _beside(g, x, work)
    if taken != EPILOGUE:
        return None, work()
    from fast.kernels import cublaslt

    product = product_stream(g.get_device())
    current = torch.cuda.current_stream(g.device)
    product.wait_stream(current)
    result = cublaslt.weight_and_bias_gradients(g, x, product)
    try:
        return result, work()
    finally:
        current.wait_stream(product)


def way(g: torch.Tensor, x: torch.Tensor) -> str:
    """`gradients` on the GPUs that it was measured on."""
    if _capability(g.get_device()) != HOPPER:
        return APART
    return gradients(*g.shape, x.shape[1], g.dtype)


@lru_cache(maxsize=64)
def _capability(device: int) -> tuple[int, int]:
    """Of a CUDA device; torch takes as long to say so as to launch a kernel."""
    return torch.cuda.get_device_capability(device)


def product_stream(device: int) -> torch.cuda.Stream:
    """The stream of a device's products; another one while a graph is captured: cuBLAS keeps a workspace for each stream, and
    that of calls outside of graphs is none of a graph's memory."""
    return _stream(device, torch.cuda.is_current_stream_capturing())


@lru_cache(maxsize=64)
def _stream(device: int, captured: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=PRIORITY)


def _kernel(record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any) -> Pair | None:
    g, x = operands
    if not covers(g):
        return None
    taken = way(g, x)
    if taken == BESIDE:
        return beside(g, x)
    if taken == APART:
        return None
    from fast.kernels import cublaslt

    return cublaslt.weight_and_bias_gradients(g, x)


def weight_and_bias_gradients_op(g: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """See `weight_and_bias_gradients`."""
    return list(execute(LINEAR_GRADIENTS, None, (), (g, x)))


def _fake(g: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    return [g.new_empty((g.shape[1], x.shape[1])), g.new_empty((g.shape[1],))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grads: Any) -> Pair:
    """Of g and x, by the gradients of dW (N, K) and db (N)."""
    (g, x), (dw, db) = ctx.saved_tensors, grads
    return x.mm(dw.t()) + db, g.mm(dw)


LINEAR_GRADIENTS = Function(
    "weight_and_bias_gradients", ("g", "x"), lambda r, v, o: apart(*o),
    lambda r, v, o: tuple(LINEAR_GRADIENTS_OP(*o)), _kernel, differentiable=True,
)  # fmt: skip
LINEAR_GRADIENTS_OP = register(
    "weight_and_bias_gradients", weight_and_bias_gradients_op, _fake, _backward, _save
)

__all__ = [
    "LINEAR_GRADIENTS",
    "apart",
    "beside",
    "beside_work",
    "weight_and_bias_gradients",
]
