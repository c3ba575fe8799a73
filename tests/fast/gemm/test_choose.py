"""Which family multiplies: order, ranges of rows, and that products ask."""

import csv
import itertools
import json
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fast
from ao_lab.config.recipe import named
from experiments.report import families as families_page
from fast import dispatch
from fast.gemm import families
from fast.gemm.choose import Range, able, by_rows, choose, in_one_launch
from fast.gemm.families import (
    CODES,
    HOPPER,
    PRESHUFFLED,
    SPARSE,
    SPARSE_INT4,
    Device,
    Problem,
    device_of,
    of_stored,
)
from fast.matmul.preshuffled import linear

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
ROOT = Path(__file__).resolve().parents[3]
BF16, HALF = torch.bfloat16, torch.float16


HOST = Device((9, 0), 132, nvrtc=False)
OLDER = Device((8, 0), 108, nvrtc=True)


def weight(rows, shape=(14336, 4096), element="int4", group=128, inputs=BF16, device=HOPPER, **more):
    """A product by a preshuffled weight."""
    return Problem(PRESHUFFLED, rows, *shape, inputs, device, element, group, **more)


def names(p):
    """The order."""
    return [family.name for family in choose(p)]


GEMV, SMALL_M, GEMM, TORCH = "sm90_w4a16_gemv", "triton_small_m", "sm90_w4a16_gemm", "torch_dequantize"


@pytest.mark.parametrize(
    ("rows", "order"),
    [
        (0, [TORCH]),
        (1, [GEMV, SMALL_M, GEMM, TORCH]),
        (8, [GEMV, SMALL_M, GEMM, TORCH]),
        (9, [SMALL_M, GEMM, TORCH]),
        (64, [SMALL_M, GEMM, TORCH]),
        (128, [GEMM, SMALL_M, TORCH]),
        (129, [GEMM, TORCH]),
    ],
)
def test_order(rows, order):
    assert names(weight(rows)) == order


def test_what_was_measured_goes_first():
    """Where it takes the problem; the others follow in their order. All that take it may be measured."""
    assert [one.name for one in choose(weight(1), GEMM)] == [GEMM, GEMV, SMALL_M, TORCH]
    assert [one.name for one in choose(weight(9), GEMV)] == [GEMV, SMALL_M, GEMM, TORCH]
    assert [one.name for one in choose(weight(17), GEMV)] == [SMALL_M, GEMM, TORCH]
    assert [one.name for one in able(weight(9))] == [SMALL_M, GEMM, GEMV]
    assert [one.name for one in able(weight(300))] == [GEMM]


def test_what_is_not_taken():
    """Other GPUs, dtypes, and lengths that are filled; many rows of NF4; no compiler of CUDA C++."""
    assert names(weight(4, inputs=torch.float32)) == [TORCH]
    assert names(weight(128, device=OLDER)) == [SMALL_M, TORCH]
    assert names(weight(4, (14300, 4096), filled=True)) == [SMALL_M, TORCH]
    assert names(weight(2048, element="nf4", group=64)) == [GEMM, TORCH]
    assert names(weight(2049, element="nf4", group=64)) == [TORCH]
    assert names(weight(4, element="e2m1", group=32, inputs=HALF)) == [SMALL_M, GEMM, TORCH]
    assert [names(weight(rows, device=HOST)) for rows in (1, 128, 129)] == [
        [SMALL_M, TORCH], [SMALL_M, TORCH], [TORCH],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("element", "group", "shape", "most"),
    [
        ("nf4", 64, (14336, 4096), 2048), ("nf4", 64, (1024, 4096), 512), ("e2m1", 16, (14336, 4096), 1024),
        ("e2m1", 16, (1024, 4096), 512), ("e2m1", 32, (1024, 4096), None), ("int8", 0, (14336, 4096), None),
    ],
)  # fmt: skip
def test_many_rows_are_left_to_the_dense_weight(element, group, shape, most):
    """Of levels, and of groups of 16, where that was measured to be faster: sooner for small weights."""
    assert names(weight(most or 1 << 20, shape, element, group)) == [GEMM, TORCH]
    beyond = names(weight((most or 1 << 20) + 1, shape, element, group))
    assert beyond == ([TORCH] if most else [GEMM, TORCH])
    assert names(weight(256, (192, 256), element, group)) == [TORCH]


def filled_times():
    """(problem, microseconds of `triton_small_m`, of torch) of filled weights: torch's by those of 129 rows, but for what the
    product in bfloat16 takes less."""
    with (ROOT / "reports/gpu/filled_times.csv").open(newline="") as lines:
        cells = {
            (row["scheme"], int(row["n"]), int(row["k"]), int(row["rows"])): row
            for row in csv.DictReader(lines)
        }
    for (scheme, n, k, rows), row in cells.items():
        if rows <= 128:
            many = cells[scheme, n, k, 129]
            torch_us = float(many["us"]) - float(many["bf16_us"]) + float(row["bf16_us"])
            p = families_page.problem_of(PRESHUFFLED, scheme, (n, k))._replace(rows=rows, filled=True)
            yield p, float(row["us"]), torch_us


def test_filled_weights_are_multiplied_by_the_quicker_one():
    """Of what was measured on an H200, within 8 percent; torch where that is quicker by more."""
    taken = {}
    for p, small, dense in filled_times():
        first = next(choose(p)).name
        chosen = {SMALL_M: small, TORCH: dense}[first]
        assert chosen < 1.08 * min(small, dense), p
        taken.setdefault(first, []).append(p)
    assert (len(taken[SMALL_M]), len(taken[TORCH])) == (38, 6)
    assert {p.rows for p in taken[TORCH]} == {128}


@pytest.mark.parametrize(
    ("average", "device", "order"),
    [
        (0, HOPPER, [SMALL_M, TORCH]),
        (1, HOPPER, [SMALL_M, TORCH]),
        (40.5, HOPPER, [GEMM, SMALL_M, TORCH]),
        (65, HOPPER, [GEMM, TORCH]),
        (41, OLDER, [SMALL_M, TORCH]),
        (65, OLDER, [TORCH]),
    ],
)
def test_experts(average, device, order):
    assert names(weight(average, device=device, experts=8)) == order


def test_plain_weights():
    """One row, several, and more than kernels take; packed integers of other widths have one kernel for all."""

    def of(scheme, rows, device=HOST):
        w = fast.quantize(torch.zeros(64, 512), scheme, packed=True)
        return next(choose(of_stored(w, rows, BF16)._replace(device=device))).name

    assert [of("int4_g64", rows) for rows in (0, 1, 2, 32, 33)] == [
        TORCH, "triton_gemv_w4a16", "triton_gemm_small_m", "triton_gemm_small_m", TORCH,
    ]  # fmt: skip
    assert [of("int8_rowwise", rows) for rows in (1, 128)] == ["triton_gemv_w8a16", "triton_gemm_small_m"]
    assert of("mxfp4", 1) == "triton_gemv_any"
    assert [of("int3_g64", rows, HOPPER) for rows in (1, 32, 33)] == ["sm90_intn_small_m"] * 2 + [TORCH]
    assert of("int3_g64", 1) == "triton_gemv_any"


def test_codes():
    """One row, several; int8 by wgmma where its tiles fill the GPU."""

    def of(rows, element="int8", **more):
        return next(choose(Problem(CODES, rows, 4096, 4096, BF16, HOPPER, element, **more))).name

    assert [of(rows) for rows in (1, 2, 255, 1024)] == [
        "triton_gemv_w8a8", "triton_int_scaled_mm", "triton_int_scaled_mm", "sm90_s8_gemm",
    ]  # fmt: skip
    assert of(1024, zero=True) == "triton_int_scaled_mm"
    empty = Problem(CODES, 8192, 4096, 0, BF16, HOPPER, "int8")
    assert names(empty) == ["triton_int_scaled_mm"], "sums of nothing are no tensor map's"
    assert of(1024, "float8_e4m3fn") == "triton_scaled_mm"


def test_sparse():
    """Whole copies of 16 bytes, inputs of the same element, on Hopper."""

    def of(element, k=4096, out=BF16, device=HOPPER):
        return names(Problem(SPARSE, 1024, 4096, k, out, device, element))

    assert [of(element) for element in ("bfloat16", "float16", "int8", "float8_e5m2")] == [
        ["sm90_sparse24_gemm", TORCH]
    ] * 4
    assert [of("bfloat16", k) for k in (4104, 4112)] == [[TORCH], ["sm90_sparse24_gemm", TORCH]]
    assert [of("int8", k) for k in (4112, 4128)] == [[TORCH], ["sm90_sparse24_gemm", TORCH]]
    assert of("int4") == of("int8", out=torch.int32) == of("int8", device=HOST) == [TORCH]


def test_sparse_int4():
    def of(rows, zero=False, device=HOPPER):
        return names(Problem(SPARSE_INT4, rows, 4096, 4096, BF16, device, "int4", 128, zero))

    gemv, small = "sm90_sparse24_w4a16_gemv", "triton_sparse24_small_m"
    assert [of(rows) for rows in (0, 1, 64, 65)] == [
        [TORCH],
        [gemv, small, TORCH],
        [gemv, small, TORCH],
        [TORCH],
    ]
    assert of(1, zero=True) == [gemv, TORCH]
    assert of(1, device=HOST) == [small, TORCH]


@pytest.mark.parametrize("layout", families_page.WEIGHTS)
def test_what_is_chosen_is_taken(layout):
    """The order and the records do not contradict each other, at any number of rows."""
    for name in families_page.WEIGHTS[layout]:
        p = families_page.problem_of(layout, name, (4096, 4096))
        for rows, device in itertools.product((1, 2, 8, 17, 64, 128, 129, 4096), (HOPPER, HOST)):
            asked = p._replace(rows=rows, device=device)
            refused = {one.name: one.refusal(asked) for one in choose(asked) if one.takes}
            assert set(refused.values()) <= {None}, (name, rows, refused)


def test_every_family_is_a_folder_of_kernels():
    """Its functions are there, and it says why it does not take what is not its own."""
    other = Problem("none", 1, 64, 64, BF16, HOPPER)
    for name, family in families.FAMILIES.items():
        assert (ROOT / family.source).is_dir()
        assert name == family.name
        assert all(callable(family.function(kind)) for kind in family.functions)
        assert family.function("none") is None
        assert not family.takes or "weights, got none" in family.refusal(other)


def test_ranges():
    """Each bound is found, the last one stands for all that follow."""
    bounds = [(1, "a"), (9, "b"), (33, "c"), (2049, "d")]

    def name(rows):
        return [what for first, what in bounds if first <= rows][-1]

    found = by_rows(name, 1 << 16)
    assert found == (Range(1, 8, "a"), Range(9, 32, "b"), Range(33, 2048, "c"), Range(2049, None, "d"))
    assert (
        ", ".join(map(str, found)) == "1-8 tokens a, 9-32 tokens b, 33-2048 tokens c, 2049 tokens and more d"
    )
    assert [str(one) for one in by_rows(lambda rows: "a", 1 << 16)] == ["a"]
    assert str(by_rows(lambda rows: "a" if rows == 1 else "b", 4)[0]) == "1 token a"


@pytest.mark.parametrize("faster", [False, True])
def test_the_product_asks(monkeypatch, faster):
    """The one that is faster first, and where it declines the other."""
    called, order = [], (families.SM90_W4A16_GEMM, families.TRITON_SMALL_M)[1 - faster :]

    def multiply(family, kind):
        return lambda x, *operands, **more: (
            called.append(family.name) or (x if family.name == SMALL_M else None)
        )

    monkeypatch.setattr(linear, "choose", lambda p, *first: order[:: -1 if first else 1])
    monkeypatch.setattr(families.Family, "function", multiply)
    q = fast.quantize(torch.randn(128, 256), named("int4_g128"), packed=True)
    w, x = linear.preshuffled(q), torch.randn(64, 256, dtype=torch.bfloat16)
    operands = (x, w.codes, w.scale, w.zero, None)
    assert linear._kernel(w.scheme, ((128, 256),), operands, None) is x
    assert called == [family.name for family in order]
    called.clear()
    assert linear._kernel(w.scheme, ((128, 256), order[-1].name), operands, None) is x
    assert called[0] == order[-1].name


def test_operands_are_checked_before(monkeypatch):
    """Whichever kernel it were: shapes and devices that do not go together."""
    w = linear.preshuffled(fast.quantize(torch.randn(128, 256), named("int4_g128"), packed=True))
    x, elsewhere = torch.randn(64, 256).bfloat16(), replace(w, codes=w.codes.to("meta"))
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    monkeypatch.setattr(linear, "choose", lambda p: pytest.fail("chosen"))
    with pytest.raises(ValueError, match="tensors on one device, got x on cpu and codes on meta"):
        linear.linear_small(x, elsewhere)
    with pytest.raises(ValueError, match="the last axes must be the same"):
        linear.linear_small(x[:, :128], w)


@pytest.mark.parametrize(
    ("shape", "element", "rows", "together"),
    [
        ((14336, 4096), "int4", 3, False),
        ((14336, 4096), "int4", 16, True),
        ((4096, 4096), "int4", 3, True),
        ((28672, 8192), "int4", 2, False),
        ((28672, 8192), "int4", 3, True),
        ((28672, 8192), "int8", 16, False),
        ((14336, 4096), "int8", 16, True),
        ((4096, 4096), "int4", 17, False),
        ((4096, 4096), "nf4", 3, False),
    ],
)
def test_pairs(shape, element, rows, together):
    group = 128 if element == "int4" else 0
    found = names(weight(rows, shape, element, group, products=2))
    assert found == [SMALL_M] if together else SMALL_M not in found


@pytest.mark.parametrize(
    ("rows", "zero", "one"),
    [(1, True, True), (1, False, False), (2, True, True), (3, False, True), (17, True, False)],
)
def test_large_pairs_are_one_launch_where_one_weight_goes_through_shared_memory(rows, zero, one):
    """Not those that are read straight from memory."""
    p = weight(rows, (14336, 4096), "int4", 128, zero=zero, products=2)
    assert names(p) == [GEMV] * one
    assert one == (rows < 17 and in_one_launch(p._replace(products=1)))


def test_no_pair_loses_much_of_the_times_that_were_measured():
    """Of an H200; a product and a gated one go one way, so that they are looked at together. A tenth, but for zero points at
    one length of K, whose tiles of 4 and 8 rows are the slow ones."""
    for row in json.loads((ROOT / "reports/data/linear_small_pair_times.json").read_text())["times"]:
        scheme, shape, rows = row["scheme"], tuple(row["shape"]), row["rows"]
        element = {"int4": "int4", "int8": "int8", "fp8_": "e4m3"}[scheme[:4]]
        group = int(re.search(r"_g(\d+)", scheme)[1]) if element == "int4" else 0
        p = weight(rows, shape, element, group, zero="asymmetric" in scheme, products=2)
        together, apart = row["pair"] + row["swiglu"], row["apart"] + row["swiglu apart"]
        most = 1.17 if shape == (8192, 3072) and p.zero else 1.1
        chosen = together if names(p) == [SMALL_M] else apart
        assert chosen <= most * min(together, apart), row


def test_a_pair_asks(monkeypatch):
    """Two launches are made of None."""
    from fast.matmul.preshuffled import pair

    q = fast.quantize(torch.randn(128, 256), named("int4_g128"), packed=True)
    w = linear.preshuffled(q)
    operands = (torch.randn(2, 256).bfloat16(), *(w.codes, w.scale, w.zero) * 2)
    monkeypatch.setattr(families.Family, "function", lambda family, kind: lambda *given, **more: kind)
    for function, name in ((pair._pair_kernel, "pair"), (pair._swiglu_kernel, "swiglu")):
        for order, found in (([families.TRITON_SMALL_M], name), ([], None)):
            monkeypatch.setattr(pair, "choose", lambda p, order=order: order)
            assert function(w.scheme, ((128, 256),), operands, None) == found


def test_float16():
    """Factors are of bfloat16 alone in the kernel of few rows."""
    small = weight(1, (1024, 4096), "e2m1", 32)
    assert names(small)[0] == GEMV
    assert names(small._replace(inputs=HALF))[0] == SMALL_M
    assert names(small._replace(element="int4", group=128, inputs=HALF))[0] == GEMV


def test_devices():
    assert device_of(torch.device("cpu")) == Device((0, 0), 132, nvrtc=False)
    assert not HOST.is_sm90
    assert HOPPER.is_sm90
