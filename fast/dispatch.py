"""`run`: what every public function does with its arguments, in one order.

1. Under a tracer, a dispatch mode or a transform, for tensors without memory, and where a gradient is wanted of a function that
   has one: the function's `torch.library` operator, which has a fake, a rule for vmap and, for products and layers, a gradient.
2. A call like one before it: the call that the cache has for it.
3. Else checks (dense tensors, one device), then a kernel on NVIDIA GPUs of `OLDEST` or later, then the reference.

Functions whose results are codes, and those of codes, have no gradient: their inputs are detached.

**The one cache of calls** has what a call like one before it needs, found by one key, with all checks behind it. A key says
everything that the checks and the launches of a call depend on: function, record, the plain arguments with their types, and
of every operand its presence, dtype, shape and device (and strides, where kernels read by them). What is left to see is where
the tensors lie, which `launch.launcher.Call` does. Operands that are no plain tensors have a key of their own and find
nothing. The oldest entry goes first, so that a program which sees ever new shapes pays for each of them, and for no other.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx.traceback import get_current_meta, has_preserved_node_meta

from reference import Quantized, Scales
from reference.arrays.namespace import tensor_kind

# Which tensors the kernels take: CUDA tensors on Hopper or later, with triton; which calls have to be operators.

# Conversion instructions and the block sizes here are those of sm_90.
OLDEST = (9, 0)

# Fake tensors and other subclasses have no memory of their own that a kernel could be given.
PLAIN = (torch.Tensor, torch.nn.Parameter)

_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def has_kernels(x: torch.Tensor) -> bool:
    """Whether kernels run on this tensor. Where they cannot, a warning says once what runs instead."""
    return x.is_cuda and type(x) in PLAIN and not x.is_neg() and _reason(x.get_device()) is None


def is_traced(x: torch.Tensor) -> bool:
    """Whether a call is being recorded, or has shapes alone (meta): then it has to appear as an operator (see `fast.ops`)."""
    return _is_compiling() or _has_no_memory(x)


def _has_no_memory(x: torch.Tensor) -> bool:
    """Whether a tensor has shapes alone, or is of a class whose memory kernels cannot be given."""
    return type(x) not in PLAIN or x.is_meta


def is_transformed() -> bool:
    """Whether a mode listens to the dispatcher, or a transform (vmap, `torch.func.grad`, tangents) may have wrapped tensors.

    The wrappers of functorch have the class of plain tensors; only its stack tells them.
    """
    return _modes() > 0 or _transforms() is not None or forward_ad._current_level >= 0


def is_intercepted() -> bool:
    """Whether a tracer, a mode or a transform has to see each call as an operator, whatever its tensors."""
    return _is_compiling() or is_transformed()


def is_operator(*tensors: torch.Tensor) -> bool:
    """Whether a call on these has to appear as an operator, gradients aside: as above, or because they have no memory."""
    return is_intercepted() or any(map(_has_no_memory, tensors))


def runs_eagerly(*tensors: torch.Tensor) -> bool:
    """Whether nothing has to see a call on these as an operator: no tracer, mode, transform or gradient, tensors with memory.

    Operators of `torch.library.custom_op` take the host longer than a launch; such a call goes past them.
    """
    return not is_operator(*tensors) and not wants_gradient(tensors)


def is_below_autograd() -> bool:
    """Whether the dispatcher has come past autograd, as where a tensor subclass computes: what called differentiates, and a
    tangent of an operand, which is still there, must not be taken a second time."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def functional_transform() -> str | None:
    """The transform of torch.func (or forward-mode differentiation) that a call runs under, by name; None where there is none.

    Under one, an `autograd.Function` needs `setup_context` and rules of its own for vmap and jvp.
    """
    level = _transforms()
    if level is not None:
        return f"torch.func.{level.key().name.lower()}"
    return "torch.autograd.forward_ad" if forward_ad._current_level >= 0 else None


@lru_cache(maxsize=64)
def _reason(index: int) -> str | None:
    """Why there are no kernels on a CUDA device, or None; warns when there is a reason."""
    reason = None
    if torch.version.hip is not None:
        reason = "this build of torch is for ROCm, the kernels are for NVIDIA GPUs"
    elif importlib.util.find_spec("triton") is None:
        reason = "triton is not installed (pip install triton)"
    elif torch.cuda.get_device_capability(index) < OLDEST:
        name = torch.cuda.get_device_name(index)
        reason = f"{name} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    if reason is not None:
        warnings.warn(
            f"ao_lab's kernels do not run on cuda:{index}: {reason}. The same functions run as torch operations there, "
            f"with the same bits, many times slower; CPU tensors run the reference.",
            RuntimeWarning,
            stacklevel=4,
        )
    return reason


#: For each key the call, and the record whose id the key has: as long as it is stored here no other record gets that id.
CALLS: dict[Any, tuple[Callable[..., Any], Any]] = {}


_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled

#: Record (scheme, format or None), plain values and operands of a call to its result; a kernel takes the key too, and may
#: give None where it does not cover the operands.
Reference = Callable[[Any, tuple[Any, ...], Sequence[Any]], Any]
Kernel = Callable[[Any, tuple[Any, ...], Sequence[Any], Any], Any]


@dataclass(frozen=True, eq=False)
class Function:
    """A public function below its signature. operands: what to call its tensors in messages.

    differentiable: its operator has a gradient, or an error in place of one; host: the kernel of CPU tensors.
    """

    name: str
    operands: tuple[str, ...]
    reference: Reference
    operator: Reference
    kernel: Kernel | None = None
    differentiable: bool = False
    host: Kernel | None = None


def run(function: Function, record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> Any:
    """The function's result. The first operand has to be a tensor; what is wrong with others the reference says."""
    if is_intercepted() or (function.differentiable and wants_gradient(operands)):
        _check(function, operands)
        return _operate(function, record, values, operands)
    try:
        key = key_of(function.name, record, values, operands)
    except RuntimeError:  # nested tensors have no shape
        _check(function, operands)
        raise
    call = find(key)
    if call is not None:
        result = call(*operands)
        if result is not None:
            return result
    _check(function, operands)
    if any(isinstance(t, torch.Tensor) and _has_no_memory(t) for t in operands):
        return _operate(function, record, values, operands)
    return _compute(function, record, values, operands, key)


def _operate(function: Function, record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> Any:
    """By the operator, without history where there is no gradient."""
    if not function.differentiable:
        operands = [o.detach() if isinstance(o, torch.Tensor) and o.requires_grad else o for o in operands]
    if torch.compiler.is_dynamo_compiling() or not has_preserved_node_meta():
        return function.operator(record, values, operands)
    with own_source(function.name):
        return function.operator(record, values, operands)


@contextmanager
def own_source(name: str) -> Iterator[None]:
    """Nodes of a graph that is traced inside say that they come from a function of ours, not from the layer around it.

    Partitioners of backends (ExecuTorch's for XNNPACK) look for nodes that come from nn.Linear, and take each for a movement of
    its weight: they would give codes to a kernel as float32.
    """
    meta = get_current_meta()
    before = meta.get("source_fn_stack")
    meta["source_fn_stack"] = [*(before or ()), (name, f"ao_lab.{name}")]
    try:
        yield
    finally:
        if before is None:
            meta.pop("source_fn_stack", None)
        else:
            meta["source_fn_stack"] = before


def execute(function: Function, record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> Any:
    """The result of dense tensors with memory, without autograd: what operators are implemented by."""
    key = key_of(function.name, record, values, operands)
    call = find(key)
    result = None if call is None else call(*operands)
    if result is not None:
        return result
    _check(function, operands)
    return _compute(function, record, values, operands, key)


def _compute(
    function: Function, record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any
) -> Any:
    """By a kernel, or by the reference."""
    operands = [_plain(operand) for operand in operands]
    if function.kernel is not None and has_kernels(operands[0]):
        result = function.kernel(record, values, operands, key)
        if result is not None:
            return result
    if function.host is not None and operands[0].device.type == "cpu":
        result = function.host(record, values, operands, key)
        if result is not None:
            return result
    return function.reference(record, values, operands)


def wants_gradient(operands: Sequence[Any]) -> bool:
    """Whether autograd records, and one of the operands requires a gradient."""
    return _grad_enabled() and any(
        operand is not None and getattr(operand, "requires_grad", False) for operand in operands
    )


def _plain(operand: Any) -> Any:
    """A tensor without history and without a negative bit; anything else as it is."""
    if not isinstance(operand, torch.Tensor):
        return operand
    operand = operand if type(operand) in PLAIN else operand.as_subclass(torch.Tensor)
    operand = operand.detach() if operand.requires_grad else operand
    return operand.resolve_conj().resolve_neg()


def require_tensor(value: Any, what: str) -> torch.Tensor:
    """`value` if it is a torch tensor; TypeError that names the way out otherwise."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"fast.{what} takes torch tensors, got {type(value).__name__}; those of `reference` take NumPy and JAX arrays"
        )
    return value


#: Dtypes of inputs and biases that products take.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def has_float_inputs(*tensors: Any) -> bool:
    """Whether inputs and bias, where there is one, have dtypes that kernels and torch multiply as the reference does."""
    return all(t is None or t.dtype in FLOATS for t in tensors)


def _kind(x: torch.Tensor) -> str:
    """`tensor_kind`: "" for a dense tensor, as nearly all are."""
    if type(x) in PLAIN and (_is_compiling() or (x.layout is torch.strided and not x.is_nested)):
        return ""
    return tensor_kind(torch, x)


def _check(function: Function, operands: Sequence[Any]) -> None:
    """TypeError or ValueError for tensors that are not dense, or not on one device.

    A tracer knows no layout of the gradients in a backward pass; operators refuse other layouts when they run.
    """
    first = require_tensor(operands[0], function.name)
    for name, operand in zip(function.operands, operands, strict=False):
        if not isinstance(operand, torch.Tensor):
            continue
        if kind := _kind(operand):
            raise TypeError(
                f"fast.{function.name} takes dense tensors, got {name} as a {kind} tensor; make it dense first"
            )
        if operand.device != first.device:
            raise ValueError(
                f"fast.{function.name} takes tensors on one device, got {function.operands[0]} on {first.device} and {name} on "
                f"{operand.device}"
            )


# The one cache of calls.


MOST = 4096
PARTS = ("scale", "outer", "zero")
TENSORS = ("codes", *PARTS)
# Arguments of these types are what they are equal to, and stay so.
VALUES = frozenset((str, int, float, bool, tuple, torch.dtype, type(None)))


def key_of(name: str, record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> Any:
    """The key of a call. record: a scheme or format, by name or itself; hashing one would read all its fields."""
    named = record if record.__class__ is str else id(record)
    return (name, named, values, *map(type, values), *map(_operand, operands))


def _operand(tensor: Any) -> Any:
    """A tensor as keys have it; an object that no other key has where it is no plain tensor."""
    if tensor.__class__ in PLAIN:
        return tensor.dtype, tensor.shape, tensor.device
    return None if tensor is None else object()


def find(key: Any) -> Callable[..., Any] | None:
    """The call with this key, or None."""
    try:
        result = CALLS.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None
    return None if result is None else result[0]


def remember(key: Any, call: Callable[..., Any], record: Any) -> None:
    """Answer calls with this key by this one; not where an argument is no plain value."""
    if key is None or not all(type(value) in VALUES for value in key[2]):
        return
    while len(CALLS) >= MOST:
        CALLS.pop(_oldest(), None)
    CALLS[key] = (call, record)


def _oldest() -> Any:
    """The key that was put in first; None where another thread is changing the cache."""
    try:
        return next(iter(CALLS), None)
    except RuntimeError:
        return None


def settings(q: Quantized) -> tuple[Any, ...]:
    """All else that a `Quantized` says, except for its scheme."""
    return q.shape, q.axis, q.packed, q.tiled


def scale_parts(scales: Any) -> tuple[Any, Any, Any]:
    """Scale, outer scale and zero point of scales as callers give them."""
    return (scales.scale, scales.outer, scales.zero) if isinstance(scales, Scales) else (scales, None, None)


def maker(template: Any, places: Mapping[str, int]) -> Callable[[Sequence[Any]], Any]:
    """What makes a result of tensors: the template with the tensor at its place for every name in it.

    template: a name, None, a tuple of templates, or `Scales` or a `Quantized` of names and None.
    """
    if template is None:
        return lambda tensors: None
    if isinstance(template, str):
        return itemgetter(places[template])
    if isinstance(template, Quantized):
        return _quantized_maker(template, places)
    if isinstance(template, Scales):
        parts = maker(scale_parts(template), places)
        return lambda tensors: Scales(*parts(tensors))
    makers = [maker(part, places) for part in template]
    if len(makers) == 2:
        # Most tuples, without the frame of a comprehension.
        first, second = makers
        return lambda tensors: (first(tensors), second(tensors))
    return lambda tensors: tuple([make(tensors) for make in makers])


def _quantized_maker(template: Quantized, places: Mapping[str, int]) -> Callable[[Sequence[Any]], Quantized]:
    """`maker` of a `Quantized`, past the checks of its constructor."""
    values = {**vars(template), **dict.fromkeys(TENSORS)}
    parts = [(part, places[name]) for part in TENSORS if (name := getattr(template, part)) is not None]

    def make(tensors: Sequence[Any]) -> Quantized:
        result = Quantized.from_fields(values)
        stored = result.__dict__
        for part, at in parts:
            stored[part] = tensors[at]
        return result

    return make
