"""Keys of remembered calls: whatever a call depends on tells it from those that were remembered."""

import gc
import inspect
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

import fast
import reference
from fast import dispatch
from fast.launch import launcher
from reference import FORMATS, SCHEMES, Scales
from tests.fast.kernels.compiling.recorded_launches import Flat, Recorded
from tests.support.situations import ANSWERS, EXAMPLES, SITUATIONS, walk

# Every public function of `fast` in every situation of `tests.support.situations` gives its one stated answer.


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_answer_is_the_stated_one(example, situation):
    assert list(walk(example, situation)) == []


def test_each_public_function_is_in_the_table():
    functions = {name for name in fast.__all__ if inspect.isfunction(getattr(fast, name))}
    # SparseGPT is no single call: torch's own factorizations and products, by steps, for one weight at a time.
    functions.remove("sparsegpt")
    # Nor are those of calibration: tests/fast/calibration.
    functions -= {
        name for name in functions if "calibration" in inspect.getmodule(getattr(fast, name)).__name__
    }
    assert functions == {name.partition(",")[0] for name in EXAMPLES}
    assert {name for name, _ in ANSWERS} <= {"", *EXAMPLES}
    assert {name.partition(":")[0] for _, name in ANSWERS} <= {*SITUATIONS, "another library"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_arrays_of_another_library_are_refused(example):
    case = EXAMPLES[example]
    tensors = case.make(case.rows, "cpu")
    name, x = next(iter(tensors.items()))
    error, text = ANSWERS["", "another library"]
    array = x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()
    with pytest.raises((error, AttributeError) if name in ("codes", "packed") else error, match=text):
        case.call(fast, {**tensors, name: array})


def test_builds_for_rocm_have_no_kernels(monkeypatch):
    """An MI300 reports a compute capability of (9, 4); what we compile is for NVIDIA GPUs."""
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    dispatch._reason.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="this build of torch is for ROCm"):
            assert "ROCm" in dispatch._reason(0)
    finally:
        dispatch._reason.cache_clear()


ROWS, COLUMNS = 256, 128


@pytest.fixture
def flat(monkeypatch):
    return Recorded(monkeypatch, Flat)


def normals(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def unaligned(x):
    """The same numbers some bytes further on."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def transposed(x):
    """The same shape, columns next to each other."""
    return x.T.contiguous().T


def words(shape=(ROWS, COLUMNS)):
    return torch.arange(shape[0] * shape[1], dtype=torch.int32).view(torch.uint32).view(shape)


X = normals(ROWS, COLUMNS)
CODES = torch.arange(ROWS * COLUMNS, dtype=torch.int32).to(torch.uint8).view(ROWS, COLUMNS)
WEIGHT = normals(COLUMNS)
DRAWN = replace(SCHEMES["mxfp8_e4m3"], name="drawn", rounding="stochastic")
TENSORWISE, ZEROS = SCHEMES["fp8_tensorwise"], SCHEMES["int4_g32_asymmetric"]
ONE = reference.choose_scales(X, TENSORWISE)
TWO = Scales(ONE.scale * 2)
GIVEN = reference.choose_scales(X, ZEROS)
ROW, ROWWISE = reference.quantize(X[:1], "int8_rowwise"), reference.quantize(X, "int8_rowwise")
FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn"
# Of each function a call, and others that are like it but for a detail.
LIKE = {
    "quantize": (
        lambda x=X, s=DRAWN, **more: fast.quantize(x, s, **{"random_bits": words(x.shape), **more}),
        [{"x": X.half()}, {"x": normals(128, 256)}, {"x": transposed(X)}, {"x": unaligned(X)},
         {"random_bits": transposed(words())}, {"random_bits": unaligned(words().view(torch.int32)).view(torch.uint32)},
         {"axis": 0}, {"axis": 1}, {"packed": True}, {"tiled": True}, {"s": replace(DRAWN, overflow="nan")}],
    ),
    "choose_scales": (
        lambda x=X, s="fp8_rowwise", **more: fast.choose_scales(x, s, **more),
        [{"x": X.float()}, {"x": X[:, :64].contiguous()}, {"x": transposed(X)}, {"x": unaligned(X)}, {"axis": 0},
         {"s": "fp8_1x128"}, {"s": replace(SCHEMES["fp8_rowwise"], overflow="nan")}],
    ),
    "fake_quantize": (
        lambda x=X, s=ZEROS, scales=GIVEN, **more: fast.fake_quantize(x, s, scales=scales, **more),
        [{"x": X.half()}, {"x": transposed(X)}, {"x": unaligned(X)}, {"scales": None}, {"s": replace(ZEROS, nan="ieee")},
         {"scales": replace(GIVEN, scale=transposed(GIVEN.scale))}, {"scales": replace(GIVEN, zero=unaligned(GIVEN.zero))}],
    ),
    "fake_quantize_vjp": (
        lambda g=X, x=X, s=ZEROS, scales=GIVEN, **more: fast.fake_quantize_vjp(g, x, s, scales=scales, **more),
        [{"g": X.half(), "x": X.half()}, {"g": unaligned(X)}, {"x": transposed(X)}, {"scales": None},
         {"s": replace(ZEROS, nan="ieee")}, {"scales": replace(GIVEN, scale=unaligned(GIVEN.scale))}],
    ),
    "quantize_both": (
        lambda x=X, s="mxfp8_e4m3", **more: fast.quantize_both(x, s, **more),
        [{"x": X.half()}, {"x": X.float()}, {"x": normals(128, 256)}, {"x": transposed(X)}, {"x": unaligned(X)},
         {"packed": True}, {"tiled": True}, {"s": "mxfp8_e4m3_rceil"}, {"s": "mxfp8_e5m2"}],
    ),
    "quantize_both, given": (
        lambda x=X, s=TENSORWISE, scales=(ONE, ONE), **more: fast.quantize_both(x, s, scales=scales, **more),
        [{"scales": (ONE, TWO)}, {"scales": (ONE.scale.clone(), ONE.scale)}, {"x": X.half()}, {"x": transposed(X)},
         {"scales": (None, ONE)}, {"s": replace(TENSORWISE, overflow="nan")}, {"packed": True}, {"scales": None}],
    ),
    "encode": (
        lambda x=X, fmt=FP8, **more: fast.encode(x, fmt, **more),
        [{"x": X.half()}, {"x": normals(128, 256)}, {"x": transposed(X)}, {"x": unaligned(X)}, {"fmt": "float8_e5m2"},
         {"fmt": replace(FORMATS[FP8], name="my_own")}, {"rounding": "toward_zero"}, {"overflow": "nonfinite"},
         {"rounding": "stochastic", "random_bits": words()}],
    ),
    "decode": (
        lambda codes=CODES, fmt=FP8: fast.decode(codes, fmt),
        [{"codes": CODES.to(torch.uint16)}, {"codes": CODES.view(-1)}, {"codes": transposed(CODES)},
         {"codes": unaligned(CODES)}, {"fmt": "float8_e5m2"}],
    ),
    "pack": (
        lambda codes=CODES, fmt=FP4: fast.pack(codes, fmt),
        [{"codes": CODES.view(-1)}, {"codes": transposed(CODES)}, {"codes": unaligned(CODES)}, {"fmt": "int3"},
         {"fmt": "float6_e2m3fn"}],
    ),
    "unpack": (
        lambda packed=CODES, fmt=FP4, shape=(ROWS, 2 * COLUMNS): fast.unpack(packed, fmt, shape),
        [{"shape": (ROWS, 2 * COLUMNS - 1)}, {"packed": transposed(CODES)}, {"packed": unaligned(CODES)},
         {"fmt": "int2", "shape": (ROWS, 4 * COLUMNS)}, {"packed": CODES.view(-1), "shape": (2 * ROWS * COLUMNS,)}],
    ),
    "linear_of_codes": (
        lambda x=ROW, w=ROWWISE, bias=None, dtype=torch.bfloat16: fast.linear_of_codes(x, w, bias, dtype=dtype),
        [{"bias": X[:, 0].contiguous()}, {"dtype": torch.float16}, {"x": replace(ROW, codes=unaligned(ROW.codes))},
         {"x": reference.quantize(X[:1], "int8_rowwise_asymmetric")}, {"x": reference.quantize(X[:1], "int8_tensorwise")},
         {"w": replace(ROWWISE, codes=transposed(ROWWISE.codes))}, {"w": reference.quantize(X, "int8_tensorwise")},
         {"w": reference.quantize(X[:64], "int8_rowwise")},
         {"x": replace(ROW, scheme=replace(ROW.scheme, nan="ieee"))},
         {"w": replace(ROWWISE, scheme=replace(ROWWISE.scheme, nan="ieee"))}],
    ),
    "rms_norm_quantize": (
        lambda x=X, w=WEIGHT, s="mxfp8_e4m3", **more: fast.rms_norm_quantize(x, w, s, **more),
        [{"eps": 1}, {"x": X.half(), "w": WEIGHT.half()}, {"residual": X}, {"packed": True}, {"s": "mxfp8_e5m2"},
         {"x": unaligned(X)}, {"w": unaligned(WEIGHT)}, {"x": transposed(X)}],
    ),
    "swiglu_quantize": (
        lambda gate=X, up=X, s="mxfp8_e4m3", **more: fast.swiglu_quantize(gate, up, s, **more),
        [{"gate": X.half(), "up": X.half()}, {"up": torch.cat([X, X], 1)[:, :COLUMNS]}, {"up": unaligned(X)},
         {"packed": True}, {"s": "mxfp8_e5m2"}, {"gate": transposed(X)}],
    ),
}  # fmt: skip
CASES = [(name, number) for name, (_, others) in LIKE.items() for number in range(len(others))]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_call_that_differs_repeats_no_other(flat, monkeypatch, name, number):
    """After the first call was remembered and repeated, one that is like it but for a detail goes the ordinary way."""
    call, others = LIKE[name]
    call()
    launches = len(flat.jit)
    call()
    assert flat.counts() == (launches, launches)
    flat.refuse_repetitions(monkeypatch)
    call(**others[number])
    assert len(flat.jit) + len(flat.straight) > 2 * launches


WRONG = {
    "quantize": [{"axis": True}, {"axis": -1.0}, {"random_bits": words((ROWS, 64))}, {"random_bits": None},
                 {"random_bits": words().view(torch.int32)}, {"x": X.int()}],
    "choose_scales": [{"axis": True}, {"axis": 2}, {"s": "fp8"}, {"x": X.int()}],
    "fake_quantize": [{"axis": 0}, {"axis": -1.0}, {"scales": GIVEN.scale}, {"scales": Scales()},
                      {"scales": replace(GIVEN, zero=GIVEN.zero.int())}, {"scales": replace(GIVEN, outer=ONE.scale)},
                      {"random_bits": words()}],
    "fake_quantize_vjp": [{"g": X.half()}, {"g": X[:1]}, {"axis": 0}, {"scales": replace(GIVEN, scale=GIVEN.scale[:1])}],
    "quantize_both": [{"x": X[0]}, {"random_bits": (words(), words())}, {"scales": [ONE]}, {"s": "fp8"}],
    "quantize_both, given": [{"scales": (ONE, replace(ONE, zero=ONE.scale))}, {"scales": (ONE, GIVEN)}, {"tiled": True}],
    "encode": [{"rounding": "nearest"}, {"overflow": True}, {"random_bits": words()}, {"fmt": "float9"}, {"x": CODES}],
    "decode": [{"codes": X}, {"fmt": "float9"}],
    "pack": [{"codes": X}, {"fmt": "float9"}],
    "unpack": [{"shape": (ROWS, COLUMNS)}, {"shape": (float(ROWS), 2.0 * COLUMNS)}, {"packed": X}],
    "linear_of_codes": [{"x": X}, {"w": X}, {"dtype": torch.float64}, {"bias": X},
                        {"w": replace(ROWWISE, scale=ROW.scale)}, {"x": replace(ROW, scale=ROWWISE.scale)}],
    "rms_norm_quantize": [{"eps": "1e-6"}, {"eps": -1.0}, {"w": WEIGHT[:1]}, {"residual": X[:1]}, {"w": None}],
    "swiglu_quantize": [{"up": X[:1]}, {"up": X.half()}, {"up": None}, {"s": "fp8"}],
}  # fmt: skip


@pytest.mark.parametrize("name", LIKE)
def test_what_is_wrong_stays_wrong(flat, name):
    """The error of a wrong call is the same before and after the right one was remembered, and nothing is launched."""
    call = LIKE[name][0]

    def errors():
        for wrong in WRONG[name]:
            with pytest.raises((TypeError, ValueError)) as caught:
                call(**wrong)
            yield caught.type, str(caught.value)

    first = list(errors())
    call()
    call()
    counts = flat.counts()
    assert list(errors()) == first
    assert flat.counts() == counts


class Tagged(torch.Tensor):
    """A subclass, which no kernel may be given."""


@pytest.mark.parametrize("argument", [np.float64(1e-6), np.int64(-1), torch.tensor(-1)])
def test_values_that_only_look_plain_are_not_remembered(argument):
    key = dispatch.key_of("name", "record", (argument,), (X,))
    dispatch.remember(key, pytest.fail, None)
    assert dispatch.find(key) is None


def test_subclasses_find_nothing(flat):
    for _ in range(2):
        fast.encode(X, FP8)
    key = ("encode", FP8, ("nearest_even", "saturate"))
    assert dispatch.find(dispatch.key_of(*key, (X.as_subclass(Tagged), None))) is None
    assert dispatch.find(dispatch.key_of(*key, (torch.nn.Parameter(X), None))) is not None


def test_functions_do_not_answer_for_each_other(flat):
    """Where all else of two calls is alike."""
    for _ in range(2):
        fast.decode(CODES, FP4)
        fast.choose_scales(X, "mxfp8_e4m3")
    assert fast.pack(CODES, FP4).dtype == torch.uint8
    assert fast.fake_quantize(X, "mxfp8_e4m3").dtype == X.dtype


def test_what_a_compiler_traces_finds_nothing(flat, monkeypatch):
    for _ in range(2):
        fast.decode(CODES, FP8)
    counts = flat.counts()
    monkeypatch.setattr(dispatch, "_is_compiling", lambda: True)
    monkeypatch.setattr(dispatch, "find", lambda key: pytest.fail("asked the cache"))
    monkeypatch.setattr(dispatch, "_operate", lambda *call: "an operator")
    assert fast.decode(CODES, FP8) == "an operator"
    assert flat.counts() == counts


def test_tiled_scales_are_taken_apart_each_time(flat):
    q = reference.quantize(X, "mxfp8_e4m3", tiled=True)
    for _ in range(3):
        fast.dequantize(q)
    assert flat.counts() == (1, 2)
    assert all(q.scale.data_ptr() not in given for given in flat.straight)


def test_two_scales_over_the_same_memory_are_two(flat):
    """Another time they may have different memory, and the same key."""
    other = replace(ONE, scale=ONE.scale.view(()))
    fast.quantize_both(X, TENSORWISE, scales=(ONE, other))
    fast.quantize_both(X, TENSORWISE, scales=(ONE, ONE))
    assert [given[-4] for given in flat.jit] == [False, True]


def test_a_product_of_codes_is_launched_on_its_own_tensors(flat):
    """The second time, on other tensors: their addresses, and that of what comes back."""
    fast.linear_of_codes(ROW, ROWWISE, dtype=torch.bfloat16)
    x, w = (replace(q, codes=q.codes.clone(), scale=q.scale.clone()) for q in (ROW, ROWWISE))
    made = fast.linear_of_codes(x, w, dtype=torch.bfloat16)
    assert (made.shape, made.dtype) == ((1, ROWS), torch.bfloat16)
    given = (x.codes, x.scale, None, w.codes, w.scale, None, made)
    assert flat.counts() == (1, 1)
    assert [None if part is None else part.data_ptr() for part in given] == [*flat.straight[0][: len(given)]]


def test_launches_within_a_tensor_are_not_remembered(flat):
    """What is left of codes after whole groups begins at an address that the next call would have to look at again."""
    codes = CODES.view(-1)[:1001].clone()
    for count in (1, 2):
        fast.pack(codes, "int4")
        assert flat.counts() == (2 * count, 0)


def test_padding_of_tiled_scales_is_cleared_again(flat, monkeypatch):
    full = lambda shape, strides, dtype: torch.full(shape, 77, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(launcher, "allocator", lambda device: full)
    x = normals(128, 64)
    for _ in range(2):
        made = fast.quantize_both(x, "mxfp8_e4m3", tiled=True)
    assert flat.counts() == (1, 1)
    assert all(q.scale.numel() > x.numel() // 32 and not q.scale.any() for q in made)


def test_results_of_remembered_calls_require_no_gradient(flat):
    """Given scales that nobody differentiates skip autograd; those that somebody does are parameters."""
    x, step = X.float(), GIVEN.scale.clone().requires_grad_()
    kept = replace(GIVEN, scale=step)
    for _ in range(2):
        assert not fast.fake_quantize(x, ZEROS, scales=GIVEN).requires_grad
        with torch.no_grad():
            assert not fast.fake_quantize(x, ZEROS, scales=kept).requires_grad
        y = fast.fake_quantize(x, ZEROS, scales=kept)
        y.sum().backward()
        assert step.grad.shape == step.shape
    assert flat.counts()[1] > 0
    with pytest.raises(ValueError, match="takes scale"):
        fast.fake_quantize(x.requires_grad_(), ZEROS, scales=Scales())


def test_compilers_meet_operators():
    """A program that torch.compile traces asks nothing of what eager calls left behind."""
    x = X.float()

    def program(x, scale):
        q = fast.quantize(x, "mxfp8_e4m3")
        return q.codes, fast.dequantize(q, torch.bfloat16), fast.fake_quantize(x, TENSORWISE, scales=scale)

    want = program(x, ONE.scale)
    made = torch.compile(program, fullgraph=True, backend="eager")(x, ONE.scale)
    assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))


def test_a_full_cache_loses_its_oldest_call_alone(monkeypatch):
    monkeypatch.setattr(dispatch, "CALLS", {})
    monkeypatch.setattr(dispatch, "MOST", 3)
    keys = [dispatch.key_of("name", "record", (number,), (X,)) for number in range(4)]
    for key in keys:
        dispatch.remember(key, pytest.fail, None)
    assert [dispatch.find(key) is not None for key in keys] == [False, True, True, True]


def test_a_record_lives_as_long_as_the_call_that_is_known_by_its_id(monkeypatch):
    """Another record may get the id of one that is gone, and with it the remembered call."""
    monkeypatch.setattr(dispatch, "CALLS", {})

    class Record:
        """Held by nothing else, as a scheme of one's own may be."""

    record = Record()
    alive = weakref.ref(record)
    dispatch.remember(dispatch.key_of("name", record, (), (X,)), pytest.fail, record)
    del record
    gc.collect()
    assert alive() is not None
    dispatch.CALLS.clear()
    gc.collect()
    assert alive() is None
