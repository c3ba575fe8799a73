"""`sm90_heads` in the emulator: codes and scales of keys and values bit for bit those of the reference under the mean key that
was found, which is near the exact one; planted faults; what is compiled, and what is taken."""

from unittest import mock

import numpy as np
import pytest
import torch

from fast.kernels.attention import prefill, sm90, sm90_heads
from fast.kernels.attention.quantize_heads import Heads
from fast.kernels.attention.sm90_heads import Problem, Variant
from reference.attention.quantized import (
    ATTENTION_RECIPES,
    AttentionRecipe,
    attention_recipe_of,
    quantize_operands,
)
from tests.emulator.device.stand_in import StandIn
from tests.emulator.faults import assert_seen, at_night, unchanged
from tests.fast.kernels.sm90.machine_code import compiled
from tests.fast.kernels.sm90.products import require_nvrtc

#: Without a transform, and without a mean.
AS_IT_IS = AttentionRecipe(rotate=False, center=False)
#: Recipe, sequences, heads, tokens, dtype.
CASES = {
    "a tile": ("int8_block", 1, 1, 60, torch.bfloat16),
    "two tiles": ("int8_block", 1, 1, 130, torch.bfloat16),
    "by token": ("int8", 2, 1, 60, torch.float16),
    "parts": ("fp8", 1, 1, 1000, torch.bfloat16),
    "heads": ("int8_block", 1, 3, 300, torch.float16),
    "not finite": ("int8", 1, 1, 200, torch.float16),
    "huge": ("int8_block", 1, 1, 130, torch.bfloat16),
    "as they are": (AS_IT_IS, 1, 2, 70, torch.bfloat16),
}


def states(name):
    """Keys with a mean and values of many sizes, as views of (B, T, heads, width)."""
    _, batch, heads, tokens, dtype = CASES[name]
    draw = torch.Generator().manual_seed(0)
    shape = (batch, tokens, heads, 128)
    k = (torch.randn(shape, generator=draw) + 3 * torch.randn(128, generator=draw)).to(dtype).transpose(1, 2)
    v = (torch.randn(shape, generator=draw) * torch.logspace(-2, 1, 128)).to(dtype).transpose(1, 2)
    k[..., 50], v[..., 9] = 0.5, 0.0
    if name == "not finite":
        k[0, 0, 9, 3], v[0, 0, 3, 5], v[0, 0, 7, 11] = torch.nan, torch.nan, torch.inf
    if name == "huge":  # differences from the mean that are no float32
        k[0, 0, :, 7], k[0, 0, :, 8] = 3e38, -3.3e38
        k[0, 0, 1, 7], k[0, 0, 1, 8] = -3e38, 3.3e38
    return k, v


def made_of(name, change=unchanged, early=True, seed=1):
    """What the kernels make of a case."""
    k, v = states(name)
    recipe = attention_recipe_of(CASES[name][0])
    return StandIn(early=early, seed=seed, change=change, late=True).made(
        lambda: sm90_heads.quantized(k, v, recipe), k, v
    )


def is_reference(name, made):
    """Whether codes and scales are the reference's, and codes zeros beyond the tokens."""
    k, v = states(name)
    expected = quantize_operands(k, k, v, CASES[name][0], mean=made.mean)
    tokens, blocks = k.shape[2], expected.k.scale.shape[2]
    place = np.arange(made.v.shape[3])
    token = place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
    values = np.empty(made.v.shape, np.uint8)
    values[..., token] = made.v
    pairs = (
        (expected.k.codes, made.k[:, :, :tokens]), (expected.k.scale[..., 0], made.k_scale[:, :, :blocks]),
        (expected.v.codes, values[..., :tokens].swapaxes(2, 3)), (expected.v.scale[:, :, 0], made.v_scale),
    )  # fmt: skip
    return all(np.array_equal(a, b, equal_nan=np.asarray(a).dtype == np.float32) for a, b in pairs)


@pytest.mark.parametrize("name", at_night(CASES, *list(CASES)[1:]))
def test_codes(name):
    require_nvrtc()
    made = made_of(name)
    k, v = states(name)
    assert (made.q, made.q_scale) == (None, None)
    assert is_reference(name, made)
    exact = quantize_operands(k, k, v, CASES[name][0]).mean
    if exact is None:
        assert made.mean is None
    elif name != "not finite":
        # Sums of 16 tokens or fewer, then of 16, then of 32: at most 64 roundings of values below the largest.
        largest = k.float().abs().amax(2, keepdim=True)
        assert ((made.mean - torch.as_tensor(exact)).abs() <= 64 * 2.0**-24 * largest).all()


#: Recipe, sequences and heads of queries, of keys, tokens of both: more programs of queries than of keys and values, or fewer.
#: Where codes lie as queries do the most chunks of a program, else 0.
QUERIES = {
    "many": ("int8_block", (2, 2), (2, 1), 140, 60, 0), "float8": ("fp8", (1, 2), (1, 1), 40, 60, 0),
    "few": ("int8_block", (1, 1), (1, 1), 150, 300, 0), "a ring": ("int8_block", (1, 2), (1, 1), 70, 20, 4),
    "side by side": ("int8_block", (2, 3), (2, 1), 140, 60, 1), "float8, a ring": ("fp8", (1, 2), (1, 1), 40, 60, 4),
    "by token": ("int8", (1, 2), (1, 1), 40, 60, 1), "as they are": (AS_IT_IS, (1, 3), (1, 1), 9, 9, 4),
    "a long ring": ("int8_block", (2, 3), (2, 1), 140, 60, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", at_night(QUERIES, *(one for one in QUERIES if one != "a ring")))
def test_codes_of_queries(name):
    """Beside those of keys, where queries lie; zeros and least scales beyond the tokens."""
    require_nvrtc()
    made = queries_made(name)
    assert queries_are_reference(name, made)
    assert made.q.transpose(1, 2).is_contiguous() == (QUERIES[name][5] > 0 or QUERIES[name][1][1] == 1)
    np.testing.assert_array_equal(reference_of(name, made).k.codes, made.k[:, :, : QUERIES[name][4]])


def queries_of(name):
    """Queries as projections leave them, some not finite and some zeros, and keys."""
    _, heads, key_heads, queries, keys, *_ = QUERIES[name]
    draw = torch.Generator().manual_seed(0)
    q = torch.randn((heads[0], queries, heads[1], 128), generator=draw).half()
    q[0, 3, 0, 5], q[0, 4, -1, 7], q[0, 5] = torch.nan, torch.inf, 0
    return q.transpose(1, 2), torch.randn((*key_heads, keys, 128), generator=draw).half()


def queries_made(name, change=unchanged, early=True):
    """What the kernels make of them, in as few programs as may be."""
    (q, k), (recipe, *_, chunks) = queries_of(name), QUERIES[name]
    call = lambda: sm90_heads.quantized(k, k, attention_recipe_of(recipe), q, chunks > 0)  # noqa: E731
    with mock.patch.multiple(sm90_heads, MANY_PROGRAMS=1, CHUNKS=chunks):
        return StandIn(seed=1, change=change, early=early, late=True).made(call, k, q)


def reference_of(name, made):
    q, k = queries_of(name)
    return quantize_operands(q, k, k, QUERIES[name][0], mean=made.mean)


def queries_are_reference(name, made):
    """Codes and scales, and those beyond the tokens."""
    expected, queries = reference_of(name, made).q, QUERIES[name][3]
    return (
        np.array_equal(expected.codes, made.q[:, :, :queries])
        and np.array_equal(expected.scale[..., 0], made.q_scale[:, :, :queries], equal_nan=True)
        and not made.q[:, :, queries:].any()
        and bool((made.q_scale[:, :, queries:] == 2.0**-126).all())
    )


#: The same of queries whose heads lie side by side.
QUERY_FAULTS = {
    "rows are read before they have come": ("cp.async.wait_group 1;", "cp.async.wait_group 2;"),
    "rows that come take the place of those that are read": (
        "ask(chunk + step, chunks, stage ^ 1);", "ask(chunk + step, chunks, stage);",
    ),
    "a chunk is left out": ("chunk += step, stage", "chunk += 2 * step, stage"),
    "scales lie as codes do": ("* p.query_heads + at.head) * room + at.token]", "* room * p.query_heads) + at.row]"),
    "a head's queries are its neighbour's": ("at.head * WIDTH);", "(at.head ^ 1) * WIDTH);"),
    "there is a token more": ("at.token < p.queries);", "at.token < p.queries - 1);"),
    "pieces of a lane follow each other": ("from + 2 * EACH * OWN * j", "from + 2 * EACH * j"),
    "codes of a lane follow each other": ("(to + EACH * OWN * j)", "(to + EACH * j)"),
    "programs of queries are left out": ("own = at < both ? at / 2 : at - both / 2;", "own = at / 2;"),
    "a sum for a difference": ("const float sign = lane & far ? -1.0f : 1.0f;", "const float sign = 1.0f;"),
    "pieces mix with others": ("if (!(i / EACH & far)) add", "if (i / EACH & far) add"),
    "signs are another half's": ("const bool odd = lane % 2;", "const bool odd = lane / 2 % 2;"),
    "a scale is of half a row": (
        "far < LANES / PIECES; far *= 2) most = larger", "far < LANES / PIECES / 2; far *= 2) most = larger",
    ),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("fault", QUERY_FAULTS)
def test_the_emulator_sees_it_of_queries(fault):
    require_nvrtc()
    assert_seen(QUERY_FAULTS[fault], queries_are_right)


def queries_are_right(early, change):
    """The headers have the change where they have the piece."""
    has = lambda text: change is unchanged or change.old in text  # noqa: E731
    either = lambda text: change(text) if has(text) else text  # noqa: E731
    name = "side by side" if change is not unchanged and "at < both" in change.old else "a ring"
    return queries_are_reference(name, queries_made(name, either, early))


#: A piece of the sources and what takes its place.
FAULTS = {
    "the last token is a part's": ("min(p.tokens, (part + 1) * p.each)", "min(p.tokens, (part + 1) * p.each - 1)"),
    "a part's sums are left out": ("part < parts; part += THREADS", "part < parts - 1; part += THREADS"),
    "the mean of the next channels": ("memory[lane * EACH + i];\n    // Signs", "memory[(lane * EACH + i) ^ 8];\n    // Signs"),
    "tokens that are not there get the mean": ("< p.tokens ? 1.0f : 0.0f);", "< p.tokens ? 1.0f : 1.0f);"),
    "a block's scale is a warp's": ("for (int i = 0; i < WARPS; i++) most", "for (int i = 0; i < 0; i++) most"),
    "tokens of values in their own order": ("quad % 4 * 2 + j / 2 * 8 + j % 2", "quad % 4 * 4 + j"),
    "codes of values are turned by another word": ("(quad ^ 2 * lane)", "(quad ^ lane)"),
    "halves of four words are not exchanged": ("turned % 2 ? make", "turned % 2 == 2 ? make"),
    "values have another scale's codes": ("const float by = memory[lane * EACH + j];", "const float by = memory[lane * EACH];"),
    "the mean is taken twice": ("__fmaf_rn(-there, mean[i], v[i])", "__fmaf_rn(-2.0f * there, mean[i], v[i])"),
    "nothing waits for statistics": ('asm volatile("griddepcontrol.wait;" ::: "memory");', ""),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], is_right)


def is_right(early, change):
    """Both launches have the change where they have the piece; the mean is compared, too."""
    either = lambda text: change(text) if change is unchanged or change.old in text else text  # noqa: E731
    made = made_of("two tiles", either, early)
    k, v = states("two tiles")
    exact = torch.as_tensor(quantize_operands(k, k, v, CASES["two tiles"][0]).mean)
    # Two float32 sums of n values in any order differ by at most 2 n 2**-24 sums of absolute values; means by an n-th of it.
    bound = 2 * k.shape[2] * 2.0**-24 * float(torch.as_tensor(k).float().abs().max())
    return is_reference("two tiles", made) and bool(((made.mean - exact).abs() <= bound).all())


PROBLEMS = [Problem("int8", "bfloat16", False, True, True, True), Problem("int8", "bfloat16", False, True, True),
            Problem("int8", "float16", True, True, True), Problem("float8_e4m3fn", "bfloat16", True, False, False),
            Problem("float8_e4m3fn", "float16", True, False, False, True)]  # fmt: skip


@pytest.mark.parametrize(
    "problem", [PROBLEMS[0], *(pytest.param(one, marks=pytest.mark.nightly) for one in PROBLEMS[1:])], ids=str
)
def test_compiled_without_spills(problem):
    require_nvrtc()
    for kernel in (sm90_heads.STATISTICS_KERNEL, sm90_heads.CODES_KERNEL):
        log = compiled(kernel, Variant(), problem)[1]
        assert "0 bytes stack frame, 0 bytes spill stores" in log


def test_what_is_taken():
    k, recipe = torch.zeros(1, 2, 8, 128, dtype=torch.bfloat16), ATTENTION_RECIPES["int8"]
    assert sm90_heads.unfit(k, k, recipe) is None
    assert "128 channels" in sm90_heads.unfit(k[..., :64], k, recipe)
    assert "16-bit" in sm90_heads.unfit(k.float(), k.float(), recipe)
    assert "multiples of 16" in sm90_heads.unfit(
        k, torch.zeros(1, 2, 8, 132, dtype=torch.bfloat16)[..., :128], recipe
    )
    assert "Hopper" in sm90_heads.refusal(k, k, recipe)


def test_what_a_form_does_not_take_is_made_as_before(monkeypatch):
    """Operands of each form, by either's kernels; queries that those in CUDA C++ leave out by Triton's."""
    q = torch.zeros(1, 2, 8, 128, dtype=torch.bfloat16)
    calls = []
    made = Heads(None, None, q, q, q, q, None)
    monkeypatch.setattr(sm90_heads, "refusal", lambda *given: None)
    monkeypatch.setattr(sm90_heads, "quantized", lambda *given: calls.append("sm90") or made)
    monkeypatch.setattr(prefill, "query_codes", lambda *given: calls.append("queries") or (q, q))
    monkeypatch.setattr(prefill, "quantize_heads", lambda *given: calls.append("triton") or made)
    recipe = ATTENTION_RECIPES["int8"]

    def called(plan, q=q, seen=None):
        calls.clear()
        prefill.operands(q, q, q, recipe, seen, plan)
        return list(calls)

    heads = sm90.Variant(heads=True)
    assert called(sm90.Variant()) == called(None) == ["triton"]
    assert called(heads) == ["sm90", "queries"]
    assert called(heads, seen=torch.ones(1, 8, dtype=torch.bool)) == ["triton"]
    made = made._replace(q=q, q_scale=q)
    assert called(heads) == ["sm90"]
    made = None
    assert called(heads) == ["sm90", "triton"]
