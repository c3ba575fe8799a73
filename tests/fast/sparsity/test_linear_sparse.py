"""`fast.linear_sparse` of CPU tensors and under tracers: the reference's bits; what is refused before anything is computed."""

import pytest
import torch

import fast
from ao_lab.testing.strategies import assert_same_bits
from fast.sparsity import linear_sparse
from tests.fast.kernels.sm90.test_sparse24_gemm import expected, operands

KINDS = [("float8_e4m3fn", "float8_e5m2"), ("bfloat16", "bfloat16"), ("int8", "int8")]


def call(given, **options):
    x, values, metadata, bias, x_scale, scale = given
    return fast.linear_sparse(x, values, metadata, bias, x_scale=x_scale, scale=scale, **options)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("arranged", [False, True])
def test_cpu_tensors_have_the_bits_of_the_reference(kinds, arranged):
    given = operands(7, 70, 96, kinds)
    wanted = expected(given, "bfloat16")
    if arranged:
        given[2] = fast.arrange_sparse_metadata(given[2], given[1].dtype)
        assert given[2].dim() == 3
    assert_same_bits(call(given, out_dtype=torch.bfloat16), wanted)
    assert_same_bits(call(given, out_dtype=torch.bfloat16, fast_sums=False), wanted)


def test_odd_numbers_of_groups():
    """K = 12: three groups, two bytes."""
    given = operands(3, 5, 12, ("float16", "float16"))
    wanted = expected(given, "float16")
    given[2] = fast.arrange_sparse_metadata(given[2], torch.float16)
    assert_same_bits(call(given), wanted)


@pytest.mark.parametrize("arranged", [False, True])
def test_compiled_programs(arranged):
    given = operands(4, 6, 64, ("bfloat16", "bfloat16"))
    wanted = expected(given, "float32")
    if arranged:
        given[2] = fast.arrange_sparse_metadata(given[2], torch.bfloat16)
    run = torch.compile(lambda *g: call(g, out_dtype=torch.float32) * 1, fullgraph=True, backend="eager")
    assert_same_bits(run(*given), wanted)


def test_the_fake_knows_shapes_dtypes_and_errors():
    given = [None if one is None else one.to("meta") for one in operands(6, 8, 64, ("int8", "int8"))]
    given[0], given[4] = given[0].view(2, 3, 64), given[4].view(2, 3, 1)
    made = call(given, out_dtype=torch.float16)
    assert (made.shape, made.dtype, made.device.type) == ((2, 3, 8), torch.float16, "meta")
    assert call(given).dtype == torch.float32
    given[2] = given[2][:4]
    with pytest.raises(ValueError, match="go with metadata of shape"):
        call(given)


def test_there_is_no_gradient():
    given = operands(4, 6, 64, ("bfloat16", "bfloat16"))
    given[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="linear_sparse has no gradient"):
        call(given).float().sum().backward()


BAD = {
    "no tensor": (TypeError, "torch tensors", lambda g: g.__setitem__(0, g[0].float().numpy())),
    "values no tensor": (TypeError, "values as list", lambda g: g.__setitem__(1, [1])),
    "metadata's dtype": (TypeError, "metadata is uint8", lambda g: g.__setitem__(2, g[2].int())),
    "metadata's shape": (ValueError, "where it is arranged", lambda g: g.__setitem__(2, g[2][:, :3])),
    "arranged for 16 bits": (
        ValueError, "where it is arranged",
        lambda g: g.__setitem__(2, fast.arrange_sparse_metadata(g[2], torch.bfloat16)),
    ),
    "scale": (ValueError, "scale has shape", lambda g: g.__setitem__(5, torch.ones(3, 1))),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_refused(what):
    given = operands(4, 6, 64, ("int8", "int8"))
    kind, message, change = BAD[what]
    change(given)
    with pytest.raises(kind, match=message):
        call(given)


def test_options_that_are_refused():
    given = operands(4, 6, 64, ("int8", "int8"))
    assert call(given, out_dtype="bfloat16").dtype == torch.bfloat16
    with pytest.raises(
        ValueError, match=r"out_dtype is one of float32, bfloat16, float16, int32.*got 'float64'"
    ):
        call(given, out_dtype="float64")
    with pytest.raises(TypeError, match="fast_sums as a bool"):
        call(given, fast_sums=1)
    with pytest.raises(ValueError, match="int32 is for int8"):
        call(given, out_dtype=torch.int32)


def test_metadata_that_cannot_be_arranged():
    good = operands(4, 6, 64, ("int8", "int8"))[2]
    for wrong, dtype in ((good.int(), torch.int8), (good, torch.float32)):
        with pytest.raises(TypeError, match="uint8 metadata of values"):
            fast.arrange_sparse_metadata(wrong, dtype)
    with pytest.raises(ValueError, match=r"got shape \(6, 8, 1\)"):
        fast.arrange_sparse_metadata(good[..., None], torch.int8)
    bad = good.clone()
    bad[2, 3] = 0x55
    with pytest.raises(ValueError, match="1 bytes of metadata"):
        fast.arrange_sparse_metadata(bad, torch.int8)


def test_lengths_that_the_copy_engine_does_not_take(monkeypatch):
    """On Hopper, before anything is launched; here its check alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for kinds, length in ((("int8", "int8"), 32), (("float16", "float16"), 16)):
        given = operands(3, 5, length + 8, kinds, scaled=False, bias=None)
        with pytest.raises(ValueError, match=f"multiples of {length} .*decompress"):
            linear_sparse._kernel(None, (None, True), given, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert linear_sparse._kernel(None, (None, True), given, None) is None
