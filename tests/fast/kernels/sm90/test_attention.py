"""`sm90_attention` in the emulator, within the bound of the reference: swizzles, barriers, turns, masks; planted faults; what
is compiled, and what is taken."""

import re
import subprocess

import numpy as np
import pytest
import torch

from fast.kernels.attention import sm90
from fast.kernels.attention.quantize_heads import Heads, padded
from fast.kernels.attention.sm90 import KERNEL, Problem, Variant
from fast.launch.cuda import MOST_SHARED
from reference.attention.quantized import (
    ATTENTION_RECIPES,
    AttentionRecipe,
    quantize_operands,
    quantized_attention,
    quantized_attention_error_bound,
)
from tests.emulator.device.stand_in import StandIn
from tests.emulator.faults import assert_seen, at_night
from tests.fast.kernels.sm90.machine_code import (
    compiled,
    complaints,
    disassembled,
    uses_in_flight,
    waits_for_registers,
)
from tests.fast.kernels.sm90.products import require_nvrtc
from tests.fast.kernels.sm90.test_compile import assemblers
from tests.gpu.attention.prefill_variants import ABLATIONS, VARIANTS, changed, forms

#: Recipe, sequences, heads, key heads, queries, keys, options, dtype, variant.
CASES = {
    "causal": ("int8_block", 1, 2, 1, 130, 200, {"causal": True}, torch.bfloat16, Variant(2)),
    "all": ("int8", 1, 1, 1, 64, 150, {}, torch.float16, Variant(2)),
    "float8": ("fp8", 2, 1, 1, 70, 300, {"causal": True}, torch.float32, Variant(4)),
    "ring": ("int8_block", 1, 2, 1, 64, 400, {"causal": True}, torch.bfloat16, Variant(2)),
    "earlier": (
        "int8",
        1,
        2,
        2,
        200,
        130,
        {"causal": True, "offset": 2},
        torch.bfloat16,
        Variant(3),
    ),
    "zeros": ("int8_block", 1, 1, 1, 64, 130, {"causal": True}, torch.bfloat16, Variant(2)),
    "two units": ("int8_block", 1, 4, 2, 60, 70, {"causal": True}, torch.bfloat16, Variant(2, units=2)),
}


def states(batch, heads, kv, queries, keys, dtype):
    draw = torch.Generator().manual_seed(0)
    sizes = (batch, heads, queries, 128), (batch, kv, keys, 128), (batch, kv, keys, 128)
    return [torch.randn(size, generator=draw).to(dtype) for size in sizes]


def heads_of(made):
    """Codes where the kernels read them: `quantize_heads`."""

    def filled(x, tokens, axis):
        x = torch.as_tensor(np.asarray(x))
        return torch.nn.functional.pad(
            x, [0, 0] * (x.dim() - 1 - axis) + [0, tokens - x.shape[axis]]
        ).contiguous()

    queries, keys = padded(made.q.codes.shape[2]), padded(made.k.codes.shape[2])
    place = torch.arange(keys)
    token = place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
    values = filled(made.v.codes, keys, 2)[:, :, token].transpose(2, 3).contiguous()
    scales = filled(made.k.scale[..., 0], keys if made.k.scale.shape[2] > keys // 128 else keys // 128, 2)
    return Heads(
        filled(made.q.codes, queries, 2), filled(made.q.scale[..., 0], queries, 2), filled(made.k.codes, keys, 2), scales,
        values, torch.as_tensor(np.asarray(made.v.scale[:, :, 0])).contiguous(), None,
    )  # fmt: skip


def attended(name, **device):
    """The emulated result and operands of a case."""
    recipe, batch, heads, kv, queries, keys, options, dtype, variant = CASES[name]
    q, k, v = states(batch, heads, kv, queries, keys, dtype)
    if name == "zeros":  # least scales, whose product is 0
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    made = heads_of(quantize_operands(q, k, v, recipe))
    rules = (ATTENTION_RECIPES[recipe], 128**-0.5, options.get("causal", False), options.get("offset"), keys)
    call = lambda: sm90.attended(made, q, *rules, variant)  # noqa: E731
    y = StandIn(**device).made(call, *made[:6])
    return y, (q, k, v, recipe), options


def within(name, **device):
    """Whether the emulated result is within the bound."""
    y, operands, options = attended(name, **device)
    exact = quantized_attention(*operands, out_dtype="float64", **options)
    out = str(y.dtype).removeprefix("torch.")
    bound = quantized_attention_error_bound(*operands, out_dtype=out, accumulation="exact", **options)
    return bool((np.abs(y.double().numpy() - np.asarray(exact)) <= bound).all())


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", at_night(CASES, *(one for one in CASES if one != "all")))
def test_within_the_bound(name, early):
    require_nvrtc()
    assert within(name, early=early, seed=1)


def test_codes_of_queries_by_tokens():
    """The same bits of codes of queries that lie as (B, T, H, 128)."""
    require_nvrtc()
    q, k, v = states(2, 2, 1, 20, 30, torch.bfloat16)
    made = heads_of(quantize_operands(q, k, v, "int8_block"))
    rules = ATTENTION_RECIPES["int8_block"], 128**-0.5, True, None, 30, Variant(2, units=2)
    by_token = made._replace(q=made.q.transpose(1, 2).contiguous().transpose(1, 2))
    y, same = (
        StandIn(seed=1).made(lambda one=one: sm90.attended(one, q, *rules), *one[:6])
        for one in (made, by_token)
    )
    assert by_token.q.stride() == (2 * 128 * 128, 128, 2 * 128, 1)
    assert torch.equal(y, same)


#: A piece of the source and what takes its place.
FAULTS = {
    "scores of a tile that has not arrived": ("if (tile + 1 < work.tiles) wait_for_keys(next);", ""),
    "values that have not arrived": ("wait_for(ring.full_v + 8 * at.stage, at.parity);", ""),
    "the next queries come while these are multiplied": (
        "wait_for(ring.empty_q + 8 * of_queries.stage(), of_queries.parity() ^ 1);", "",
    ),
    "keys are handed back by two warps of eight": ("ring.empty_k + 8 * s, GROUPS * 4", "ring.empty_k + 8 * s, 2"),
    "values are handed back by two warps of eight": (
        "ring.empty_v + 8 * s, GROUPS * 4", "ring.empty_v + 8 * s, 2",
    ),
    "scores are read while they are made": (
        "finish<0>(s);\n      keep<SCORES / 2, SCORES>(x);", "finish<1>(s);\n      keep<SCORES / 2, SCORES>(x);",
    ),
    "the sum shrinks by the next tile's factor": ("add(y, d, shrink);", "add(y, d, rows.shrink);"),
    "the sum shrinks by the other row's factor": ("shrink[i / 2 % 2]", "shrink[1 - i / 2 % 2]"),
    "weights of two rows are exchanged": ("p[j] = e4m3s_of", "p[j ^ 1] = e4m3s_of"),
    "the last key is seen": ("first + p.offset + 1", "first + p.offset + 2"),
    "a tile at the edge is not masked": ("if (tile < work.free)", "if (tile <= work.free)"),
    "tokens of values in their own order": ("4 * (i / 2) + i % 2", "4 * (i % 2) + i / 2"),
    "ones are twos": ("0x38383838", "0x40404040"),
    "a query head's keys are its own": ("row % p.heads / p.groups;", "row % p.heads % p.groups;"),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right, WAYS)


#: Whether copies arrive early, and the order of threads and copies.
WAYS = [(early, seed) for seed in range(1, 7) for early in (True, False)]


def is_right(way, change):
    early, seed = way
    return within("ring", early=early, change=change, seed=seed)


PROBLEMS = [Problem(element, out, by_token, causal) for element, out, by_token, causal in (
    ("int8", "bfloat16", False, True), ("int8", "bfloat16", True, True), ("float8_e4m3fn", "float16", True, False),
    ("int8", "float32", True, False),
)]  # fmt: skip


#: Variant and problem; the first is what serves.
COMPILED = [(sm90.SERVED, PROBLEMS[0]), *((Variant(), one) for one in PROBLEMS),
            (Variant(units=2), PROBLEMS[0])]  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "problem"),
    [COMPILED[0], *(pytest.param(*one, marks=pytest.mark.nightly) for one in COMPILED[1:])],
    ids=str,
)
def test_compiled(variant, problem):
    """No spills, no serialized products, registers of products are left alone until they are waited for, and no warp group
    asks for more registers than others leave it."""
    cubin, log = compiled(KERNEL, variant, problem)
    assert complaints(log, variant.threads) == []
    assert waits_for_registers(disassembled(cubin), log, variant.threads) == []
    assert variant.shared <= MOST_SHARED
    code = disassembled(cubin)
    assert uses_in_flight(code) == []
    products = [at for at, line in enumerate(code.lines) if "GMMA." in line.text]
    assert sum(code.lines[at].text.startswith("QGMMA.64x136x32") for at in products) == 4
    assert len(products) == 16  # scores of the first tile, of the second and of a next one
    assert not any(line.text.startswith(("STL", "LDL")) for line in code.lines)


@pytest.mark.nightly
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_older_assemblers(problem, tmp_path):
    require_nvrtc()
    ptx = KERNEL.compiled(Variant(), problem, ptx=True)[0].decode().rstrip("\0")
    text, cubin = tmp_path / "a.ptx", tmp_path / "a.cubin"
    text.write_text(re.sub(r"\.version .*", ".version 8.7", ptx))
    for assembler in assemblers():
        command = [assembler, "-arch=sm_90a", "-v", str(text), "-o", str(cubin)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert complaints(log, Variant().threads) == []
        assert uses_in_flight(disassembled(cubin.read_bytes())) == []


def test_what_is_taken():
    recipe = ATTENTION_RECIPES["int8"]
    assert sm90.unfit(128, 128, recipe, None, None) is None
    assert "128 channels" in sm90.unfit(64, 64, recipe, None, None)
    assert "no windows" in sm90.unfit(128, 128, recipe, 7, None)
    assert "chains of 128" in sm90.unfit(128, 128, AttentionRecipe(chain=32), None, None)
    assert "Hopper" in sm90.refusal(*states(1, 1, 1, 4, 4, torch.float32)[::2], recipe, None, None)


def test_whose_queries_codes_are_made_in_cuda():
    q = torch.zeros(2, 4, 3, 128, dtype=torch.bfloat16)
    assert sm90.takes_queries(q)
    assert not sm90.takes_queries(q.float())
    assert not sm90.takes_queries(torch.zeros(2, 4, 3, 132, dtype=torch.bfloat16)[..., :128])
    assert not sm90.takes_queries(torch.zeros(2 * 4 * 3 * 128 + 1, dtype=torch.bfloat16)[1:].view_as(q))


def test_ablations_fit_the_source(tmp_path):
    """What `tests/gpu/attention/prefill.py --part variants` leaves out of the source stands there once."""
    with forms() as made:
        assert set(made) == {*VARIANTS, *ABLATIONS}
    with pytest.raises(ValueError, match="stands once"):
        changed(KERNEL, (("no such piece", ""),), tmp_path)
