"""Preshuffled weights of experts (E, N, K): parts bit for bit, and the operator of the grouped product. The kernel's bits are
compared in Triton's interpreter (`tests/emulator/programs/linear_small.py`)."""

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.matmul.preshuffled import layout, linear
from fast.matmul.preshuffled.grouped import grouped_linear_small
from reference import SCHEMES
from tests.support.linear_cases import inputs, weight

BF16 = torch.bfloat16
EXPERTS, N, K = 3, 128, 256
NAMES = [
    name for name in SCHEMES if layout.scheme_reason(SCHEMES[name], (EXPERTS, N, K), 2) is None
]  # fmt: skip
ENDS = torch.tensor([4, 4, 9], dtype=torch.int32)


def same(first, second):
    """Whether both are None, or the same bits in one dtype and shape."""
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)


def matrices(name, shape=(N, K)):
    return [weight(SCHEMES[name], *shape, seed) for seed in range(EXPERTS)]


def joined(weights):
    """Weights of one scheme with an axis of experts."""
    parts = {part: [getattr(w, part) for w in weights] for part in ("codes", "scale", "zero")}
    made = {part: None if each[0] is None else torch.stack(each) for part, each in parts.items()}
    return replace(weights[0], **made, shape=(len(weights), *weights[0].shape), axis=2)


def expert(q, at):
    """One of the experts of a weight in any layout."""
    parts = {part: getattr(q, part) for part in ("codes", "scale", "zero")}
    return {part: None if value is None else value[at] for part, value in parts.items()}


@pytest.mark.parametrize("shape", [(N, K), (72, 768)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_of_each_expert(name, shape):
    weights = matrices(name, shape)
    if weights[0].outer is not None:
        # One is of all experts.
        weights = [replace(one, outer=weights[0].outer) for one in weights]
    w = joined(weights)
    made = linear.preshuffled(w)
    for at, one in enumerate(weights):
        alone = linear.preshuffled(one)
        assert all(same(part, getattr(alone, key)) for key, part in expert(made, at).items())
    for back in (linear.restored(made), layout.restored(made)):
        assert all(same(getattr(back, part), getattr(w, part)) for part in ("codes", "scale", "zero"))
        assert same(fast.dequantize(back), fast.dequantize(w))


def test_the_schemes_that_are_taken():
    assert {
        "int4_g128",
        "int4_g32_asymmetric",
        "int8_rowwise",
        "fp8_rowwise",
        "mxfp8_e4m3",
        "mxfp4",
        "nvfp4",
    } <= set(NAMES)
    assert not {"fp8_tensorwise", "int8_tensorwise", "nf4", "te.nvfp4"} & set(NAMES)


@pytest.mark.parametrize(
    ("shape", "axis", "text"),
    [
        ((3, 128, 256), 1, "along its last axis"), ((3, 100, 128), 2, "multiples of 8"),
        ((3, 128, 100), 2, "multiples of 8"), ((0, 128, 128), 2, "must have rows and columns"),
        ((2, 3, 128, 128), 3, "a matrix, or experts"), ((128,), 0, "a matrix, or experts"),
    ],
)  # fmt: skip
def test_shapes_that_are_not(shape, axis, text):
    assert text in layout.scheme_reason(SCHEMES["int8_rowwise"], shape, axis)
    assert layout.scheme_reason(SCHEMES["int8_rowwise"], (3, 104, 136), 2) is None


def test_more_rows_than_a_grid_holds_go_to_torch():
    """The arranging kernel's grid has 65535 atoms along its second axis."""
    codes = torch.empty((linear.MOST_ROWS_ARRANGED + 64, 64), dtype=torch.uint8, device="meta")
    assert linear.WORDS.kernel(None, ("int4",), (codes,), None) is None


@pytest.mark.parametrize("shape", [(N, K), (72, 384)], ids=str)
@pytest.mark.parametrize("name", ["int4_g128_asymmetric", "int8_rowwise", "fp8_rowwise", "mxfp4"])
def test_the_product_on_a_cpu(name, shape):
    """Of each expert's rows by its own weight; zeros behind the last."""
    weights, x = matrices(name, shape), inputs(11, shape[1], BF16)
    made = grouped_linear_small(x, linear.preshuffled(joined(weights)), ENDS)
    assert same(made[:4], reference.linear(x[:4], weights[0]))
    assert same(made[4:9], reference.linear(x[4:9], weights[2]))
    assert same(made[9:], torch.zeros((2, shape[0]), dtype=BF16))


def test_errors():
    w, x = linear.preshuffled(joined(matrices("int8_rowwise"))), inputs(9, K, BF16)
    for given, text in (
        ((x[:, :128], w, ENDS), r"rows \(T, K\) and experts' weights \(E, N, K\), got \(9, 128\)"),
        ((x[None], w, ENDS), r"got \(1, 9, 256\)"),
        ((x, w, ENDS[:2]), r"one for each of 3 experts, got torch.int32 of shape \(2,\)"),
        ((x, w, ENDS.long()), "int32 offsets"),
        ((x, linear.preshuffled(matrices("int8_rowwise")[0]), ENDS), r"and \(128, 256\)"),
        ((x, w, ENDS.to("meta")), "on one device"),
    ):
        with pytest.raises(ValueError, match=text):
            grouped_linear_small(*given)
    learned = replace(w, scale=w.scale.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match="no gradient for the scales"):
        grouped_linear_small(x, learned, ENDS).sum().backward()


@pytest.mark.parametrize("rows", [9, 300])
def test_the_operator_is_traced(rows):
    """In one graph, rows left open, with its gradient by the dequantized weight."""
    torch.compiler.reset()
    w = joined(matrices("int4_g128_asymmetric"))
    made, seen = linear.preshuffled(w), []

    def backend(graph, example):
        seen.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    x, g = inputs(rows, K, BF16).requires_grad_(), inputs(rows, N, BF16, 8)
    ends = torch.tensor([4, 4, rows], dtype=torch.int32)
    compiled = torch.compile(
        lambda x, ends: grouped_linear_small(x, made, ends), backend=backend, fullgraph=True, dynamic=True
    )
    found = compiled(x, ends)
    assert same(found.detach(), grouped_linear_small(x.detach(), made, ends))
    assert "ao_lab.grouped_linear_small" in {str(target).removesuffix(".default") for target in seen[0]}
    found.backward(g)
    assert same(x.grad, torch._grouped_mm(g, fast.dequantize(w, BF16), ends))


def test_the_operator_is_described_to_torch():
    """Schema, fake and dispatch as torch checks them."""
    made, x = linear.preshuffled(joined(matrices("int8_g32_asymmetric"))), inputs(9, K, BF16)
    operands = (x, made.codes, made.scale, made.zero, ENDS, list(made.shape), made.scheme.key)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.ao_lab.grouped_linear_small.default, operands, test_utils=checks)


@pytest.mark.parametrize(
    ("ends", "owners"), [((5, 3, 8), (5, 5, 8)), ((-2, 4, 8), (0, 4, 8)), ((4, 90, 9), (4, 11, 11))]
)
def test_ends_out_of_order_leave_an_expert_without_rows_of_others(ends, owners):
    """As the kernels have them (`tests/fast/kernels/sm90/test_w4a16_gemm_experts.py`)."""
    w, x = linear.preshuffled(joined(matrices("int4_g128"))), torch.randn(11, K).bfloat16()
    found, wanted = (
        grouped_linear_small(x, w, torch.tensor(one, dtype=torch.int32)) for one in (ends, owners)
    )
    assert torch.equal(found, wanted)
