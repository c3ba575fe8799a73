"""Operations of `QuantizedTensor` that layers are made of: products, selected in `ao_lab.gemm.select`; and F.linear of eager
inference, outside of the dispatcher.

On a GPU and on a CPU that is prepared: what is left of the host's time of a layer. The first product of a
shape goes the ordinary way (`eager_linear`), of many rows the second one too. If it was launches alone, or these and torch's
product of codes, it is kept with the weight as a program (`fast.prepared`) among what `_settled` keeps for the weight's parts
and goes with them.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.autograd import forward_ad

from ao_lab.gemm.choices import VERSION, pinned
from ao_lab.gemm.dense import grouped_product
from ao_lab.gemm.select import Prepared, is_tuned, prepared_product, product, select_product
from ao_lab.tensor.op_registry import eager_function, operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from fast.dispatch import PLAIN, is_transformed
from fast.prepared import ALIGNMENT

aten = torch.ops.aten


@operation(aten._grouped_mm.default, "transformers::grouped_mm_fallback")
def _grouped_mm(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """torch's, and what transformers calls in its place where that is compiled in another dtype than bfloat16."""
    x, weight = args[0], args[1]
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"{func} with {x!r} as its first operand; dequantize() it first")
    return grouped_product(x, weight, func, *args[2:], **kwargs)


@operation(aten.mm.default, aten.bmm.default)
def _mm(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """A weight on the left whose inputs are quantized is turned to the right: (W x) is (x' W')'."""
    left, right = args
    if isinstance(right, QuantizedTensor) and _is_repeated(right):
        rows = _dense(left).reshape(left.shape[0] * left.shape[1], left.shape[2])
        one: Any = right.select(0, 0)
        return product(rows, one).reshape((*left.shape[:2], right.shape[2]))
    if isinstance(right, QuantizedTensor):
        return product(_dense(left), right)
    if left.recipe.activation is not None and left.block_axis == -1:
        return product(right.transpose(-2, -1).contiguous(), left.transposed()).transpose(-2, -1)
    result: torch.Tensor = func(left.dequantize(), right)
    return result


def _is_repeated(t: QuantizedTensor) -> bool:
    """Whether a batch is one matrix over and over, as torch makes of a weight for inputs that are no matrix in memory."""
    parts = [part for part in t.parts.values() if part is not None and part.dim() == 3]
    return len(t.shape) == 3 and bool(parts) and all(part.stride(0) == 0 for part in parts)


@operation(aten.mv.default)
def _mv(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """A layer of a vector."""
    left, right = args
    if not isinstance(left, QuantizedTensor):
        raise TypeError(f"mv of a dense matrix and {right!r}; dequantize() it first")
    if left.recipe.activation is not None and left.block_axis == -1:
        return product(right[None], left.transposed())[0]
    result: torch.Tensor = func(left.dequantize(), right)
    return result


@operation(aten.addmm.default, aten.baddbmm.default)
def _addmm(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    bias, left, right = args
    plain = kwargs.get("alpha", 1) == kwargs.get("beta", 1) == 1
    vector = bias.dim() <= 1
    if isinstance(right, QuantizedTensor) and plain and vector:
        return product(_dense(left), right, bias)
    if any(isinstance(x, QuantizedTensor) and x.recipe.activation is not None for x in (left, right)):
        raise ValueError(
            f"{func} of quantized inputs: a weight on the right, alpha and beta 1, a bias vector; use linear, or dequantize()"
        )
    return func(_dense(bias), _dense(left), _dense(right), **kwargs)  # type: ignore[no-any-return]


@operation(aten.linear.default)
def _linear(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x, weight = _dense(args[0]), args[1]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    y = product(_rows(x), weight.transposed(), bias)
    return y.reshape((*x.shape[:-1], weight.shape[0]))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A layer's input as a matrix; -1 would not say how many rows of length 0 there are."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def eager_linear(
    input: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """F.linear outside of the dispatcher; None where that has something to say.

    It has for other subclasses, modes, transforms, tangents, autocast, and tensors of no memory.
    """
    plain = type(input) in PLAIN and (bias is None or type(bias) in PLAIN)
    if not plain or type(weight) is not QuantizedTensor or watched(input):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        settled = weight.__dict__.get("_settled")
        known = None if settled is None else settled.get(input.dtype)
        if known is None or known[2] != VERSION[0]:
            known = _settled(weight, input.dtype)
        if known is None:
            return None
        run, transposed, _ = known
        result: torch.Tensor = run(input if input.dim() == 2 else _rows(input), transposed, bias)
        return result if input.dim() == 2 else result.reshape((*input.shape[:-1], transposed.shape[1]))


def watched(x: torch.Tensor) -> bool:
    """Whether somebody listens to the dispatcher, or would change the inputs there, or x is none that has rows of elements.

    Forward-mode derivatives are taken outside of grad mode, too. `torch.jit.trace` listens: it records one linear layer there,
    for any number of rows.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or x.is_meta
        or x.dim() == 0
        or (torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type))
    )


def _settled(weight: QuantizedTensor, dtype: torch.dtype) -> Any:
    """The product and the transposed weight of inputs of a dtype, kept with the weight: recipe, shape and device stay its own,
    and what was tuned does while its version stands.

    None for weights that the dispatcher has to look at (of other shapes, or parts of no memory).
    """
    if len(weight.shape) != 2 or weight.meta.flat is not None or type(weight.codes) is not torch.Tensor:
        return None
    transposed = weight.transposed()
    known = select_product(transposed, dtype), transposed, VERSION[0]
    weight.__dict__.setdefault("_settled", {})[dtype] = known
    return known


def _dense(x: Any) -> Any:
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


#: The most rows that are prepared when they come first; more, which may be a prompt of a length that never comes again, when
#: they come twice.
FIRST_ROWS = 128
#: The most shapes of inputs that a weight keeps, of either.
MOST_SHAPES = 64
#: How often a CPU's program is asked for that is not there: its loops are compiled for what is called again and again.
MOST_TRIES = 64
#: Where programs are in `_settled`, beside dtypes.
PROGRAMS = "programs"

_any_autocast = torch._C._is_any_autocast_enabled
_autocast_on = torch.is_autocast_enabled


class PreparedProducts:
    """A weight's programs by shapes and dtypes of inputs and bias; None where there is none."""

    __slots__ = ("programs", "seen", "tries", "tuned", "version")

    def __init__(self, tuned: bool) -> None:
        """tuned: whether something was, for the device: then what is pinned goes another way."""
        self.version, self.tuned, self.tries = VERSION[0], tuned, 0
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
        if (self.tuned and pinned()) or (on_gpu(w) and is_captured()):
            return
        self.seen.discard(key)
        if len(self.programs) >= MOST_SHAPES:
            self.programs.clear()
        key = _one(key)
        transposed = w.transposed()
        shape = (*x.shape[:-1], transposed.shape[1])
        program = prepared_product(x.reshape(rows, x.shape[-1]), transposed, bias, shape)
        if program is None and not w.is_cuda and self.tries < MOST_TRIES:
            self.tries += 1
            return
        self.programs[key] = program

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
        y = known(input, bias)
        if y is not None:
            return y
    result: torch.Tensor | None = eager_linear(input, weight, bias)
    if result is not None and (on_gpu(weight) or on_cpu(weight)):
        with torch._C.DisableTorchFunctionSubclass():
            settled = weight.__dict__["_settled"]
            if known is None or known.version != VERSION[0]:
                known = settled[PROGRAMS] = PreparedProducts(is_tuned(weight.device))
            known.add(input, weight, bias)
    return result


def on_cpu(weight: QuantizedTensor) -> bool:
    """Whether a weight's parts are a CPU's, where a layer's product takes longer to look up than to compute."""
    return weight.codes.device.type == "cpu"


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
