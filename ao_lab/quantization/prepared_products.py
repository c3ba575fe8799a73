"""F.linear of a weight on a GPU in eager inference, prepared: what is left of the host's time of a layer.

The first product of a shape goes the ordinary way (`matmul_ops.eager_linear`), of many rows the second one too. If it was
launches alone, or these and torch's product of codes, they are kept with the weight as a program (`ao_lab.gemm.select`) among
what `_settled` keeps for the weight's parts and goes with them. Importing this module switches it on, as
`ao_lab.quantization` and `ao_lab.checkpoint` do; training, which has no such products, does not.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch

from ao_lab.gemm.choices import VERSION, pinned
from ao_lab.gemm.select import Prepared, is_tuned, prepared_product
from ao_lab.tensor.matmul_ops import eager_linear
from ao_lab.tensor.op_registry import eager_function
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from fast.dispatch import PLAIN, is_transformed
from fast.launch.program import ALIGNMENT

#: The most rows that are prepared when they come first; more, which may be a prompt of a length that never comes again, when
#: they come twice.
FIRST_ROWS = 128
#: The most shapes of inputs that a weight keeps, of either.
MOST_SHAPES = 64
#: Where programs are in `_settled`, beside dtypes.
PROGRAMS = "programs"

_any_autocast = torch._C._is_any_autocast_enabled
_autocast_on = torch.is_autocast_enabled


class PreparedProducts:
    """A weight's programs by shapes and dtypes of inputs and bias; None where there is none."""

    __slots__ = ("programs", "seen", "tuned", "version")

    def __init__(self, tuned: bool) -> None:
        """tuned: whether something was, for the device: then what is pinned goes another way."""
        self.version, self.tuned = VERSION[0], tuned
        self.programs: dict[Any, Prepared | None] = {}
        #: Shapes of more than FIRST_ROWS rows that came once.
        self.seen: set[Any] = set()

    def __deepcopy__(self, memo: object) -> PreparedProducts:
        """Of another weight: empty."""
        return PreparedProducts(self.tuned)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The product, or None where it was not prepared."""
        program: Any = self.programs.get((x.shape, x.dtype) if bias is None else _key(x, bias))
        if program is None or self.version != VERSION[0] or (self.tuned and pinned()):
            return None
        y: torch.Tensor | None = program.launch(program, x, bias)
        return y

    def add(self, x: torch.Tensor, w: QuantizedTensor, bias: torch.Tensor | None) -> None:
        """Prepare what was computed just now: inputs (..., K) times a weight (N, K).

        Not while a CUDA graph is captured: what is launched to prepare a product would stay in the graph. Nor of inputs at an
        odd address, whose kernels are others than those of programs.
        """
        key, rows = _key(x, bias), prod(x.shape[:-1])
        if key in self.programs or not rows or x.data_ptr() % ALIGNMENT:
            return
        if rows > FIRST_ROWS and self._is_new(key):
            return
        if (self.tuned and pinned()) or is_captured():
            return
        self.seen.discard(key)
        if len(self.programs) >= MOST_SHAPES:
            self.programs.clear()
        key = _one(key)
        transposed = w.transposed()
        shape = (*x.shape[:-1], transposed.shape[1])
        self.programs[key] = prepared_product(x.reshape(rows, x.shape[-1]), transposed, bias, shape)

    def _is_new(self, key: Any) -> bool:
        """Whether a key comes for the first time, of the last MOST_SHAPES."""
        if key in self.seen:
            return False
        if len(self.seen) >= MOST_SHAPES:
            self.seen.clear()
        self.seen.add(key)
        return True


@lru_cache(maxsize=1024)
def _one(key: Any) -> Any:
    """The same key for all weights, so that the processor has at hand what it compares with."""
    return key


def _key(x: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return (x.shape, x.dtype) if bias is None else (x.shape, x.dtype, bias.shape, bias.dtype)


@eager_function(torch.nn.functional.linear)
def prepared_linear(
    input: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """F.linear by what the weight keeps prepared, else by `eager_linear`; None where the dispatcher has something to say.

    Meta tensors and those of no axis have no program; the others that `watched` names are looked at here.
    """
    settled = weight.__dict__.get("_settled") if isinstance(weight, QuantizedTensor) else None
    known: PreparedProducts | None = None if settled is None else settled.get(PROGRAMS)
    if known is not None and _is_plain(input, bias):
        product = known(input, bias)
        if product is not None:
            return product
    result: torch.Tensor | None = eager_linear(input, weight, bias)
    if result is not None and on_gpu(weight):
        with torch._C.DisableTorchFunctionSubclass():
            settled = weight.__dict__["_settled"]
            if known is None or known.version != VERSION[0]:
                known = settled[PROGRAMS] = PreparedProducts(is_tuned(weight.device))
            known.add(input, weight, bias)
    return result


def _is_plain(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether nobody would change the operands, or see them."""
    plain = type(x) in PLAIN and (bias is None or type(bias) in PLAIN) and not is_transformed()
    plain = plain and torch._C._get_tracing_state() is None
    return plain and not (_any_autocast() and _autocast_on(x.device.type)) and not x.is_nested


def is_captured() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def on_gpu(weight: QuantizedTensor) -> bool:
    """Whether a weight's parts are a GPU's."""
    return weight.codes.is_cuda
