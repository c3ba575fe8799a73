"""`config.for_layout(layout)`: the configuration whose models a plain reader of that layout computes as they are here.

"compressed-tensors" is read by transformers and vLLM without this library, by their own rules. So zero points go (transformers
reads packed ones with dequantize=True alone), scales of weights are rounded to the weight's dtype (readers hold them in the
model's), and inputs take the reader's own record. `changes` tells what was changed. "ao_lab" holds everything as it is.

Readers multiply dequantized inputs with dequantized weights. Where inputs are quantized and the configuration names no kernel,
the recipe takes kernel "dequantize", which does the same: products that another kernel rounds otherwise put a few inputs of the
next layer on the other side of a rounding, and those differ by a whole step.

Inputs as compressed-tensors' readers compute them: the record of each `input_activations`, and the way there from ours.

transformers runs compressed-tensors 0.20 on the inputs of quantized layers: `quantization/lifecycle/forward.py` quantizes and
dequantizes them in their own dtype, then the dequantized weight is multiplied. Its scales are not the default ones: symmetric
integers map the largest magnitude to 127.5 (by default to 127), MX scales round the largest magnitude (by default they do not),
and every step is rounded to the input's dtype. `reader_activation` gives the record that has those bits.

Of an input with two axes (tokens, channels) that reader takes one scale for all tokens where the strategy is "token": it
reduces over all axes but the first two. Most layers of transformers' models see three axes; poolers and experts see two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ao_lab.config.recipe import Recipe, cast_scales, integer_scheme, numerics, power_of_two_outer, registered
from reference import SCHEMES, Scheme
from reference.arrays.namespace import choice
from reference.formats.formats import BUILT_IN
from reference.schemes.conventions import compressed_tensors_input
from reference.schemes.schemes import MX_ELEMENTS, Block

# What others call a recipe: "W4A16 INT4, group size 128", for pages that people read who do not know our names.


def common_name(recipe: Recipe) -> str:
    """Bits of weights and inputs, the elements, and what has a scale, of weights and then of inputs."""
    weight, inputs = recipe.weight, recipe.activation
    told = [f"{short_name(recipe)} {element_name(weight)}", _scaled(weight, "channel")]
    if weight.zero is not None:
        told.append("zero points")
    if weight.scale.power_of_two and not element_name(weight).startswith("MX"):
        told.append("e8m0 scales")
    if inputs is not None:
        other = "" if element_name(inputs) == element_name(weight) else f"{element_name(inputs)} "
        told.append(f"{other}inputs {_scaled(inputs, 'token')}")
    return ", ".join(told)


def short_name(recipe: Recipe) -> str:
    """W4A16: the bits of a weight's and of an input's element; inputs that are not quantized have 16."""
    inputs = 16 if recipe.activation is None else recipe.activation.format.bits
    return f"W{recipe.weight.format.bits}A{inputs}"


def element_name(scheme: Scheme) -> str:
    """INT4, FP8 (E5M2), MXFP4, NVFP4, NF4; other elements by their own names, floats of one's own as "8-bit float (1-3-4)"."""
    fmt, scale = scheme.format, scheme.scale
    if fmt.kind == "int" and not fmt.fraction_bits:
        return f"INT{fmt.bits}"
    if fmt.kind != "float":
        return fmt.name.upper()
    if fmt.name not in BUILT_IN:
        return f"{fmt.bits}-bit float (1-{fmt.exponent_bits}-{fmt.mantissa_bits})"
    if scheme.outer is not None and scale.block == 16 and fmt.bits == 4:
        return "NVFP4"
    micro = "MX" if scale.power_of_two and scale.block == 32 and fmt.name in MX_ELEMENTS else ""
    kind = f" (E{fmt.exponent_bits}M{fmt.mantissa_bits})" if fmt.name not in DEFAULTS else ""
    return f"{micro}FP{fmt.bits}{kind}"


#: Elements that the width alone names.
DEFAULTS = ("float8_e4m3fn", "float4_e2m1fn")


def _scaled(scheme: Scheme, row: str) -> str:
    """What has a scale of its own."""
    block = scheme.scale.block
    if isinstance(block, tuple):
        return f"per block of {block[0]}x{block[1]}"
    if isinstance(block, str):
        return "per tensor" if block == "tensor" else f"blocks of {block.rpartition(':')[2]}"
    return f"per {row}" if block == -1 else f"group size {block}"


# Which format of compressed-tensors 0.20 stores a recipe's weight, and whether vLLM serves it: rules on recipes, as data.


@dataclass(frozen=True)
class StorageFormat:
    """One format: its name in config.json, and the recipes whose weights it stores."""

    name: str
    holds: Callable[[Recipe], bool]
    #: Widths of elements for which vLLM lists kernels.
    served_bits: tuple[int, ...]


def format_of(recipe: Recipe) -> StorageFormat | None:
    """The format that stores a recipe's weight, or None."""
    scale, zero = recipe.weight.scale, recipe.weight.zero
    if scale.stored != "decode" or (scale.partial and isinstance(scale.block, int) and scale.block > 0):
        return None
    if zero is not None and zero.rule != "code":
        return None
    return next((one for one in FORMATS if one.holds(recipe)), None)


def plain_scales(scheme: Scheme) -> bool:
    """Whether scales are on one level, in float32 or bfloat16."""
    return scheme.scale.storage in ("float32", "bfloat16") and scheme.outer is None


def _holds_int(recipe: Recipe) -> bool:
    """8-bit integers beside quantized inputs, as int8 products read them."""
    scheme = recipe.weight
    rows = scheme.scale.block in (-1, "tensor")
    return recipe.activation is not None and scheme.element == "int8" and rows and plain_scales(scheme)


def _holds_packed(recipe: Recipe) -> bool:
    scheme = recipe.weight
    groups = isinstance(scheme.scale.block, int)
    signed = scheme.format.kind == "int" and scheme.format.signed and scheme.format.fraction_bits == 0
    floats = recipe.activation is not None and recipe.activation.format.kind == "float"
    return signed and groups and plain_scales(scheme) and not floats and scheme.format.specials == "none"


def _holds_float(recipe: Recipe) -> bool:
    return recipe.weight.element == "float8_e4m3fn" and plain_scales(recipe.weight)


def _holds_mx(element: str) -> Callable[[Recipe], bool]:
    def holds(recipe: Recipe) -> bool:
        scale = recipe.weight.scale
        return recipe.weight.element == element and scale.power_of_two and scale.block == 32

    return holds


def _holds_nvfp4(recipe: Recipe) -> bool:
    scheme = recipe.weight
    two_levels = scheme.outer is not None and scheme.outer.statistic == "absmax_elements"
    block = scheme.scale.storage == "float8_e4m3fn" and scheme.scale.block == 16
    return scheme.element == "float4_e2m1fn" and block and two_levels and scheme.outer_order != "folded"


FORMATS = (
    StorageFormat("int-quantized", _holds_int, (8,)),
    StorageFormat("pack-quantized", _holds_packed, (4, 8)),
    StorageFormat("float-quantized", _holds_float, (8,)),
    StorageFormat("mxfp8-quantized", _holds_mx("float8_e4m3fn"), (8,)),
    StorageFormat("mxfp6-pack-quantized", _holds_mx("float6_e2m3fn"), ()),
    StorageFormat("mxfp4-pack-quantized", _holds_mx("float4_e2m1fn"), (4,)),
    StorageFormat("nvfp4-pack-quantized", _holds_nvfp4, (4,)),
)


#: Group sizes of packed integers that vLLM's kernels (Marlin) take; -1: one scale a row.
SERVED_GROUPS = (-1, 32, 64, 128)


def unserved(recipe: Recipe) -> str:
    """What vLLM lists no kernel for in a recipe, in words; "" where it lists one."""
    known, weight = format_of(recipe), recipe.weight
    if known is None or weight.format.bits not in known.served_bits:
        return common_name(recipe)
    groups = known.name == "pack-quantized" and weight.scale.block not in SERVED_GROUPS
    return f"{common_name(recipe)} (its kernels take 32, 64, 128 or whole rows)" if groups else ""


# QuantizationArgs of compressed-tensors for the scheme of a weight or of an input.

#: Storage of scales as compressed-tensors names it; float32 is its default.
SCALE_DTYPES = {"float8_e8m0fnu": "torch.uint8", "float8_e4m3fn": "torch.float8_e4m3fn"}


def weight_arguments(scheme: Scheme) -> dict[str, Any]:
    """QuantizationArgs of a weight."""
    return {**_arguments(scheme, "channel"), "dynamic": False}


def input_arguments(scheme: Scheme, static: bool) -> dict[str, Any]:
    """QuantizationArgs of an input; ValueError for a scheme that compressed-tensors' readers do not compute."""
    scale = scheme.scale
    if scheme.outer is not None or isinstance(scale.block, tuple) or scale.flat_size:
        raise ValueError(f"compressed-tensors does not quantize inputs in {scheme.name} as they come")
    return {**_arguments(scheme, "token"), "dynamic": not static}


def _arguments(scheme: Scheme, row: str) -> dict[str, Any]:
    block, fmt = scheme.scale.block, scheme.format
    if fmt.kind not in ("int", "float") or fmt.fraction_bits:
        raise ValueError(f"compressed-tensors has no elements {fmt.name}")
    if fmt.kind == "float" and fmt.name not in ("float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn"):
        raise ValueError(f"compressed-tensors has no elements {fmt.name}")
    strategy = {"-1": row, "tensor": "tensor"}.get(
        str(block), "block" if isinstance(block, tuple) else "group"
    )
    result: dict[str, Any] = {
        "num_bits": fmt.bits,
        "type": fmt.kind,
        "symmetric": scheme.zero is None,
        "strategy": "tensor_group" if scheme.outer is not None else strategy,
        "group_size": block if strategy == "group" else None,
        "block_structure": list(block) if isinstance(block, tuple) else None,
    }
    storage = SCALE_DTYPES.get(scheme.scale.storage)
    return result if storage is None else {**result, "scale_dtype": storage, "zp_dtype": storage}


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
    return ValueError(f"input_activations ({told}): no scheme computes what loaders compute; {rule}")


COMPRESSED, OWN = "compressed-tensors", "ao_lab"
LAYOUTS = (COMPRESSED, OWN)


def recipe_for_layout(recipe: Recipe, layout: str) -> Recipe:
    """The recipe of a configuration for a layout; ValueError, with the reason, where it has nothing like that."""
    return recipe if choice(layout, LAYOUTS, "layout") == OWN else recipe_for_readers(recipe)


def recipe_for_readers(recipe: Recipe) -> Recipe:
    """The recipe nearest to one that plain readers compute; ValueError where there is none."""
    activation = recipe.activation
    if activation is not None and not is_as_read(activation):
        activation = activation_as_read(_symmetric(activation))
    kernel = "dequantize" if activation is not None and recipe.kernel == "auto" else recipe.kernel
    result = replace(recipe, weight=weight_for_readers(recipe.weight), activation=activation, kernel=kernel)
    if format_of(result) is None:
        raise ValueError(
            f"compressed-tensors has no format for {recipe}; layout='ao_lab' holds it, and transformers reads that after "
            f"`import ao_lab`"
        )
    return result


def weight_for_readers(scheme: Scheme) -> Scheme:
    """A weight's scheme without zero points, its scales in the weight's dtype or in 16 bits or fewer.

    An outer scale is a power of two: readers keep its reciprocal, and that of another number often is none of float32's.
    """
    plain = _symmetric(scheme)
    if plain.outer is not None:
        return power_of_two_outer(plain)
    if plain.scale.storage != "float32":
        return plain
    return cast_scales(plain)


def _symmetric(scheme: Scheme) -> Scheme:
    """The default integers without zero points in place of those with them; ValueError for one bit, which has none."""
    if scheme.zero is None:
        return scheme
    bits, block = scheme.format.bits, scheme.scale.block
    if bits == 1:
        raise ValueError(
            f"compressed-tensors has no one-bit levels like those of {scheme.name}; layout='ao_lab' has"
        )
    return integer_scheme(bits, block, asymmetric=False)


def changes(before: Recipe, after: Recipe) -> list[str]:
    """What `recipe_for_readers` has changed, a sentence each."""
    told = []
    if before.weight != after.weight:
        why = "loaders store scales in the weight's dtype"
        if before.weight.outer is not None:
            why = "loaders divide by the reciprocal of the outer scale, which is exact for a power of two"
        if before.weight.zero is not None:
            why = "transformers 5.23 does not load packed zero points without dequantize=True; " + why
        told.append(f"weights: {after.weight.name} in place of {before.weight.name}, because {why}")
    if (
        before.activation is not None
        and after.activation is not None
        and before.activation != after.activation
    ):
        told.append(
            f"inputs: {after.activation.name} in place of {before.activation.name}, because {_why(after.activation)}"
        )
    if before.kernel != after.kernel:
        told.append(
            f"kernel: {after.kernel}, so that results are bitwise those of transformers, which dequantizes weights and inputs "
            "before each matmul; this takes as long as dense layers or longer (on a CPU up to three times), the option "
            f"kernel={faster_kernel(after)} selects a faster kernel"
        )
    return told


def faster_kernel(recipe: Recipe) -> str:
    """A kernel that multiplies what a recipe of readers stores; its sums are not those of transformers."""
    if recipe.activation is None or recipe.weight.scale.block not in (-1, "tensor"):
        return "fused"
    formats = (recipe.weight.format, recipe.activation.format)
    if all(one.name == "int8" for one in formats):
        return "int8"
    return "scaled_mm" if all(one.kind == "float" and one.bits == 8 for one in formats) else "fused"


def _why(inputs: Scheme) -> str:
    """How readers quantize inputs."""
    if inputs.scale.power_of_two:
        return "loaders round the largest magnitude of a block before they take its exponent"
    if inputs.format.kind == "int":
        return f"loaders scale inputs by {inputs.scale.target:g}, without zero points, in the input's dtype"
    return "loaders compute the scale in the input's dtype, and divide by it"
