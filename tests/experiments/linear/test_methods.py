"""Every method is the configuration that its name says; torchao's are of the same weights as ours beside them."""

import pytest

from experiments.linear.methods import BASE, OF_OURS, PARTS, PEERS, TORCHAO

#: Schemes of weight and inputs.
SCHEMES = {
    "int4 g128": ("int4_g128", None),
    "int4 g32": ("int4_g32", None),
    "int4 g128, zero points": ("int4_g128_asymmetric", None),
    "int8": ("int8_rowwise", None),
    "int8 g128": ("int8_g128", None),
    "fp8": ("fp8_rowwise", None),
    "mxfp8": ("mxfp8_e4m3_rceil", None),
    "mxfp4": ("mxfp4_rceil", None),
    "nvfp4": ("nvfp4", None),
    "nf4": ("nf4", None),
    "int2 g32": ("int2_g32", None),
    "int3 g32": ("int3_g32", None),
    "int6 g32": ("int6_g32", None),
    "int8 dynamic": ("int8_rowwise", "int8_rowwise"),
    "int8 dynamic, zero points": ("int8_rowwise", "int8_rowwise_asymmetric"),
    "fp8 dynamic, tensor": ("fp8_tensorwise", "fp8_tensorwise"),
    "fp8 dynamic, rows": ("fp8_rowwise", "fp8_rowwise"),
    "fp8 dynamic, blocks": ("fp8_128x128", "fp8_1x128"),
    "int8 dynamic, int4 g32 weight": ("int4_g32", "int8_rowwise_asymmetric"),
    "fp8 dynamic, int4 g128 weight": ("int4_g128", "fp8_rowwise"),
    "mxfp8 dynamic": ("mxfp8_e4m3_rceil", "mxfp8_e4m3_rceil"),
    "mxfp4 dynamic": ("mxfp4_rceil", "mxfp4_rceil"),
    "nvfp4 dynamic": ("nvfp4", "nvfp4"),
}


def test_methods_have_the_schemes_of_their_names():
    recipes = {name: method.build().recipe() for name, method in OF_OURS.items()}
    found = {
        name: (one.weight.name, one.activation.name if one.activation else None)
        for name, one in recipes.items()
    }
    assert found == SCHEMES
    # The rules of layers choose the kernel: that is what is measured.
    assert {one.kernel for one in recipes.values()} == {"auto"}


def test_bfloat16_stands_first_in_every_part_and_names_are_unique():
    for methods in PARTS.values():
        assert methods[0] == BASE
        assert len({one.name for one in methods}) == len(methods)
    names = [one.name for one in PARTS[TORCHAO][1:]]
    assert dict(zip(names[1::2], names[::2], strict=True)) == {one.name: ours for one, ours in PEERS.items()}


def test_torchaos_configurations_are_built():
    pytest.importorskip("torchao")
    classes = [type(peer.build()).__name__ for peer in PEERS]
    assert classes == [
        "Int4WeightOnlyConfig", "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig",
        "Float8DynamicActivationFloat8WeightConfig",
    ]  # fmt: skip
    assert next(iter(PEERS)).build().group_size == 128
