"""From a call of a function to launches: its inputs, the buffers that it allocates, its launches in order, and what makes its
result; and the launches of Triton's kernels.

The first time a `Call` runs while it is described. After that it answers calls with the same key (`fast.dispatch`): only
addresses change, so what is left is to allocate the buffers and to launch. All that is checked is what no key has: where
tensors lie.

A `CompiledLaunch` is a kernel with a fixed grid and fixed arguments, compiled once for each device and each dtype and
presence of its pointers. `kernel[grid](...)` compiles and launches. Triton's own call takes as long as a small kernel runs,
most of it spent on finding again which compiled kernel the arguments ask for. `DirectLaunch` keeps the compiled kernel and
calls the C function beneath Triton's launcher. That function is no public interface, so this is done for the versions in
TESTED alone; with any other version every launch is `kernel[grid](...)`. Every private interface of Triton and torch that
launches use is in this file.

First operands may be matrices that the tensor memory accelerator (TMA) reads through descriptors (`DescriptorLaunch`). A
descriptor says where a matrix begins, its shape, and the block of it that a kernel takes at once; it is an argument of the
launch by value, so that CUDA graphs keep it. Only the address changes between calls, and activations of a model have few of
them: descriptors are made once for each address, past Triton's launcher as `DirectLaunch` does, and kept.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fast import dispatch
from fast.dispatch import PLAIN

#: Versions of Triton (major.minor) whose launcher the tests and the GPU validation have covered.
TESTED = ("3.6", "3.7")
SUPPORTED = ".".join(triton.__version__.split(".")[:2]) in TESTED
HOOKS = triton.knobs.runtime
# Builds of torch without CUDA do not have these.
current_device = getattr(torch._C, "_cuda_getDevice", None)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# Programs along three axes.
Grid = tuple[int, int, int]
# Makes an uninitialized tensor on the current device from shape, strides and dtype.
Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


class DirectLaunch:
    """A compiled kernel with its grid and the arguments (`tail`) after its pointers."""

    def __init__(self, compiled: Any, grid: Grid, pointers: int, tail: tuple[Any, ...]) -> None:
        self.compiled, self.grid, self.pointers, self.tail = compiled, grid, pointers, tail

    @cached_property
    def function(self) -> Callable[[int, Sequence[int | None]], Any]:
        """Launches on a stream, given the addresses of the pointers, with as little before the driver as possible."""
        compiled, count = self.compiled, self.pointers
        stream, *marks = (object() for _ in range(count + 1))
        launch, passed = _beneath(
            compiled.run,
            (*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *marks, *self.tail),
        )  # fmt: skip
        at = _position(stream, passed)
        before, after, last = passed[:at], passed[at + 1 :], passed[-1]
        if isinstance(last, tuple) and _position(marks[0], last) == 0:
            # Triton 3.7: a kernel's arguments are one tuple at the end.
            between, rest = after[:-1], last[count:]
            return lambda stream, addresses: launch(*before, stream, *between, (*addresses, *rest))
        first = _position(marks[0], after)
        between, rest = after[:first], after[first + count :]
        return lambda stream, addresses: launch(*before, stream, *between, *addresses, *rest)


def _position(mark: object, arguments: tuple[Any, ...]) -> int:
    """Where an argument is, -1 where it is not."""
    return next((at for at, value in enumerate(arguments) if value is mark), -1)


def _beneath(run: Any, arguments: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The C function that Triton's launcher ends in, and what it passes down; the launcher itself where that cannot be known.

    What the launcher adds depends on Triton's version, so a copy of it is observed. Kernels with scratch memory, which the
    launcher allocates each time, keep it.
    """
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if scratch or not hasattr(run, "launch"):
        return run, arguments
    passed: list[tuple[Any, ...]] = []
    observed = copy.copy(run)
    observed.launch = lambda *given: passed.append(given)
    observed(*arguments)
    return (run.launch, passed[0]) if len(passed) == 1 else (run, arguments)


def hooked() -> bool:
    """Whether somebody wants to hear of launches (`triton.knobs.runtime`, profilers): only `kernel[grid]` tells them."""
    enter, leave = HOOKS.launch_enter_hook, HOOKS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@lru_cache(maxsize=1)
def _set_bytes() -> Callable[[int, int, int, int], int] | None:
    """The driver's `cuMemsetD8Async` (address, value, bytes, stream); None where the driver is not found by its name."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemsetD8Async
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    return function  # type: ignore[no-any-return]


def zero(address: int | None, size: int, stream: int) -> bool:
    """Set bytes of the current device to 0 on a stream, in less host time than `Tensor.zero_`; whether that was done."""
    function = _set_bytes()
    return function is not None and address is not None and function(address, 0, size, stream) == 0


def allocator(device: torch.device) -> Allocate:
    """What allocates on the current device, which is to be this one.

    torch.compile's own programs allocate past the dispatcher, in less time; where torch has no such function any more, the
    public one does.
    """
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


# Compiled kernels take addresses that are multiples of this; for others `kernel[grid]` specializes anew.
ALIGNMENT = 16
# The compiler's option by which products and sums are rounded one by one, as the reference rounds them. Kernels have it unless
# they say that they promise less.
UNFUSED = {"enable_fp_fusion": False}

# What a kernel is compiled for: the device, and the dtype of each pointer, None where there is no tensor.
Signature = tuple[int | torch.dtype | None, ...]
#: Addresses whose descriptors a launch keeps.
MOST_DESCRIPTORS = 1024
#: Arguments that a matrix is: the descriptor, two sizes, two strides.
MATRIX_ARGUMENTS = 5
# Makes the arguments of a matrix at an address.
Make = Callable[..., tuple[Any, ...]]


#: The largest index of a kernel whose offsets are 32-bit integers.
INT32 = 2**31 - 1


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def power_above(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


class CompiledLaunch:
    """A kernel with a fixed grid and fixed arguments (`tail`) after its pointers. options: of the compiler."""

    def __init__(
        self, kernel: Any, grid: int | Grid, tail: tuple[Any, ...], warps: int, **options: Any
    ) -> None:
        self.kernel, self.tail, self.warps = kernel, tail, warps
        self.options = {**UNFUSED, **options}
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        #: What was compiled for aligned addresses.
        self.compiled: dict[Signature, DirectLaunch] = {}

    def run(self, pointers: Sequence[torch.Tensor | None], device: int) -> Signature:
        """Run on contiguous tensors of one CUDA device, on its current stream; what the kernel was compiled for."""
        addresses = [None if p is None else p.data_ptr() for p in pointers]
        aligned = not any(a and a % ALIGNMENT for a in addresses)
        signature = (device, *(None if p is None else p.dtype for p in pointers))
        known = self.compiled.get(signature) if aligned and not hooked() else None
        if known is not None:
            with torch.cuda.device(device):
                known.function(current_stream(device), addresses)  # type: ignore[misc]
            return signature
        compiled = self._compile(pointers, device)
        if aligned and compiled is not None and SUPPORTED:
            self.compiled[signature] = self._direct(compiled, len(addresses))
        return signature

    def _direct(self, compiled: Any, pointers: int) -> DirectLaunch:
        """The compiled kernel to be launched past Triton."""
        return DirectLaunch(compiled, self.grid, pointers, self.tail)

    def _compile(self, pointers: Sequence[torch.Tensor | None], device: int) -> Any:
        """Compile where that is needed, and launch."""
        if interpreted():
            self.kernel[self.grid](*pointers, *self.tail)
            return None
        with torch.cuda.device(device):
            return self.kernel[self.grid](*pointers, *self.tail, num_warps=self.warps, **self.options)


def same_device(x: torch.Tensor, *others: Any) -> bool:
    """Whether all tensors lie on one device; where they do not, no kernel can read them."""
    return all(other is None or other.device == x.device for other in others)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Matrix:
    """A contiguous matrix of elements of one byte as a kernel reads it; rows are multiples of 16 bytes.

    dtype: what the elements are. shape, block: the matrix's (rows, length) and the block's, which reads zeros beyond it.
    """

    dtype: torch.dtype
    shape: tuple[int, int]
    block: tuple[int, int]

    def of(self, tensor: torch.Tensor) -> TensorDescriptor:
        """Triton's descriptor of a tensor of bytes, which is copied where it begins at an odd address."""
        tensor = tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
        return TensorDescriptor.from_tensor(tensor.view(self.dtype), list(self.block))

    def at(self, address: int) -> Any:
        """What Triton's launcher reads of a descriptor of the matrix at an address."""
        return SimpleNamespace(
            base=SimpleNamespace(data_ptr=lambda: address), shape=list(self.shape), strides=[self.shape[1], 1],
            padding="zero", round_f32_to_tf32=False,
        )  # fmt: skip


class DescriptorLaunch(CompiledLaunch):
    """A `CompiledLaunch` whose first two pointers are matrices, the others tensors."""

    def __init__(
        self,
        kernel: Any,
        grid: int | Grid,
        tail: tuple[Any, ...],
        warps: int,
        matrices: tuple[Matrix, Matrix],
        **options: Any,
    ) -> None:
        super().__init__(kernel, grid, tail, warps, **options)
        self.matrices = matrices

    def _compile(self, pointers: Sequence[torch.Tensor | None], device: int) -> Any:
        count = len(self.matrices)
        given = [m.of(p) for m, p in zip(self.matrices, pointers, strict=False) if p is not None]
        return super()._compile([*given, *pointers[count:]], device)

    def _direct(self, compiled: Any, pointers: int) -> DirectLaunch:
        return DirectDescriptors(compiled, self.grid, pointers, self.tail, self.matrices)


class DirectDescriptors(DirectLaunch):
    """A direct launch whose first addresses are those of matrices."""

    def __init__(
        self, compiled: Any, grid: Grid, pointers: int, tail: tuple[Any, ...], matrices: tuple[Matrix, Matrix]
    ) -> None:
        super().__init__(compiled, grid, pointers, tail)
        self.matrices = matrices

    @cached_property
    def function(self) -> Callable[[int, Sequence[int | None]], Any]:
        """As `DirectLaunch.function`."""
        compiled, makers = _past_descriptors(self.compiled, self.matrices)
        first, second = (lru_cache(maxsize=MOST_DESCRIPTORS)(make) for make, _ in makers)
        pointers = self.pointers + sum(count - 1 for _, count in makers)
        launch = DirectLaunch(compiled, self.grid, pointers, self.tail).function
        return lambda stream, addresses: launch(
            stream, (*first(addresses[0]), *second(addresses[1]), *addresses[2:])
        )


def _past_descriptors(compiled: Any, matrices: tuple[Matrix, Matrix]) -> tuple[Any, list[tuple[Make, int]]]:
    """The compiled kernel without what makes descriptors of tensors at each launch; and for each matrix what makes the
    arguments that it takes, with their number.

    Where a version of Triton hides its inner launcher, the outer one goes on making them.
    """
    outer = getattr(compiled.run, "launch", None)
    inner = inspect.getclosurevars(outer).nonlocals.get("launcher") if inspect.isfunction(outer) else None
    if inner is None:
        return compiled, [(lambda address, m=m: (m.at(address),), 1) for m in matrices]
    from triton.backends.nvidia.driver import make_tensordesc_arg as describe

    run = copy.copy(compiled.run)
    run.launch = inner
    bare = SimpleNamespace(run=run, function=compiled.function, packed_metadata=compiled.packed_metadata)
    layouts = compiled.metadata.tensordesc_meta
    return bare, [
        (lambda address, m=m, layout=layout: (*describe(m.at(address), layout),), MATRIX_ARGUMENTS)
        for m, layout in zip(matrices, layouts, strict=True)
    ]


#: The dtypes that are quantized, with their names.
FLOAT_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Shape, strides and dtype of a buffer.
Size = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# Bytes that kernels read at once of packed codes, and of the values that become some.
WORD = 4


class Launch(Protocol):
    """What a call launches: a `CompiledLaunch` of Triton, or a `fast.launch.cuda.CudaLaunch`."""

    @property
    def compiled(self) -> Mapping[Signature, Any]:
        """What launches directly, by what it was compiled for."""

    def run(self, pointers: Sequence[torch.Tensor | None], device: int) -> Signature:
        """Run on tensors of a device; what the kernel was compiled for."""


class Call:
    """See the module text. Buffers are allocated each time: a CUDA graph owns what its capture made, streams share none."""

    def __init__(
        self, inputs: Mapping[str, torch.Tensor | None], *, strided: bool = False, words: tuple[str, ...] = ()
    ) -> None:
        """inputs: in the order of the key. strided: the key has their strides, and kernels read by them; otherwise kernels get
        them contiguous. words: inputs that kernels read in words of 4 bytes."""
        given = [tensor for tensor in inputs.values() if tensor is not None]
        # The number of the CUDA device, or -1 for the CPU, where the interpreter runs.
        self.device, self.index = given[0].device, given[0].get_device()
        self.inputs, self.strided, self.words = dict(inputs), strided, words
        #: What kernels are given, by name, while the call is described.
        self.tensors = self._usable(inputs)
        #: Shape, dtype and fill. A buffer may have the name of an input that is not there.
        self.buffers: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]] = {}
        self.steps: list[tuple[Launch, list[str | None], Signature]] = []
        #: Whether the launches serve other tensors: not where one begins within a tensor, or an input is no plain tensor.
        self.repeatable = all(type(tensor) in PLAIN for tensor in given)

    def _usable(self, inputs: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """The inputs that are there, as kernels read them."""
        usable = {}
        for name, tensor in inputs.items():
            if tensor is not None:
                tensor = tensor.resolve_neg() if self.strided else tensor.resolve_neg().contiguous()
                usable[name] = tensor.clone() if name in self.words and tensor.data_ptr() % WORD else tensor
        return usable

    # Describing and running for the first time

    def allocate(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | str, fill: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """A fresh tensor. fill: the value that each row starts with; () where the launches write every element."""
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        result = filled(torch.empty(shape, dtype=dtype, device=self.device), fill)
        self.tensors[name], self.buffers[name] = result, (tuple(shape), dtype, fill)
        return result

    def launch(
        self,
        kernel: Launch,
        pointers: Sequence[str | None],
        views: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Run on the tensors of these names; a name that there is no tensor of stands for None.

        views: parts of the tensors in their places. A call whose launches begin within a tensor is not remembered.
        """
        tensors = {**self.tensors, **views} if views else self.tensors
        names = [name if name in tensors else None for name in pointers]
        given = [None if name is None else tensors[name] for name in names]
        self.steps.append((kernel, names, kernel.run(given, self.index)))
        for name, view in (views or {}).items():
            self.repeatable &= view.data_ptr() == self.tensors[name].data_ptr()

    def result(
        self,
        template: Any,
        key: Any = None,
        record: Any = None,
        convert: Callable[[Any], Any] | None = None,
        before: Callable[[Call], Callable[..., Any]] | None = None,
    ) -> Any:
        """What the launches made: the template with tensors for their names (`cache.maker`), converted at last.

        With a key this answers the next call like it. record: whose id the key may have. before: what answers
        in its place, given this one, where operands have to be changed first.
        """
        names = [*self.inputs, *self.buffers]
        places = {name: at for at, name in enumerate(names) if name in self.tensors}
        finish = dispatch.maker(template, places)
        self.finish = finish if convert is None else lambda tensors: convert(finish(tensors))
        output = self.finish([*self.inputs.values(), *(self.tensors[name] for name in self.buffers)])
        if key is not None and self.repeatable and not interpreted():
            self._prepare(places)
            dispatch.remember(key, self if before is None else before(self), record)
        return output

    # Repeating

    def _prepare(self, places: dict[str, int]) -> None:
        """Forget the tensors, and keep what every call needs. places: of names among inputs and buffers."""
        self._places = places
        self._allocate = allocator(self.device)
        buffers = self.buffers.items()
        self._sizes: list[Size] = [
            (shape, self.tensors[name].stride(), dtype) for name, (shape, dtype, _) in buffers
        ]
        self._fills = [
            (places[name], fill, self.tensors[name].nbytes) for name, (_, _, fill) in buffers if fill
        ]
        self._launches: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        self.inputs, self.tensors = dict.fromkeys(self.inputs), {}

    def __call__(self, *inputs: torch.Tensor | None) -> Any:
        """The result for other inputs with the same key; None for tensors without memory."""
        tensors = self._run(inputs, self._sizes)
        return None if tensors is None else self.finish(tensors)

    def viewed(self, **views: Size | None) -> Callable[..., tuple[torch.Tensor, ...] | None]:
        """The same launches, which give these buffers alone, each as a view of its memory: shape, strides and dtype. None:
        as it is.

        What a caller would make of the results by `view` and `t` costs as much as allocating them. None for tensors without
        memory, as above. KeyError where there is no such buffer.
        """
        sizes, first = list(self._sizes), len(self.inputs)
        for name, size in views.items():
            at = self._places[name] - first
            sizes[at] = size or sizes[at]
        places = [self._places[name] for name in views]

        def run(*inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...] | None:
            tensors = self._run(inputs, sizes)
            return None if tensors is None else tuple([tensors[at] for at in places])

        return run

    def _run(self, inputs: Sequence[torch.Tensor | None], sizes: list[Size]) -> list[Any] | None:
        """Inputs and buffers after the launches; None for tensors without memory."""
        if hooked():
            return self._launch_again(inputs, sizes)
        if current_device() != self.index:  # type: ignore[misc]
            with torch.cuda.device(self.index):
                return self._run(inputs, sizes)
        addresses: list[int | None] = []
        for tensor in inputs:
            if tensor is None:
                addresses.append(None)
                continue
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # sparse or nested
                return None
            if address % ALIGNMENT or tensor.is_neg() or not (self.strided or tensor.is_contiguous()):
                return self._launch_again(inputs, sizes)
            addresses.append(address)
        launches = self._launches or self._direct_launches()
        if not launches:
            return self._launch_again(inputs, sizes)
        # Allocate the buffers and launch, past everything of Triton that looks at arguments.
        allocate = self._allocate
        buffers = [allocate(*size) for size in sizes]
        addresses += [tensor.data_ptr() for tensor in buffers]
        addresses.append(None)
        tensors = [*inputs, *buffers]
        stream = current_stream(self.index)  # type: ignore[misc]
        for at, fill, size in self._fills:
            if fill != (0,) or not zero(addresses[at], size, stream):
                filled(tensors[at], fill)
        for launch, select in launches:
            launch(stream, select(addresses))
        return tensors

    def _direct_launches(self) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
        """For each launch its function, and what selects its addresses; nothing before all are compiled for aligned tensors.

        The last address is that of no tensor.
        """
        absent, launches = len(self.inputs) + len(self.buffers), []
        for function, pointers in self.launches():
            slots = [absent if name is None else self._places[name] for name in pointers]
            launches.append((function, itemgetter(*slots)))
        # In one step: another thread may be launching.
        self._launches = launches
        return launches

    def launches(self) -> list[tuple[Callable[..., Any], list[str | None]]]:
        """For each launch its function, of a stream and addresses, and the names of its pointers; nothing before all are
        compiled for aligned tensors."""
        result = [(kernel.compiled.get(signature), names) for kernel, names, signature in self.steps]
        return (
            [(one.function, names) for one, names in result if one] if all(one for one, _ in result) else []
        )

    def _launch_again(self, inputs: Sequence[torch.Tensor | None], sizes: list[Size]) -> list[Any]:
        """By `kernel[grid]` where nothing else will do: odd addresses, tensors that have to be copied, hooks."""
        tensors = self._usable(dict(zip(self.inputs, inputs, strict=True)))
        result = [
            filled(torch.empty(shape, dtype=dtype, device=self.device), fill)
            for shape, dtype, fill in self.buffers.values()
        ]
        tensors.update(zip(self.buffers, result, strict=True))
        for kernel, pointers, _ in self.steps:
            kernel.run([None if name is None else tensors[name] for name in pointers], self.index)
        views = [
            one if size is own else torch.as_strided(one.view(size[2]), *size[:2])
            for one, own, size in zip(result, self._sizes, sizes, strict=True)
        ]
        return [*inputs, *views]


def filled(made: torch.Tensor, fill: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose rows start with the values of a fill."""
    if fill == (0,):
        return made.zero_()
    if fill:
        for row, value in zip(made, fill, strict=True):
            row.fill_(value)
    return made
