"""`sm90_decode` in the emulator, within the bound of the reference: decoders, scales, windows, masks, parts; planted faults;
what is compiled, and what is taken."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from ao_lab.kv_cache.recipe import INT4, RECIPES, KVRecipe
from fast.attention.stored import append_, computed_values, quantized_tokens, room_for, token_values
from fast.kernels.attention import sm90_decode
from fast.kernels.attention.decode import LOG2E, kind_of
from fast.kernels.attention.parts import parts_of
from fast.kernels.attention.sm90_decode import KERNEL, Problem, splits_of, variant_of
from reference.attention.attention import attention, attention_error_bound
from reference.attention.window import ALL_STORED
from tests.emulator.device.stand_in import StandIn
from tests.emulator.faults import assert_seen, at_night, unchanged
from tests.fast.kernels.sm90.machine_code import compiled, complaints, disassembled
from tests.fast.kernels.sm90.products import require_nvrtc
from tests.support.zero_points import RAISED, zero_values

PLAIN4 = KVRecipe(key=INT4, value=INT4)
OPEN = KVRecipe(key="int4_g32_asymmetric", key_axis=-2, value=INT4, residual=8, sinks=3)
#: Recipe, sequences, heads, key heads, width, room, tokens, masked, parts, dtype.
CASES = {
    "values": ("bfloat16", 1, 4, 1, 128, 96, 77, True, 1, torch.bfloat16),
    "fp8": ("fp8", 1, 8, 1, 128, 320, 300, False, 2, torch.float16),
    "channels": ("int4", 1, 2, 1, 128, 640, 600, True, 2, torch.bfloat16),
    "open": (OPEN, 1, 4, 1, 64, 192, 151, True, 1, torch.bfloat16),
    "int8": ("int8", 2, 4, 2, 64, 400, 90, True, 4, torch.bfloat16),
    "int4": (PLAIN4, 1, 4, 1, 64, 96, 77, False, 1, torch.float16),
    "window": ("int4_tokens", 1, 6, 2, 128, 160, 130, True, 1, torch.bfloat16),
    "open, short": (OPEN, 1, 4, 1, 64, 96, 40, False, 2, torch.bfloat16),
    "short": ("int4_tokens", 1, 1, 1, 64, 96, 41, False, 2, torch.float16),
    "fp8 window": ("fp8_residual", 1, 2, 1, 64, 160, 130, False, 1, torch.bfloat16),
    "int8 channels": ("int8_channels", 1, 2, 1, 64, 256, 200, False, 1, torch.bfloat16),
    "a head": ("fp8 head", 1, 4, 2, 64, 96, 77, False, 1, torch.bfloat16),
    "a tensor": ("int8 tensor", 1, 4, 2, 128, 96, 77, False, 1, torch.bfloat16),
    "fp8 masked": ("fp8", 2, 4, 2, 64, 96, 77, True, 1, torch.bfloat16),
    "values of float16": ("bfloat16", 1, 8, 1, 64, 96, 96, False, 1, torch.float16),
}


def _behind(keys, values, length):
    """Behind the last token there is what an earlier sequence left."""
    keys.scale[:, :, length:] = values.scale[:, :, length:] = torch.inf
    values.codes[:, :, length:] = 0x7F


def _hidden(keys, values, length):
    """Of what the mask hides scales are infinite."""
    keys.scale[:1, :, 4::3] = values.scale[:1, :, 4::3] = torch.inf


def _hidden_values(keys, values, length):
    """What the mask hides is NaN."""
    for one in (keys, values):
        hidden = one.codes[:1, :, 4::3]
        hidden.fill_(torch.nan if hidden.is_floating_point() else 0x7F)


def _small(keys, values, length):
    """Values are small, stored and as computed."""
    values.scale *= 2.0**-17
    values.computed *= 2.0**-17


def _hidden_as_computed(keys, values, length):
    """What the mask hides is NaN as computed."""
    positions = keys.window.position(np.arange(keys.window.slots), length)
    hidden = (positions >= 4) & (positions % 3 == 1)
    assert hidden.any()
    keys.computed[:, :, hidden] = values.computed[:, :, hidden] = torch.nan


def _zeros(keys, values, length):
    """The first tile has scales of 0 and by far the largest score."""
    values.scale[:, :, :32], values.scale[:, :, 32:] = 0.0, 8.0
    keys.scale[:] *= 0.01
    keys.scale[:, :, 0] *= 1e4


def _apart(keys, values, length):
    """One token has a far larger scale, and channels of 0."""
    values.scale[:] = 2.0**-4
    values.scale[:, :, 5] = 2.0**14
    values.codes[:, :, 5, ::2] = 0


#: What is changed in the caches of another case.
CHANGED = {
    "behind": ("fp8", _behind),
    "hidden": ("int8", _hidden),
    "hidden values": ("values", _hidden_values),
    "hidden codes": ("fp8 masked", _hidden_values),
    "hidden as computed": ("window", _hidden_as_computed),
    "small": ("fp8 window", _small),
    "zeros": ("fp8", _zeros),
    "apart": ("fp8", _apart),
}


def _nan_of_a_value(keys, values, length):
    """One channel of one token's values is NaN."""
    values.codes[0, 0, 5, 3] = 0x7F


def _nan_of_a_key(keys, values, length):
    """The scale of one token's keys is NaN, in one sequence and head; the mask shows it."""
    keys.scale[0, 0, 6] = torch.nan


#: The same, where the result is NaN.
NAN = {"NaN of a value": ("fp8", _nan_of_a_value), "NaN of a key": ("int8", _nan_of_a_key)}
#: Other cases whose parts lie in a cluster.
CLUSTERS = {"cluster": "int8", "cluster, short": "open, short"}
CASES |= {name: CASES[base] for name, (base, _) in CHANGED.items()}
CASES |= {name: CASES[base] for name, base in CLUSTERS.items()}
STATIC = {"fp8 head": ("fp8", torch.tensor([0.01, 0.02])), "int8 tensor": ("int8", torch.tensor([0.03]))}


def cache(name):
    """Queries, keys and values as stored, their count and the mask of a case; scales differ by token."""
    recipe, batch, heads, kv, width, room, tokens, masked, _, dtype = CASES[
        NAN[name][0] if name in NAN else name
    ]
    recipe, scale = STATIC.get(recipe, (recipe, None)) if isinstance(recipe, str) else (recipe, None)
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(batch, kv, tokens, width, generator=draw) for _ in "kv")
    v = v * 10 ** (torch.rand(tokens, 1, generator=draw) * 2 - 1)
    k, v = k.to(dtype), v.to(dtype)
    keys, values = (
        room_for(
            x, room, scheme, axis=axis, window=recipe.window, scale=None if scale is None else scale.clone()
        )
        for x, scheme, axis in zip((k, v), recipe.schemes, recipe.axes, strict=True)
    )
    length = torch.tensor(0)
    append_(keys, values, k, v, length)
    changes = CHANGED | NAN
    if name in changes:
        changes[name][1](keys, values, int(length))
    q = torch.randn(batch, heads, 1, width, generator=draw).to(dtype)
    mask = None
    if masked:
        mask = torch.ones(batch, 1, 1, room, dtype=torch.bool)
        mask[0, ..., 4::3] = False
    return q, keys, values, length, mask


def attended(name, **device):
    """The emulated result of a case, (B, H, 1, D)."""
    q, keys, values, length, mask = cache(name)
    splits = CASES[NAN[name][0] if name in NAN else name][8]
    problem = sm90_decode.problem_of(q, keys, kind_of(keys)[0], mask)
    variant = variant_of(problem)._replace(cluster=splits if name in CLUSTERS else 1)
    at = StandIn(**device)
    y = at.empty((q.shape[0], 1, q.shape[1], q.shape[3]), q.dtype)
    parts = (
        [] if splits == variant.cluster else [at.empty(one.shape, one.dtype) for one in parts_of(y, splits)]
    )
    mask_bytes = None if mask is None else mask.view(torch.uint8)
    given = [
        q,
        length,
        mask_bytes,
        *(t for x in (keys, values) for t in (x.codes, x.scale, x.zero, x.computed)),
    ]
    rules = (mask_bytes, q.shape[3] ** -0.5 * LOG2E, splits, (y, *(parts or (None, None))))

    def attend():
        sm90_decode.launch(problem, variant, q, keys, values, length, *rules)
        if parts:
            added = sm90_decode.parts_added(problem, splits)
            window = keys.window if problem.window else ALL_STORED
            sm90_decode.add(added, *parts, length, y, splits, window)

    at.made(attend, *given)
    return y.transpose(1, 2).double()


def after_another(change=unchanged, **device):
    """The emulated result whose queries are that of the launch in front."""
    q, keys, values, length, _ = cache("values of float16")
    problem = sm90_decode.problem_of(q, keys, kind_of(keys)[0], None)
    at = StandIn(change=change, **device)
    first, second = (at.empty((q.shape[0], 1, q.shape[1], q.shape[3]), q.dtype) for _ in range(2))

    def attend():
        for queries, y in ((q, first), (first.transpose(1, 2), second)):
            given = (queries, keys, values, length, None, 0.2, 1, (y, None, None))
            sm90_decode.launch(problem, variant_of(problem), *given)

    at.made(attend, q, length, keys.codes, values.codes)
    return second


def test_it_waits_for_the_launch_in_front():
    """Which may still be writing the queries, or the last token, when this one begins."""
    require_nvrtc()
    expected = after_another()
    assert torch.equal(after_another(late=True), expected)
    left_out = lambda text: text.replace("griddepcontrol.wait;", "")  # noqa: E731
    assert not torch.equal(after_another(left_out, late=True), expected)


def spread(values, tokens):
    """The largest scale of a token's values over the smallest one."""
    if values.scale is None or values.static:
        return 1.0
    scales = values.scale[:, :, :tokens]
    scales = scales[(scales > 0) & scales.isfinite()]
    return float(scales.max() / scales.min())


def within(name, **device):
    """Whether the emulated result is within the bound."""
    q, keys, values, length, mask = cache(name)
    tokens, window = int(length), keys.window
    y = attended(name, **device)
    if keys.computed is not None:
        # The ring holds more of the last tokens than are seen as computed.
        near = torch.from_numpy(window.seen(1, tokens, tokens, True))[0, 0, 0, :, None]
        stored = [token_values(x, tokens) for x in (keys, values)]
        computed = [computed_values(x, y, length) for x, y in zip((keys, values), stored, strict=True)]
        held = [torch.where(near, x, y) for x, y in zip(computed, stored, strict=True)]
    else:
        held = [x.codes if not x.scheme else quantized_tokens(x, tokens) for x in (keys, values)]
        held = [x[:, :, :tokens] if isinstance(x, torch.Tensor) else x for x in held]
    rules = {"causal": True, "mask": None if mask is None else mask[..., :tokens].numpy()}
    exact = attention(q, *held, out_dtype="float64", **rules)
    weights = str(q.dtype).removeprefix("torch.") if window.slots or not keys.scheme else "float16"
    out = str(q.dtype).removeprefix("torch.")
    bound = attention_error_bound(
        q,
        *held,
        weights=weights,
        out_dtype=out,
        products=2.0**-10 * (keys.axis == 2),
        zeros=zero_values(keys, tokens, RAISED),
        spread=spread(values, tokens),
        **rules,
    )
    return bool((np.abs(y.numpy() - np.asarray(exact)) <= bound).all())


@pytest.mark.parametrize("name", at_night(CASES, "behind", "hidden values", "small", "channels", "cluster"))
def test_within_the_bound(name):
    require_nvrtc()
    assert within(name)


@pytest.mark.parametrize("name", at_night(NAN, "NaN of a value"))
def test_nan_of_what_is_seen(name):
    """It is where the reference has it: of a value its channel, of a key the results of its heads."""
    require_nvrtc()
    q, keys, values, length, mask = cache(name)
    held = [quantized_tokens(x, int(length)) for x in (keys, values)]
    seen = None if mask is None else mask[..., : int(length)].numpy()
    expected = np.isnan(np.asarray(attention(q, *held, causal=True, mask=seen, out_dtype="float64")))
    assert 0 < expected.sum() < expected.size
    assert np.array_equal(np.isnan(attended(name).numpy()), expected)


#: A piece of the source and what takes its place.
FAULTS = {
    "the second byte's nibbles first": ('"shr.u32 y, %4, 8;\\n"', '"shr.u32 y, %4, 4;\\n"'),
    "tiles that end inside are read from where the last one was": ("at.advance(ahead - start);", ""),
    "a cluster does not wait": ("  wait_for_cluster();\n  for", "  for"),
    "codes are raised, zero points are not": ("raised ? 0x64386438 :", "raised ? 0x64806480 :"),
    "zero points are left out": ("if constexpr (ZERO) x -= q.beside[c];", ""),
    "a group has the scales of the one before": (
        "take_scales(q, at, start / GROUP,", "take_scales(q, at, max(start / GROUP - 1, 0),",
    ),
    "tokens as computed are seen as stored, too": ("token >= least", "token >= 0"),
    "the open group is read as stored": ("count - count % open", "count"),
    "a slot of the ring is off by one": ("const int back = (count - 1 - slot)", "const int back = (count - slot)"),
    "hidden values count": ("if (!__any_sync(ALL, hidden != 0)) return;", "return;"),
    "the mask is not read": ("(!MASKED || t.seen[i])", "true"),
    "sums do not shrink": ("sums.y[m][i] *= shrink[i % 2];", ";"),
    "parts overlap": ("first = split * each * BLOCK;", "first = split * (each - 1) * BLOCK;"),
    "warps begin at the same tile": ("first + warp * SPAN", "first"),
    "values of the token itself twice": ("8 * i + e, 2 * quarter", "8 * i, 2 * quarter"),
}  # fmt: skip


def right_of(kernel):
    """Whether a case is right with a change of one of the two kernels' sources."""

    def is_right(name, change=unchanged):
        return within(name, change=lambda text: change(text) if f" {kernel}" in text else text)

    return is_right


#: Of what adds parts.
PARTS_FAULTS = {
    "the parts that are read together count once": (
        "const float share = i < live ?",
        "const float share = u == 0 ?",
    ),
    "a part of each warp is left out": (
        "int u = 0; u < AT_ONCE; u++) {\n    const int i",
        "int u = 1; u < AT_ONCE; u++) {\n    const int i",
    ),
    "parts have equal shares": ("exponential(one.x - top)", "1.0f"),
    "the first part alone": (
        "return max(1, min(parts_with_tokens(all, BLOCK, each) + p.beside, p.splits));",
        "return 1;",
    ),
    "tokens as computed are left out": (" + p.beside", ""),
}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", PARTS_FAULTS)
def test_the_emulator_sees_of_parts(fault):
    require_nvrtc()
    assert_seen(PARTS_FAULTS[fault], right_of("sm90_decode_parts"), ["channels", "int8", "open, short"])


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault):
    require_nvrtc()
    assert_seen(FAULTS[fault], right_of("sm90_decode("), ["channels", "open", "hidden values", "cluster"])


def problem(kind, scales, **more):
    """Of heads of 128 channels, four that share a key head."""
    return replace_in(Problem(kind, 128, 4, "bfloat16", scales, False, 1, False, False), **more)


def replace_in(one, **more):
    return one._replace(**more)


PROBLEMS = [
    problem("fp8", "token"), problem("int4", "token", window=True), problem("value", ""),
    problem("int8", "token", masked=True), problem("fp8", "head", dtype="float16"), problem("int4", "token", width=64),
    problem("int8", "channel", zero=True, group=32, window=True),
    problem("int4", "channel", zero=True, group=64, window=True),
]  # fmt: skip


@pytest.mark.parametrize(
    "one", [*PROBLEMS[:2], *(pytest.param(one, marks=pytest.mark.nightly) for one in PROBLEMS[2:])], ids=str
)
def test_compiled(one):
    """No spills, and as many programs of a multiprocessor as the variant says; codes never pass through shared memory."""
    variant = variant_of(one)
    cubin, log = compiled(KERNEL, variant, one)
    assert complaints(log, variant.threads * variant.resident) == []
    names = [re.sub(r"^@!?U?P\d+ ", "", line.text).split()[0] for line in disassembled(cubin).lines]
    loop = names[: names.index("BAR.SYNC.DEFER_BLOCKING")] if "BAR.SYNC.DEFER_BLOCKING" in names else names
    # Queries that scales of channels multiply wait there, too.
    shared = ("LDSM", "LDGSTS") if one.scales == "channel" else ("LDS", "LDGSTS")
    assert not [name for name in loop if name.startswith(shared)]
    # Two products of a tile's 16 tokens by 16 channels each.
    products = sum(name.startswith("HMMA.16816") for name in names)
    assert products >= 2 * variant.tile // 16 * one.width // 16


def test_parts_fill_the_device():
    one = problem("fp8", "token")
    places = 132 * variant_of(one).resident
    assert splits_of(one, 8, 32768) == places // 8
    assert splits_of(one, 8, 128) == 1
    assert splits_of(one, places, 8192) == 1
    busy = []
    for pairs in range(1, 4 * places):
        splits = splits_of(one, pairs, 131072)
        rounds = -(-pairs * splits // places)
        busy.append(pairs * splits / (rounds * places))
    assert min(busy) >= 0.8
    assert np.mean(np.asarray(busy) >= sm90_decode.BUSY) >= 0.96
    assert [sm90_decode.parts_added(one, splits).together for splits in (2, 12, 33, 66, 132)] == [
        3,
        3,
        9,
        17,
        17,
    ]


def test_what_is_taken():
    q, keys, *_ = cache("fp8")
    assert sm90_decode.unfit(q, keys) is None
    assert "it is for Hopper" in sm90_decode.refusal(q, keys)
    assert "one query of each head" in sm90_decode.unfit(q.repeat(1, 1, 2, 1), keys)
    assert "8 heads that share" in sm90_decode.unfit(q.repeat(1, 2, 1, 1), keys)
    assert "64 or 128 channels" in sm90_decode.unfit(q, replace(keys, width=256))
    assert "one scale of a token" in sm90_decode.unfit(q, replace(keys, scale=keys.scale.repeat(1, 1, 1, 2)))
