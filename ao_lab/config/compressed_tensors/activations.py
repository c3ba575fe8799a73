"""Inputs as compressed-tensors' readers compute them: the record of each `input_activations`, and the way there from ours.

transformers runs compressed-tensors 0.20 on the inputs of quantized layers: `quantization/lifecycle/forward.py` quantizes and
dequantizes them in their own dtype, then the dequantized weight is multiplied. Its scales are not the default ones: symmetric
integers map the largest magnitude to 127.5 (by default to 127), MX scales round the largest magnitude (by default they do not),
and every step is rounded to the input's dtype. `reader_activation` gives the record that has those bits.

Of an input with two axes (tokens, channels) that reader takes one scale for all tokens where the strategy is "token": it
reduces over all axes but the first two. Most layers of transformers' models see three axes; poolers and experts see two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ao_lab.config.compressed_tensors.arguments import input_arguments
from ao_lab.config.recipe import numerics, registered
from reference import SCHEMES, Scheme
from reference.schemes.conventions import compressed_tensors_input
from reference.schemes.schemes import Block

#: Elements by type and width, as the reader decodes them.
FLOATS = {8: "float8_e4m3fn", 6: "float6_e2m3fn", 4: "float4_e2m1fn"}
MX_GROUP, NVFP4_GROUP = 32, 16
SHORT = {"float8_e4m3fn": "fp8", "float6_e2m3fn": "fp6", "float4_e2m1fn": "fp4"}


def reader_activation(arguments: Mapping[str, Any]) -> Scheme:
    """The record of an input that compressed-tensors 0.20 quantizes by these QuantizationArgs; its defaults hold.

    Static scales (dynamic false) are of the strategy "tensor" and given to the record; of "tensor_group" with 4-bit floats
    (NVFP4, dynamic "local") the scale over the whole tensor is. ValueError where the reader refuses the arguments, or computes
    what no record says (zero points: it adds them before rounding).
    """
    given = {key: _plain(value) for key, value in arguments.items() if value is not None}
    bits, kind = given.get("num_bits", 8), given.get("type", "int")
    strategy, group = given.get("strategy"), given.get("group_size")
    dynamic, stored = given.get("dynamic", False), given.get("scale_dtype")
    if strategy is None:
        strategy = "tensor" if group is None else "group"
    if given.get("symmetric", True) is not True:
        raise _none(given, "zero points of inputs are added before rounding there; take symmetric inputs")
    element = _element(given, kind, bits)
    if strategy == "tensor_group":
        return _nvfp4(given, element, group, dynamic)
    if stored is not None and not (stored == "uint8" and strategy == "group" and group == MX_GROUP):
        raise _none(given, f"scales stored as {stored} belong to groups of 32 (uint8, MX)")
    if dynamic is not True and strategy != "tensor":
        raise _none(given, "static scales of inputs are one for the tensor: strategy 'tensor'")
    if stored is not None:
        if kind != "float":
            raise _none(given, "power-of-two scales belong to floats")
        return _mx(element)
    return _ratio(element, _block(given, strategy, group))


def activation_as_read(scheme: Scheme) -> Scheme:
    """The reader's record for inputs that a record of ours quantizes: the same element and blocks; itself where it is one.

    ValueError where compressed-tensors has no such inputs.
    """
    static = scheme.scale.block == "tensor"
    return reader_activation(input_arguments(scheme, static))


def is_as_read(scheme: Scheme) -> bool:
    """Whether a plain reader quantizes inputs to the same values as this record."""
    try:
        read = activation_as_read(scheme)
    except ValueError:
        return False
    return numerics(scheme) == numerics(read)


def _plain(value: Any) -> Any:
    """Names of enumerations and dtypes; numbers and booleans as they are."""
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int)) else str(value).lower().removeprefix("torch.")


def _element(given: Mapping[str, Any], kind: Any, bits: Any) -> str:
    if kind == "float" and bits in FLOATS:
        return FLOATS[bits]
    if kind == "int" and type(bits) is int and 2 <= bits <= 8:
        return f"int{bits}"
    raise _none(given, "elements are integers of 2 to 8 bits, or floats of 8, 6 (e2m3) or 4 (e2m1) bits")


def _block(given: Mapping[str, Any], strategy: Any, group: Any) -> Block:
    if strategy == "group" and type(group) is int and group > 0:
        return group
    blocks: dict[Any, Block] = {"token": -1, "tensor": "tensor"}
    if strategy not in blocks:
        raise _none(given, "strategies of inputs are token, tensor, group and tensor_group")
    return blocks[strategy]


def _nvfp4(given: Mapping[str, Any], element: str, group: Any, dynamic: Any) -> Scheme:
    """NVFP4 inputs: the scale over the tensor is stored, those of blocks are found for each input."""
    if element != FLOATS[4] or group != NVFP4_GROUP or dynamic != "local":
        raise _none(given, "'tensor_group' is NVFP4: 4-bit floats in groups of 16, dynamic 'local'")
    return SCHEMES["compressed_tensors.nvfp4"]


def _mx(element: str) -> Scheme:
    """The record of MX inputs: the largest magnitude of a block is rounded before its exponent is taken."""
    return next(s for s in SCHEMES.values() if s.element == element and s.scale.even_bits is not None)


def _ratio(element: str, block: Block) -> Scheme:
    name = f"{SHORT.get(element, element)}_" + {"-1": "token", "tensor": "tensor"}.get(
        str(block), f"group_{block}"
    )
    return registered(compressed_tensors_input(element, block, name))


def _none(given: Mapping[str, Any], rule: str) -> ValueError:
    told = ", ".join(f"{key}={value}" for key, value in given.items())
    return ValueError(f"input_activations ({told}): no record has what readers compute; {rule}")


__all__ = ["activation_as_read", "is_as_read", "reader_activation"]
