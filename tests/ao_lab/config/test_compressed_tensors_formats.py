"""What others call a recipe."""

import pytest

from ao_lab import Recipe
from ao_lab.config.compressed_tensors import common_name
from ao_lab.config.recipe import named


@pytest.mark.parametrize(
    ("weight", "inputs", "name"),
    [
        ("int8_rowwise_cast", "compressed_tensors.int8_token", "W8A8 INT8, per channel, inputs per token"),
        ("int4_g128", None, "W4A16 INT4, group size 128"),
        ("int4_g32_asymmetric", None, "W4A16 INT4, group size 32, zero points"),
        ("int4_g32", "int8_rowwise", "W4A8 INT4, group size 32, INT8 inputs per token"),
        ("fp8_128x128", "fp8_1x128", "W8A8 FP8, per block of 128x128, inputs group size 128"),
        ("fp8_rowwise_e5m2", None, "W8A16 FP8 (E5M2), per channel"),
        ("mxfp4", "mxfp8_e4m3", "W4A8 MXFP4, group size 32, MXFP8 inputs group size 32"),
        ("mxfp6_e2m3", None, "W6A16 MXFP6 (E2M3), group size 32"),
        ("nvfp4", "nvfp4", "W4A4 NVFP4, group size 16, inputs group size 16"),
        ("nf4", None, "W4A16 NF4, blocks of 64"),
        ("int1_g32", None, "W1A16 INT1, group size 32, zero points"),
    ],
)
def test_names(weight, inputs, name):
    assert common_name(Recipe(weight=named(weight), activation=named(inputs))) == name
