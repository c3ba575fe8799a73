"""`fast.attention`: CPU tensors against the reference, kernels compiled for Hopper and in Triton's interpreter."""

import platform

import pytest
import torch

from ao_lab.kv_cache.recipe import INT4, NVFP4, RECIPES, KVRecipe
from fast.attention.attention import _dequantized as by_torch
from fast.attention.attention import attention
from fast.attention.stored import append_, computed_values, quantized_tokens, room_for, token_values
from fast.stored_tokens import NewTokens
from reference.attention import attention as specified

#: What a kernel decodes.
KINDS = {
    "value": "bfloat16",
    "fp8": "fp8",
    "int8": "int8",
    "int4": KVRecipe(key=INT4, value=INT4, rotate=True),
}


def cache(name, dtype=torch.bfloat16, tokens=9, room=16, width=64):
    """Keys and values of one recipe, some written at once and one after them."""
    recipe = RECIPES[name] if isinstance(name, str) else name
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, tokens, width, generator=draw).to(dtype) for _ in range(2))
    stores = [
        room_for(x, room, scheme, axis=axis, window=recipe.window)
        for x, scheme, axis in zip((k, v), recipe.schemes, recipe.axes, strict=True)
    ]
    length = torch.tensor(0)
    append_(*stores, k[:, :, :-1], v[:, :, :-1], length)
    append_(*stores, k[:, :, -1:], v[:, :, -1:], length)
    return *stores, length


@pytest.mark.parametrize("name", RECIPES)
def test_cpu_is_the_reference(name):
    """Of what is stored, in float64: the same numbers, rounded once."""
    recipe = RECIPES[name]
    keys, values, length = cache(KVRecipe(key=recipe.key, value=recipe.value))
    q = torch.randn(2, 4, 3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    mask = torch.ones(2, 1, 3, 16, dtype=torch.bool)
    mask[1, ..., :2] = False
    y = attention(q, keys, values, length, mask=mask)
    held = [x.codes[:, :, :9] if not x.scheme else quantized_tokens(x, 9) for x in (keys, values)]
    expected = specified.attention(q, *held, causal=True, mask=mask[..., :9].numpy())
    assert torch.equal(y, expected)
    assert y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("mask", ["bool", "bias", "none"])
def test_of_dequantized_states(mask):
    """What a GPU without a kernel for the scheme computes, within the bound of float32; none beyond the length."""
    keys, values, length = cache(KVRecipe(key=NVFP4, value=NVFP4), torch.float32)
    draw = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 3, 64, generator=draw)
    seen = torch.ones(2, 1, 3, 16, dtype=torch.bool)
    seen[1, ..., :2] = False
    bias = torch.randn(2, 4, 3, 16, generator=draw).masked_fill(~seen, torch.finfo(torch.float32).min)
    given = {"bool": seen, "bias": bias, "none": None}[mask]
    if mask == "bool":
        keys.scale[1, :, :2] = values.scale[1, :, :2] = 0x7F  # NaN that nobody sees
    held = [quantized_tokens(x, 9) for x in (keys, values)]
    for softcap in (0.0, 2.0):
        y = by_torch(q, keys, values, length, given, 0.125, True, softcap).double().numpy()
        exact = attention(q, keys, values, length, mask=given, softcap=softcap).double().numpy()
        rules = {
            "causal": True,
            "mask": None if given is None else given[..., :9],
            "softcap": softcap or None,
        }
        bound = specified.attention_error_bound(q, *held, weights="float32", out_dtype="float32", **rules)
        assert (abs(y - exact) <= bound).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_nan_that_is_seen_stays(softcap):
    """Where a GPU has no kernel, as on a CPU."""
    keys, values, length = cache("bfloat16", torch.float32)
    keys.codes[1, 0, 3, 0] = values.codes[0, 1, 2, 5] = torch.nan
    q = torch.randn(2, 4, 3, 64, generator=torch.Generator().manual_seed(1))
    y = by_torch(q, keys, values, length, None, 0.125, True, softcap)
    expected = attention(q, keys, values, length, scale=0.125, softcap=softcap or None)
    assert 0 < expected.isnan().sum() < expected.numel()
    assert torch.equal(y.isnan(), expected.isnan())


SHORT = KVRecipe(key="fp8_rowwise", value="fp8_rowwise", residual=3, sinks=2)


@pytest.mark.parametrize("name", ["bfloat16", "fp8_residual", SHORT], ids=["values", "window", "short"])
@pytest.mark.parametrize("shape", [(3, 16), (4, 3, 16), (1, 1, 3, 1)], ids=str)
def test_masks_of_fewer_axes(name, shape, monkeypatch):
    """Of all sequences, heads or keys, where a GPU has no kernel as on a CPU: NaN that nobody sees does no harm."""
    keys, values, length = cache(name, torch.float32)
    q = torch.randn(2, 4, 3, 64, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., :1, :2] = mask[..., -1:] = False
    if shape[-1] > 1:
        mask[..., 4] = False
        for one in (keys, values):
            one.codes[:, :, 4] = 0x7F if one.scheme else torch.nan
            if one.computed is not None:
                slots = one.window.position(torch.arange(one.window.slots), 9)
                one.computed[:, :, slots == 4] = torch.nan
    expected = attention(q, keys, values, length, mask=mask)
    monkeypatch.setattr(
        "fast.attention.attention._specified", lambda q, k, v, n, *rules: by_torch(q, k, v, length, *rules)
    )
    y = attention(q, keys, values, length, mask=mask)
    for t in range(3):
        rules = {"length": 7 + t, "mask": mask.expand(2, 4, 3, 16)[:, :, t : t + 1, :9]}
        seen = of_query(q, keys, values, 7 + t, t)
        exact = specified.attention(*seen, out_dtype="float64", **rules)
        bound = specified.attention_error_bound(*seen, weights="float32", out_dtype="float32", **rules)
        for result in (y, expected):
            assert (abs(result[:, :, t : t + 1].numpy() - exact.numpy()) <= bound).all()


def of_query(q, keys, values, end, t):
    """Query t of q, and of nine tokens what it reads, computed or stored, where it sees `end` of them."""
    at, window = torch.arange(9), keys.window if keys.scheme else values.window
    near = ((at < window.sinks) | (at >= window.first(torch.tensor(end))))[:, None]
    stored = [token_values(x, 9) for x in (keys, values)]
    computed = [computed_values(x, y, torch.tensor(9)) for x, y in zip((keys, values), stored, strict=True)]
    both = (torch.where(near, x, y) for x, y in zip(computed, stored, strict=True))
    return q[:, :, t : t + 1], *both


@pytest.mark.parametrize("name", ["bfloat16", SHORT], ids=["values", "short"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_scores_of_minus_infinity_alone(name, softcap):
    """Zeros, as of a query that sees nothing; a bounded score counts."""
    keys, values, length = cache(name, torch.float32)
    (keys.codes if keys.computed is None else keys.computed)[..., 0] = -torch.inf
    q = torch.ones(2, 4, 3, 64)
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[:, 6] = True
    expected = attention(q, keys, values, length, mask=mask, softcap=softcap or None)
    y = by_torch(q, keys, values, length, mask[None, None], 0.125, True, softcap)
    assert expected.isfinite().all()
    assert bool(expected.any()) == bool(softcap)
    assert torch.equal(y, expected)


def test_an_eager_call_goes_past_the_operators():
    """A mode, a tracer or a gradient sees operators; nothing else does, which take the host longer than the launches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names += (func.name(),)
            return func(*args, **(kwargs or {}))

    keys, values, length = cache("fp8")
    q = torch.randn(2, 4, 1, 64).bfloat16()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = attention(q, keys, values, length)
        append_(keys, values, *torch.randn(2, 2, 2, 1, 64).bfloat16(), length)
    assert not [one.name for one in profile.events() if one.name.startswith("ao_lab::")]
    length.sub_(1)
    with Seen() as mode:
        assert torch.equal(attention(q, keys, values, length), y)
        append_(keys, values, *torch.randn(2, 2, 2, 1, 64).bfloat16(), length)
    assert [one for one in mode.names if one.startswith("ao_lab::")] == [
        "ao_lab::cached_attention", "ao_lab::append_tokens_"
    ]  # fmt: skip


def test_written_one_by_one():
    """The codes of a token do not depend on the tokens beside it."""
    keys, values, length = cache("int4_tokens")
    like = torch.zeros(2, 2, 1, 64, dtype=torch.bfloat16)
    recipe = RECIPES["int4_tokens"]
    together = [room_for(like, 16, s, window=recipe.window) for s in recipe.schemes]
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, 9, 64, generator=draw).bfloat16() for _ in range(2))
    count = torch.tensor(0)
    append_(*together, k, v, count)
    for x, y in zip((keys, values), together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x.tensors(), y.tensors(), strict=True))
    assert count == length == 9


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
class TestKernels:
    @pytest.mark.parametrize(
        ("what", "names"),
        [
            ("attend", "value,int4_g64,fp8_static,int4_channels"),
            pytest.param("attend", "fp8,int8,int8_window,int4,int4_window", marks=pytest.mark.nightly),
            ("write", "bfloat16,static,window,channels"),
            pytest.param("write", ",".join(RECIPES), marks=pytest.mark.nightly),
        ],
    )
    def test_interpreted(self, what, names):
        from tests.emulator.interpreter_process import lines_of

        assert lines_of("cache_attention", what, names) == [f"{what} {name}" for name in names.split(",")]

    @pytest.mark.parametrize(
        "kind",
        ["value", "fp8", "int4", "int4 by channel",
         *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("int8", "fp8 static"))],
    )  # fmt: skip
    def test_compiled(self, kind):
        """Tensor cores, copies of 16 bytes that wait for nothing, and no spills; not `wgmma`, whose A may be in registers."""
        from fast.kernels.attention import decode
        from tests.fast.kernels.compiling.kernel_compiler import launched

        recipe = KINDS.get(kind, {"fp8 static": "fp8"}.get(kind, "int4"))
        keys, values, length = cache(recipe, room=8192, width=128)
        if kind == "fp8 static":
            keys.scale = values.scale = torch.ones(2)
        q = torch.zeros(2, 1, 8, 128, dtype=torch.bfloat16).transpose(1, 2)
        mask = torch.ones(2, 1, 1, 8192, dtype=torch.bool)
        machine, combine = launched(lambda: decode.attention(q, keys, values, length, mask, 0.1, True))
        assert (machine.kernel, combine.kernel) == ("attend_kernel", "combine_kernel")
        assert machine.local == machine.stack == combine.local == combine.stack == 0
        names = {name.split(".")[0] for name in machine.instructions}
        assert {"HMMA", "LDGSTS"} <= names
        assert "HGMMA" not in names

    def test_a_mask_has_a_byte_for_each_token_of_the_room(self):
        """How many tokens there are is known on the device alone: what a shorter mask leaves out is hidden, not read."""
        from fast.kernels.attention.decode import _mask_bytes

        found = _mask_bytes(torch.ones(2, 1, 1, 5, dtype=torch.bool), 8)
        assert (found.dtype, found.stride(-1), found[0].tolist()) == (torch.uint8, 1, [[[1] * 5 + [0] * 3]])
        assert _mask_bytes(torch.ones(1, dtype=torch.bool).expand(1, 1, 1, 8), 8).stride(-1) == 1

    def test_append_compiled(self):
        from fast.kernels.attention import append
        from tests.fast.kernels.compiling.kernel_compiler import launched

        keys, values, length = cache("int4_tokens", room=64, width=128)
        k = torch.zeros(2, 2, 1, 128, dtype=torch.bfloat16)
        (machine,) = launched(lambda: append.append(NewTokens(keys, values, k, k, length, True)))
        assert (machine.kernel, machine.local, machine.stack) == ("append_kernel", 0, 0)
        assert machine.registers <= 64
        assert "__assertfail" in machine.ptx  # tokens beyond the cache

    def test_what_append_does_not_cover_is_left_to_torch(self):
        """float32, strided channels, odd widths, and of keys by channel several tokens at once."""
        from fast.kernels.attention import append

        k = torch.zeros(2, 2, 1, 128, dtype=torch.bfloat16)
        strided = torch.zeros(2, 2, 1, 256, dtype=torch.bfloat16)[..., ::2]
        for name, x in (
            ("int8", k.float()),
            ("int8", strided),
            ("int8", k[..., :96]),
            ("int4", k.repeat(1, 1, 2, 1)),
        ):
            keys, values, length = cache(name, room=128, width=x.shape[-1])
            assert not append.append(NewTokens(keys, values, x, x, length))
            assert length == 9

    def test_group_compiled(self):
        """Two launches for a token whose keys are stored by channel."""
        from fast.kernels.attention import append
        from tests.fast.kernels.compiling.kernel_compiler import launched

        keys, values, length = cache("int4", room=128, width=128)
        k = torch.zeros(2, 2, 1, 128, dtype=torch.bfloat16)
        machines = launched(lambda: append.append(NewTokens(keys, values, k, k, length)))
        assert [one.kernel for one in machines] == ["append_kernel", "group_kernel"]
        assert all(one.local == one.stack == 0 for one in machines)
