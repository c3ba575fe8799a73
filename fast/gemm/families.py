"""Products as a choice sees them, and the families of kernels that multiply rows by a stored weight, as records: what each is
called, takes, and is made of.

A problem is lengths, dtypes, what the weight holds, and the device. No tensor is part of it, so that `choose` can be asked for
any number of rows and for a GPU that is not here.

A name says architecture, operands and kind: `gemv` for a few rows, `small_m` for up to 128, `gemm` for any number. It is what
`ao_lab.explain` prints for a layer's ranges of rows, and what rows of benchmarks and profiles have. `choose` says which of them
takes a product; `reports/families.md` is made of these records and of what `choose` says.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import lru_cache
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from fast.scale_factors import ArrangedWeight
    from reference import Quantized, Scheme

#: Layouts of a weight: as `reference.quantize` stores it, in the order of the tensor core's fragments, as 8-bit codes beside
#: inputs that are codes too; in 2:4 storage beside inputs of the same element, and int4 there.
PLAIN, PRESHUFFLED, CODES, SPARSE, SPARSE_INT4 = "plain", "preshuffled", "codes", "2:4", "2:4 int4"
#: Compute capability that kernels in CUDA C++ are compiled for.
SM90 = (9, 0)


class Device(NamedTuple):
    """What a choice asks of a device. capability: of a CUDA device, (0, 0) of others. processors: its multiprocessors. nvrtc:
    whether kernels in CUDA C++ can be compiled."""

    capability: tuple[int, int]
    processors: int
    nvrtc: bool

    @property
    def is_sm90(self) -> bool:
        """Whether kernels in CUDA C++ run: a GPU of capability 9.0, and NVRTC."""
        return self.capability == SM90 and self.nvrtc


#: An H100 or H200 with torch's own wheels: what pages and tests of choices are made for where there is no GPU.
HOPPER = Device(SM90, 132, True)


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """The facts of a device. Under Triton's interpreter, and on a CPU, there is no CUDA C++."""
    if device.type != "cuda":
        return Device((0, 0), HOPPER.processors, False)
    from fast.launch.launcher import interpreted
    from fast.launch.nvrtc import missing_compiler

    properties = torch.cuda.get_device_properties(device)
    nvrtc = missing_compiler() is None and not interpreted()
    return Device((properties.major, properties.minor), properties.multi_processor_count, nvrtc)


class Problem(NamedTuple):
    """A product of rows (`rows`, k) by a weight (n, k).

    rows: of experts those of one, on average. layout: see above. inputs: the dtype of the rows; of "codes" and
    "2:4" that of the result. element, group, zero: what a preshuffled weight has, see `ArrangedWeight`; of
    "codes" the inputs' element and whether they have zero points, of "2:4" the weight's element. filled:
    whether a preshuffled weight has rows or columns that are none of its own, a plain one tiled scales.
    products: 2 where two weights like this one are multiplied at once. experts: how many weights there are, 0
    for one matrix. weight: of a plain weight scheme, axis and whether it is packed.
    """

    layout: str
    rows: float
    n: int
    k: int
    inputs: torch.dtype
    device: Device
    element: str = ""
    group: int = 0
    zero: bool = False
    filled: bool = False
    products: int = 1
    experts: int = 0
    weight: tuple[Scheme, int, bool] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.n, self.k


def of_preshuffled(
    w: ArrangedWeight, rows: float, inputs: torch.dtype, products: int = 1, experts: int = 0
) -> Problem:
    """Rows of a dtype by a preshuffled weight, or by one of `experts`."""
    (n, k), filled = w.shape, w.shape != (w.rows, w.columns)
    facts: tuple[Any, ...] = (w.element, w.group, w.zero is not None, filled)
    return Problem(PRESHUFFLED, rows, n, k, inputs, device_of(w.words.device), *facts, products, experts)


def of_stored(w: Quantized, rows: int, inputs: torch.dtype) -> Problem:
    """Rows of a dtype by a weight in the plain layout; (0, 0) where it is no matrix."""
    n, k = (int(length) for length in w.shape) if len(w.shape) == 2 else (0, 0)
    weight = (w.scheme, w.axis, w.packed)
    filled = bool(w.tiled)
    return Problem(PLAIN, rows, n, k, inputs, device_of(w.codes.device), filled=filled, weight=weight)


def of_codes(
    x: Scheme, w: Scheme, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device
) -> Problem:
    """Rows of 8-bit codes by the codes of a weight (N, K), into a dtype."""
    zero = x.zero is not None
    return Problem(CODES, rows, *shape, dtype, device_of(device), element=x.element, zero=zero)


def of_sparse(values: torch.Tensor, rows: int, dtype: torch.dtype) -> Problem:
    """Rows of the element of 2:4 values (N, K/2) by these, into a dtype."""
    n, k = int(values.shape[0]), 2 * int(values.shape[1])
    element = str(values.dtype).removeprefix("torch.")
    return Problem(SPARSE, rows, n, k, dtype, device_of(values.device), element)


def of_sparse_int4(
    codes: torch.Tensor, rows: int, inputs: torch.dtype, group: int, zero: bool, products: int = 1
) -> Problem:
    """Rows of a dtype by int4 in 2:4 storage, codes (N, K/4)."""
    n, k = int(codes.shape[0]), 4 * int(codes.shape[1])
    facts = ("int4", group, zero, False, products)
    return Problem(SPARSE_INT4, rows, n, k, inputs, device_of(codes.device), *facts)


HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
#: Elements of preshuffled weights, and those whose scales are factors of the elements.
ELEMENTS = ("int4", "int8", "e4m3", "e2m1", "e4m3_mx", "nf4")
FACTORED = ("e2m1", "e4m3_mx")
#: Elements of 2:4 weights beside inputs of the same, of 16 bits and of 8.
WIDE_24, NARROW_24 = ("bfloat16", "float16"), ("int8", "float8_e4m3fn", "float8_e5m2")
#: Elements that k is a multiple of there, by the bits of an element: 16 bytes of a row of values.
MULTIPLES_24 = {8: 32, 16: 16}
#: More rows than there can be.
ALL_ROWS = 2**31 - 1


class Takes(NamedTuple):
    """What a family multiplies. layout: of the weight, as a problem has it. elements: of a preshuffled weight or of codes, ()
    for any. rows: the most. inputs: dtypes of rows, of results where the rows are codes. multiples: of n and k. sm90: whether
    it is CUDA C++ for GPUs of capability 9.0, compiled by NVRTC. filled: whether weights may have rows and columns that fill
    tiles. zero: whether codes of the inputs may have zero points. bfloat16: elements that it multiplies by bfloat16 alone.
    products: how many weights at once, at most. experts: whether rows sorted by expert."""

    layout: str
    elements: tuple[str, ...] = ()
    rows: int = ALL_ROWS
    inputs: tuple[torch.dtype, ...] = HALVES
    multiples: tuple[int, int] = (1, 1)
    sm90: bool = False
    filled: bool = True
    zero: bool = True
    bfloat16: tuple[str, ...] = ()
    products: int = 1
    experts: bool = False


class Chosen(NamedTuple):
    """What a family launches for a problem. variant: its numbers. kernel, problem: of CUDA C++ the source, and what is defined
    for it beside the variant (`launch.cuda.Kernel`)."""

    variant: Any
    kernel: Any = None
    problem: Any = None

    @property
    def name(self) -> str:
        """As files of times have it: the variant's own name, or its numbers."""
        fields = self.variant if isinstance(self.variant, tuple) else astuple(self.variant)
        name: str = getattr(self.variant, "name", "") or ",".join(str(int(field)) for field in fields)
        return name


class Family(NamedTuple):
    """name: see the module text. about: one line, for which rows, shapes and formats it is the quickest. source: the folder of
    its kernels, from the root. takes: of one weight, of two at once, of experts. functions: by the kind of a call what computes
    it, as "module:name", which returns None where the kernel does not compile or load; () of what torch computes. chosen: which
    of its variants multiplies a problem, None where none does; from it tests compile, emulate and hold to measured times."""

    name: str
    about: str
    source: str = ""
    takes: tuple[Takes, ...] = ()
    functions: Mapping[str, str] = MappingProxyType({})
    chosen: Callable[[Problem], Chosen | None] | None = None

    @property
    def layouts(self) -> frozenset[str]:
        """Of the weights that it takes."""
        return frozenset(takes.layout for takes in self.takes)

    def refusal(self, p: Problem) -> str | None:
        """Why the family does not multiply; None where it does, as far as that is known before it is compiled."""
        reasons = [_refusal(takes, p) for takes in self.takes if takes.layout == p.layout]
        reasons = [_refusal(takes, p) for takes in self.takes if _is_kind(takes, p)] or reasons
        if not reasons:
            return f"{self.name} takes {' and '.join(sorted(self.layouts))} weights, got {p.layout}"
        return None if None in reasons else reasons[0]

    def failure(self, p: Problem, device: int) -> str | None:
        """Why what it chooses for a problem that it takes did not compile or load on a device, in this process; None where it
        did, or was not tried yet."""
        from fast.launch import cuda

        one = self.chosen(p) if cuda.FAILURES and self.chosen else None
        if one is None or one.kernel is None:
            return None
        return cuda.failure(one.kernel, one.variant, one.problem, device)

    def function(self, kind: str) -> Callable[..., Any] | None:
        """What computes a kind of call: "linear", "experts", "pair", "swiglu"; None where torch does."""
        return _function(self.functions[kind]) if kind in self.functions else None


def _is_kind(takes: Takes, p: Problem) -> bool:
    is_element = takes.layout != SPARSE or p.element in takes.elements
    return (
        takes.layout == p.layout
        and is_element
        and takes.experts == (p.experts > 0)
        and takes.products >= p.products
    )


@lru_cache(maxsize=64)
def _function(path: str) -> Callable[..., Any]:
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _refusal(takes: Takes, p: Problem) -> str | None:
    """Of one of a family's kinds."""
    if takes.sm90 and not p.device.is_sm90:
        return f"it is CUDA C++ for GPUs of capability 9.0 with NVRTC, got {p.device}"
    if takes.experts != (p.experts > 0) or takes.products < p.products:
        return f"it takes at most {takes.products} at once, {'of' if takes.experts else 'not of'} experts"
    if takes.elements and p.element not in takes.elements:
        return f"elements are {', '.join(takes.elements)}, got {p.element}"
    if p.inputs not in takes.inputs or (p.element in takes.bfloat16 and p.inputs != torch.bfloat16):
        alone = f", {' and '.join(takes.bfloat16)} by bfloat16 alone" if takes.bfloat16 else ""
        return f"inputs are {', '.join(map(str, takes.inputs))}{alone}, got {p.inputs}"
    if not p.n or not p.k:
        return f"weights have rows and columns, got {p.shape}"
    if not 0 < p.rows <= takes.rows:
        return f"there are 1 to {takes.rows} tokens, got {p.rows}"
    if p.n % takes.multiples[0] or p.k % takes.multiples[1] or (p.filled and not takes.filled):
        return f"n and k are multiples of {takes.multiples}, got {p.shape}"
    return "inputs have no zero points" if p.zero and p.layout == CODES and not takes.zero else None


def _sm90_w4a16_gemv(p: Problem) -> Chosen | None:
    from fast.kernels.sm90_w4a16_gemv.host import KERNEL, Form, choose
    from fast.kernels.sm90_w4a16_gemv.several import variant_of

    form = Form(p.element, p.group, p.zero, p.inputs == torch.float16, _name(p.inputs), p.products)
    if p.products > 1:
        variant: Any = variant_of(form, int(p.rows), (p.n,) * p.products, p.k)
    else:
        variant = choose(form, int(p.rows), p.n, p.k)
    return variant and Chosen(variant, KERNEL, form)


def _triton_small_m(p: Problem) -> Chosen:
    from fast.kernels.triton_small_m import grouped, host, pair

    facts = p.n, p.k, p.element
    if p.experts:
        count = round(p.rows * p.experts)
        at_once = grouped.rows_at_once(count, p.experts)
        return Chosen((at_once, *grouped.tile_of(*facts, count, p.experts)))
    tiling = pair.pair_tiling if p.products > 1 else host.tiling_of
    return Chosen(tiling(*facts, p.group, int(p.rows)))


def _sm90_w4a16_gemm(p: Problem) -> Chosen:
    from fast.kernels.sm90_w4a16_gemm import experts, host

    weight = host.Weight(p.element, p.zero, max(1, host.ATOM // (p.group or host.ATOM)))
    choose, count = (experts.choose, (p.experts,)) if p.experts else (host.choose, ())
    one = choose(ceil(p.rows), *count, p.n, p.k, weight, p.device.processors)
    return Chosen(one, host.KERNEL, host.Problem(weight, _name(p.inputs)))


def _sm90_intn_small_m(p: Problem) -> Chosen | None:
    from fast.kernels.sm90_intn_small_m.host import KERNEL, choose, form_of

    scheme, axis, packed = p.weight  # type: ignore[misc]
    form = form_of(scheme, p.shape, axis, packed)
    if form is None or not p.n:
        return None
    form = form._replace(half=p.inputs == torch.float16)
    variant = choose(form, int(p.rows), p.n, p.k)
    return variant and Chosen(variant, KERNEL, form)


def _sm90_s8_gemm(p: Problem) -> Chosen | None:
    from fast.kernels.sm90_s8_gemm.host import KERNEL, choose
    from fast.kernels.sm90_s8_gemm.host import Problem as Codes

    variant = choose(int(p.rows), p.n, p.inputs.itemsize == 2, p.device.processors)
    return variant and Chosen(variant, KERNEL, Codes(p.element, _name(p.inputs)))


def _sm90_sparse24_gemm(p: Problem) -> Chosen:
    from fast.kernels.sm90_sparse24_gemm.host import ELEMENTS, KERNEL, variant_of
    from fast.kernels.sm90_sparse24_gemm.host import Problem as Sparse

    elements, out = ELEMENTS[p.element, p.element], _name(p.inputs)
    variant = variant_of(int(p.rows), *p.shape, elements, out, processors=p.device.processors)
    return Chosen(variant, KERNEL, Sparse(elements, out))


def _sm90_sparse24_w4a16_gemv(p: Problem) -> Chosen | None:
    from fast.kernels.sm90_sparse24_w4a16_gemv.host import KERNEL, Form, choose

    form = Form(p.group, False, p.inputs == torch.float16, zeros=p.zero)
    variant = choose(form, int(p.rows), p.n, p.k)
    return variant and Chosen(variant, KERNEL, form)


def _triton_sparse24_small_m(p: Problem) -> Chosen:
    from fast.kernels.triton_sparse24_small_m.host import tiling_of

    return Chosen(tiling_of(p.n, p.k, p.group, int(p.rows)))


def _triton_scaled_mm(p: Problem) -> Chosen:
    from fast.kernels.triton_scaled_mm.host import int_tile_of, tile_of

    sizes = int(p.rows), p.n, p.k
    return Chosen(int_tile_of(*sizes) if p.element == "int8" else tile_of(*sizes, fast_sums=False))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_GEMV, _GEMM, _SMALL = (
    f"fast.kernels.{name}" for name in ("sm90_w4a16_gemv", "sm90_w4a16_gemm", "triton_small_m")
)

SM90_W4A16_GEMV = Family(
    "sm90_w4a16_gemv",
    "preshuffled weights: 1 to 8 tokens with int4, 1 to 16 with NF4, a few with 8 bits",
    "fast/kernels/sm90_w4a16_gemv",
    (
        Takes(PRESHUFFLED, ELEMENTS, 16, multiples=(1, 128), sm90=True, filled=False, bfloat16=FACTORED),
        Takes(PRESHUFFLED, ("int4",), 16, multiples=(64, 128), sm90=True, filled=False, products=2),
    ),
    {
        "linear": f"{_GEMV}.host:sm90_w4a16_gemv",
        "pair": f"{_GEMV}.several:linear_small_pair",
        "swiglu": f"{_GEMV}.several:linear_small_swiglu",
    },
    _sm90_w4a16_gemv,
)
TRITON_SMALL_M = Family(
    "triton_small_m",
    "preshuffled weights, up to 128 tokens, between the other two; a few tokens per expert; two matmuls in one launch",
    "fast/kernels/triton_small_m",
    (
        Takes(PRESHUFFLED, ELEMENTS, 128),
        Takes(PRESHUFFLED, ELEMENTS, 64, experts=True),
        Takes(PRESHUFFLED, ("int4", "int8", "e4m3"), 16, multiples=(128, 128), products=2),
    ),
    {
        "linear": f"{_SMALL}.host:linear_small",
        "experts": f"{_SMALL}.grouped:grouped_linear_small",
        "pair": f"{_SMALL}.pair:linear_small_pair",
        "swiglu": f"{_SMALL}.pair:linear_small_swiglu",
    },
    _triton_small_m,
)
SM90_W4A16_GEMM = Family(
    "sm90_w4a16_gemm",
    "preshuffled weights, 129 tokens and more, from 33 on if tiles fill the GPU; many tokens per expert",
    "fast/kernels/sm90_w4a16_gemm",
    (
        Takes(PRESHUFFLED, ELEMENTS, multiples=(128, 128), sm90=True, filled=False),
        Takes(PRESHUFFLED, ELEMENTS[:-1], multiples=(128, 128), sm90=True, filled=False, experts=True),
    ),
    {
        "linear": f"{_GEMM}.host:sm90_w4a16_gemm",
        "experts": f"{_GEMM}.experts:sm90_w4a16_gemm_of_experts",
    },
    _sm90_w4a16_gemm,
)
SM90_INTN_SMALL_M = Family(
    "sm90_intn_small_m",
    "packed integers of 2, 3, 5 or 6 bits, up to 96 tokens, or 32 if the weight has fewer than 8192 output channels",
    "fast/kernels/sm90_intn_small_m",
    (Takes(PLAIN, rows=128, sm90=True, filled=False),),
    chosen=_sm90_intn_small_m,
)
TRITON_GEMV_W4A16 = Family(
    "triton_gemv_w4a16", "one token, packed 4-bit integers that are not preshuffled", "fast/kernels/triton_gemv",
    (Takes(PLAIN, rows=1, filled=False),),
)  # fmt: skip
TRITON_GEMV_W8A16 = Family(
    "triton_gemv_w8a16", "one token, 8-bit elements that are not preshuffled", "fast/kernels/triton_gemv",
    (Takes(PLAIN, rows=1, inputs=FLOATS, filled=False),),
)  # fmt: skip
TRITON_GEMV_ANY = Family(
    "triton_gemv_any", "one token, any other weight: codebooks, MX, six bits, odd lengths", "fast/kernels/triton_gemv",
    (Takes(PLAIN, rows=1, inputs=FLOATS, filled=False),),
)  # fmt: skip
TRITON_GEMM_SMALL_M = Family(
    "triton_gemm_small_m", "2 to 128 tokens, weights that are not preshuffled; 32 if scales change along K",
    "fast/kernels/triton_gemv", (Takes(PLAIN, rows=128, filled=False),),
)  # fmt: skip
TRITON_GEMV_W8A8 = Family(
    "triton_gemv_w8a8", "one token, 8-bit inputs by 8-bit weights", "fast/kernels/triton_gemv",
    (Takes(CODES, rows=1, inputs=FLOATS, multiples=(1, 16)),),
    {"linear": "fast.kernels.triton_gemv.select:linear_of_codes"},
)  # fmt: skip
SM90_S8_GEMM = Family(
    "sm90_s8_gemm", "int8 by int8, 256 tokens and more, if tiles fill seven of ten multiprocessors",
    "fast/kernels/sm90_s8_gemm", (Takes(CODES, ("int8",), inputs=FLOATS, multiples=(8, 16), sm90=True, zero=False),),
    {"linear": "fast.kernels.sm90_s8_gemm.host:linear_of_codes"}, _sm90_s8_gemm,
)  # fmt: skip
TRITON_INT_SCALED_MM = Family(
    "triton_int_scaled_mm", "int8 by int8, 2 tokens and more, zero points too", "fast/kernels/triton_scaled_mm",
    (Takes(CODES, ("int8",), inputs=FLOATS, multiples=(1, 16)),),
    {"linear": "fast.kernels.triton_scaled_mm.host:linear_of_codes"}, _triton_scaled_mm,
)  # fmt: skip
TRITON_SCALED_MM = Family(
    "triton_scaled_mm", "float8 by float8, if torch leaves most multiprocessors idle",
    "fast/kernels/triton_scaled_mm",
    (Takes(CODES, ("float8_e4m3fn", "float8_e5m2"), inputs=FLOATS, multiples=(1, 16), zero=False),),
    {"linear": "fast.kernels.triton_scaled_mm.host:linear_of_codes"}, _triton_scaled_mm,
)  # fmt: skip
SM90_SPARSE24_GEMM = Family(
    "sm90_sparse24_gemm", "8 or 16 bits by a weight of the same in 2:4 storage, any number of tokens",
    "fast/kernels/sm90_sparse24_gemm",
    (
        Takes(SPARSE, WIDE_24, inputs=FLOATS, multiples=(1, MULTIPLES_24[16]), sm90=True),
        Takes(SPARSE, NARROW_24, inputs=FLOATS, multiples=(1, MULTIPLES_24[8]), sm90=True),
    ),
    chosen=_sm90_sparse24_gemm,
)  # fmt: skip
SM90_SPARSE24_W4A16_GEMV = Family(
    "sm90_sparse24_w4a16_gemv", "int4 in 2:4 storage, up to 24 tokens at once, 64 in chunks of 16",
    "fast/kernels/sm90_sparse24_w4a16_gemv", (Takes(SPARSE_INT4, rows=64, multiples=(1, 256), sm90=True, products=2),),
    chosen=_sm90_sparse24_w4a16_gemv,
)  # fmt: skip
TRITON_SPARSE24_SMALL_M = Family(
    "triton_sparse24_small_m", "int4 in 2:4 storage, up to 64 tokens, shapes that the other does not divide, and other GPUs",
    "fast/kernels/triton_sparse24_small_m", (Takes(SPARSE_INT4, rows=64),), chosen=_triton_sparse24_small_m,
)  # fmt: skip
TORCH_SCALED_MM = Family("torch_scaled_mm", "float8 by float8 otherwise: `torch._scaled_mm`")
TORCH_INT_MM = Family("torch_int_mm", "int8 by int8 on GPUs before Hopper: `torch._int_mm`")
TORCH_DEQUANTIZE = Family(
    "torch_dequantize", "everything else: the weight is dequantized in the call, then torch's matmul"
)

FAMILIES = {
    family.name: family
    for family in (
        SM90_W4A16_GEMV,
        TRITON_SMALL_M,
        SM90_W4A16_GEMM,
        SM90_INTN_SMALL_M,
        TRITON_GEMV_W4A16,
        TRITON_GEMV_W8A16,
        TRITON_GEMV_ANY,
        TRITON_GEMM_SMALL_M,
        TRITON_GEMV_W8A8,
        SM90_S8_GEMM,
        TRITON_INT_SCALED_MM,
        TRITON_SCALED_MM,
        SM90_SPARSE24_GEMM,
        SM90_SPARSE24_W4A16_GEMV,
        TRITON_SPARSE24_SMALL_M,
        TORCH_SCALED_MM,
        TORCH_INT_MM,
        TORCH_DEQUANTIZE,
    )
}
