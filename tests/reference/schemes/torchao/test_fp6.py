"""`torchao.fp6_*_rowwise` against torchao's own cast to six bits: codes and scales are equal."""

import numpy as np
import pytest

import reference
from ao_lab.config.recipe import named
from reference.schemes.conventions import torchao_float6

torch = pytest.importorskip("torch")
custom = pytest.importorskip("torchao.prototype.custom_fp_utils")


@pytest.mark.parametrize(("name", "bits"), [("e3m2", (3, 2)), ("e2m3", (2, 3))])
@pytest.mark.parametrize(("dtype", "end"), [("bfloat16", ""), ("float16", "_f16")])
def test_codes_and_scales_are_torchaos(name, bits, dtype, end):
    """Rows of zeros, of denormals and of large values among ordinary ones; scales are rounded after the elements were made."""
    scheme = named(f"torchao.fp6_{name}_rowwise{end}")
    dtype = getattr(torch, dtype)
    w = torch.from_numpy(np.random.default_rng(3).standard_normal((64, 256), dtype=np.float32)).to(dtype)
    w[3] = 0
    w[5] *= 2.0**-10
    w[7] *= 2.0**10
    values = w.float()
    scale = values.abs().amax(1).clamp(min=1e-12) / reference.FORMATS[scheme.element].max
    theirs = custom._f32_to_floatx_unpacked(values / scale.view(-1, 1), *bits)
    ours = reference.quantize(values.numpy(), scheme)
    assert np.array_equal(ours.codes, theirs.numpy())
    stored = reference.decode(ours.scale, str(dtype).removeprefix("torch.")).ravel()
    assert np.array_equal(stored, scale.to(dtype).float().numpy())
    decoded = reference.decode(theirs.numpy(), scheme.element) * stored[:, None]
    assert np.array_equal(reference.dequantize(ours), decoded.astype(np.float32))


def test_other_names_are_no_fp6():
    assert torchao_float6("torchao.fp6_e3m2_g32") is None
    assert torchao_float6("fp6_e3m2_rowwise") is None
    assert named("torchao.fp6_e3m2_rowwise").deviations
