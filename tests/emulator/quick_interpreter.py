"""Triton's interpreter without the work that it does again and again: what kernels compute stays as it was.

`install` is for programs that started with TRITON_INTERPRET=1. Three quarters of their time went into changing the language
anew at every call of a device function, though the launch has changed it already; into checks of overflow whose answer nothing
reads; into shapes of tensors, made anew for each; and into reductions element by element. Of the rest a quarter went into
operands that have one type and shape already, and into numbers, made to blocks anew in each program of a launch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

#: What kernels see as the language: the project's modules import the first, Triton's own functions the second.
LANGUAGES = (tl, tl.core)
np_dtype = lru_cache(None)(interpreter._get_np_dtype)


def patch_lang(_fn: Any) -> Any:
    """The language as the interpreter changes it, for everything that a launch may call; whoever asks restores it."""
    scope = interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    for changed in (*LANGUAGES, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        interpreter._patch_builtin(changed, builder, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
    for language in LANGUAGES:
        interpreter._patch_lang_core(language, scope)
    return scope


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function: the launch has changed the language."""
    return self.rewrite()(*args, **kwargs)


def get_np_dtype(kind: Any) -> np.dtype:
    """The interpreter's table of dtypes, which it makes anew at each look."""
    kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else np_dtype(kind)


@lru_cache(None)
def checked(lengths: tuple[int, ...]) -> dict[str, Any]:
    """Fields of a type of blocks, with the language's own checks: powers of two, not too many elements."""
    made = tl.block_type.__new__(tl.block_type)
    first_init[tl.block_type](made, tl.int8, list(lengths))
    return {"shape": made.shape, "numel": made.numel, "name": made.name.removesuffix(f"{tl.int8}>")}


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """A type of blocks whose shape is remembered; that of another block is known by itself."""
    fields = of_shape.get(id(shape))
    if fields is None:
        fields = checked(tuple(s.value if isinstance(s, tl.constexpr) else s for s in shape))
        of_shape[id(fields["shape"])] = fields
    self.element_ty, self.shape, self.numel = element_ty, fields["shape"], fields["numel"]
    self.name = f"{fields['name']}{element_ty}>"


@lru_cache(None)
def shape_of(lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's number of elements and shape, as the language has them."""
    made = tl.tensor.__new__(tl.tensor)
    first_init[tl.tensor](made, None, tl.block_type(tl.int8, list(lengths)) if lengths else tl.int8)
    return made.numel, made.shape


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """A tensor whose shape is remembered."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = shape_of(tuple(type.shape.values) if type.is_block() else ())


def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Two operands of one shape: itself for both where they have it already."""
    first, second = lhs.type, rhs.type
    if first.is_block() and second.is_block() and first.shape is second.shape:
        return lhs, rhs
    return broadcast_impl_value(self, lhs, rhs)


def operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Both operands with one type and shape: as they are where they have them already, and a number as it was made before.

    What becomes of a number depends on the other operand's type alone, if that is not changed itself.
    """
    first, second = type(lhs) in NUMBERS, type(rhs) in NUMBERS
    options = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
    if first is second:
        same = not first and lhs.dtype is rhs.dtype and type(lhs.dtype) is tl.dtype and lhs.shape is rhs.shape
        return (lhs, rhs) if same and not div_or_mod else type_checking(self, lhs, rhs, *options)
    number, other = (lhs, rhs) if first else (rhs, lhs)
    key = (first, type(number), number, other.dtype.name, id(other.shape), options)
    if (known := made.get(key)) is None:
        both = type_checking(self, lhs, rhs, *options)
        if both[first] is not other or type(other.dtype) is not tl.dtype:
            return both
        if len(made) >= MOST_NUMBERS:
            made.clear()
        known = made[key] = both[not first]
    return (known, other) if first else (other, known)


def is_int(self: Any) -> bool:
    """Whether a dtype is one of integers."""
    return self.name in INTEGERS


def generic_reduce(self: Any, tensors: Any) -> list[Any]:
    """A reduction by any function, half with half rather than element by element: as on a GPU, any order has to do."""
    if self.axis is None or len(tensors) > 1:
        return element_by_element(self, tensors)
    (tensor,) = tensors
    shape = np.delete(tensor.handle.data.shape, self.axis)
    data = np.moveaxis(tensor.handle.data, self.axis, 0)
    while len(data) > 1:
        # Lengths are powers of two.
        halves = (self.to_tensor(np.ascontiguousarray(half), tensor.dtype) for half in np.split(data, 2))
        data = np.asarray(self.combine_fn.fn(*halves).handle.data).reshape(-1, *shape)
    whole = np.ascontiguousarray(data).reshape(shape)
    return [self.to_tensor(np.expand_dims(whole, self.axis) if self.keep_dims else whole, tensor.dtype)]


def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """A product whose sums are rounded once: in float32 a library adds in an order that depends on a column's place."""
    if d.data.dtype != np.float32:
        return dot_impl(self, a, b, d, *options)
    wide = interpreter.TensorHandle(d.data.astype(np.float64), tl.float64)
    made = dot_impl(self, a, b, wide, *options)
    return interpreter.TensorHandle(made.data.astype(np.float32), d.dtype.scalar)


NUMBERS = frozenset({int, float, bool})
INTEGERS = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
#: Numbers that are kept as operands, and how many at most: blocks of some thousand elements.
made: dict[Any, Any] = {}
MOST_NUMBERS = 512
#: Fields of types of blocks by the identity of their shape, which `checked` keeps.
of_shape: dict[int, dict[str, Any]] = {}
first_init = {kind: kind.__init__ for kind in (tl.block_type, tl.tensor)}
broadcast_impl_value = type(interpreter.interpreter_semantic).broadcast_impl_value
type_checking = type(interpreter.interpreter_semantic).binary_op_type_checking_impl
dot_impl = interpreter.InterpreterBuilder.create_dot
element_by_element = interpreter.ReduceOps.generic_reduce


def install() -> None:
    """Change the interpreter."""
    interpreter._patch_lang = patch_lang
    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = get_np_dtype
    interpreter.ReduceOps.generic_reduce = generic_reduce
    interpreter.InterpreterBuilder.create_dot = create_dot
    tl.block_type.__init__, tl.tensor.__init__ = init_block_type, init_tensor
    type(interpreter.interpreter_semantic).broadcast_impl_value = broadcast
    type(interpreter.interpreter_semantic).binary_op_type_checking_impl = operands
    tl.dtype.is_int = is_int
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "checks of overflow are read"
    builder.options = replace(builder.options, sanitize_overflow=False)
