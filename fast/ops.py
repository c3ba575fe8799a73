"""What the `torch.library` operators of the functions here share: for whatever traces, transforms or differentiates a call.

Eager calls do not go through them: dispatching a custom operator takes as long as a small kernel runs. Under a tracer the
public functions of `fast` call these operators, whose fake implementations know shapes and dtypes. A record travels by name, a
changed one (`dataclasses.replace`) with all its fields, so that a saved program runs in another process. Operators are
implemented by `dispatch.execute`, below the public functions. A saved program may name one whose module nobody has imported:
`torch.ops.ao_lab` imports that module then. What C++ loads (a package compiled ahead of time) does not ask there: it needs
`register_operators()` first.

`derived` makes records of other records, while a program is traced too. Dynamo runs a function whose result is constant
instead of tracing it. Of a record that such a function gives, Dynamo of torch 2.11 knows no origin, and reads its fields but
not its key, by which operators are called. So `derived` gives no record but the attribute that holds it: attributes are read
when they are asked for, where of a dictionary (`reference.schemes.RECORDS`) a program would see what was in it when it first
looked. `once_differentiable` says what has no second derivatives.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from functools import wraps
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from fast.dispatch import is_below_autograd, is_transformed
from reference import FORMATS, Format, Scales
from reference.formats.formats import format_of
from reference.lazy import homes_of
from reference.schemes.schemes import Scheme, record_of

Marked = TypeVar("Marked", bound=Callable[..., Any])


_Namespace = type(torch.ops.ao_lab)
#: Operators that are not called as a public function of `fast`, by the module that registers them, where that is imported when
#: it is first used. Packages above add theirs.
LATE = {
    name: f"{__package__}.{module}"
    for module, names in {
        "attention.attention": ("cached_attention",),
        "attention.quantized": ("quantized_attention",),
        "attention.stored": ("append_tokens_",),
        "layers.attention": ("rotary",),
        "layers.gather": ("gather_transposed",),
        "layers.linear_gradients": ("weight_and_bias_gradients",),
        "layers.normalize": ("rms_norm_vjp",),
        "layers.swiglu": ("swiglu_vjp",),
        "kernels.attention.pointwise": ("pointwise_attention",),
        "matmul.cpu_ops": ("cpu_linear",),
        "matmul.preshuffled.pair": ("linear_small_pair", "linear_small_swiglu"),
        "matmul.preshuffled.several": ("linear_small_several",),
        "quantize.two_levels": ("divided",),
        "quantize.rowwise_colwise": ("both_values", "values_and_codes"),
        "sparsity.compress": ("prune",),
        "sparsity.linear_sparse_int4": (
            "linear_sparse_int4_pair",
            "linear_sparse_int4_swiglu",
            "sparse_int4_dense",
        ),
    }.items()
    for name in names
}


class _Operators(_Namespace):  # type: ignore[misc, valid-type]
    """`torch.ops.ao_lab`, where asking for an operator imports the module that registers it."""

    #: The module that operators say they are of: Inductor looks for them there.
    __module__ = _Namespace.__module__

    def __getattr__(self, name: str) -> Any:
        home = LATE.get(name) or HOMES.get(name)
        if home is not None:
            importlib.import_module(home)
        return super().__getattr__(name)


HOMES = homes_of(Path(__file__).with_name("__init__.pyi"))


def register_operators() -> None:
    """Register all operators, by importing the modules that do."""
    for home in {**HOMES, **LATE}.values():
        # An operator that is a kernel alone is none where Triton is not.
        if ".kernels." not in home or find_spec("triton") is not None:
            importlib.import_module(home)


torch.ops.ao_lab.__class__ = _Operators


def constant_result(function: Marked) -> Marked:
    """`torch.compiler.assume_constant_result`: while a program is traced the function runs, and its result is a constant of the
    program. torch's decorator imports its compiler, a second that a program which compiles nothing has no use for.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def register(
    name: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[..., Any] | None = None,
    schema: str | None = None,
    linear_in: tuple[int, ...] = (),
    direct: tuple[str, ...] = ("CUDA",),
) -> Any:
    """The operator `ao_lab::name`; schema: None for that of the implementation's annotations. Without a backward, what comes of
    operands that require a gradient raises NotImplementedError where it is differentiated. linear_in: places of arguments in
    which together it is linear: its inputs, then such as may be None (a bias). Of others tangents raise NotImplementedError.
    direct: devices on which the implementation is called past torch's wrapping (`_call_directly`)."""
    schema = torch.library.infer_schema(implementation, mutates_args=()) if schema is None else schema
    if backward is None:
        implementation = _without_gradient(name, implementation)
    operator = torch.library.custom_op(f"ao_lab::{name}", implementation, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator.register_vmap(_one_by_one(operator))
    _call_directly(operator, implementation, backward is not None, direct)
    if backward is None:
        operator.register_torch_dispatch(FunctionalTensorMode, _traced_without_gradient)
        return operator
    operator.register_autograd(backward, setup_context=save)
    return _differentiable(operator, backward, save, linear_in)


def _call_directly(
    operator: Any, implementation: Callable[..., Any], differentiable: bool, devices: tuple[str, ...]
) -> None:
    """Let an operator call its implementation on some devices without what torch puts around that in Python.

    A compiled training step calls four such operators a layer, and that wrapping, which records gradients and compares the
    memory of results with that of arguments, takes the host longer than a prepared launch. Where there is no gradient none is
    recorded, on CPUs either: the functions detach what they give to such operators (`fast.dispatch`), and what a direct call
    gives refuses to be differentiated (`_without_gradient`). Memory is compared on CPUs still, where the same implementations
    are tested, but for those whose product takes as long (`fast.matmul.cpu_ops`).
    """
    name = operator._opoverload._schema.name
    for key in () if differentiable else ("AutogradCPU", "AutogradCUDA"):
        operator._lib.impl(name, torch.library.fallthrough_kernel, key)
    # Called between graphs of a compiled function, an implementation is not compiled itself.
    for device in devices:
        operator._lib.impl(name, torch._disable_dynamo(implementation), device)


def _without_gradient(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation, whose results raise where they are differentiated, instead of losing the gradient without a word."""

    @functools.wraps(implementation)
    def call(*args: Any) -> Any:
        return _refusing(name, implementation(*args), args)

    return call


def _traced_without_gradient(mode: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """The same while a compiler traces the operator for autograd, where no implementation runs: differentiating raises then.

    A rule for the tracer alone: eager calls and compiled programs go no other way than without it. A compiler differentiates
    all that a graph returns, also what nobody asks a gradient of, so that results which leave a graph have to be detached.
    """
    result = mode.__torch_dispatch__(function, types, args, kwargs)
    return _refusing(function._schema.name.rpartition("::")[2], result, args)


def _refusing(name: str, result: Any, args: tuple[Any, ...]) -> Any:
    """Results of an operator, of which floating-point ones raise where they are differentiated if an operand asks for that."""
    if not torch.is_grad_enabled() or not any(map(_requires_gradient, args)):
        return result
    refused = (
        f"torch.ops.ao_lab.{name} has no gradient: it rounds. ao_lab.fake_quantize is the same rounding with a "
        "straight-through gradient, fast.linear multiplies by quantized weights with one for x; or call it in torch.no_grad(), "
        "or detach() its results, as those that a compiled program returns have to be"
    )
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    parts = [_Refusing.apply([one], refused, *args) if one.is_floating_point() else one for one in parts]  # type: ignore[no-untyped-call]
    return parts[0] if isinstance(result, torch.Tensor) else type(result)(parts)


def _requires_gradient(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.requires_grad


class _Refusing(torch.autograd.Function):
    """The tensor of a list as it is, with an error for its gradient."""

    @staticmethod
    def forward(ctx: Any, result: list[torch.Tensor], message: str, *args: Any) -> torch.Tensor:
        ctx.message = message
        return result[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ctx.message)


def _differentiable(
    operator: Any,
    backward: Callable[..., Any],
    save: Callable[..., Any] | None,
    linear_in: tuple[int, ...],
) -> Callable[..., Any]:
    """The operator, which under a transform of functorch is an `autograd.Function`: torch's rule for operators knows none."""

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            result = operator(*args)
            return tuple(result) if isinstance(result, list) else result

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.is_list = isinstance(output, tuple) and returns_list
            if save is not None:
                save(ctx, inputs, output)
            _keep(ctx, inputs, output)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            result = call(*_with_tangents(operator, linear_in, ctx, tangents))
            return tuple(result) if isinstance(result, list) else result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grads = _or_zeros(ctx, grads)
            return backward(ctx, list(grads)) if ctx.is_list else backward(ctx, *grads)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return rule(info, in_dims, *args)

    rule, returns_list = _one_by_one(Transformed.apply), "-> Tensor[]" in str(operator._opoverload._schema)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not is_transformed() or is_below_autograd():
            return operator(*args)
        return Transformed.apply(*args)  # type: ignore[no-untyped-call]

    return call


#: Stands for a tensor among the arguments that are kept for tangents.
_TENSOR = object()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """What `_with_tangents` and `_or_zeros` read. torch would give zeros for tangents that there are not, too."""
    ctx.set_materialize_grads(False)
    ctx.save_for_forward(*(arg for arg in inputs if isinstance(arg, torch.Tensor)))
    ctx.arguments = [_TENSOR if isinstance(arg, torch.Tensor) else arg for arg in inputs]
    results = output if isinstance(output, tuple) else (output,)
    ctx.results = [(one.shape, one.dtype, one.device) for one in results]


def _or_zeros(ctx: Any, grads: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """The gradients of all results: zeros of one that nothing depends on."""
    return tuple(
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.results, strict=True)
    )


def _with_tangents(
    operator: Any, linear_in: tuple[int, ...], ctx: Any, tangents: tuple[Any, ...]
) -> list[Any]:
    """An operator's arguments, those in which it is linear replaced by their tangents, inputs without one by zeros."""
    others = [at for at, tangent in enumerate(tangents) if tangent is not None and at not in linear_in]
    if others:
        raise _no_tangents(operator._opoverload._schema, others)
    kept = iter(ctx.saved_tensors)
    arguments = [next(kept) if arg is _TENSOR else arg for arg in ctx.arguments]
    first = linear_in[0]
    zeros = torch.zeros_like(arguments[first])
    for at in linear_in:
        arguments[at] = tangents[at]
    arguments[first] = zeros if arguments[first] is None else arguments[first]
    return arguments


def _no_tangents(schema: Any, places: list[int]) -> NotImplementedError:
    names = ", ".join(schema.arguments[at].name for at in places)
    return NotImplementedError(
        f"torch.ops.ao_lab.{schema.name.rpartition('::')[2]} has no forward-mode derivative in {names}: use reverse mode "
        "(torch.func.vjp, jacrev) where it has one"
    )


def _one_by_one(operator: Any) -> Callable[..., Any]:
    """The rule for vmap: one sample after the other."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        results = [
            operator(*(_sample(arg, dim, at) for arg, dim in zip(args, in_dims, strict=True)))
            for at in range(info.batch_size)
        ]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        # A list for a list, and a tuple for a tuple.
        kind, parts = type(results[0]), [torch.stack(parts) for parts in zip(*results, strict=True)]
        return kind(parts), kind([0] * len(parts))

    return rule


def _sample(arg: Any, dim: Any, at: int) -> Any:
    if isinstance(arg, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_sample(one, axis, at) for one, axis in zip(arg, dim, strict=True)]
    return arg if dim is None else arg.select(dim, at)


def strides(*tensors: Any) -> tuple[Any, ...]:
    """Where rows lie: kernels read them there. Nothing for what has no strides, which is refused elsewhere."""
    try:
        return tuple(t.stride() for t in tensors)
    except (AttributeError, RuntimeError):
        return ()


def in_own_memory(made: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    """An operator's result: copied where it lies in the memory of an operand, which torch does not allow."""
    shared = made.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr()
    return made.clone(memory_format=torch.contiguous_format) if shared else made


def no_gradient(name: str, advice: str) -> Callable[..., Any]:
    """A backward that says that there is none."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"fast.{name} has no gradient: {advice}")

    return backward


def record_name(scheme: str | Scheme) -> str:
    """The text that stands for a scheme in an operator's arguments."""
    return scheme if isinstance(scheme, str) else scheme.key


@constant_result
def constant_record(name: str) -> Scheme:
    """The record of a name, while a program is traced: a copy, with scales of its own.

    Where a program meets an object twice, Dynamo guards that both places hold the same one; for the result of a constant
    function, and for what it holds, that guard names what does not exist ("name 'constant_record_7' is not defined").
    """
    return deepcopy(record_of(name))


@constant_result
def format_name(fmt: str | Format) -> str:
    """The text that stands for a format in an operator's arguments."""
    if isinstance(fmt, str) or FORMATS.get(fmt.name) == fmt:
        return fmt if isinstance(fmt, str) else fmt.name
    return json.dumps(asdict(fmt))


def named_format(text: str) -> Format:
    """The format of a name or of a `format_name`."""
    if not text.startswith("{"):
        return format_of(text)
    fields = json.loads(text)
    return Format(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    )


def given_of(scale: Any, outer: Any, zero: Any) -> Any:
    """Scales as `quantize` takes them, of their parts: None where there is no part."""
    if outer is None and zero is None:
        return scale
    return Scales(scale, outer, zero)


# Gradients that have no derivatives: codes stand between, and gradients of rounded values are straight-through estimates.

REFUSED = (
    "a layer that trains in low precision, with fake quantization or sparse has no second derivatives: its gradient is "
    "computed from quantized values, or treats rounding as the identity. Compute this loss (a gradient penalty, a "
    "Hessian-vector product) with ordinary layers: exclude the layer with filter_fn, or copy the model before quantize_, "
    "convert_for_training_ or sparsify_; if the first gradient is a constant, call its detach()"
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `torch.autograd.Function.backward` whose results raise a RuntimeError where they are differentiated (create_graph).

    torch's own decorator takes gradients for constants where the gradient that arrives is one, as that of a sum is: weights and
    inputs, on which they depend, would get no gradient through them, without a word. A compiled program refuses by itself.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            result = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return result
        results = result if isinstance(result, tuple) else (result,)
        refusing: Any = torch._C._functions.DelayedError(REFUSED, len(results))
        return refusing(*map(_requiring, results))

    return wrapper


def _requiring(result: Any) -> Any:
    """The same values, which require a gradient: what comes of them then has the refusing function for its origin."""
    return result.detach().requires_grad_() if isinstance(result, torch.Tensor) else result


Given = ParamSpec("Given")


class _Kept:
    """Records as attributes."""


def derived(make: Callable[Given, Scheme]) -> Callable[Given, Scheme]:
    """A function from text and numbers to a record, which is made once, and which a tracer can read as any other."""
    kept, numbers, places = _Kept(), count(), dict[object, str]()

    @constant_result
    def place(*given: str | int) -> str:
        key = *map(type, given), *given  # 1 is True
        if key not in places:
            name = f"record_{next(numbers)}"
            setattr(kept, name, make(*given))  # type: ignore[arg-type, call-arg]
            places.setdefault(key, name)
        return places[key]

    @wraps(make)
    def found(*args: Given.args, **kwargs: Given.kwargs) -> Scheme:
        if kwargs:
            raise TypeError(f"{make.__name__} takes positional arguments, got {', '.join(kwargs)}")
        record: Scheme = getattr(kept, place(*args))
        return record

    return found
