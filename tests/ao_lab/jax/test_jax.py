"""ao_lab.jax: the reference's bits on CPU, programs for GPUs, kernels in Triton's interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast import dispatch
from reference import SCHEMES, Scales
from reference.quantize.blocks import Blocks
from tests.emulator.interpreter_process import lines_of
from tests.support.record_samples import sampled

jax = pytest.importorskip("jax")
jnp = jax.numpy

from ao_lab import jax as functions  # noqa: E402  JAX is optional
from ao_lab.jax import functions as device  # noqa: E402
from ao_lab.jax import functions as operations  # noqa: E402
from ao_lab.jax import functions as programs  # noqa: E402

X = np.random.default_rng(0).standard_normal((4, 64, 256)).astype(np.float32)
KINDS = ("mxfp4", "nvfp4", "nf4", "int4_g32_asymmetric", "fp8_tensorwise", "fp8_128x128")
PARTS = ("codes", "scale", "outer", "zero")
CUSTOM_CALL = "triton_kernel_call_ffi"


# By day a batch that is one tensor and one that is not, and zero points: on a CPU the rest is up to the reference.
BY_DAY = ("mxfp4", "nvfp4", "int4_g32_asymmetric")


@pytest.mark.parametrize("name", sampled(BY_DAY, KINDS))
def test_bits_on_a_cpu(name):
    """Arrays as they are, traced, and as a batch."""
    q = reference.quantize(X, name)
    x = jnp.asarray(X)
    made = functions.quantize(x, name)
    assert_same_bits(made, q)
    assert_same_bits(functions.choose_scales(x, name), q.scales)
    packed = jax.jit(lambda v: functions.quantize(v, name, packed=True))(x)
    assert_same_bits(packed, reference.quantize(X, name, packed=True))
    assert_same_bits(functions.dequantize(made, "bfloat16"), reference.dequantize(q, "bfloat16"))
    batch = jax.vmap(lambda v: functions.quantize(v, name))
    assert_rows(jax.jit(batch)(x), [reference.quantize(row, name) for row in X])
    if name == "mxfp4":
        assert_same_bits(functions.quantize(x, name, packed=True), packed)


@pytest.mark.nightly  # hundreds of programs
def test_step_by_step_on_a_cpu():
    """Without jit a batch, and a gradient, run operation by operation."""
    batch = jax.vmap(lambda v: functions.quantize(v, "mxfp4"))
    assert_rows(batch(jnp.asarray(X)), [reference.quantize(row, "mxfp4") for row in X])
    gradient = jax.grad(lambda v: functions.fake_quantize(v, "mxfp4").sum())
    assert_same_bits(gradient(jnp.asarray(X)), reference.fake_quantize_vjp(np.ones_like(X), X, "mxfp4")[0])


def assert_rows(mapped, rows):
    for part in (part for part in PARTS if getattr(rows[0], part) is not None):
        assert_same_bits(getattr(mapped, part), np.stack([getattr(row, part) for row in rows]))


def test_remembered_calls_tell_arguments_apart(monkeypatch):
    """After a call was repeated without a trace, those that are like it but for a detail give the reference's bits."""
    monkeypatch.setattr(dispatch, "CALLS", {})
    record = SCHEMES["fp8_rowwise"]
    scales = reference.choose_scales(X, record)
    given = Scales(jnp.asarray(scales.scale))
    functions.quantize(jnp.asarray(X), record)
    known = dict(dispatch.CALLS)
    assert len(known) == 1
    monkeypatch.setattr(programs, "run", lambda *_: pytest.fail("another program"))
    assert_same_bits(functions.quantize(jnp.asarray(X[::-1]), record), reference.quantize(X[::-1], record))
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "CALLS", dict(known))
    for number, (x, scheme, more) in enumerate(
        [
            (X.astype("float16"), record, {}),
            (X[:2], record, {}),
            (X, "fp8_1x128", {}),
            (X, replace(record, name="other", nan="ieee"), {}),
            (X, record, {"axis": 1}),
            (X, record, {"packed": True}),
            (X, record, {"scales": (scales, given)}),
        ]
    ):
        for _ in range(2):
            mine, theirs = (
                dict(more, scales=more["scales"][at]) if "scales" in more else more for at in (1, 0)
            )
            made = functions.quantize(jnp.asarray(x), scheme, **mine)
            assert_same_bits(made, reference.quantize(x, scheme, **theirs))
        assert len(dispatch.CALLS) == 2 + number
    for wrong in ({"axis": True}, {"axis": 2.0}, {"random_bits": jnp.zeros(X.shape, "uint32")}):
        with pytest.raises((TypeError, ValueError)):
            functions.quantize(jnp.asarray(X), record, **wrong)
    q = functions.quantize(jnp.asarray(X), record)
    for dtype in ("float32", "bfloat16", "float32"):
        assert_same_bits(
            functions.dequantize(q, dtype), reference.dequantize(reference.quantize(X, record), dtype)
        )
    with pytest.raises(ValueError, match="have shape"):
        functions.dequantize(replace(q, codes=q.codes[:1]))
    with pytest.raises(ValueError, match="scale"):
        functions.dequantize(replace(q, scale=q.scale[:1]))


@pytest.mark.parametrize("name", ["mxfp4", "int4_g32_asymmetric"])
def test_gradients_on_a_cpu(name):
    assert_same_bits(functions.fake_quantize(jnp.asarray(X), name), reference.fake_quantize(X, name))
    gradient = jax.jit(jax.grad(lambda v: functions.fake_quantize(v, name).sum()))
    assert_same_bits(gradient(jnp.asarray(X)), reference.fake_quantize_vjp(np.ones_like(X), X, name)[0])


@pytest.mark.parametrize("value", [X, torch.zeros(4, 32), [1.0]])
def test_other_arrays_are_refused(value):
    for function in (functions.quantize, functions.choose_scales, functions.fake_quantize):
        with pytest.raises(TypeError, match="takes JAX arrays"):
            function(value, "mxfp4")


def test_errors_are_the_references(kernels_everywhere):
    """Also where kernels would run: what they do not take, and what nobody takes."""
    x = jnp.zeros((4, 64))
    calls = [
        lambda f: f.quantize(x, "no such scheme"),
        lambda f: f.quantize(x, "mxfp4", axis=True),
        lambda f: f.quantize(x, "mxfp4", axis=2),
        lambda f: f.quantize(x.astype("int32"), "mxfp4"),
        lambda f: f.quantize(x[0, 0], "int4_g32", packed=True),
        lambda f: f.quantize(x, "int4_g32", tiled=True),
        lambda f: f.quantize(x, "mxfp4", axis=0, tiled=True),
        lambda f: f.quantize(x, "int4_g32", scales=np.zeros((4, 2), np.float32)),
        lambda f: f.quantize(x, "int4_g32", scales=jnp.zeros((4, 3))),
        lambda f: f.quantize(x, "mxfp4", random_bits=jnp.zeros((4, 64), "uint32")),
        lambda f: f.dequantize(f.quantize(x, "mxfp4"), "int8"),
        lambda f: f.dequantize(3),
        lambda f: f.fake_quantize(x, "mxfp4", scales="large"),
    ]
    for call in calls:
        errors = []
        for side in (functions, reference):
            with pytest.raises((TypeError, ValueError, KeyError)) as caught:
                jax.eval_shape(lambda call=call, side=side: call(side))
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]


# Programs for a GPU, made without one.


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """As on a machine with a GPU: traced arrays may end there."""
    monkeypatch.setattr(device, "has_kernels", lambda: True)


def program(function, *shapes, platforms=("cuda",)):
    """StableHLO of a function for a platform."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(CUSTOM_CALL)]
    exported = jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)
    return exported(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)).mlir_module()


@pytest.mark.parametrize(
    ("name", "launches"), [("mxfp4", 1), ("nvfp4", 2), ("nf4", 3), ("int8_rowwise_asymmetric", 2)]
)
def test_programs_for_a_gpu_launch_kernels(kernels_everywhere, name, launches):
    """One launch, one more for a statistic over all elements or over long rows, and where scales have scales one
    for parts of their mean and one for them."""
    text = program(lambda x: functions.quantize(x, name, packed=True), ((4, 32768), "bfloat16"))
    assert text.count(f"@{CUSTOM_CALL}(") == launches


@pytest.mark.parametrize(("name", "launches"), [("mxfp4", 1), ("nvfp4", 2)])
def test_tiled_scales_for_a_gpu(kernels_everywhere, name, launches):
    """Whole tiles leave the kernel as they are; others are made of plain scales."""
    wanted = lambda x: functions.quantize(x, name, tiled=True).scale  # noqa: E731
    whole = program(wanted, ((256, 1024), "bfloat16"))
    assert whole.count(f"@{CUSTOM_CALL}(") == launches
    assert "stablehlo.transpose" not in whole
    padded = program(wanted, ((130, 1024), "bfloat16"))
    assert padded.count(f"@{CUSTOM_CALL}(") == launches
    assert "stablehlo.transpose" in padded


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_tiled_scales_on_a_cpu(name):
    x, q = jnp.asarray(X[0]), reference.quantize(X[0], name)
    for scales in (None, q.scales):
        wanted = reference.quantize(X[0], name, scales=scales, tiled=True)
        given = None if scales is None else jax.tree.map(jnp.asarray, scales)
        assert_same_bits(functions.quantize(x, name, scales=given, tiled=True), wanted)


def test_gradients_and_batches_for_a_gpu_launch_kernels(kernels_everywhere):
    def loss(x):
        return functions.fake_quantize(x, "mxfp8_e4m3").sum()

    x = ((4, 64, 256), "float32")
    assert program(jax.grad(loss), x).count(f"@{CUSTOM_CALL}(") == 1
    # One launch for the whole batch, and no loop.
    mapped = program(jax.vmap(lambda v: functions.quantize(v, "mxfp4").codes), x)
    assert mapped.count(f"@{CUSTOM_CALL}(") == 1
    assert "stablehlo.while" not in mapped
    # A scale over all elements of each: one after the other.
    assert "stablehlo.while" in program(jax.vmap(lambda v: functions.quantize(v, "nvfp4").codes), x)


def test_programs_for_a_cpu_launch_none(kernels_everywhere):
    def function(x):
        return functions.dequantize(functions.quantize(x, "mxfp4"))

    x = ((64, 256), "float32")
    assert CUSTOM_CALL not in program(function, x, platforms=("cpu",))
    assert CUSTOM_CALL in program(function, x, platforms=("cpu", "cuda"))
    assert_same_bits(jax.jit(function)(jnp.asarray(X)), reference.dequantize(reference.quantize(X, "mxfp4")))


def test_no_gradient_flows_through_codes(kernels_everywhere):
    x = ((64, 256), "float32")
    assert CUSTOM_CALL not in program(
        jax.grad(lambda v: functions.dequantize(functions.quantize(v, "mxfp4")).sum()), x
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_kernels_read_before_they_write(name):
    """XLA hands over inputs, then outputs; in every plan the kernel's arguments have that order."""
    from ao_lab.jax.launches import POINTERS
    from fast.kernels.quantize import plan as passes

    scheme = SCHEMES[name]
    for shape in ((256, 256), (32, 32768)):
        of = passes.problem_of("float32", scheme, Blocks.of(shape, scheme.scale, -1))
        if of is None:
            continue
        plans = [passes.choosing(of), passes.dequantizing(of)]
        for given in ("", "outer", "all") if of.rule.has_outer else ("", "all"):
            plans += [passes.quantizing(of, given), passes.fake_quantizing(of, given)]
        for one in (one for plan in [*plans, passes.masking(of)] for one in plan.passes):
            order = [
                argument in one.writes
                for argument in POINTERS
                if argument in (*one.reads, *one.writes, *one.updates)
            ]
            assert order == sorted(order)
            assert not (one.writes and one.updates)


def test_the_message_is_what_jaxlib_writes():
    """Bytes that jaxlib 0.10.2's own classes made: a kernel with an array, an int32 and an int64."""
    from ao_lab.jax.launches import kernel_message, launch_message

    kernel = kernel_message("f", "ptx", 33, 4, 90)
    expected = (
        "0a2a0a100a0166100418212203707478305a50011001180120012a040a0210102a0218052a06288080808020220661"
        "6f5f6c6162"
    )
    assert launch_message(kernel, 1, 1, [5, 2**33]).hex() == expected


@pytest.mark.parametrize(
    "names", sampled({"day nvfp4"}, ["day nvfp4", "nvfp4", "int8_rowwise_asymmetric", "nf4"])
)
def test_kernels_in_the_interpreter(names):
    """Plans, vmap's rule and gradients with real kernels; by night all shapes, zero points and a scheme of three passes."""
    assert lines_of("jax_calls", *names.split()) == [names.split()[-1], "stochastic"]


def test_what_folds():
    """A batch is one tensor where no block and no scale reaches over it."""
    of = lambda name, shape=(64, 256): operations.Operation("quantize", SCHEMES[name], shape, 1, "float32")  # noqa: E731
    assert [name for name in KINDS if of(name).folds] == ["mxfp4", "int4_g32_asymmetric", "fp8_128x128"]
    assert not of("fp8_rowwise", ()).folds


def gpu(capability):
    return SimpleNamespace(compute_capability=capability, device_kind="GPU", platform="gpu")


def test_why_there_are_no_kernels(monkeypatch):
    assert "older than compute capability 9.0" in device.missing([gpu("9.0"), gpu("8.9")])
    assert "no custom call" in device.missing([gpu("9.0")])  # this JAX has no CUDA plugin
    monkeypatch.setattr(device, "_registered", lambda: True)
    assert device.missing([gpu("9.0"), gpu("12.0")]) == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton is not installed" in device.missing([gpu("9.0")])


def test_a_gpu_without_kernels_warns_once(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu("8.0")])
    device.has_kernels.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="run as XLA operations"):
            assert not device.has_kernels()
        assert not device.has_kernels()
    finally:
        device.has_kernels.cache_clear()
