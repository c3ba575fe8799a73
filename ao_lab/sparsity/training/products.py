"""The products of a sparse layer that its masked weight is an operand of: output and inputs' gradient, by name.

"dense" multiplies the masked weight as it is. "cusparselt" and "sparse_wgmma" mask and compress it in each product, so that
nothing is kept from forward to backward; the inputs' gradient takes the transposed weight, which is 2:4 where masks are
transposable, and is a dense product else. The first multiplies by cuSPARSELt. The second multiplies by `fast.linear_sparse`,
the sparse tensor cores of Hopper, after one kernel that reads weight and mask once and writes what that one reads
(`fast.sparsity.compress`), of the transpose too; the host waits for neither, and a CUDA graph may capture both.

cuSPARSELt compresses the first operand of A B, so y^T = W x^T and dx^T = W^T g^T, whose transposes it writes itself. Its second
operand is read by its strides, as contiguous or as transposed and packed: x and g are made contiguous first. Rows of x are
padded to a multiple of 8. The result has the dtype of the inputs, sums are in float32.

Gradients of weight and bias together are those of `fast.layers.linear_gradients`, of a bias alone `fast.layers.column_sums`;
with "dense" torch's own product and sum, as all else there is torch's. With "sparse_wgmma" and transposable masks all three
gradients are one call, and one operator of a traced program: what compresses the weight may run beside the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fast.dispatch import execute, is_operator
from fast.layers.column_sums import column_sums
from fast.layers.linear_gradients import beside_work, weight_and_bias_gradients
from fast.sparsity.compress import DTYPES, compress_masked, masked
from fast.sparsity.linear_sparse import HOPPER, LINEAR_SPARSE

#: What lengths of a 2:4 matrix are multiples of.
STEP = 16
#: What rows of cuSPARSELt's other operand are multiples of.
ROWS = 8
#: Compute capability from which there are instructions for 2:4.
OLDEST = (8, 0)


class Product(NamedTuple):
    """output(x, w, mask, bias), input_grad(g, w, mask, transposable) for g (M, N), why a weight cannot be taken, what a bias
    gets of g, what weight and bias get of g and x (M, K), and where it is not just one after the other, all three of
    (g, x, w, mask, transposable). Masks are bool, or uint8 of bits (`fast.sparsity.compress`)."""

    output: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    input_grad: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]
    unsupported_reason: Callable[[torch.Tensor], str | None]
    bias_grad: Callable[[torch.Tensor], torch.Tensor] = column_sums
    both_grads: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = (
        weight_and_bias_gradients
    )
    all_grads: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None


def _dense_output(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return F.linear(x, masked(w, mask), bias)


def _dense_input_grad(
    g: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, transposable: bool
) -> torch.Tensor:
    return g.mm(masked(w, mask))


def _dense_bias_grad(g: torch.Tensor) -> torch.Tensor:
    return g.sum(0)


def _dense_both_grads(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return g.t().mm(x), _dense_bias_grad(g)


def _cusparselt_output(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    _check(x, "cusparselt")
    y: torch.Tensor = torch.ops.ao_lab.cusparselt_linear(x.reshape(-1, x.shape[-1]), w, mask, bias)
    # No view: what FSDP2 hangs a hook on may be written to.
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w.shape[0]))


def _cusparselt_input_grad(
    g: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, transposable: bool
) -> torch.Tensor:
    if not transposable:
        return _dense_input_grad(g, w, mask, transposable)
    made: torch.Tensor = torch.ops.ao_lab.cusparselt_linear(g, w.t(), mask.t(), None)
    return made


def _wgmma_output(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    _check(x, "sparse_wgmma")
    return _wgmma(x, w, mask, bias, transposed=False)


def _wgmma_input_grad(
    g: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, transposable: bool
) -> torch.Tensor:
    if not transposable:
        return _dense_input_grad(g, w, mask, transposable)
    return _wgmma(g, w, mask, None, transposed=True)


def _wgmma_all_grads(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, transposable: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dW, db; of transposable masks by one operator where something listens."""
    if not (transposable and g.numel() and w.numel()):
        return _wgmma_input_grad(g, w, mask, transposable), *weight_and_bias_gradients(g, x)
    if is_operator(g, w):
        dx, dw, db = torch.ops.ao_lab.sparse_wgmma_gradients(g, x, w, mask)
        return dx, dw, db
    return _all_gradients(g, x, w, mask)


def _all_gradients(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `sparse_wgmma_gradients`. Where dW's product is on a stream of its own, W is compressed for dx beside it."""
    grads, compressed = beside_work(g, x, lambda: compress_masked(w, mask, True))
    dx: torch.Tensor = execute(LINEAR_SPARSE, None, (None, True), (g, *compressed, None, None, None))
    return dx, *(weight_and_bias_gradients(g, x) if grads is None else grads)


def _wgmma(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None, *, transposed: bool
) -> torch.Tensor:
    """By the operator where something listens; dispatching one takes as long as a small kernel runs."""
    if not is_operator(x, w):
        return _multiply(x, w, mask, bias, transposed)
    # Rows, as backward keeps them: of two shapes of one tensor a compiler writes two copies.
    rows: torch.Tensor = torch.ops.ao_lab.sparse_wgmma_linear(
        x.reshape(-1, x.shape[-1]), w, mask, bias, transposed
    )
    # No view: what FSDP2 hangs a hook on may be written to.
    return rows if x.dim() == 2 else torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))


@torch.library.custom_op("ao_lab::cusparselt_linear", mutates_args=())
def cusparselt_linear(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x (M, K) times (w * mask)^T plus bias, w (N, K), by cuSPARSELt; K and N are multiples of 16."""
    rows, more = x.shape[0], -x.shape[0] % ROWS
    if rows == 0:
        return x.new_zeros((0, w.shape[0]))
    x = F.pad(x, (0, 0, 0, more)) if more else x.contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    compressed = torch._cslt_compress(masked(w, mask).contiguous())
    y = torch._cslt_sparse_mm(compressed, x.t(), bias=bias, transpose_result=True)
    return y[:rows].clone() if more else y


@cusparselt_linear.register_fake
def _cusparselt_fake(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((x.shape[0], w.shape[0]))


@torch.library.custom_op("ao_lab::sparse_wgmma_linear", mutates_args=())
def sparse_wgmma_linear(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """x (..., K) times (w * mask)^T plus bias, w (N, K), by `fast.linear_sparse`; transposed: x (..., N) times w * mask.

    The lengths of w are multiples of 16.
    """
    return _multiply(x, w, mask, bias, transposed)


@sparse_wgmma_linear.register_fake
def _wgmma_fake(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[1] if transposed else w.shape[0]))


@torch.library.custom_op("ao_lab::sparse_wgmma_gradients", mutates_args=())
def sparse_wgmma_gradients(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx = g (w * mask), dW = g^T x and db, the sums of g's columns, of g (M, N), x (M, K) and w (N, K); nothing is empty.

    mask is transposable, and the lengths of w are multiples of 16.
    """
    return _all_gradients(g, x, w, mask)


@sparse_wgmma_gradients.register_fake
def _gradients_fake(
    g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return g.new_empty((g.shape[0], w.shape[1])), g.new_empty(w.shape), g.new_empty((g.shape[1],))


def _multiply(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """See `sparse_wgmma_linear`."""
    if not x.numel():
        return x.new_zeros((*x.shape[:-1], w.shape[1] if transposed else w.shape[0]))
    values, metadata = compress_masked(w, mask, transposed)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    y: torch.Tensor = execute(LINEAR_SPARSE, None, (None, True), (x, values, metadata, bias, None, None))
    return y


def _check(x: torch.Tensor, name: str) -> None:
    """What can differ from call to call."""
    if x.dtype not in DTYPES or not x.is_cuda:
        raise TypeError(
            f"products={name!r} takes float16 and bfloat16 inputs on CUDA, got {x.dtype} on {x.device}; use "
            f"torch.autocast, or products='dense'"
        )


def _sparse_reason(w: torch.Tensor) -> str | None:
    """Why cuSPARSELt cannot multiply with a weight."""
    if (reason := _device_reason(w, "cusparselt")) is not None:
        return reason
    if torch.version.hip is not None or not torch.backends.cusparselt.is_available():
        return "this torch has no cuSPARSELt; use products='dense'"
    if torch.cuda.get_device_capability(w.device) < OLDEST:
        return f"{torch.cuda.get_device_name(w.device)} has no sparse matrix units; use products='dense'"
    return _shape_reason(w, "cuSPARSELt")


def _wgmma_reason(w: torch.Tensor) -> str | None:
    """Why the sparse tensor cores of Hopper cannot multiply with a weight."""
    if (reason := _device_reason(w, "sparse_wgmma")) is not None:
        return reason
    if torch.version.hip is not None or torch.cuda.get_device_capability(w.device) != HOPPER:
        return f"products='sparse_wgmma' is for GPUs of compute capability {HOPPER[0]}.{HOPPER[1]}; use products='dense'"
    return _shape_reason(w, "products='sparse_wgmma'")


def _device_reason(w: torch.Tensor, name: str) -> str | None:
    if w.is_cuda:
        return None
    return f"products={name!r} needs weights on CUDA, got {w.device}; move the model first, or use products='dense'"


def _shape_reason(w: torch.Tensor, who: str) -> str | None:
    if w.shape[0] % STEP or w.shape[1] % STEP:
        return f"{who} needs lengths in multiples of {STEP}, got shape {tuple(w.shape)}; use products='dense'"
    return None


def _no_reason(w: torch.Tensor) -> str | None:
    return None


PRODUCTS: dict[str, Product] = {
    "dense": Product(_dense_output, _dense_input_grad, _no_reason, _dense_bias_grad, _dense_both_grads),
    "cusparselt": Product(_cusparselt_output, _cusparselt_input_grad, _sparse_reason),
    "sparse_wgmma": Product(_wgmma_output, _wgmma_input_grad, _wgmma_reason, all_grads=_wgmma_all_grads),
}
