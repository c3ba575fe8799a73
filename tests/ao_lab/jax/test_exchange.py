"""`ao_lab.jax.from_torch` and `to_torch`: one memory in two libraries, copies only where asked for or needed."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fast
from ao_lab.testing.strategies import assert_same_bits
from reference import SCHEMES, Quantized, Scales
from tests.support.runs import forks

jax = pytest.importorskip("jax")
jnp = jax.numpy

from ao_lab import jax as functions  # noqa: E402  JAX is optional
from ao_lab.jax import exchange  # noqa: E402

X = np.random.default_rng(0).standard_normal((4, 64, 256)).astype(np.float32)
KINDS = ("mxfp4", "nvfp4", "nf4", "int4_g32_asymmetric", "fp8_tensorwise")
PARTS = ("codes", "scale", "outer", "zero")


def aligned(tensor):
    """A copy at an address that XLA takes."""
    room = torch.empty(tensor.numel() * tensor.element_size() + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return (
        room[start : start + tensor.numel() * tensor.element_size()]
        .view(tensor.dtype)
        .view(tensor.shape)
        .copy_(tensor)
    )


def at_good_addresses(q):
    return replace(q, **{part: aligned(getattr(q, part)) for part in PARTS if getattr(q, part) is not None})


@pytest.mark.parametrize("name", KINDS)
def test_quantized_both_ways_without_a_copy(name):
    q = at_good_addresses(fast.quantize(torch.from_numpy(X), name))
    made = functions.from_torch(q, copy=False)
    back = functions.to_torch(made, copy=False)
    assert isinstance(made, Quantized)
    assert (made.shape, made.axis, made.scheme, made.packed) == (q.shape, q.axis, q.scheme, q.packed)
    for part in (part for part in PARTS if getattr(q, part) is not None):
        a, b, c = (getattr(side, part) for side in (q, made, back))
        assert a.data_ptr() == b.unsafe_buffer_pointer() == c.data_ptr()
    assert_same_bits(made, q)
    assert_same_bits(back, q)
    assert_same_bits(functions.dequantize(made), fast.dequantize(q))


@pytest.mark.parametrize("dtype", exchange.SHARED)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5, 7)])
def test_every_dtype_and_shape_is_shared(dtype, shape):
    tensor = aligned(torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype)))
    made = functions.from_torch(tensor, copy=False)
    assert (made.shape, made.dtype.name) == (shape, dtype)
    back = functions.to_torch(made, copy=False)
    assert back.dtype == tensor.dtype
    assert back.data_ptr() == tensor.data_ptr() or not tensor.numel()
    assert torch.equal(
        back.view(torch.uint8) if shape else back, tensor.view(torch.uint8) if shape else tensor
    )


VIEWS = {
    "columns": lambda t: t[:, 1:], "transposed": lambda t: t.t(), "odd address": lambda t: t.flatten()[4:],
    "expanded": lambda t: t[:1].expand(8, -1), "every second": lambda t: t[::2],
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_cannot_be_shared_is_copied_or_refused(view):
    tensor = view(aligned(torch.arange(512, dtype=torch.float32).reshape(8, 64)))
    made = functions.from_torch(tensor)
    assert made.unsafe_buffer_pointer() != tensor.data_ptr()
    assert np.array_equal(np.asarray(made), tensor.numpy())
    with pytest.raises(ValueError, match="cannot be shared"):
        functions.from_torch(tensor, copy=False)


def test_a_copy_is_independent():
    tensor = aligned(torch.zeros(64))
    made = functions.from_torch(tensor, copy=True)
    tensor += 1
    assert not np.asarray(made).any()
    array = jnp.zeros(64)
    functions.to_torch(array, copy=True).add_(1)
    assert not np.asarray(array).any()


def test_negated_and_learned_tensors():
    learned = torch.nn.Parameter(aligned(torch.ones(32)))
    assert functions.from_torch(learned).unsafe_buffer_pointer() == learned.data_ptr()
    negated = torch._neg_view(aligned(torch.ones(32)))
    assert np.array_equal(np.asarray(functions.from_torch(negated)), -np.ones(32))


@pytest.mark.parametrize(
    "dtype", ["bool", "float64", "int64", "float8_e4m3fn", "float8_e8m0fnu", "complex64"]
)
def test_dtypes_that_codes_never_have(dtype):
    tensor = torch.zeros(4).to(getattr(torch, dtype))
    with pytest.raises(TypeError, match=f"codes is {dtype}; quantized values and scales are"):
        functions.from_torch(Quantized(tensor, None, None, None, (4,), 0, SCHEMES["mxfp4"]))
    if hasattr(jnp, dtype) and dtype not in ("float64", "int64"):
        with pytest.raises(TypeError, match="view its bytes as uint8"):
            functions.to_torch(jnp.zeros(4, dtype))


def test_arrays_of_the_wrong_library():
    with pytest.raises(TypeError, match="from_torch takes torch tensors"):
        functions.from_torch(jnp.zeros(3))
    with pytest.raises(TypeError, match=r"to_torch takes JAX arrays, .* scale is a Tensor"):
        functions.to_torch(Scales(torch.zeros(3)))
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda v: functions.to_torch(v))(jnp.zeros(3))


def test_devices_that_differ_or_are_unknown():
    meta = torch.zeros(4, device="meta")
    with pytest.raises(ValueError, match="different devices: scale on cpu, outer on meta"):
        functions.from_torch(Scales(torch.zeros(4), meta))
    with pytest.raises(ValueError, match="tensor on meta; move it"):
        functions.from_torch(meta)
    with pytest.raises(ValueError, match="tensor on cpu; move it"):
        functions.from_torch(torch.eye(3).to_sparse())


def test_scales_and_none_parts():
    scales = functions.from_torch(
        Scales(aligned(torch.ones(4)), None, aligned(torch.zeros(4, dtype=torch.int8)))
    )
    assert isinstance(scales, Scales)
    assert scales.outer is None
    assert_same_bits(functions.to_torch(scales), Scales(np.ones(4, np.float32), None, np.zeros(4, np.int8)))


def test_what_from_torch_makes_is_a_pytree_at_once():
    """JAX may be imported after `reference`, and nothing else be called before `jax.jit`."""
    program = """
import sys
assert not {"jax", "fast", "reference"} & set(sys.modules)
import torch, fast
q = fast.quantize(torch.ones(4, 64), "mxfp4")
from ao_lab import jax as functions
import jax
print(len(jax.tree.leaves(functions.from_torch(q))))
"""
    done = forks.python("-c", program, server="transformers")
    assert done.stdout.split()[-1:] == ["2"], done.stderr
