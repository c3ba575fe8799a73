"""`fast.kernels.attention` in Triton's interpreter: tokens written bit for bit, attention within its bound of the reference.

    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process cache_attention write RECIPE[,RECIPE...]
    TRITON_INTERPRET=1 python -m tests.emulator.interpreter_process cache_attention attend KIND[,KIND...]

Queries are float16: the interpreter truncates bfloat16 where it should round.
"""

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import interpreter_builder

from ao_lab.kv_cache.recipe import INT4, RECIPES, KVRecipe
from ao_lab.testing.strategies import assert_same_bits
from fast.attention.stored import append_, quantized_tokens, room_for, token_values
from fast.kernels.attention import append, decode
from fast.stored_tokens import NewTokens
from reference import SCHEMES
from reference.attention.attention import attention, attention_error_bound
from reference.attention.window import Window
from tests.emulator import quick_interpreter
from tests.support.zero_points import zero_values

SCHEME = {
    "value": None, "fp8": SCHEMES["fp8_rowwise"], "int8": SCHEMES["int8_rowwise"], "int4": INT4,
    "int4_g64": SCHEMES["int4_g64"], "int4_window": INT4, "int8_window": SCHEMES["int8_rowwise"],
    "int4_channels": INT4, "fp8_static": SCHEMES["fp8_rowwise"],
}  # fmt: skip
#: Which tokens are read as computed, by kind.
WINDOWS = {"int4_window": Window(40, 3), "int8_window": Window(0, 5), "int4_channels": Window(8, 3, 32)}
#: A window of fewer tokens than are written at once.
CHANNELS = KVRecipe(key="int4_g32_asymmetric", key_axis=-2, value=INT4, residual=8, sinks=3)
SHORT = KVRecipe(key=INT4, value=INT4, rotate=True, residual=3, sinks=2)
#: Sequences, heads, key heads, queries of a head, width, room, tokens, whether masked, parts.
CASES = (
    (2, 8, 2, 1, 64, 96, 77, True, 1),
    (1, 4, 1, 1, 128, 160, 130, False, 3),
    (1, 4, 2, 3, 128, 160, 130, True, 2),
)
#: Of kinds with a window: one query; a few tokens that all have a slot, and most.
WITH_WINDOW = (
    (2, 8, 2, 1, 64, 96, 77, True, 1),
    (1, 4, 1, 1, 128, 160, 130, False, 3),
    (1, 4, 1, 1, 64, 160, 21, True, 2),
)


def main(what, names):
    """All of a list of names."""
    quick_interpreter.install()
    interpreter_builder.options = replace(interpreter_builder.options, debug=True)  # as the launch has it
    for name in names.split(","):
        {"write": write, "attend": attend}[what](name)
        print(what, name, flush=True)


def write(name):
    """Tokens of several calls, one of them zeros, keys as views of (B, n, heads, width); those beyond the cache are refused."""
    if name == "static":
        write_static()
        return
    recipe = {"window": SHORT, "channels": CHANNELS}.get(name) or RECIPES[name]
    if recipe.window.group > 1:
        write_groups(recipe)
        return
    torch.manual_seed(0)
    stores = [
        [
            room_for(torch.zeros(2, 3, 1, 64, dtype=torch.bfloat16), 12, s, window=recipe.window)
            for s in recipe.schemes
        ]
        for _ in range(2)
    ]
    lengths = torch.tensor(0), torch.tensor(0)
    for tokens in (5, 1, 3):
        k = (torch.randn(2, tokens, 3, 64) * torch.logspace(-4, 4, 64)).bfloat16().transpose(1, 2)
        v = torch.randn(2, 3, tokens, 64).bfloat16()
        k[0, 0, 0] = 0
        append_(*stores[0], k, v, lengths[0], recipe.rotate)
        assert append.append(NewTokens(*stores[1], k, v, lengths[1], recipe.rotate))
    assert lengths[0] == lengths[1] == 9
    for expected, found in zip(*stores, strict=True):
        for x, y in zip(expected.tensors(), found.tensors(), strict=True):
            assert_same_bits(x, y)
    before = [x.clone() for one in stores[1] for x in one.tensors()]
    four = (x[:, :, :1].repeat(1, 1, 4, 1) for x in (k, v))
    with pytest.raises(InterpreterError, match="has no room for these tokens"):
        append.append(NewTokens(*stores[1], *four, lengths[1], recipe.rotate))
    assert lengths[1] == 9
    for x, y in zip(before, (x for one in stores[1] for x in one.tensors()), strict=True):
        assert_same_bits(x, y)


def write_static():
    """Codes of scales that are there: of heads, and of all heads together."""
    for scales in (torch.tensor([0.01, 0.02, 0.005]), torch.tensor([0.01])):
        torch.manual_seed(0)
        like = torch.zeros(2, 3, 1, 64, dtype=torch.bfloat16)
        for scheme in ("fp8_rowwise", "int8_rowwise"):
            stores = [
                [room_for(like, 12, SCHEMES[scheme], scale=scales.clone()) for _ in "kv"] for _ in range(2)
            ]
            lengths = torch.tensor(0), torch.tensor(0)
            for tokens in (5, 1):
                k, v = (torch.randn(2, 3, tokens, 64).bfloat16() * 3 for _ in "kv")
                append_(*stores[0], k, v, lengths[0])
                assert append.append(NewTokens(*stores[1], k, v, lengths[1]))
            for expected, found in zip(*stores, strict=True):
                assert_same_bits(expected.codes, found.codes)
                assert_same_bits(found.scale, scales)


def write_groups(recipe):
    """A prompt by operations of torch, then tokens one by one: a group has its codes as soon as it is full."""
    torch.manual_seed(0)
    like = torch.zeros(2, 3, 1, 64, dtype=torch.bfloat16)
    stores = [
        [
            room_for(like, 70, s, axis=axis, window=recipe.window)
            for s, axis in zip(recipe.schemes, recipe.axes, strict=True)
        ]
        for _ in range(2)
    ]
    lengths = torch.tensor(0), torch.tensor(0)
    for tokens in (25, *([1] * 8), 29, 1, 1, 1):
        k = (torch.randn(2, tokens, 3, 64) * torch.logspace(-2, 2, 64) + 3).bfloat16().transpose(1, 2)
        v = torch.randn(2, 3, tokens, 64).bfloat16()
        for one, length in zip(stores, lengths, strict=True):
            if one is stores[1] and tokens == 1:
                assert append.append(NewTokens(*one, k, v, length, recipe.rotate))
            else:
                append_(*one, k, v, length, recipe.rotate)
        group = recipe.window.group
        whole = int(lengths[0]) // group
        assert lengths[0] == lengths[1]
        for expected, found in zip(*stores, strict=True):
            by_channel = expected.axis == 2
            last = int(lengths[0]) if not by_channel else whole * group
            assert_same_bits(expected.codes[:, :, :last], found.codes[:, :, :last])
            assert_same_bits(expected.computed, found.computed)
            if by_channel:
                assert_same_bits(expected.scale[:, :, :whole], found.scale[:, :, :whole])
                assert_same_bits(expected.zero[:, :, :whole], found.zero[:, :, :whole])


def attend(kind):
    """Every case of a kind; values over four powers of ten, NaN and infinity beyond the tokens."""
    window = WINDOWS.get(kind, Window())
    for batch, heads, kv, queries, width, room, tokens, masked, parts in (
        WITH_WINDOW if window.slots else CASES
    ):
        torch.manual_seed(1)
        k = torch.randn(batch, kv, tokens, width).half()
        v = (torch.randn(batch, kv, tokens, width) * torch.logspace(-3, 1, tokens)[:, None]).half()
        q = torch.randn(batch, queries, heads, width).half().transpose(1, 2)
        by_channel = window.group > 1
        keys = room_for(
            k,
            room,
            SCHEMES["int4_g32_asymmetric"] if by_channel else SCHEME[kind],
            axis=3 - by_channel,
            window=window,
        )
        values = room_for(v, room, SCHEME[kind], window=window)
        if kind == "fp8_static":
            keys.scale, values.scale = (torch.rand(kv) * 0.02 + 0.01 for _ in range(2))
        length = torch.tensor(0)
        append_(keys, values, k, v, length)
        values.codes[:, :, tokens:] = 0x7F if values.scheme else torch.nan
        if values.scale is not None and not values.static:
            values.scale[:, :, tokens:] = torch.inf
        mask = None
        if masked:
            mask = torch.ones(batch, 1, queries, room, dtype=torch.bool)
            mask[0, ..., :3] = False
            if not window.slots and values.scheme in ("", SCHEMES["fp8_rowwise"].key):
                for one in (keys, values):  # NaN that nobody sees
                    one.codes[0, :, :3] = 0x7F if one.scheme else torch.nan
            if values.scale is not None and not values.static:
                values.scale[0, :, :3] = torch.nan
        assert decode.refusal(q, keys, values, mask, 0.0) is None
        plan = decode.Plan(parts, 32, 4, 1)
        y = decode.attention(q, keys, values, length, mask, width**-0.5, True, plan)
        held = (k, v) if kind == "value" else tuple(quantized_tokens(x, tokens) for x in (keys, values))
        if window.slots:
            near = torch.from_numpy(window.seen(1, tokens, tokens, True))[0, 0, 0, :, None]
            held = tuple(
                torch.where(near, x, token_values(y, tokens))
                for x, y in zip((k, v), (keys, values), strict=True)
            )
        seen = None if mask is None else mask[..., :tokens].numpy()
        expected = attention(q, *held, causal=True, mask=seen, out_dtype="float64")
        # Queries with the scales of channels are rounded to float16.
        bound = attention_error_bound(
            q,
            *held,
            causal=True,
            mask=seen,
            weights="float16",
            out_dtype="float16",
            products=by_channel * 2.0**-11,
            zeros=zero_values(keys, tokens),
        )
        assert ((y.double() - expected).abs() <= torch.from_numpy(bound)).all(), (kind, batch, queries)
