"""Preshuffled weights: which there are, their parts bit for bit, and the product's operator. The kernel's bits are compared in
Triton's interpreter (`tests/emulator/programs/linear_small.py`)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fast
import reference
from ao_lab.checkpoint.formats.bitsandbytes import RECORDS
from fast.matmul.preshuffled import layout, linear
from fast.matmul.preshuffled.linear import linear_small
from fast.scale_factors import LEAST, SECOND, TERMS, element_with_factors
from reference import SCHEMES
from tests.support.linear_cases import inputs, weight

BF16 = torch.bfloat16
#: Whole tiles, and what is filled to them: rows, columns, both; whole bytes, and half of one.
SHAPES = ((128, 256), (256, 384), (70, 384), (128, 448), (1, 576), (133, 1001))
TAKEN = [
    (name, shape) for name in SCHEMES for shape in SHAPES if layout.scheme_reason(SCHEMES[name], shape, 1) is None
]  # fmt: skip


def same(first, second):
    """Whether both are None, or the same bits in one dtype and shape."""
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)


@pytest.mark.parametrize(("name", "shape"), TAKEN, ids=str)
def test_parts_come_back(name, shape):
    w = weight(SCHEMES[name], *shape)
    made = linear.preshuffled(w)
    rows, columns = map(layout.filled, shape)
    assert made.codes.nbytes == rows * columns * w.scheme.format.bits // 8
    assert made.shape == w.shape
    has_words = name == "nf4" or element_with_factors(w.scheme) is not None
    assert made.scale.dtype == (torch.int32 if has_words else torch.float32)
    alone = linear.weight_of(w.scheme, shape, (made.codes, made.scale, made.zero))
    for back in (linear.restored(made), layout.restored(made), layout.restored(alone)):
        assert all(
            same(getattr(back, part), getattr(w, part)) for part in ("codes", "scale", "zero", "outer")
        )
        assert same(fast.dequantize(back), fast.dequantize(w))
    if name == "nf4":
        return
    rows = torch.tensor([5, 0, shape[0] - 1, 77, 8]) % shape[0]
    for one in (made, alone):
        assert same(fast.dequantize(layout.rows_restored(one, rows)), fast.dequantize(w)[rows])


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted({name for name, _ in TAKEN})),
    rows=st.integers(1, 300),
    columns=st.integers(1, 700),
    whole=st.booleans(),
    experts=st.integers(0, 2),
)
def test_any_lengths(name, rows, columns, whole, experts):
    """Parts come back bit for bit and products are those of the plain weight, or the weight is refused for its blocks."""
    scheme = SCHEMES[name]
    block = scheme.scale.block if isinstance(scheme.scale.block, int) else -1
    least = 8 if experts else 1
    step = LEAST if name == "nf4" else max(block, least)
    rows, columns = (-(-rows // least) * least, -(-columns // step) * step) if whole else (rows, columns)
    shape = (experts, rows, columns) if experts else (rows, columns)
    reason = layout.scheme_reason(scheme, shape, len(shape) - 1)
    if reason is not None:
        assert experts or columns % step or (name == "nf4" and columns < LEAST)
        return
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(rows))
    w = fast.quantize(dense, scheme, packed=scheme.format.bits < 8)
    if (reason := layout.unsupported_reason(w)) is not None:
        assert "zero points" in reason or "scales of blocks" in reason
        return
    made = linear.preshuffled(w)
    assert same(made.codes, layout.preshuffled(w).codes)
    for back in (linear.restored(made), layout.restored(made)):
        assert all(
            same(getattr(back, part), getattr(w, part)) for part in ("codes", "scale", "zero", "outer")
        )
    if not experts:
        x = inputs(2, columns, BF16)
        assert same(linear_small(x, made), fast.linear(x, w))


def test_the_schemes_that_are_taken():
    """Integers of 4 and 8 bits and e4m3, in rows, groups and as a whole, scales in float32 and powers of two; MXFP4, NVFP4."""
    names = {name for name, _ in TAKEN}
    assert {
        "int4_g32",
        "int4_g128_asymmetric",
        "int8_rowwise",
        "int8_tensorwise",
        "fp8_1x128",
        "mxfp8_e4m3",
        "mxfp4",
        "nvfp4",
        "torchao.nvfp4",
        "compressed_tensors.mxfp4",
        "nf4",
    } <= names
    assert not {"torchao.nf4", "te.nvfp4", "te.nvfp4_16x16", "compressed_tensors.nvfp4", "mxfp8_e5m2"} & names
    assert not {"int2_g32", "fp8_rowwise_e5m2", "fp8_128x128"} & names
    assert len(names) > 40


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_narrow_scales_come_back(storage):
    """Each pattern of 16 bits, NaN where no rounding may change it; where one does, the weight is not preshuffled."""
    scheme = SCHEMES["int8_g32"]
    scheme = replace(scheme, name="narrow", scale=replace(scheme.scale, storage=storage, floor=None))
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    nan = patterns.view(getattr(torch, storage)).isnan()
    patterns = torch.where(nan, 0, patterns) if storage == "float16" else patterns
    w = weight(SCHEMES["int8_g32"], 128, 2**14)
    w = replace(w, scheme=scheme, scale=patterns.view(torch.uint16).reshape(128, -1))
    assert same(linear.restored(linear.preshuffled(w)).scale, w.scale)
    w = replace(w, scale=torch.full_like(w.scale.view(torch.int16), -1).view(torch.uint16))
    if storage == "float16":
        with pytest.raises(ValueError, match="none of its scales may be NaN"):
            linear.preshuffled(w)
    else:
        assert same(linear.restored(linear.preshuffled(w)).scale, w.scale)


def test_what_is_not_taken():
    w = weight(SCHEMES["int4_g128"], 128, 256)
    for name, length in (
        ("int4_g32", 144),
        ("int8_g128", 1152 - 64),
        ("mxfp4", 80),
        ("nvfp4", 72),
        ("nf4", 416),
    ):
        assert "whole blocks of" in layout.scheme_reason(SCHEMES[name], (128, length), 1)
    for shape in ((0, 256), (128, 0), (0, 128, 128)):
        assert "must have rows and columns" in layout.scheme_reason(
            SCHEMES["int8_rowwise"], shape, len(shape) - 1
        )
    with pytest.raises(ValueError, match="its elements must be"):
        linear.preshuffled(weight(SCHEMES["mxfp8_e5m2"], 128, 256))
    with pytest.raises(ValueError, match="or 16 of e4m3 ones under an outer scale that decodes"):
        linear.preshuffled(weight(SCHEMES["te.nvfp4"], 128, 256))
    with pytest.raises(ValueError, match="with blocks along its last axis"):
        linear.preshuffled(replace(w, axis=0))
    with pytest.raises(ValueError, match="blocks must be 32, 64"):
        linear.preshuffled(weight(SCHEMES["fp8_128x128"], 128, 256))
    asymmetric = weight(SCHEMES["int4_g128_asymmetric"], 128, 256)
    linear.preshuffled(replace(asymmetric, zero=torch.full_like(asymmetric.zero, -8)))
    asymmetric.zero[3, 1] = 8
    with pytest.raises(ValueError, match="must be -8 to 7"):
        linear.preshuffled(asymmetric)
    floats = weight(SCHEMES["fp8_rowwise"], 128, 256)
    floats.codes[5, 7] = 0xFF
    with pytest.raises(ValueError, match="none of its codes may be NaN"):
        linear.preshuffled(floats)


def powers(name, scale, element=1):
    """A weight (128, 256) of these scales of blocks, over and over, and of a code."""
    w = weight(SCHEMES[name], 128, 256)
    scale = (
        scale.to(torch.uint8)
        .repeat(-(-w.scale.numel() // len(scale)))[: w.scale.numel()]
        .reshape(w.scale.shape)
    )
    return replace(w, codes=torch.full_like(w.codes, element), scale=scale)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3"])
def test_powers_of_two_come_back(name):
    """Each but NaN, where blocks are zeros, of either sign, or not so far apart that an element is lost."""
    for element in (0, 0x80 if name == "mxfp8_e4m3" else 0x88):
        w = powers(name, torch.arange(255), element)
        assert same(linear.restored(linear.preshuffled(w)).scale, w.scale)
    smallest = {"mxfp4": 1, "mxfp8_e4m3": 9}[name]
    for scale in (torch.arange(1 + smallest, 128), torch.arange(150, 255)):
        w = powers(name, scale)
        assert same(linear.restored(linear.preshuffled(w)).scale, w.scale)
    for scale in (torch.tensor([smallest, 100]), torch.tensor([100, 254])):
        with pytest.raises(ValueError, match="must leave their elements"):
            linear.preshuffled(powers(name, scale))
    with pytest.raises(ValueError, match="none of its scales may be NaN"):
        linear.preshuffled(powers(name, torch.tensor([100, 255])))


def test_scales_of_nvfp4_come_back():
    """Each but NaN, under any outer scale but the largest ones."""
    signed = torch.cat([torch.arange(127), torch.arange(128, 255)])
    w = powers("nvfp4", signed)
    for outer in (1.0, 2.0**-149, 3e-5, -1.5, float("nan"), 2.0**118):
        w = replace(w, outer=torch.tensor(outer))
        back = linear.restored(replace(linear.preshuffled(w), outer=None))
        assert same(back.scale, w.scale)
        assert same(back.outer.view(torch.int32), w.outer.view(torch.int32))
    with pytest.raises(ValueError, match="outer scale must be below"):
        linear.preshuffled(replace(w, outer=torch.tensor(2.0**119)))
    for pattern in (0x7F, 0xFF):
        w.scale[3, 1] = pattern
        with pytest.raises(ValueError, match="none of its scales may be NaN"):
            linear.preshuffled(replace(w, outer=torch.tensor(1.0)))
        assert layout.unsupported_reason(w) == "none of its scales may be NaN"


def nf4_with_bits():
    """An NF4 weight (128, 384) whose scales have every code, and whose outer scales and mean are bits that nothing computes."""
    w = weight(SCHEMES["nf4"], 128, 384)
    codes = (torch.arange(768) % 256 - 128).to(torch.int8)
    bits = torch.tensor([0x7FC12345, 1, -0x7FFFFFFF], dtype=torch.int32)
    return replace(
        w, scale=codes, outer=bits.view(torch.float32), zero=bits[:1].view(torch.float32).reshape(())
    )


def test_scales_of_nf4_come_back():
    """To the bit, NaN and all."""
    w = nf4_with_bits()
    made = linear.preshuffled(w)
    assert made.outer is made.zero is None
    back = linear.restored(made)
    assert same(back.scale, w.scale)
    for part in ("outer", "zero"):
        assert same(getattr(back, part).view(torch.int32), getattr(w, part).view(torch.int32))


def test_nf4_is_taken_where_its_levels_are_within_the_bound():
    """Both terms of a level, in roundings of float32; a level rounded to bfloat16 would need thousands of columns."""
    levels = torch.tensor(SCHEMES["nf4"].format.values.tolist()).double()
    allowed = (2 * LEAST + 6 - 19 / 16 * LEAST - 3) * 2.0**-24
    for name, terms in TERMS.items():
        dtype = getattr(torch, name)
        patterns = torch.tensor(terms)
        assert bool((patterns[:, 0] >> 8 == patterns[:, 1] >> 8).all())
        both = patterns.to(torch.int16).view(dtype).double()
        made = both[:, 0] + SECOND * both[:, 1]
        assert bool(((made - levels).abs() <= allowed * levels.abs()).all())
        assert bool(((both[:, 0] - levels).abs() > allowed * levels.abs())[levels != 0].all())
        assert torch.equal(made[[0, 7, 15]], levels[[0, 7, 15]])
        assert torch.equal(made.float().double(), made)
    for shape, text in (((128, 256), "384 columns or more"), ((2, 128, 384), "must be a matrix")):
        assert text in layout.scheme_reason(SCHEMES["nf4"], shape, len(shape) - 1)
    assert "must be those of scheme nf4" in layout.scheme_reason(RECORDS["nf4"], (128, 384), 1)
    with pytest.raises(ValueError, match="dequantize it, or restore it whole"):
        layout.rows_restored(linear.preshuffled(weight(SCHEMES["nf4"], 128, 384)), torch.tensor([3]))


def test_parts_have_memory_of_their_own():
    """A weight with a scale for each row has them in one order in both layouts."""
    w = weight(SCHEMES["int8_rowwise"], 128, 256)
    made = linear.preshuffled(w)
    back = linear.restored(made)
    assert len({q.scale.data_ptr() for q in (w, made, back)}) == 3


@pytest.mark.parametrize(
    "name", ["int4_g128_asymmetric", "int8_rowwise", "fp8_rowwise", "mxfp4", "nvfp4", "nf4"]
)
def test_the_product_on_a_cpu(name):
    length = 384 if name == "nf4" else 256
    w, x, bias = weight(SCHEMES[name], 128, length), inputs(3, length, BF16), inputs(1, 128, BF16)[0]
    made = linear.preshuffled(w)
    assert same(linear_small(x, made, bias), reference.linear(x, w, bias))
    with pytest.raises(ValueError, match=str(length)):
        linear_small(x[:, :128], made)


@pytest.mark.parametrize(("rows", "shape"), [(1, (128, 256)), (16, (70, 384)), (200, (128, 256))])
def test_the_operator_is_traced(rows, shape):
    """In one graph, rows left open, with its gradient; codes come back by an operator too."""
    torch.compiler.reset()
    w = weight(SCHEMES["int4_g128_asymmetric"], *shape)
    made = linear.preshuffled(w)
    seen = []

    def backend(graph, example):
        seen.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def product(x):
        return linear_small(x, made), fast.dequantize(linear.restored(made), BF16)

    x = inputs(rows, shape[1], BF16).requires_grad_()
    found, dense = torch.compile(product, backend=backend, fullgraph=True, dynamic=True)(x)
    assert same(found.detach(), reference.linear(x.detach(), w))
    assert same(dense, fast.dequantize(w, BF16))
    operators = {str(target).removesuffix(".default") for target in seen[0]}
    assert {"ao_lab.linear_small", "ao_lab.restore_codes"} <= operators
    found.sum().backward()
    assert same(x.grad, torch.ones(rows, shape[0], dtype=BF16) @ dense)


def test_operators_are_described_to_torch():
    """Schema, fake and dispatch as torch checks them."""
    w, x = weight(SCHEMES["int8_g32_asymmetric"], 128, 256), inputs(2, 256, BF16)
    made = linear.preshuffled(w)
    operands = (x, made.codes, made.scale, made.zero, None, list(made.shape), made.scheme.key)
    checks = ("test_schema", "test_faketensor")
    odd = weight(SCHEMES["int8_g32_asymmetric"], 70, 160)
    operands_of_odd = (linear.preshuffled(odd).codes, "int8", odd.codes.shape)
    torch.library.opcheck(torch.ops.ao_lab.restore_codes.default, operands_of_odd, test_utils=checks)
    torch.library.opcheck(torch.ops.ao_lab.preshuffle_codes.default, (odd.codes, "int8"), test_utils=checks)
    for first in ((), ("triton_small_m",)):
        given = (*operands, *first)
        torch.library.opcheck(torch.ops.ao_lab.linear_small.default, given, test_utils=checks)
    torch.library.opcheck(torch.ops.ao_lab.restore_codes.default, (made.codes, "int8"), test_utils=checks)
    torch.library.opcheck(torch.ops.ao_lab.preshuffle_codes.default, (w.codes, "int8"), test_utils=checks)


def test_values_that_a_tracer_does_not_know():
    """Where the scheme alone decides, a traced weight is preshuffled; where values do, it is refused."""
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake = mode.from_tensor
        taken = weight(SCHEMES["int8_rowwise"], 128, 256)
        refused = weight(SCHEMES["fp8_rowwise"], 128, 256)
        taken, refused = (
            replace(w, codes=fake(w.codes), scale=fake(w.scale)) for w in map(_real, (taken, refused))
        )
        assert tuple(linear.preshuffled(taken).codes.shape) == (2, 4, 1024)
        with pytest.raises(ValueError, match="not known while a program is traced"):
            linear.preshuffled(refused)


def _real(w):
    return SimpleNamespace(**vars(w)) if not hasattr(w, "__dataclass_fields__") else w
