"""What `fast.kernels.scheme.constants` makes of records: fields decide, names do not."""

import platform
from dataclasses import replace

import pytest

from reference import FORMATS, SCHEMES, Zero
from reference.quantize.blocks import Blocks

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.launch import plan as passes
from fast.kernels.scheme.constants import element_of, rule_of
from fast.kernels.scheme.fast_path_rules import OCP, ocp_name


@pytest.fixture
def copy(monkeypatch):
    """A function that registers a format's record under another name."""

    def add(name):
        monkeypatch.setitem(FORMATS, f"own_{name}", replace(FORMATS[name], name=f"own_{name}"))
        return f"own_{name}"

    return add


@pytest.mark.parametrize("name", FORMATS)
def test_a_renamed_format_has_the_same_constants(name):
    own = replace(FORMATS[name], name="own")
    for hardware in (False, True):
        for fours in (False, True):
            made = element_of(own, hardware=hardware, fours=fours)
            assert made == element_of(FORMATS[name], hardware=hardware, fours=fours)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_renamed_element_has_the_same_kernels(name, copy):
    scheme = SCHEMES[name]
    own = replace(scheme, name="own", element=copy(scheme.element))
    for dtype in ("float32", "bfloat16"):
        assert rule_of(own, dtype) == rule_of(scheme, dtype)


@pytest.mark.parametrize("name", ["nvfp4", "nf4", "torchao.nvfp4"])
def test_a_renamed_storage_has_the_same_kernels(name, copy):
    scheme = SCHEMES[name]
    own = replace(scheme, name="own", scale=replace(scheme.scale, storage=copy(scheme.scale.storage)))
    assert rule_of(own, "bfloat16") == rule_of(scheme, "bfloat16")


def test_zero_points_in_another_dtype_have_no_kernel():
    """Kernels keep zero points that are numbers as bfloat16 or float32."""
    scheme = SCHEMES["torchao.int4_g32_tinygemm"]
    for storage in ("float32", "bfloat16", "float16"):
        own = replace(scheme, name="own", zero=Zero(rule="value", storage=storage))
        asked = passes.asked("bfloat16", own, Blocks.of((64, 256), own.scale, -1))
        assert (asked is not None) == (storage != "float16")


@pytest.mark.parametrize("name", OCP)
def test_another_field_makes_another_format(name):
    fmt = FORMATS[name]
    assert ocp_name(fmt) == OCP[name] == ocp_name(replace(fmt, name="own"))
    assert ocp_name(replace(fmt, bias=fmt.bias + 1)) == ""
    assert ocp_name(replace(fmt, specials="nan_negative_zero")) == ""
    assert element_of(replace(fmt, bias=fmt.bias + 1)) != element_of(fmt)
