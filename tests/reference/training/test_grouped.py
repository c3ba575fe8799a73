"""Linear layers of several experts: each group as a layer of its own, nothing between groups, zeros where there is no group."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized
from reference import SCHEMES
from reference.layers.hadamard import hadamard
from reference.training.grouped import group_step, grouped_operands, padded_rows
from reference.training.recipe import RECIPES, Operand, Product, Recipe
from tests.support.bits import tensor_of
from tests.support.refusals import refused

T, K, N, E = 90, 128, 128, 5
#: The first and the third expert have no tokens; the last seven rows no expert.
OFFSETS = np.array([0, 33, 33, 70, 83], np.int32)
PLAIN = [name for name, recipe in RECIPES.items() if not recipe.is_stochastic]


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal(shape) * size).astype(ml_dtypes.bfloat16)
        for shape, size in (((T, K), 1), ((E, N, K), 0.05), ((T, N), 1e-3))
    ]


def ranges(offsets=OFFSETS):
    return list(zip((0, *offsets[:-1]), offsets, strict=True))


def filled(rows, step):
    """Rows of zeros up to a multiple of step."""
    return np.concatenate([rows, np.zeros((-len(rows) % step, rows.shape[1]), rows.dtype)])


@pytest.mark.parametrize("name", PLAIN)
def test_a_group_is_a_layer_of_its_own(name):
    x, w, g = arrays()
    step = group_step(name)
    y = reference.grouped_linear(x, w, OFFSETS, name)
    dx, dw = reference.grouped_linear_vjp(g, x, w, OFFSETS, name)
    for expert, (start, end) in enumerate(ranges()):
        rows = slice(start, end)
        if start == end:
            assert not dw[expert].any()
            continue
        assert_same_bits(y[rows], reference.training_linear(x[rows], w[expert], name))
        one = filled(g[rows], step), filled(x[rows], step), w[expert]
        truth = reference.training_linear_vjp(*one, name)
        assert_same_bits(dx[rows], truth[0][: end - start])
        assert_same_bits(dw[expert], truth[1])


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_no_expert_are_zeros_and_reach_nothing(name):
    x, w, g = arrays()
    results = []
    for poison in (1.0, np.nan):
        x[OFFSETS[-1] :], g[OFFSETS[-1] :] = poison, poison
        y = reference.grouped_linear(x, w, OFFSETS, name)
        results.append([y, *reference.grouped_linear_vjp(g, x, w, OFFSETS, name, seed=3)])
        assert not y[OFFSETS[-1] :].any()
        assert not results[-1][1][OFFSETS[-1] :].any()
    for clean, poisoned in zip(*results, strict=True):
        assert_same_bits(clean, poisoned)


def bits_of(results):
    views = (
        (t.view(torch.int16).numpy() if isinstance(t, torch.Tensor) else np.asarray(t).view(np.int16))
        for t in results
    )
    return [np.array(view) for view in views]


def assert_libraries_agree(name, converted, offsets=OFFSETS, length=K):
    """NumPy's results and those of converted arrays."""
    x, w, g = arrays()
    x, w, g = x[:, :length], w[: len(offsets), :length, :length], g[:, :length]
    results = []
    for to in (np.ascontiguousarray, converted):
        one = [to(np.ascontiguousarray(a)) for a in (x, w, g)]
        ends = to(offsets)
        results.append(reference.grouped_linear(*one[:2], ends, name))
        results.extend(reference.grouped_linear_vjp(one[2], *one[:2], ends, name, seed=3))
    found = bits_of(results)
    for truth, made in zip(found[:3], found[3:], strict=True):
        assert np.array_equal(truth, made)


@pytest.mark.parametrize("name", RECIPES)
def test_torch_agrees(name):
    assert_libraries_agree(name, tensor_of)


# JAX compiles a program for each shape: groups of one length, and the other recipes at night.
@pytest.mark.parametrize(
    "name", [name if name == "mxfp8" else pytest.param(name, marks=pytest.mark.nightly) for name in RECIPES]
)
def test_jax_agrees(name):
    length = 128 if name == "blockwise" else 32
    assert_libraries_agree(
        name, jnp.asarray, np.array([0, length, length], np.int32)[: 90 // length + 1], length
    )


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_words_are_those_of_the_whole_tensors(name):
    """Of g (T, N) for the inputs' gradient; of g.T (N, P), groups filled up, for the weights'."""
    x, w, g = arrays()
    recipe, step = RECIPES[name], group_step(name)
    rows = reference.random_bits((T, N), seed=3, stream=2)
    columns = reference.random_bits((N, padded_rows(T, E, step)), seed=3, stream=4)
    along = grouped_operands("input_grad", name, OFFSETS, x=x, w=w, g=g, seed=3)
    across = grouped_operands("weight_grad", name, OFFSETS, x=x, w=w, g=g, seed=3)
    first = 0
    for expert, (start, end) in enumerate(ranges()):
        if start == end:
            assert along[expert] is None
            continue
        last = first + -(-(end - start) // step) * step
        for found, matrix, words, record in (
            (along[expert][0], g[start:end], rows[start:end], recipe.input_grad.a),
            (across[expert][0], filled(g[start:end], step).T, columns[:, first:last], recipe.weight_grad.a),
        ):
            matrix, words = map(np.ascontiguousarray, (matrix, words))
            mixed = hadamard(matrix, record.hadamard) if record.hadamard else matrix
            assert_same_quantized(found, reference.quantize(mixed, record.scheme, random_bits=words))
        first = last


def test_padded_rows_are_those_of_the_worst_split():
    for rows, experts, step in itertools.product(range(6), (1, 2, 3), (1, 2, 4)):
        most = max(
            sum(-(-(b - a) // step) * step for a, b in itertools.pairwise((0, *ends, rows)))
            for ends in itertools.combinations_with_replacement(range(rows + 1), experts - 1)
        )
        assert most == padded_rows(rows, experts, step)


def test_codes_from_the_output():
    """Operands that are made of what the forward ones stand for."""
    recipe = RECIPES["rowwise"]
    product = recipe.weight_grad
    recipe = replace(
        recipe, name="again", weight_grad=replace(product, b=replace(product.b, source="output"))
    )
    x, w, g = arrays()
    *_, (_, found) = grouped_operands("weight_grad", recipe, OFFSETS, x=x, w=w, g=g)
    start, end = ranges()[-1]
    forward = reference.dequantize(reference.quantize(x[start:end], recipe.output.a.scheme), "bfloat16")
    matrix = np.ascontiguousarray(filled(forward, 16).T)
    assert_same_quantized(found, reference.quantize(matrix, recipe.weight_grad.b.scheme))


def test_wrong_calls():
    x, w, g = arrays()
    for offsets, message in (
        ([5, 3, 5, 5, 5], "do not fall"),
        ([1, 2, 3, 4, 91], "within the 90 rows"),
        ([1, 2], "one integer for each of 5"),
        ([0.0] * 5, "float64"),
    ):
        refused(ValueError, message, reference.grouped_linear, x, w, np.array(offsets), "rowwise")
    refused(ValueError, r"w \(E, N, K\)", reference.grouped_linear, x, w[0], OFFSETS, "rowwise")
    with pytest.raises(TypeError, match="one dtype"):
        reference.grouped_linear(x, w.astype(np.float32), OFFSETS, "rowwise")
    refused(ValueError, "unknown recipe", reference.grouped_linear_vjp, g, x, w, OFFSETS, "rowise")


def test_groups_are_filled_up_to_sixteen():
    """What a matrix product of codes takes, also where blocks are shorter."""
    scheme = SCHEMES["nvfp4"]
    short = replace(scheme, name="nvfp4_b8", scale=replace(scheme.scale, block=8))
    operand = Operand(scheme=short)
    assert group_step(Recipe(name="short blocks", weight_grad=Product(a=operand, b=operand))) == 16
