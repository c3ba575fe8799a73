"""What each recipe quantizes and how, and the claims of its text: no saturation, no bias, nothing flushed. Records: what they
refuse, and what they say of themselves."""

from dataclasses import replace

import numpy as np
import pytest

from ao_lab.testing.strategies import assert_same_bits
from reference import SCHEMES, Quantized, dequantize, quantize, random_bits
from reference.layers.hadamard import hadamard
from reference.training.linear import operand, operands, training_linear_vjp
from reference.training.recipe import (
    PLACES,
    PRODUCTS,
    RECIPES,
    Operand,
    Product,
    Recipe,
    power_of_two,
    recipe_of,
    saving_codes,
)
from tests.support.refusals import refused

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
RECIPES_ROW, TENSOR, TENSOR_2 = (
    (E4M3, -1, "ratio_pow2"),
    (E4M3, "tensor", "ratio"),
    (E4M3, "tensor", "ratio_pow2"),
)
BLOCK, SQUARE = (E4M3, 128, "ratio_pow2"), (E4M3, (128, 128), "ratio_pow2")
GRADIENT = (E5M2, "tensor", "ratio")
MX8, MX4 = (E4M3, 32, "rceil"), (E2M1, 32, "rceil")
MX6, MX6_G = ("float6_e2m3fn", 32, "rceil"), ("float6_e3m2fn", 32, "rceil")
NV, NV_SQUARE = (E2M1, 16, "ratio"), (E2M1, (16, 16), "ratio")
DRAWN = (*MX4, "stochastic", 32)
#: Recipe: x, w, g, w.T, g.T, x.T as (element, block, rule of the scale, rounding, length of the Hadamard transform), and
#: accumulation of y, dx and dw.
RECORDED = {
    "bf16": ((None,) * 6, "ppp"),
    "tensorwise": ((TENSOR, TENSOR, GRADIENT, TENSOR, GRADIENT, TENSOR), "fpp"),
    "rowwise": ((RECIPES_ROW,) * 6, "fpp"),
    "rowwise_with_gw_hp": ((RECIPES_ROW, RECIPES_ROW, RECIPES_ROW, TENSOR_2, None, None), "fpp"),
    "blockwise": ((BLOCK, SQUARE, BLOCK, SQUARE, BLOCK, BLOCK), "ppp"),
    "mxfp8": ((MX8,) * 6, "fpp"),
    "mxfp6": ((MX6, MX6, MX6_G, MX6, MX6_G, MX6), "fpp"),
    "mxfp4": ((MX4, MX4, DRAWN, DRAWN, DRAWN, DRAWN), "fpp"),
    "nvfp4": (
        (NV, NV_SQUARE, (*NV, "stochastic"), NV_SQUARE, (*NV, "stochastic", 16), (*NV, "nearest_even", 16)),
        "fpp",
    ),
}


def described(operand):
    """An operand as in RECORDED."""
    if operand.scheme is None:
        assert operand.hadamard == 0
        return None
    scale = operand.scheme.scale
    return operand.scheme.element, scale.block, scale.rule, operand.scheme.rounding, operand.hadamard


def full(fields):
    """Fields that are left out are those of plain rounding."""
    return None if fields is None else (*fields, *("nearest_even", 0)[len(fields) - 3 :])


def test_every_recipe_is_recorded():
    assert list(RECIPES) == list(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_records(name):
    """Besides these fields every scheme is the default one."""
    recipe, (wanted, sums) = RECIPES[name], RECORDED[name]
    assert recipe.name == name
    assert recipe.note
    for place, one, fields in zip(PLACES, recipe.operands, wanted, strict=True):
        assert described(one) == full(fields), place
        assert one.source == "tensor"
        if one.scheme is not None:
            assert (one.scheme.nan, one.scheme.overflow, one.scheme.scale.stored) == (
                "block",
                "saturate",
                "decode",
            )
            assert (one.scheme.outer is not None) == (name == "nvfp4")
    products = (recipe.output, recipe.input_grad, recipe.weight_grad)
    assert "".join(product.accumulation[0] for product in products) == sums


def normals(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mixed_and_quantized(name, x):
    """For each quantized operand: what is rounded, and its `Quantized`; x stands for all three tensors."""
    for which in PRODUCTS:
        record = getattr(RECIPES[name], which)
        for matrix, one, q in zip(
            {"output": (x, x), "input_grad": (x, x.T), "weight_grad": (x.T, x.T)}[which],
            (record.a, record.b),
            operands(which, name, x=x, w=x, g=x, seed=1),
            strict=True,
        ):
            if one.scheme is not None:
                yield (hadamard(matrix, one.hadamard) if one.hadamard else matrix), q


def largest_values(q):
    """What each element would be with the element format's largest code."""
    codes = np.full(q.shape, int(np.nanargmax(q.scheme.format.values)), q.codes.dtype)
    return dequantize(replace(q, codes=codes)).astype(np.float64)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])
def test_no_element_saturates(name):
    """A quotient that is rounded to nearest may be half a unit too small."""
    for x, q in mixed_and_quantized(name, normals(128, 128)):
        assert np.all(np.abs(x) <= largest_values(q) * (1 + 2.0**-24))


def test_how_far_nvfp4_saturates():
    """Its block scales are rounded to nearest in e4m3: 1 in 17 at most where they are normal, 1 in 3 below."""
    x = normals(128, 128)
    x[:, 64:] *= np.float32(2.0**-14)
    lost = []
    for given, q in mixed_and_quantized("nvfp4", x):
        blocks = np.repeat(q.scale, 16, axis=-1)
        blocks = np.repeat(blocks, 16, axis=0) if blocks.shape[0] < q.shape[0] else blocks
        share = np.maximum(1 - largest_values(q) / np.abs(given), 0)
        assert np.all(share <= np.where(blocks >= 0x08, 1 / 17, 1 / 3) + 2.0**-20)
        lost.append(share.max())
    assert max(lost) > 0.04


def test_weights_have_the_same_codes_both_ways():
    """One scale for the tensor, or square blocks; rows and blocks of rows have others."""
    w = normals(256, 384) * np.exp2(normals(256, 1, seed=1))
    for name, recipe in RECIPES.items():
        forward, backward = recipe.output.b, recipe.input_grad.b
        if forward.scheme is None:
            continue
        q = operands("output", name, x=w, w=w)[1]
        again = operands("input_grad", name, w=w, g=w.T, seed=1)[1]
        same = np.array_equal(again.codes, q.codes.T) and np.array_equal(again.scale, q.scale.T)
        assert same == forward.serves_transposed(backward) == (name in ("tensorwise", "blockwise", "nvfp4"))


def means(x, scheme, count=4096):
    """The mean over evenly spaced random words of the values that x, rounded stochastically, takes."""
    words = (np.arange(count, dtype=np.uint64) << np.uint64(20)).astype(np.uint32)
    rows = np.broadcast_to(x, (count, x.size))
    q = quantize(rows, scheme, random_bits=np.broadcast_to(words[:, None], rows.shape).copy())
    step = np.exp2(q.scale[0].astype(np.float64) - 127)
    return dequantize(q).astype(np.float64).mean(0), step


@pytest.mark.parametrize("seed", range(4))
def test_stochastic_rounding_of_mxfp4_has_no_bias(seed):
    """Also for the largest element, which lies in (3, 6] steps: what 3/4 does for scales rounded down."""
    x = normals(32, seed=seed) * np.float32(1.3**seed)
    drawn = RECIPES["mxfp4"].input_grad.a.scheme
    mean, step = means(x, drawn)
    assert 3 < np.abs(x).max() / step <= 6
    assert np.all(np.abs(mean - x) <= 2 * step * 2.0**-12)  # the words' spacing, in the largest steps of e2m1


def test_scales_rounded_down_are_biased():
    """A largest element of 7 saturates at 6."""
    x = np.linspace(-7, 7, 32, dtype=np.float32)
    floor = replace(SCHEMES["mxfp4"], name="floor_drawn", rounding="stochastic")
    mean, step = means(x, floor)
    assert step == 1
    assert np.abs(mean - x).max() > 0.9
    mean, step = means(x, RECIPES["mxfp4"].input_grad.a.scheme)
    assert np.abs(mean - x).max() <= 2 * step * 2.0**-12


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
@pytest.mark.parametrize("shift", [27, 70])
def test_small_gradients_keep_their_codes(name, shift):
    """Times 2**-27 (1e-8) and 2**-70 (far below torchao's floor of 1e-12)."""
    g, small = normals(32, 32), np.float32(2.0**-shift)
    x = np.ones((32, 32), np.float32)
    for which in ("input_grad", "weight_grad"):
        before = operands(which, name, x=x, w=x, g=g, seed=5)[0]
        after = operands(which, name, x=x, w=x, g=g * small, seed=5)[0]
        if isinstance(before, Quantized):
            assert_same_bits(after.codes, before.codes)
            assert_same_bits(dequantize(after), dequantize(before) * small)


def from_output(x, scheme):
    """(values of x quantized along its first axis, the same from codes along its last, smallest normal values)."""
    forward, backward = Operand(scheme=scheme), Operand(scheme=scheme, source="output")
    first, own = quantize(x, scheme), quantize(x.T, scheme)
    again = operand(x.T, backward, forward)
    ones = np.ones_like(first.codes) << scheme.format.mantissa_bits
    normal = [dequantize(replace(q, codes=ones)) for q in (first, quantize(x.T, scheme), again)]
    least = np.maximum(np.maximum(normal[0], normal[1].T), normal[2].T)
    return dequantize(own).T, dequantize(again).T, least


@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
def test_codes_of_the_output_requantize_without_loss(name, spread):
    """Powers of two: elements that neither rounding makes subnormal keep their values; of normal ones all but a few."""
    scheme = RECIPES[name].output.a.scheme
    x = normals(512, 512) * np.exp2(spread * normals(512, 1, seed=1))
    own, again, least = from_output(x, scheme)
    differ = own != again
    assert not differ[np.abs(x) >= least].any()
    assert differ.mean() <= (0.0005 if spread == 0 else 0.15)
    errors = [np.linalg.norm(values - x) / np.linalg.norm(x) for values in (own, again)]
    assert errors[1] <= errors[0] * 1.001


def test_recipes_that_keep_codes():
    kept = {name for name, recipe in RECIPES.items() if saving_codes(recipe) is not recipe}
    assert kept == {"rowwise", "blockwise", "mxfp8", "mxfp6", "mxfp4"}
    x, g = normals(64, 96), normals(64, 32, seed=1)
    for name in kept:
        recipe = saving_codes(RECIPES[name])
        assert recipe.name == f"{name}_codes"
        assert recipe.output == RECIPES[name].output
        assert recipe.input_grad == RECIPES[name].input_grad
        values = dequantize(quantize(x, recipe.output.a.scheme))
        wanted = operands("weight_grad", name, x=values, g=g, seed=3)
        assert_same_bits(operands("weight_grad", recipe, x=x, g=g, seed=3)[1], wanted[1])


def test_each_matrix_comes_from_its_own_codes():
    """x.T from those of x, w.T from those of w: here of 4 and 8 bits."""
    four, eight = (RECIPES[name].output.a for name in ("mxfp4", "mxfp8"))
    again = replace(eight, source="output")
    own = Recipe(
        name="own", output=Product(a=four, b=eight), input_grad=Product(a=eight, b=again), weight_grad=Product(a=eight, b=again)
    )  # fmt: skip
    x, w, g = normals(64, 96), normals(32, 96, seed=1), normals(64, 32, seed=2)
    rounded = {"x": dequantize(quantize(x, four.scheme)), "w": dequantize(quantize(w, eight.scheme))}
    for which, matrix in (("weight_grad", "x"), ("input_grad", "w")):
        got = operands(which, own, x=x, w=w, g=g)[1]
        assert_same_bits(got, quantize(rounded[matrix].T, eight.scheme))
    assert (
        dequantize(operands("weight_grad", own, x=x, g=g)[1]) != dequantize(quantize(x.T, eight.scheme))
    ).any()


def test_other_scales_change_nearly_every_value():
    """Why `rowwise` has powers of two."""
    own, again, _ = from_output(normals(256, 256), SCHEMES["fp8_rowwise"])
    assert (own != again).mean() > 0.5
    x = normals(256, 256)
    assert np.linalg.norm(again - x) > 1.2 * np.linalg.norm(own - x)


def test_draws_are_distinct():
    """One matrix in the place of all: operands draw their own words, other seeds others, the same seed the same."""
    x = normals(32, 32)
    x = x + x.T
    for name in ("mxfp4", "nvfp4"):
        recipe = RECIPES[name]
        seen = {}
        for seed in (0, 1, 2**40):
            for which in PRODUCTS:
                record, made = getattr(recipe, which), operands(which, name, x=x, w=x, g=x, seed=seed)
                again = operands(which, name, x=x, w=x, g=x, seed=seed)
                for side, one, q, same in zip("ab", (record.a, record.b), made, again, strict=True):
                    assert_same_bits(q.codes, same.codes)
                    key = q.codes.tobytes()
                    kind = (one.scheme, one.hadamard) if not one.is_stochastic else (seed, which, side)
                    assert seen.setdefault(key, kind) == kind
        drawn = sum(one.is_stochastic for one in recipe.operands)
        assert sum(len(kind) == 3 for kind in seen.values()) == 3 * drawn


def test_gradients_of_mxfp4_have_no_bias():
    """The mean of 64 draws is eight times as near as one, of dx and dw; rounded to nearest it would stay where it is."""
    x, w, g = normals(32, 64), normals(32, 64, seed=1), normals(32, 32, seed=2)
    draws = [training_linear_vjp(g, x, w, "mxfp4", seed=seed)[:2] for seed in range(64)]
    for made, exact in zip(zip(*draws, strict=True), (g @ w, g.T @ x), strict=True):
        one, mean = (
            np.linalg.norm(value - exact) / np.linalg.norm(exact) for value in (made[0], np.mean(made, 0))
        )
        assert 0.15 < one < 0.35
        assert mean < 1.2 * one / 8


def test_which_words():
    """Element i of g, the third of the six operands, draws word i of stream 2; of x.T, the last, word i of stream 5."""
    g = normals(32, 64)
    scheme = RECIPES["mxfp4"].input_grad.a.scheme
    words = random_bits((32, 64), seed=9, stream=2)
    wanted = quantize(hadamard(g, 32), scheme, random_bits=words)
    q, _ = operands("input_grad", "mxfp4", w=normals(64, 96), g=g, seed=9)
    assert_same_bits(q.codes, wanted.codes)
    x = normals(32, 96)
    words = random_bits((96, 32), seed=9, stream=5)
    wanted = quantize(hadamard(x.T, 32), scheme, random_bits=words)
    assert_same_bits(operands("weight_grad", "mxfp4", x=x, g=g, seed=9)[1].codes, wanted.codes)


def test_power_of_two_names_itself():
    scheme = power_of_two(SCHEMES["fp8_rowwise"])
    assert scheme.name == "fp8_rowwise_pow2"
    scale = quantize(normals(64, 64), scheme).scale
    plain = quantize(normals(64, 64), "fp8_rowwise").scale
    assert np.array_equal(scale, np.exp2(np.ceil(np.log2(plain.astype(np.float64)))))


ROW = RECIPES["rowwise"].output.a


def test_names_and_records():
    assert recipe_of("mxfp8") is RECIPES["mxfp8"]
    own = Recipe(name="own")
    assert recipe_of(own) is own
    assert repr(own) == "Recipe(own)"
    refused(
        ValueError,
        r"unknown recipe 'mxfp9'; the nearest is mxfp8; there are bf16, tensorwise, .*nvfp4",
        recipe_of,
        "mxfp9",
    )
    refused(TypeError, "given by name or as a record", recipe_of, 8)


def test_operands_in_the_order_of_the_products():
    marked = [Operand(scheme=SCHEMES[name]) for name in list(SCHEMES)[: len(PLACES)]]
    products = [Product(a=a, b=b) for a, b in zip(marked[::2], marked[1::2], strict=True)]
    recipe = Recipe(name="own", output=products[0], input_grad=products[1], weight_grad=products[2])
    assert recipe.operands == tuple(marked)
    assert PLACES == (
        "output.a", "output.b", "input_grad.a", "input_grad.b", "weight_grad.a", "weight_grad.b",
    )  # fmt: skip


def test_who_is_stochastic():
    assert {name for name, recipe in RECIPES.items() if recipe.is_stochastic} == {"mxfp4", "nvfp4"}


def test_codes_that_serve_both_ways():
    """One scale for the tensor, or square blocks; never rows, draws or mixed elements."""
    serve = {
        name
        for name, recipe in RECIPES.items()
        for forward, backward in (
            (recipe.output.a, recipe.weight_grad.b),
            (recipe.output.b, recipe.input_grad.b),
        )
        if forward.serves_transposed(backward)
    }
    assert serve == {"tensorwise", "blockwise", "nvfp4"}
    square = RECIPES["nvfp4"].output.b
    assert square.serves_transposed(square)
    mixed = replace(square, hadamard=16)
    assert not mixed.serves_transposed(mixed)
    assert not square.serves_transposed(mixed)
    drawn = replace(square, scheme=replace(square.scheme, rounding="stochastic"))
    assert not drawn.serves_transposed(drawn)
    assert not Operand().serves_transposed(Operand())
    oblong = replace(square, scheme=replace(square.scheme, scale=replace(square.scheme.scale, block=(8, 16))))
    assert not oblong.serves_transposed(oblong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Operand(hadamard=12), "hadamard is 0 or a power of two, got 12"),
        (lambda: Operand(hadamard=-2), "hadamard is 0 or a power of two"),
        (lambda: Operand(source="input"), "source is one of tensor, output"),
        (lambda: Product(accumulation="slow"), "accumulation is one of fast, precise"),
        (lambda: Product(a=Operand(hadamard=16)), "one Hadamard transform, got 16 and 0"),
    ],
)
def test_fields(make, message):
    refused(ValueError, message, make)


def test_codes_of_the_output_serve_the_gradients_alone():
    again = Operand(scheme=ROW.scheme, source="output")
    with pytest.raises(
        ValueError, match=r"weight_grad.a of own: source 'output' is for input_grad.b and weight_grad.b"
    ):
        Recipe(name="own", weight_grad=Product(a=again))
    refused(ValueError, r"output.b of own: source", Recipe, name="own", output=Product(b=again))
    good = Recipe(name="own", output=Product(a=ROW, b=ROW), weight_grad=Product(b=again))
    assert good.weight_grad.b.source == "output"
    drawn = Operand(scheme=replace(ROW.scheme, rounding="stochastic"))
    mixed = Product(a=replace(ROW, hadamard=16), b=replace(ROW, hadamard=16))
    for output in (Product(a=drawn), mixed):
        with pytest.raises(ValueError, match="mixed or rounded stochastically do not serve backward"):
            Recipe(name="own", output=output, weight_grad=Product(b=again))


def test_the_key_holds_how_sums_are_accumulated():
    """Plans and choices are remembered by the key: another accumulation is another recipe."""
    recipe = RECIPES["rowwise"]
    for product in ("output", "input_grad", "weight_grad"):
        record = getattr(recipe, product)
        other = "fast" if record.accumulation == "precise" else "precise"
        assert replace(recipe, **{product: replace(record, accumulation=other)}).key != recipe.key
