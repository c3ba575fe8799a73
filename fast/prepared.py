"""Products prepared for inputs like those that they had, for those who keep their weights: from addresses to launches, nothing
looked up.

`fast.linear` finds a call by a key of all its operands (`fast.dispatch`), which is half of its time on the host. Who keeps a
weight knows that its parts stay, so that a `Program` looks at the inputs and the bias alone. It launches the steps of the calls
that the cache has, one call after the other; where the cache has none there is no program. There are programs of `fast.linear`,
of `linear_small`, also of inputs in a scheme, and of `fast.quantize` and `fast.linear_of_codes` of inputs that are quantized
first. `ScaledProduct`: inputs quantized by a `Program`, then `torch._scaled_mm` of their codes by a kept weight's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any

import torch

from fast import dispatch
from fast.matmul.linear import LINEAR, LINEAR_OF_CODES
from fast.matmul.preshuffled.dynamic import CODES, LINEAR_SMALL_DYNAMIC, inputs_record, kind_of
from fast.matmul.preshuffled.linear import LINEAR_SMALL, MOST_ROWS, values_of
from fast.quantize.fake_quantize import FAKE_QUANTIZE
from fast.quantize.quantize import QUANTIZE, operands_of, quantize
from fast.quantize.static_scales import QUANTIZE_ROWS, quantize_rows
from reference import Quantized, Scales, Scheme

#: Compiled kernels take addresses that are multiples of this (`launcher.ALIGNMENT`; that module needs Triton).
ALIGNMENT = 16
#: What places of buffers in one allocation are multiples of, as those of allocations are.
APART = 256
#: Addresses in order: of the inputs, of the bias, of the fixed tensors, of buffers, and last that of no tensor.
X, BIAS, FIXED, ABSENT = 0, 1, 2, -1

Launch = Callable[["Program", torch.Tensor, torch.Tensor | None], Any]
#: Shape, dtype and fill of a buffer; shape, strides and dtype of an allocation.
Buffer = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]
Size = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class Steps:
    """Launches of calls in order, with the places of their addresses."""

    def __init__(self, *fixed: torch.Tensor | None) -> None:
        self.fixed = [tensor for tensor in fixed if tensor is not None]
        self.buffers: list[Buffer] = []
        self.launches: list[tuple[Callable[..., Any], list[int]]] = []

    @property
    def first(self) -> int:
        """The place of the first buffer."""
        return FIXED + len(self.fixed)

    def place(self, tensor: torch.Tensor | None) -> int:
        """Of a fixed tensor."""
        return next((FIXED + at for at, one in enumerate(self.fixed) if one is tensor), ABSENT)

    def add(self, call: Any, inputs: Sequence[int]) -> Any:
        """Add a call whose inputs have these places: its result, with places for tensors. None for what cannot say its launches
        (`Call.launches`), and where a kernel was not compiled for aligned addresses."""
        launches = call.launches() if hasattr(call, "launches") else []
        if not launches:
            return None
        first = self.first + len(self.buffers)
        buffers = range(first, first + len(call.buffers))
        named = {
            **dict(zip(call.inputs, inputs, strict=True)),
            **dict(zip(call.buffers, buffers, strict=True)),
        }
        self.buffers += call.buffers.values()
        for function, names in launches:
            places = [ABSENT if name is None else named[name] for name in names]
            self.launches.append((function, places))
        return call.finish([*inputs, *buffers])

    def view(self, place: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
        """Give the buffer at a place a shape of as many elements, and a dtype as wide as its own."""
        at = place - self.first
        _, own, fill = self.buffers[at]
        self.buffers[at] = shape, dtype or own, fill


class Program:
    """The launches of a product, for inputs of one shape and dtype and a bias of one, all on one device.

    `run(x, bias)` is the product; None where it takes more than launches: tensors elsewhere, odd addresses or strides,
    listeners. That shapes and dtypes are those that the program was prepared for, the caller has seen to. Between two runs of a
    model's layer the processor forgets what belongs to that layer alone, so a program has little of its own: `launch`, called
    with the program, is one for all weights that are computed alike.
    """

    __slots__ = ("known", "launch", "parts")

    def __init__(self, steps: Steps, results: Sequence[int], device: torch.device) -> None:
        """results: places of the buffers that `run` gives, a tuple of them where they are several."""
        kept = [place - steps.first for place in results]
        sizes, spots = allocations(steps.buffers, kept)
        fills = tuple(
            (spots[at][0], fill, prod(size) * dtype.itemsize)
            for at, (size, dtype, fill) in enumerate(steps.buffers)
            if fill
        )
        launches = tuple((function, tuple(places)) for function, places in steps.launches)
        self.parts, self.known = tuple(steps.fixed), [0] * len(steps.fixed)
        self.launch = launching(device, sizes, spots, fills, launches, tuple(spots[at][0] for at in kept))

    def run(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """The product, or None; see above."""
        return self.launch(self, x, bias)

    def are_readable(self, addresses: list[int]) -> bool:
        """Whether kernels read the fixed tensors at these addresses, which are known then: not columns of a wider weight, which
        the ordinary call copies."""
        readable = not any(address % ALIGNMENT for address in addresses)
        readable = readable and all(part.is_contiguous() for part in self.parts)
        if readable:
            self.known[:] = addresses
        return readable


def allocations(
    buffers: Sequence[Buffer], kept: Sequence[int]
) -> tuple[tuple[Size, ...], tuple[tuple[int, int], ...]]:
    """Sizes of allocations, and of every buffer its allocation and how many bytes behind its beginning it lies.

    Buffers that are `kept`, or start with a fill, have their own; all others are one.
    """
    own = [at for at, (_, _, fill) in enumerate(buffers) if at in kept or fill]
    sizes = [(shape, contiguous_strides(shape), dtype) for shape, dtype, _ in (buffers[at] for at in own)]
    spots, shared = [], 0
    for at, (shape, dtype, _) in enumerate(buffers):
        spots.append((own.index(at), 0) if at in own else (len(own), shared))
        if at not in own:
            shared += -(-prod(shape) * dtype.itemsize // APART) * APART
    return (*sizes, *([((shared,), (1,), torch.uint8)] if shared else [])), tuple(spots)


@lru_cache(maxsize=1024)
def launching(
    device: torch.device, sizes: Any, spots: Any, fills: Any, launches: Any, results: tuple[int, ...]
) -> Launch:
    """What runs programs of these allocations (shape, strides, dtype), places of buffers in them (allocation, bytes), fills
    (allocation, value, bytes), launches (function, places of addresses) and results (allocations). It is a closure: in so short
    a time every attribute that is looked up counts."""
    from fast.launch import launcher

    index, hooked = -1 if device.type == "cpu" else device.index, launcher.hooked
    current, stream, allocate = launcher.current_device, launcher.current_stream, launcher.allocator(device)
    steps = [(function, itemgetter(*places)) for function, places in launches]
    alone = len(spots) == len(launches) == 1 and not fills
    (size, *_), ((first, where), *_), take = sizes, steps, itemgetter(*results)

    def launch(program: Program, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
        address, other = address_of(x, index), None if bias is None else address_of(bias, index)
        if not address or other == 0 or current() != index or hooked():
            return None
        addresses = [part.data_ptr() for part in program.parts]
        if addresses != program.known and not program.are_readable(addresses):
            return None
        if alone:  # as below, in three quarters of the time
            y = allocate(*size)
            first(stream(index), where((address, other, *addresses, y.data_ptr(), None)))
            return y
        result, on = [allocate(*size) for size in sizes], stream(index)
        if fills:
            fill(result, fills, on)
        begins = [one.data_ptr() for one in result]
        addresses = [address, other, *addresses, *[begins[at] + more for at, more in spots], None]
        for step, select in steps:
            step(on, select(addresses))
        return take(result)

    return launch


def fill(made: Sequence[torch.Tensor], fills: Any, stream: int) -> None:
    """Give buffers the values that they start with."""
    from fast.launch import launcher
    from fast.launch.launcher import filled

    for at, value, size in fills:
        if value != (0,) or not launcher.zero(made[at].data_ptr(), size, stream):
            filled(made[at], value)


def address_of(tensor: torch.Tensor, index: int) -> int:
    """Where a tensor lies on a device (-1: the CPU), as kernels read it; 0 where they cannot."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # sparse or nested
        return 0
    if address % ALIGNMENT or tensor.get_device() != index or not tensor.is_contiguous() or tensor.is_neg():
        return 0
    return address


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose last axis is the innermost."""
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def prepared_linear(
    x: torch.Tensor, w: Quantized, bias: torch.Tensor | None, shape: tuple[int, ...]
) -> Program | None:
    """`fast.linear(x, w, bias)` of a matrix x, its result in a shape of as many elements; None where the cache has no call like
    it, which it has after the first."""
    operands = (x, w.codes, w.scale, w.outer, w.zero, bias)
    call = dispatch.find(dispatch.key_of(LINEAR.name, w.scheme, dispatch.settings(w), operands))
    steps = Steps(*operands[1:5])
    result = steps.add(call, (X, *map(steps.place, operands[1:5]), ABSENT if bias is None else BIAS))
    return _program(steps, result, shape, x.device)


def prepared_linear_small(
    x: torch.Tensor,
    w: Quantized,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    scheme: Scheme | None = None,
    first: str = "",
) -> Program | None:
    """The same of a preshuffled weight (`fast.matmul.preshuffled.linear`, which has `first`), and of inputs in a scheme: by
    `dynamic`, or `fast.fake_quantize` of them and the product of that."""
    operands, values = (x, w.codes, w.scale, w.zero, bias), values_of(w.shape, first)
    steps = Steps(*operands[1:4])
    inputs: Any = X
    call = None if scheme is None else _dynamic_call(operands, w, scheme)
    if call is None:
        inputs = X if scheme is None else steps.add(_rounding_call(x, scheme), (X,))
        call = dispatch.find(dispatch.key_of(LINEAR_SMALL.name, w.scheme, values, operands))
    if not isinstance(inputs, int):
        return None
    result = steps.add(call, (inputs, *map(steps.place, operands[1:4]), ABSENT if bias is None else BIAS))
    return _program(steps, result, shape, x.device)


def _dynamic_call(operands: tuple[Any, ...], w: Quantized, scheme: Scheme) -> Any:
    """Of the cache: what quantizes few rows and multiplies them."""
    values = (tuple(w.shape), scheme.key)
    return dispatch.find(dispatch.key_of(LINEAR_SMALL_DYNAMIC.name, w.scheme, values, operands))


def _rounding_call(x: torch.Tensor, scheme: Scheme) -> Any:
    """Of the cache: `fast.fake_quantize` of x, as `linear_small_dynamic` calls it or its caller does. None for few rows whose
    codes are multiplied as they are."""
    kind = kind_of(scheme)
    if kind == CODES and x.shape[0] <= MOST_ROWS:
        return None
    record = scheme if kind is None else inputs_record(scheme.key)
    return dispatch.find(dispatch.key_of(FAKE_QUANTIZE.name, record, (-1,), operands_of(x, None, None)))


def prepared_linear_of_codes(
    x: torch.Tensor,
    w: Quantized,
    bias: torch.Tensor | None,
    shape: tuple[int, ...],
    scheme: Scheme,
    scales: Scales | None = None,
    by_rows: bool = False,
) -> Program | None:
    """`fast.linear_of_codes` of x in a scheme, by `fast.quantize(x, scheme, scales=scales)`, or for by_rows by `quantize_rows`:
    both in one program."""
    if by_rows and scales is not None:
        given: tuple[Any, ...] = (x, scales.scale, scales.zero)
        key = dispatch.key_of(QUANTIZE_ROWS.name, scheme, (), given)
        q = quantize_rows(x, scheme, scales)
    else:
        given = operands_of(x, scales, None)
        key = dispatch.key_of(QUANTIZE.name, scheme, (-1, False, False), given)
        q = quantize(x, scheme, scales=scales)
    parts = (w.codes, w.scale)
    steps = Steps(*given[1:], *parts)
    codes = steps.add(dispatch.find(key), (X, *map(steps.place, given[1:])))
    if not isinstance(codes, Quantized) or q.outer is not None or w.outer is not None or w.zero is not None:
        return None
    values = (x.dtype, w.scheme.key, False, False, *dispatch.settings(q), *dispatch.settings(w))
    call = dispatch.find(
        dispatch.key_of(LINEAR_OF_CODES.name, q.scheme, values, (q.codes, q.scale, q.zero, *parts, bias))
    )
    output = (ABSENT if part is None else part for part in (codes.codes, codes.scale, codes.zero))
    result = steps.add(call, (*output, *map(steps.place, parts), ABSENT if bias is None else BIAS))
    return _program(steps, result, shape, x.device)


def prepared_codes(
    x: torch.Tensor, scheme: Scheme, scales: Scales | None, dtype: torch.dtype
) -> tuple[Program, bool] | None:
    """`fast.quantize(x, scheme, scales=scales)` of a matrix x: its codes in a dtype of a byte and, where they were not given
    (True), its scales. None as above, and for more than codes and a scale."""
    given = operands_of(x, scales, None)
    steps = Steps(*given[1:])
    call = dispatch.find(dispatch.key_of(QUANTIZE.name, scheme, (-1, False, False), given))
    result = steps.add(call, (X, *map(steps.place, given[1:])))
    if not isinstance(result, Quantized) or result.outer is not None or result.zero is not None:
        return None
    codes: Any = result.codes
    scale: Any = result.scale
    steps.view(codes, tuple(x.shape), dtype)
    fresh = scale >= steps.first
    return Program(steps, (codes, scale) if fresh else (codes,), x.device), fresh


def _program(steps: Steps, result: Any, shape: tuple[int, ...], device: torch.device) -> Program | None:
    """Of the place of the result, which gets this shape; None where there is none."""
    if not isinstance(result, int):
        return None
    steps.view(result, shape)
    return Program(steps, (result,), device)


class ScaledProduct:
    """Codes of x (..., K) times those of a weight (N, K), for inputs of one shape and dtype; called as a `Program` is.

    The weight's codes and scales as torch takes them are views of its tensors, made anew where these have moved.
    """

    __slots__ = ("codes", "dtype", "known", "launch", "left", "operands", "quantized", "scale", "shape")

    def __init__(
        self, quantized: Program, left: torch.Tensor | None, w: Quantized, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:  # fmt: skip
        """quantized: gives codes, and scales where `left`, those that were given, is None. dtype: of the weight's codes. shape:
        of the result."""
        self.quantized, self.left, self.dtype, self.shape = quantized, left, dtype, shape
        self.codes, self.scale, self.launch = w.codes, w.scale, launch
        self.known, self.operands = (0, 0), (w.codes, w.scale)

    def are_readable(self, addresses: tuple[int, int]) -> bool:
        """Whether tensors at these addresses are taken as they are: `operands` are codes (K, N), scales (1, N) or one then."""
        readable = self.codes.is_contiguous() and self.scale.is_contiguous()
        if readable:
            scale = self.scale if self.scale.dim() == 0 else self.scale.t()
            self.operands, self.known = (self.codes.view(self.dtype).t(), scale), addresses
        return readable


def launch(program: ScaledProduct, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The product; None where the inputs' program gives None, and where the weight has strides. What torch refuses, it refuses
    in the ordinary call too."""
    addresses = program.codes.data_ptr(), program.scale.data_ptr()
    if addresses != program.known and not program.are_readable(addresses):
        return None
    result = program.quantized.launch(program.quantized, x, None)
    if result is None:
        return None
    (codes, left), (right, scale) = (
        result if program.left is None else (result, program.left),
        program.operands,
    )
    y: torch.Tensor = torch._scaled_mm(codes, right, left, scale, bias, None, x.dtype)
    return y.view(program.shape)


def prepared_scaled_mm(
    x: torch.Tensor,
    w: Quantized,
    shape: tuple[int, ...],
    scheme: Scheme,
    scales: Scales | None,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> ScaledProduct | None:
    """torch's product of `fast.quantize(x, scheme, scales=scales)` of a matrix x by a weight (N, K), its result in a shape.

    dtypes: of both codes. Both have one scale, or one for each row. None where the cache has no call that quantizes like it.
    """
    result = prepared_codes(x, scheme, scales, dtypes[0])
    if result is None or w.outer is not None or w.zero is not None:
        return None
    quantized, fresh = result
    left = None if fresh or scales is None else scales.scale
    if left is not None and not left.is_contiguous():
        return None
    return ScaledProduct(quantized, left, w, dtypes[1], shape)


__all__ = [
    "ABSENT",
    "ALIGNMENT",
    "BIAS",
    "Program",
    "ScaledProduct",
    "Steps",
    "X",
    "prepared_codes",
    "prepared_linear",
    "prepared_linear_of_codes",
    "prepared_linear_small",
    "prepared_scaled_mm",
]
