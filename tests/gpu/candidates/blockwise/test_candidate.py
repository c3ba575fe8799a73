"""The candidate for products of blocks: what can be said of it without a GPU. Its results: `validate`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.gpu.candidates.blockwise import build
from tests.gpu.candidates.blockwise.blockwise import (
    BLOCK,
    MOST_SHARED,
    VARIANTS,
    blocks_major,
    check,
    padded,
)

#: These begin the next block before they add one: at the start, twice in the loop, once after it.
DOUBLE = ("g2w1d_c2",)
LINE = re.compile(r"^BOTH\((\w+), (\d), (\d), (true|false), (\d), (\d)\)$", re.MULTILINE)


def test_variants_are_those_of_the_source():
    found = {name: tuple(map(int, rest)) for name, *rest in _lines()}
    assert found == {name: tuple(one) for name, one in VARIANTS.items()}


def _lines():
    for name, groups, waves, _, stages, cluster in LINE.findall(build.SOURCE.read_text()):
        yield name, groups, waves, stages, cluster


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_fits(name):
    """Boxes have at most 256 rows and begin at 1024 bytes, scales at 128; shared memory suffices."""
    one = VARIANTS[name]
    box = one.rows // one.cluster
    assert box <= 256
    assert (box * BLOCK % 1024, 4 * one.rows % 128) == (0, 0)
    assert one.shared <= MOST_SHARED


@pytest.mark.parametrize("rows", [1, 6, 8])
@pytest.mark.parametrize("blocks", [1, 3, 4])
def test_scales_are_laid_out(rows, blocks):
    """The values stay, strides are multiples of 16 bytes, and what is laid out so is not copied."""
    scale = torch.arange(rows * blocks, dtype=torch.float32).reshape(rows, blocks)
    for lay_out, near, far in ((blocks_major, 0, 1), (padded, 1, 0)):
        made = lay_out(scale)
        assert torch.equal(made, scale)
        assert made.stride(near) == 1
        assert made.stride(far) % 4 == 0
        assert lay_out(made).data_ptr() == made.data_ptr()


def test_shapes_that_do_not_fit():
    a, b = torch.empty(3, 256), torch.empty(32, 256)
    check(a, b, torch.empty(3, 2), torch.empty(1, 2))
    check(a, b, torch.empty(3, 2), torch.empty(32, 2))
    for wrong in ((a, b[:, :128], (3, 2), (1, 2)), (a, b[:30], (3, 2), (1, 2)), (a, b, (3, 1), (1, 2)),
                  (a, b, (3, 2), (2, 2))):  # fmt: skip
        with pytest.raises(ValueError, match="must be"):
            check(*wrong[:2], *(torch.empty(shape) for shape in wrong[2:]))


def test_spills_and_serialized_products_are_complaints():
    good = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    bad = "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads"
    assert build.complaints(good) == []
    assert build.complaints(good + bad + "\nptxas info : (C7511) serialized") == [
        bad.strip(),
        "ptxas info : (C7511) serialized",
    ]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")
def test_it_compiles(tmp_path: Path):
    """Without spills; each wave takes four wgmma of 32 codes, and codes and scales come by four copies."""
    assert build.complaints(build.build(tmp_path / "blockwise.cubin")) == []
    tool = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run(
        [tool, "-sass", tmp_path / "blockwise.cubin"], capture_output=True, text=True, check=True
    ).stdout
    kernels = {part.split()[0]: part for part in text.split("Function : ")[1:]}
    for name, one in VARIANTS.items():
        for suffix in ("", "_rows"):
            begun = 4 if name in DOUBLE else 1
            assert kernels[name + suffix].count("QGMMA.64x128x32") == 4 * one.waves * begun
            assert kernels[name + suffix].count("UTMALDG") == 4
            assert ("MULTICAST" in kernels[name + suffix]) == (one.cluster > 1)
