"""Records of recipes: what they refuse, and what they say of themselves."""

from dataclasses import replace

import pytest

from reference import SCHEMES
from reference.training import RECIPES, Recipe
from reference.training.recipe import PLACES, Operand, Product, recipe_of

ROW = RECIPES["rowwise"].output.a


def test_names_and_records():
    assert recipe_of("mxfp8") is RECIPES["mxfp8"]
    own = Recipe(name="own")
    assert recipe_of(own) is own
    assert repr(own) == "Recipe(own)"
    with pytest.raises(ValueError, match=r"unknown recipe 'mxfp9'; there are bf16, tensorwise, .*nvfp4"):
        recipe_of("mxfp9")
    with pytest.raises(TypeError, match="given by name or as a record"):
        recipe_of(8)


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
    with pytest.raises(ValueError, match=message):
        make()


def test_codes_of_the_output_serve_the_gradients_alone():
    again = Operand(scheme=ROW.scheme, source="output")
    with pytest.raises(
        ValueError, match=r"weight_grad.a of own: source 'output' is for input_grad.b and weight_grad.b"
    ):
        Recipe(name="own", weight_grad=Product(a=again))
    with pytest.raises(ValueError, match=r"output.b of own: source"):
        Recipe(name="own", output=Product(b=again))
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
