"""The host's side of the kernels, with nothing launched: what it refuses, what it remembers, and when it must not.

What the host leaves to the reference before a kernel could read beyond an array; nothing is launched here.
"""

import ctypes
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import triton

import fast
import reference
from ao_lab.config.recipe import integer_scheme
from fast import dispatch
from fast.kernels.grouped import group_columns, group_layout
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize import plan as passes
from fast.kernels.quantize.host import POINTERS
from fast.kernels.rowwise_colwise import mx as both
from fast.kernels.rowwise_colwise.host import batch_columns, fused_both
from fast.kernels.scheme.constants import constants_of
from fast.launch import direct
from fast.quantize.rowwise_colwise import both_values, values_and_codes
from reference import SCHEMES, Quantized, Scales
from reference.quantize.blocks import Blocks
from tests.fast.kernels.compiling.recorded_launches import FUNCTION, Flat, Nested, Opaque, Recorded


def normals(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture(params=[Flat, Nested, Opaque])
def launcher(request):
    return request.param


@pytest.fixture
def recorded(monkeypatch, launcher):
    return Recorded(monkeypatch, launcher)


@pytest.fixture
def flat(monkeypatch):
    return Recorded(monkeypatch, Flat)


X = normals(16, 256)
BOTH = normals(16, 512)
WEIGHT = normals(256)
STORED = {
    (name, packed): fast.quantize(X, name, packed=packed)
    for name, packed in [
        ("fp8_rowwise", False),
        ("nvfp4", True),
        ("int4_g32_asymmetric", True),
        ("nf4", True),
    ]
}
#: Packed codes that the block kernel does not read: they are unpacked in front of it.
ONE_BIT = fast.quantize(X, integer_scheme(1, -1, False), packed=True)
LONG_ROWS = fast.quantize(normals(4, 320), integer_scheme(2, -1, False), packed=True)
GIVEN = {
    name: fast.quantize(X, name).scales
    for name in ("fp8_tensorwise", "nvfp4", "int8_rowwise_asymmetric", "nf4")
}
RECORD = replace(SCHEMES["fp8_rowwise"], name="my own")

# How many launches each call has.
CALLS = {
    "quantize": (1, lambda: fast.quantize(X, "fp8_rowwise")),
    "quantize by record": (1, lambda: fast.quantize(X, RECORD, axis=0)),
    "quantize packed": (1, lambda: fast.quantize(X, "mxfp4", packed=True)),
    "quantize 8 bits packed": (1, lambda: fast.quantize(X, "mxfp8_e4m3", packed=True)),
    "quantize with zero points": (1, lambda: fast.quantize(X, "int8_rowwise_asymmetric")),
    "quantize in two passes": (2, lambda: fast.quantize(X, "nvfp4")),
    "quantize with scales of scales": (2, lambda: fast.quantize(X, "nf4", packed=True)),
    "quantize with many scales of scales": (3, lambda: fast.quantize(MANY, "nf4")),
    "quantize given scales of scales": (1, lambda: fast.quantize(X, "nf4", scales=GIVEN["nf4"])),
    "quantize given": (1, lambda: fast.quantize(X, "fp8_tensorwise", scales=GIVEN["fp8_tensorwise"])),
    "quantize given a tensor": (1, lambda: fast.quantize(X, "fp8_tensorwise", scales=GIVEN["fp8_tensorwise"].scale)),
    "quantize given all": (1, lambda: fast.quantize(X, "nvfp4", scales=GIVEN["nvfp4"])),
    "quantize given outer": (1, lambda: fast.quantize(X, "nvfp4", scales=Scales(outer=GIVEN["nvfp4"].outer))),
    "dequantize": (1, lambda: fast.dequantize(STORED["fp8_rowwise", False])),
    "dequantize packed": (1, lambda: fast.dequantize(STORED["nvfp4", True], torch.bfloat16)),
    "dequantize one bit": (2, lambda: fast.dequantize(ONE_BIT, torch.bfloat16)),
    "dequantize rows of no power of two": (2, lambda: fast.dequantize(LONG_ROWS, torch.bfloat16)),
    "dequantize zero points": (1, lambda: fast.dequantize(STORED["int4_g32_asymmetric", True], "float16")),
    "dequantize scales of scales": (1, lambda: fast.dequantize(STORED["nf4", True], torch.bfloat16)),
    "fake_quantize with scales of scales": (3, lambda: fast.fake_quantize(X, "nf4")),
    "fake_quantize_vjp with scales of scales": (1, lambda: fast.fake_quantize_vjp(X, X, "nf4")[0]),
    "fake_quantize": (1, lambda: fast.fake_quantize(X, "mxfp8_e4m3")),
    "fake_quantize in two passes": (2, lambda: fast.fake_quantize(X, "nvfp4")),
    "fake_quantize_vjp": (1, lambda: fast.fake_quantize_vjp(X, X, "mxfp8_e4m3")[0]),
    "rms_norm": (1, lambda: fast.rms_norm(X, WEIGHT)),
    "rms_norm of long rows": (2, lambda: fast.rms_norm(LONG, LONG[0], residual=LONG)),
    "rms_norm_quantize": (1, lambda: fast.rms_norm_quantize(X, WEIGHT, "mxfp4", residual=X, packed=True)),
    "swiglu": (1, lambda: fast.swiglu(X, X)),
    "swiglu_quantize": (1, lambda: fast.swiglu_quantize(*BOTH.chunk(2, -1), "fp8_rowwise")),
    "quantize stochastically": (1, lambda: fast.quantize(X, STOCHASTIC, random_bits=WORDS)),
    "choose_scales": (1, lambda: fast.choose_scales(X, "int8_rowwise_asymmetric")),
    "choose_scales of two levels": (2, lambda: fast.choose_scales(X, "nvfp4", axis=0)),
    "fake_quantize given": (1, lambda: fast.fake_quantize(X, "nvfp4", scales=GIVEN["nvfp4"])),
    "fake_quantize stochastically": (1, lambda: fast.fake_quantize(X, STOCHASTIC, random_bits=WORDS)),
    "fake_quantize_vjp given": (1, lambda: fast.fake_quantize_vjp(X, X, "nvfp4", scales=GIVEN["nvfp4"])),
    "fake_quantize_vjp given zero points": (1, lambda: gradients("int8_rowwise_asymmetric", X)),
    "fake_quantize_vjp of parts": (3, lambda: gradients("int8_rowwise_asymmetric", LONG)),
    "fake_quantize_vjp given outer": (1, lambda: gradients("nvfp4", X, Scales(outer=GIVEN["nvfp4"].outer))),
    "quantize_both": (2, lambda: fast.quantize_both(MATRIX, "mxfp8_e4m3", packed=True)),
    "quantize_both of float32": (2, lambda: fast.quantize_both(MATRIX.float(), "mxfp8_e4m3")),
    "quantize_both tiled": (1, lambda: fast.quantize_both(MATRIX, "mxfp8_e4m3", tiled=True)),
    "quantize_both given": (1, lambda: fast.quantize_both(MATRIX, "fp8_tensorwise", scales=PAIR)),
    "quantize_both of rows": (2, lambda: fast.quantize_both(MATRIX, "fp8_rowwise")),
    "quantize_both of a tensor": (2, lambda: fast.quantize_both(MATRIX, "fp8_tensorwise")),
    "quantize_both of groups": (1, lambda: fast.quantize_both(MATRIX, "fp8_1x128", packed=True)),
    "quantize_both of squares": (1, lambda: fast.quantize_both(MATRIX, "fp8_128x128")),
    "values along both axes": (1, lambda: both_values(MATRIX, SCHEMES["mxfp8_e4m3"])),
    "values and codes": (1, lambda: values_and_codes(MATRIX, SCHEMES["mxfp4_rceil"])),
    "values and codes of two reads": (2, lambda: values_and_codes(MATRIX, SCHEMES["fp8_1x128"])),
    "quantize a transpose": (1, lambda: fast.quantize(MATRIX.t(), "fp8_1x128")),
    "quantize a transpose in two passes": (2, lambda: fast.quantize(MATRIX.t(), "fp8_rowwise", axis=1)),
    "columns of a batch": (2, lambda: batch_columns(BATCH, SCHEMES["fp8_tensorwise"])),
    "columns of groups": (2, lambda: group_columns(MATRIX, SCHEMES["fp8_rowwise"], SOURCE, OWNERS, 8, 16)),
    "columns of groups in blocks": (1, lambda: group_columns(MATRIX, SCHEMES["mxfp8_e4m3"], SOURCE, OWNERS, 8, 32)),
    "layout of groups": (1, lambda: group_layout(OWNERS, 256, 512, 32)),
    "encode": (1, lambda: fast.encode(X, "float8_e4m3fn")),
    "encode stochastically": (1, lambda: fast.encode(X, "bfloat16", rounding="stochastic", random_bits=WORDS)),
    "decode": (1, lambda: fast.decode(CODES, "float8_e4m3fn")),
    "pack": (1, lambda: fast.pack(CODES, "float4_e2m1fn")),
    "pack byte by byte": (1, lambda: fast.pack(CODES, "int3")),
    "unpack": (1, lambda: fast.unpack(PACKED, "float4_e2m1fn", (16, 256))),
}  # fmt: skip
LONG = normals(2, 20480)
MANY = normals(66, 1024)
MATRIX = normals(256, 128)
BATCH = normals(2, 256, 128)
SOURCE, OWNERS = torch.zeros(384, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)
WORDS = torch.arange(16 * 256, dtype=torch.int32).view(torch.uint32).view(16, 256)
CODES = fast.quantize(X, "fp8_rowwise").codes
PACKED = fast.pack(CODES, "float4_e2m1fn")
PAIR = (GIVEN["fp8_tensorwise"], replace(GIVEN["fp8_tensorwise"], scale=GIVEN["fp8_tensorwise"].scale * 2))
STOCHASTIC = replace(SCHEMES["mxfp8_e4m3"], name="drawn", rounding="stochastic")


def gradients(name, x, scales=None):
    """`fake_quantize_vjp` for given scales."""
    if scales is None:
        scales = KEPT.setdefault((name, x.shape), reference.choose_scales(x, name))
    return fast.fake_quantize_vjp(x, x, name, scales=scales)


KEPT = {}


def tensors_of(result):
    """Name and tensor for everything that a function gave."""
    if isinstance(result, torch.Tensor):
        return {"y": result}
    if isinstance(result, tuple):
        parts = {at: part for at, part in enumerate(result) if part is not None}
        return {(at, name): t for at, part in parts.items() for name, t in tensors_of(part).items()}
    return {f.name: v for f in fields(result) if isinstance(v := getattr(result, f.name), torch.Tensor)}


def plain(result):
    """Everything of a result but the numbers in its tensors."""
    if isinstance(result, torch.Tensor):
        return (result.shape, result.dtype, result.stride(), result.device, result.requires_grad)
    if isinstance(result, tuple):
        return tuple(plain(part) if isinstance(part, (torch.Tensor, Quantized)) else part for part in result)
    return {
        f.name: plain(v) if isinstance(v := getattr(result, f.name), torch.Tensor) else v
        for f in fields(result)
    }


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_goes_straight_to_the_driver(recorded, name):
    """The same grid, stream and arguments, with the addresses of the new results where those of the first were."""
    launches, call = CALLS[name]
    first = call()
    assert recorded.counts() == (launches, 0)
    second = call()
    assert recorded.counts() == (launches, launches)
    assert plain(second) == plain(first)
    assert getattr(second, "__dict__", {}).keys() == getattr(first, "__dict__", {}).keys()
    assert [head[:3] for head in recorded.heads] == recorded.grids
    assert all(head[3:] == (7, FUNCTION) for head in recorded.heads)
    made, again = tensors_of(first), tensors_of(second)
    moves = {made[key].data_ptr(): again[key].data_ptr() for key in made}
    for jit, straight in zip(recorded.jit, recorded.straight, strict=True):
        assert len(jit) == len(straight)
        for before, after in zip(jit, straight, strict=True):
            if not isinstance(before, torch.Tensor):
                assert after is None if before is None else after == before
            elif before.data_ptr() in moves:
                assert after == moves[before.data_ptr()]
            elif any(
                before is given
                for given in (
                    X,
                    BOTH,
                    WEIGHT,
                    LONG,
                    MANY,
                    MATRIX,
                    BATCH,
                    SOURCE,
                    OWNERS,
                    WORDS,
                    CODES,
                    PACKED,
                )
            ):
                assert after == before.data_ptr()


@pytest.mark.parametrize("name", CALLS)
def test_results_are_fresh(flat, name):
    """No two calls share memory: not beside each other, not under a CUDA graph that was captured between them."""
    call = CALLS[name][1]
    call()
    results = [tensors_of(call()) for _ in range(3)]
    scales = (*GIVEN.values(), *PAIR)
    given = {id(t) for kept in scales for t in (kept.scale, kept.outer, kept.zero)}
    addresses = [t.data_ptr() for made in results for t in made.values() if id(t) not in given]
    assert len(addresses) == len(set(addresses))


@pytest.mark.parametrize(
    ("scheme", "fill"), [("fp8_rowwise", [0]), ("int8_rowwise_asymmetric", [0, 0x7FFFFFFF, -0x80000000])]
)
def test_statistics_start_from_their_fill(flat, monkeypatch, scheme, fill):
    """The memory of a call's statistics is filled again, whatever it held."""
    monkeypatch.setattr(direct, "allocator", lambda device: lambda shape, strides, dtype: full(shape, dtype))
    full = lambda shape, dtype: torch.full(shape, 77, dtype=dtype)  # noqa: E731
    x, seen = normals(640, 24), []
    numbers = ctypes.c_int32 * (24 * len(fill))

    def read(head, given):
        seen.append(list(numbers.from_address(given[POINTERS.index("statistic")])))

    flat.note = read
    fast.quantize(x, scheme, axis=0)
    fast.quantize(x, scheme, axis=0)
    assert seen[0] == [number for number in fill for _ in range(24)]


def unaligned(x):
    """The same numbers two bytes further on."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def transposed(x):
    """The same shape, columns next to each other."""
    return x.T.contiguous().T


OTHERS = {
    "unaligned": lambda: fast.quantize(unaligned(X), "fp8_rowwise"),
    "not contiguous": lambda: fast.quantize(transposed(X), "fp8_rowwise"),
    "neither rows nor columns": lambda: fast.quantize(MATRIX.t()[::2], "mxfp8_e4m3"),
    "a transpose along the other axis": lambda: fast.quantize(MATRIX.t(), "mxfp8_e4m3", axis=0),
    "another dtype": lambda: fast.quantize(X.half(), "fp8_rowwise"),
    "another shape": lambda: fast.quantize(X.view(8, 512), "fp8_rowwise"),
    "another axis": lambda: fast.quantize(X, "fp8_rowwise", axis=0),
    "another scheme": lambda: fast.quantize(X, "fp8_rowwise_e5m2"),
    "another record of this name": lambda: fast.quantize(X, replace(RECORD, overflow="nan"), axis=0),
    "packed": lambda: fast.quantize(X, "mxfp4"),
    "given scales": lambda: fast.quantize(X, "fp8_rowwise", scales=torch.ones(16, 1)),
    "unaligned scales": lambda: fast.quantize(X, "int8_rowwise_asymmetric", scales=ASYMMETRIC),
    "unaligned codes": lambda: fast.dequantize(
        replace(STORED["fp8_rowwise", False], codes=unaligned(STORED["fp8_rowwise", False].codes))
    ),
    "codes not contiguous": lambda: fast.dequantize(
        replace(STORED["fp8_rowwise", False], codes=transposed(STORED["fp8_rowwise", False].codes))
    ),
    "unaligned stored scales": lambda: fast.dequantize(
        replace(STORED["fp8_rowwise", False], scale=unaligned(STORED["fp8_rowwise", False].scale))
    ),
    "another dtype of values": lambda: fast.dequantize(STORED["fp8_rowwise", False], "float16"),
    "unaligned, faked": lambda: fast.fake_quantize(unaligned(X), "mxfp8_e4m3"),
    "not contiguous, faked": lambda: fast.fake_quantize(transposed(X), "mxfp8_e4m3"),
    "unaligned gradient": lambda: fast.fake_quantize_vjp(unaligned(X), X, "mxfp8_e4m3"),
    "another eps": lambda: fast.rms_norm(X, WEIGHT, eps=1e-5),
    "unaligned weight": lambda: fast.rms_norm(X, unaligned(WEIGHT)),
    "no residual": lambda: fast.rms_norm_quantize(X, WEIGHT, "mxfp4", packed=True),
    "other strides": lambda: fast.swiglu_quantize(X, X, "fp8_rowwise"),
}  # fmt: skip
ASYMMETRIC = replace(
    GIVEN["int8_rowwise_asymmetric"], scale=unaligned(GIVEN["int8_rowwise_asymmetric"].scale)
)


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_goes_the_ordinary_way(flat, monkeypatch, name):
    """After all calls were remembered, one that is like one of them but for a detail repeats none of them."""
    fast.quantize(X, "int8_rowwise_asymmetric", scales=GIVEN["int8_rowwise_asymmetric"])
    for _, call in CALLS.values():
        call()
    before = sum(flat.counts())
    flat.refuse_repetitions(monkeypatch)
    OTHERS[name]()
    assert sum(flat.counts()) > before


STORED_ROWS = STORED["fp8_rowwise", False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": torch.zeros(3, 1)},
        {"scale": torch.zeros(16, 1, dtype=torch.uint8)},
        {"scale": STORED_ROWS.scale.to("meta")},
        {"scale": None},
        {"shape": (256, 16)},
        {"shape": [16, 256]},
        {"axis": 0},
        {"axis": True},
        {"packed": True, "scheme": SCHEMES["mxfp4"]},
        {"codes": torch.zeros(1, 1, dtype=torch.uint8)},
        {"scheme": SCHEMES["nvfp4"]},
    ],
    ids=str,
)
def test_a_quantized_that_does_not_fit_is_never_launched(flat, wrong):
    fast.dequantize(STORED_ROWS)
    fast.dequantize(STORED_ROWS)
    before = flat.counts()
    with pytest.raises((ValueError, TypeError)):
        fast.dequantize(replace(STORED_ROWS, **wrong))
    assert flat.counts() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"axis": True}, "axis is an integer"),
        ({"axis": 1.0}, "axis is an integer"),
        ({"axis": [0]}, "axis is an integer"),
        ({"scales": torch.ones(1, 1)}, "takes scale = float32 of shape"),
        ({"scales": np.ones(1)}, "takes scale = float32 of shape"),
    ],
)
def test_arguments_that_are_wrong_stay_wrong(flat, arguments, said):
    x = normals(16, 256)
    for _ in range(2):
        fast.quantize(x, "fp8_rowwise", axis=1)
        fast.quantize(x, "fp8_rowwise", scales=torch.ones(16, 1))
    before = flat.counts()
    with pytest.raises((ValueError, TypeError), match=said):
        fast.quantize(x, "fp8_rowwise", **arguments)
    assert flat.counts() == before


def test_an_axis_that_cannot_be_hashed(flat):
    """NumPy's 0-d arrays count as integers, and are not remembered."""
    for _ in range(2):
        assert fast.quantize(X, "fp8_rowwise", axis=np.array(1)).axis == 1
    assert not dispatch.CALLS


def test_what_is_remembered_is_bounded(flat, monkeypatch):
    """The oldest goes, and no other: a program that sees ever new shapes has no cliff."""
    monkeypatch.setattr(dispatch, "MOST", 3)
    for rows in range(1, 9):
        fast.quantize(normals(rows, 64), "fp8_rowwise")
        assert [key[-1][1][0] for key in dispatch.CALLS] == list(range(max(1, rows - 2), rows + 1))


def test_a_remembered_record_is_kept(flat):
    """Its id stands for it, so no other record may get that number."""
    record = replace(SCHEMES["fp8_rowwise"], name="short-lived")
    fast.quantize(X, record)
    ((key, entry),) = dispatch.CALLS.items()
    assert id(record) in key
    assert entry[1] is record


def test_a_record_that_was_changed_is_another_one(flat):
    for overflow in ("saturate", "nan", "saturate"):
        record = replace(RECORD, overflow=overflow)
        for _ in range(2):
            assert fast.quantize(X, record).scheme is record
            assert fast.dequantize(replace(STORED_ROWS, scheme=record)).shape == X.shape


def test_hooks_hear_of_every_launch(flat):
    hook, hooks = (lambda metadata: None), triton.knobs.runtime.launch_enter_hook
    fast.quantize(X, "fp8_rowwise")
    hooks.add(hook)
    try:
        fast.quantize(X, "fp8_rowwise")
        assert flat.counts() == (2, 0)
    finally:
        hooks.remove(hook)
    fast.quantize(X, "fp8_rowwise")
    assert flat.counts() == (2, 1)


def test_launches_happen_on_the_device_of_the_tensor(flat):
    fast.quantize(X, "fp8_rowwise")
    flat.device, flat.entered = 5, []
    fast.quantize(X, "fp8_rowwise")
    assert (flat.entered, flat.device) == ([-1], 5)
    assert flat.counts() == (1, 1)


def test_tensors_that_require_a_gradient(flat):
    """Codes have none; values of fake quantization have one, and the inner call is a remembered one."""
    x = X.float().requires_grad_()
    for count in range(3):
        assert fast.quantize(x, "fp8_rowwise").codes.requires_grad is False
        y = fast.fake_quantize(x, "fp8_rowwise")
        y.sum().backward()
        assert y.requires_grad
        assert x.grad.shape == x.shape
        assert flat.counts() == (3, 3 * count)
    with torch.no_grad():
        assert not fast.fake_quantize(x, "fp8_rowwise").requires_grad


def test_kernels_with_scratch_memory_keep_their_launcher(flat):
    """The launcher allocates that memory for each launch."""
    calls = []
    run = Flat(lambda *given: pytest.fail("went past the launcher"))
    run.global_scratch_size = 16
    compiled = type("Compiled", (), {"function": 1, "packed_metadata": ()})
    compiled.run = lambda *given: calls.append(given)
    compiled.run.__dict__.update(launch=run.launch, global_scratch_size=16, profile_scratch_size=0)
    direct.DirectLaunch(compiled, (3, 1, 1), 2, ("tail",)).function(9, [64, None])
    assert calls == [(3, 1, 1, 9, 1, (), None, None, None, 64, None, "tail")]


def test_an_eps_of_another_type_is_not_remembered(flat):
    for _ in range(3):
        fast.rms_norm(X, WEIGHT, eps=np.float64(1e-6))
    assert not any(key and key[0] == "rms_norm" for key in dispatch.CALLS)


def test_memory_is_zeroed_by_the_driver(flat, monkeypatch):
    """All bytes of a buffer that starts with zeros, on the stream of the launches; other fills are written by torch."""
    zeroed = []
    monkeypatch.setattr(direct, "_set_bytes", lambda: lambda *given: zeroed.append(given) or 0)
    for _ in range(2):
        fast.quantize_both(MATRIX, "fp8_rowwise")
    statistic = flat.straight[0][1]
    assert zeroed == [(statistic, 0, 4 * sum(MATRIX.shape), 7)]
    ((call, _),) = dispatch.CALLS.values()
    call._fills = [(at, (3, 3), size) for at, _, size in call._fills]
    monkeypatch.setattr("fast.launch.call.filled", lambda made, fill: zeroed.append(fill) or made)
    call(MATRIX)
    assert zeroed[1:] == [(3, 3)]


def test_memory_is_zeroed_by_torch_where_the_driver_is_not_found(flat, monkeypatch):
    filled = []
    monkeypatch.setattr("fast.launch.call.filled", lambda made, fill: filled.append(fill) or made)
    for name in ("no driver", "an error"):
        monkeypatch.setattr(
            direct, "_set_bytes", lambda name=name: None if name == "no driver" else lambda *_: 1
        )
        for _ in range(2):
            fast.quantize_both(MATRIX, "fp8_rowwise")
    assert [fill for fill in filled if fill] == [(0,)] * 4  # a first call fills as it describes itself


@pytest.mark.parametrize(
    ("scheme", "wrong"),
    [
        ("mxfp8_e4m3", {"scale": torch.zeros(4, 1, dtype=torch.uint8)}),
        ("mxfp8_e4m3", {"scale": torch.zeros(4, 2)}),
        ("nvfp4", {"outer": None}),
        ("int4_g32_asymmetric", {"zero": torch.zeros(1, dtype=torch.int8)}),
    ],
)
def test_scales_that_do_not_fit_are_refused(scheme, wrong):
    q = fast.quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), scheme)
    with pytest.raises((ValueError, TypeError), match=f"{scheme}|shape|dtype"):
        quantizer.dequantize(replace(q, **wrong), "float32")


@pytest.mark.parametrize(
    ("shape", "start", "served"),
    [((128, 64), 0, True), ((128, 64), 2, True), ((128, 64), 1, False), ((64, 64), 0, False), ((128, 32), 0, False)],
)  # fmt: skip
def test_which_matrices_are_read_in_words(shape, start, served):
    """Words of two 16-bit numbers, whole patches."""
    memory = torch.zeros(shape[0] * shape[1] + 8, dtype=torch.bfloat16)
    x = memory[start : start + shape[0] * shape[1]].view(shape)
    assert both.covers_mx(x, constants_of(SCHEMES["mxfp8_e4m3"], "bfloat16")) is served


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "count", "fills"),
    [
        ("fp8_tensorwise", "bfloat16", (8, 4096), 1, []),
        ("fp8_tensorwise", "float32", (8, 4096), 2, []),
        ("fp8_tensorwise", "bfloat16", (3, 9001), 2, []),  # loads of single numbers: they would spill
        ("fp8_tensorwise", "bfloat16", (16, 4096), 2, []),
        ("fp8_tensorwise", "bfloat16", (1024, 4096), 2, [(0,)]),
        ("torchao.int8_tensorwise_asymmetric", "bfloat16", (8, 4096), 2, [passes.RANGE]),
        ("fp8_rowwise", "bfloat16", (2, 17008), 2, [(0,)]),
    ],
)
def test_launches_of_a_tensor_that_is_one_block(name, dtype, shape, count, fills):
    """One program where it holds all elements; else statistics of few parts, which no launch fills before."""
    scheme = SCHEMES[name]
    plan = passes.quantizing(passes.problem_of(dtype, scheme, Blocks.of(shape, scheme.scale, -1)))
    assert len(plan.passes) == count
    assert [buffer.fill for buffer in plan.buffers.values() if buffer.fill] == fills


@pytest.mark.parametrize(
    ("name", "shape", "given", "size", "fill"),
    [
        ("mxfp8_e4m3", (128, 128), "", 512, ()),
        ("mxfp8_e4m3", (96, 96), "", 512, (0,)),
        ("nvfp4", (256, 64), "outer", 1024, ()),
        ("nvfp4", (256, 32), "", 1024, (0,)),
    ],
)
def test_tiled_scales_are_flat_and_padded_with_zeros(name, shape, given, size, fill):
    scheme = SCHEMES[name]
    of = passes.problem_of("bfloat16", scheme, Blocks.of(shape, scheme.scale, -1))
    assert passes.tiles(of, given)
    assert not passes.tiles(of, "all")
    plan = passes.quantizing(of, given, tiled=True)
    assert plan.buffers["scale"] == passes.Buffer((size,), "uint8", fill)
    assert plan.passes[-1].place.blocks == shape[1] // scheme.scale.block


@pytest.mark.parametrize("part", ["scale", "zero"])
def test_scales_on_another_device_are_left_to_the_reference(part):
    x = normals(4, 64)
    kept = fast.quantize(x, "int4_g32_asymmetric").scales
    moved = replace(kept, **{part: getattr(kept, part).to("meta")})
    assert quantizer.quantize(x, "int4_g32_asymmetric", -1, moved, None, False) is None
    assert quantizer.fake_quantize(x, "int4_g32_asymmetric", -1, moved) is None


def test_scales_for_both_on_another_device_are_left_to_the_reference():
    x, scheme = normals(128, 64), SCHEMES["fp8_tensorwise"]
    scale = fast.quantize(x, "fp8_tensorwise").scales
    other = replace(scale, scale=scale.scale.to("meta"))
    assert fused_both(x, scheme, (scale, other), False) is None


def test_short_groups_of_scales_are_refused_by_gradients_too():
    x = normals(4, 32, 5, dtype=torch.float32)
    with pytest.raises(ValueError, match="full blocks of 256"):
        fast.fake_quantize_vjp(x, x, "torchao.nf4")
    with pytest.raises(ValueError, match="full blocks of 256"):
        passes.masking(
            passes.problem_of(
                "float32", SCHEMES["torchao.nf4"], Blocks.of((4, 32, 5), SCHEMES["torchao.nf4"].scale, -1)
            )
        )


def test_an_outer_scale_that_requires_a_gradient_is_refused():
    """None flows to it, which nobody would notice; x keeps its own."""
    x = torch.randn(4, 32, requires_grad=True)
    outer = torch.tensor(0.01, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient for an outer scale: detach it"):
        fast.fake_quantize(x, "nvfp4", scales=Scales(outer=outer))
    with torch.no_grad():
        fast.fake_quantize(x, "nvfp4", scales=Scales(outer=outer))
    fast.fake_quantize(x, "nvfp4", scales=Scales(outer=outer.detach())).sum().backward()
    assert x.grad is not None
