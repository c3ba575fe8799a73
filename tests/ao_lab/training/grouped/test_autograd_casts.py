"""Operands of grouped products have the bits of `reference.training.grouped.grouped_operands`."""

import itertools
from dataclasses import replace

import pytest
import torch

from ao_lab.training import layers
from ao_lab.training.grouped.autograd import (
    G_T,
    W_T,
    X_T,
    G,
    W,
    X,
    columns_operand,
    layout_of,
    rows_operand,
    token_columns,
    weight_columns,
    weight_operand,
)
from fast.layers.gather import gather_transposed
from reference import SCHEMES, Quantized, dequantize
from reference.training.grouped import group_step, grouped_operands, padded_rows
from reference.training.recipe import RECIPES, Operand
from tests.support.grouped_cases import OFFSETS, E, offsets_of, poison, tensors
from tests.support.refusals import refused


def expected(ends, rows, step):
    """Where rows stand, without a look at offsets on the host: sources of the padded places, and the group of each row and of
    each `step` places."""
    source, of_chunks = [], []
    for expert, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        mine = list(range(start, end))
        mine += [-1] * (-len(mine) % step)
        source += mine
        of_chunks += [expert] * (len(mine) // step)
    count = padded_rows(rows, len(ends), step)
    of_rows = [next((e for e, end in enumerate(ends) if row < end), len(ends)) for row in range(rows)]
    return (
        source + [-1] * (count - len(source)),
        of_rows,
        of_chunks + [len(ends)] * (count // step - len(of_chunks)),
    )


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("experts", [1, 2, 3])
def test_every_split_of_six_rows(experts, step):
    for ends in itertools.combinations_with_replacement(range(7), experts):
        layout = layout_of(torch.tensor(ends, dtype=torch.int32), 6, step)
        found = [t.tolist() for t in (layout.source, layout.of_rows(), layout.of_chunks())]
        assert found == list(expected(ends, 6, step)), ends
        assert layout.ends.dtype == layout.source.dtype == torch.int32


@pytest.mark.parametrize("step", [16, 48])
def test_owners_of_sixteen_places(step):
    for ends in ((0, 7, 40), (40, 40, 40), (0, 0, 0), (16, 32, 33)):
        layout = layout_of(torch.tensor(ends, dtype=torch.int32), 40, step)
        chunks = expected(ends, 40, step)[2]
        assert layout.owners.tolist() == [owner for owner in chunks for _ in range(step // 16)]
        assert layout.owners.dtype == torch.int32


def test_nothing_moves_where_nothing_is_filled_up():
    x = torch.randn(6, 3)
    layout = layout_of(torch.tensor([2, 6], dtype=torch.int32), 6, 1)
    assert layout.columns(x).data_ptr() == x.data_ptr()
    assert layout.of_rows().tolist() == [0, 0, 1, 1, 1, 1]


def test_columns_of_rows_that_are_left_out_are_zeros():
    x = torch.tensor([[float("nan"), float("inf")], [1.0, 2], [3, 4]])
    found = gather_transposed(x, torch.tensor([2, -1, 1, -1], dtype=torch.int32))
    assert torch.equal(found, torch.tensor([[3.0, 0, 1, 0], [4, 0, 2, 0]]))
    assert not gather_transposed(x[:0], torch.tensor([-1, -1], dtype=torch.int32)).any()


QUANTIZED = [name for name in RECIPES if name != "bf16"]
SEED = 7


def made(recipe, offsets, x, w, g):
    """Each operand of all groups: (name, matrix, rows or columns of a group or expert)."""
    layout = layout_of(offsets, x.shape[0], group_step(recipe))
    rows = rows_operand(x, recipe.output.a, layout, SEED, X)
    x_columns = token_columns(x, rows, recipe.weight_grad.b, recipe.output.a, layout, SEED, X_T)
    g_columns = columns_operand(g, recipe.weight_grad.a, layout, SEED, G_T)
    return layout, {
        "output": (rows, weight_operand(w, recipe.output.b, SEED, W)),
        "input_grad": (
            rows_operand(g, recipe.input_grad.a, layout, SEED, G),
            weight_columns(w, recipe.input_grad.b, recipe.output.b, SEED, W_T),
        ),
        "weight_grad": (g_columns.matrix, x_columns.matrix),
    }


def assert_part(found, part, want):
    """Codes and values of a part are those of the reference's operand; a scale that it has once may stand here often."""
    if not isinstance(want, Quantized):
        assert torch.equal(found[part].contiguous().view(torch.int16), want.contiguous().view(torch.int16))
        return
    assert torch.equal(found.codes[part], want.codes)
    got, truth = dequantize(found)[part], dequantize(want)
    assert torch.equal(got.view(torch.int32), truth.view(torch.int32))


def assert_operands(recipe, offsets, x, w, g):
    layout, found = made(recipe, offsets, x, w, g)
    starts = [0, *offsets.tolist()]
    padded = [0, *layout.ends.tolist()]
    for which, (a, b) in found.items():
        truth = grouped_operands(which, recipe, offsets, x=x, w=w, g=g, seed=SEED)
        for expert, pair in enumerate(truth):
            if pair is None:
                assert starts[expert] == starts[expert + 1]
                continue
            if which == "weight_grad":
                part = (slice(None), slice(padded[expert], padded[expert + 1]))
                parts = part, part
            else:
                count = b.shape[0] // E
                parts = slice(starts[expert], starts[expert + 1]), slice(expert * count, (expert + 1) * count)
            for matrix, one, want in zip((a, b), parts, pair, strict=True):
                assert_part(matrix, one, want)


@pytest.mark.parametrize("name", QUANTIZED)
def test_bits_of_every_operand(name):
    """With NaN and infinities in rows of no expert."""
    offsets = offsets_of("uneven")
    x, w, g = tensors()
    g[83:] = float("inf")
    assert_operands(RECIPES[name], offsets, poison(x, offsets), w, g)


@pytest.mark.parametrize("case", [case for case in OFFSETS if case != "uneven"])
def test_bits_in_other_groups(case):
    for name in ("tensorwise", "rowwise", "nvfp4"):
        assert_operands(RECIPES[name], offsets_of(case), *tensors())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bits_of_other_dtypes(dtype):
    for name in ("tensorwise", "rowwise", "nvfp4", "mxfp8"):
        assert_operands(RECIPES[name], offsets_of("uneven"), *tensors(getattr(torch, dtype)))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_group(name, bad):
    offsets = offsets_of("uneven")
    x, w, g = tensors()
    x[40, 3], g[41, 5], w[2, 7, 9] = bad, bad, bad
    x[2], g[61] = 0, 0
    assert_operands(RECIPES[name], offsets, x, w, g)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "nvfp4"])
def test_sizes_far_apart(name):
    """Groups, experts and rows a million times larger than others: each has the scale of its own."""
    offsets = offsets_of("uneven")
    x, w, g = tensors()
    x[:7] *= 1e6
    x[60:70] *= 1e-6
    g[:, ::2] *= 2.0**-20
    g[60:] = 0
    w[1] *= 1e5
    w[3] = 0
    assert_operands(RECIPES[name], offsets, x, w, g)


def test_operands_from_the_output():
    recipe = RECIPES["rowwise"]
    again = replace(
        recipe,
        name="again",
        input_grad=replace(recipe.input_grad, b=replace(recipe.input_grad.b, source="output")),
        weight_grad=replace(recipe.weight_grad, b=replace(recipe.weight_grad.b, source="output")),
    )
    assert_operands(again, offsets_of("uneven"), *tensors())


def drawn(operand):
    """The operand rounded stochastically."""
    return replace(operand, scheme=replace(operand.scheme, name="drawn", rounding="stochastic"))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp4", "nvfp4"])
def test_every_operand_drawn(name):
    """Words of the place of each among the six, and of each element in the tensor of all groups."""
    recipe = RECIPES[name]
    products = {
        which: replace(
            getattr(recipe, which), a=drawn(getattr(recipe, which).a), b=drawn(getattr(recipe, which).b)
        )
        for which in ("output", "input_grad", "weight_grad")
    }
    assert_operands(replace(recipe, name="drawn", **products), offsets_of("uneven"), *tensors())


def test_the_table_has_the_scale_of_each_row_in_each_group():
    """As `torch._scaled_grouped_mm` takes them: (E, rows)."""
    offsets = offsets_of("uneven")
    x, w, g = tensors()
    for name in ("rowwise", "tensorwise"):
        recipe = RECIPES[name]
        layout = layout_of(offsets, x.shape[0], 16)
        found = columns_operand(x, recipe.weight_grad.b, layout)
        truth = grouped_operands("weight_grad", recipe, offsets, x=x, w=w, g=g)
        for expert, pair in enumerate(truth):
            if pair is not None:
                scale = pair[1].scale.reshape(-1).expand(x.shape[1])
                assert torch.equal(found.table[expert], scale)


@pytest.mark.parametrize("name", RECIPES)
def test_groups_are_filled_up_as_single_layers_are(name):
    assert group_step(name) == layers.steps(RECIPES[name])[0]


@pytest.mark.parametrize("name", ["rowwise", "tensorwise", "blockwise", "mxfp8"])
def test_weights_that_lie_along_the_other_axis(name):
    """As transformers stores some (`is_transposed`): the same bits, and those of a copy."""
    _, w, _ = tensors()
    operand = RECIPES[name].output.b
    transposed = w.transpose(1, 2).contiguous().transpose(1, 2)
    assert not transposed.is_contiguous()
    for cast, one in ((weight_operand, (operand,)), (weight_columns, (RECIPES[name].input_grad.b, operand))):
        found, wanted = (cast(weight, *one) for weight in (transposed, w))
        assert found.shape == wanted.shape
        assert found.scheme == wanted.scheme
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scale, wanted.scale)


def test_dense_weights_are_not_copied():
    """Along either axis; those of rows come as one matrix."""
    _, w, _ = tensors()
    for found in (weight_operand(w, Operand()), weight_columns(w, Operand(), Operand())):
        assert found.data_ptr() == w.data_ptr()
    assert weight_columns(w, Operand(), Operand()).shape == (E, w.shape[2], w.shape[1])


@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp", "tensorwise", "blockwise", "mxfp8"])
def test_traced_operands_are_those_of_plain_calls(name):
    """Operators of layout, columns and weights: their fakes have the shapes that they make."""
    recipe, offsets = RECIPES[name], offsets_of("uneven")
    x, w, _ = tensors()

    def operands(x, w, offsets):
        layout = layout_of(offsets, x.shape[0], group_step(recipe))
        columns = columns_operand(x, recipe.weight_grad.b, layout)
        transposed = weight_columns(w, recipe.input_grad.b, recipe.output.b)
        matrix, table = columns.matrix, [] if columns.table is None else [columns.table]
        matrix = [matrix] if isinstance(matrix, torch.Tensor) else [matrix.codes, matrix.scale]
        return [layout.ends, *matrix, *table, transposed.codes, transposed.scale]

    traced = torch.compile(operands, fullgraph=True, backend="aot_eager")(x, w, offsets)
    for found, wanted in zip(traced, operands(x, w, offsets), strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_blocks_over_several_tokens_are_refused():
    layout = layout_of(offsets_of("uneven"), 90, 128)
    square = Operand(scheme=SCHEMES["fp8_128x128"])
    for cast in (rows_operand, columns_operand):
        refused(ValueError, "over several tokens", cast, tensors()[0], square, layout)
