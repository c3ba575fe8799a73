"""What is said to a wrong first argument, an unknown name, a batch that vmap made, and an operation that there is not."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
import fast
from ao_lab.tensor.op_registry import OPERATIONS

X = np.ones((4, 32, 64), np.float32)
ROW = np.ones(32, np.float32)
INT8 = ao_lab.Int8WeightOnlyConfig()
# Arguments behind the first, of the functions of the specification.
SPECIFIED = {
    "choose_scales": ("mxfp4",),
    "compress": (),
    "decode": ("float8_e4m3fn",),
    "decompress": (ROW,),
    "dequantize": (),
    "encode": ("float8_e4m3fn",),
    "fake_quantize": ("mxfp4",),
    "fake_quantize_vjp": (ROW, "mxfp4"),
    "matmul": (X[0],),
    "matmul_error_bound": (X[0],),
    "pack": ("int4",),
    "prune": (),
    "quantize": ("mxfp4",),
    "quantize_both": ("mxfp4",),
    "rms_norm": (ROW,),
    "rms_norm_quantize": (ROW, "mxfp4"),
    "swiglu": (ROW,),
    "swiglu_quantize": (ROW, "mxfp4"),
    "tile_scales": (),
    "unpack": ("int4", (4,)),
    "untile_scales": ((1, 1),),
}
# And of those that import torch, with what each takes first.
OTHERS = {
    "advance_qat": ((), "model is a torch.nn.Module"),
    "all_to_all_rows": (([1], [1]), "takes a torch tensor"),
    "apply_mods_": (("pad",), "model is a torch.nn.Module"),
    "apply_policy_": ((None,), "model is a torch.nn.Module"),
    "as_torchao": ((), "takes a configuration"),
    "calibrate": ((INT8, print), "model is a torch.nn.Module"),
    "choose_": (
        ([], {"int8": INT8, "int4": ao_lab.Int4WeightOnlyConfig()}, ao_lab.Bits(5)),
        "model is a torch.nn.Module",
    ),
    "convert_for_training_": (("rowwise",), "model is a torch.nn.Module"),
    "convert_from_training_": ((), "model is a torch.nn.Module"),
    "convert_to_float8_training": ((), "model is a torch.nn.Module"),
    "dispatch_": ((print, None), "model is a torch.nn.Module"),
    "embedding_bag": ((torch.zeros(1), torch.zeros(1)), "takes a QuantizedTensor"),
    "explain": ((), "model is a torch.nn.Module"),
    "finish_sparsity_": ((), "model is a torch.nn.Module"),
    "from_native": (("int8_rowwise",), "takes the arrays of a NativeParts"),
    "lora_state_dict": ((), "model is a torch.nn.Module"),
    "model_size": ((INT8,), "model is a torch.nn.Module"),
    "export_executorch": (((), "nowhere"), "model is a torch.nn.Module"),
    "export_onnx": (((), "nowhere"), "model is a torch.nn.Module"),
    "native_dtype": ((), "a format is given by name or as a record"),
    "probe_": (([], "rowwise"), "model is a torch.nn.Module"),
    "precompute_float8_dynamic_scale_for_fsdp": ((), "model is a torch.nn.Module"),
    "quantize_": ((INT8,), "model is a torch.nn.Module"),
    "quantized": (("int8_rowwise",), "takes a torch tensor"),
    "prepare_for_generate_": ((), "takes a transformers model"),
    "use_attention_": ((), "takes a transformers model"),
    "use_kv_cache_": ((), "takes a transformers model"),
    "quantized_compressed": (("int8_rowwise",), "takes a torch tensor"),
    "load_adapter": (("nowhere",), "model is a torch.nn.Module"),
    "save_adapter": (("nowhere",), "model is a torch.nn.Module"),
    "save_gguf": (("nowhere",), "model is a torch.nn.Module"),
    "replace_sdpa_": ((), "a recipe is an AttentionRecipe or a name of one"),
    "save_mlx": (("nowhere",), "model is a torch.nn.Module"),
    "save_pretrained": (("nowhere",), "model is a torch.nn.Module"),
    "sparse_squared_relu": ((), "takes a torch tensor"),
    "sparsify_": ((ao_lab.SparsityConfig(),), "model is a torch.nn.Module"),
    "step_sparsity_": ((), "model is a torch.nn.Module"),
    "to_native": ((), "takes a Quantized of torch tensors"),
    "tune": ((print,), "model is a torch.nn.Module"),
    "undo_mods_": ((), "model is a torch.nn.Module"),
    "weight_size": (("int8_rowwise",), "takes the shape of a weight"),
}
# What takes paths, modules of a filter, steps or nothing: their first argument has a test elsewhere, or no wrong type.
REST = {
    "FakeQuantizeConfig", "Float8FakeQuantizeConfig", "FromIntXQuantizationAwareTrainingConfig",
    "IntXQuantizationAwareTrainingConfig", "IntxFakeQuantizeConfig", "compile_options",
    "benchmark", "compare", "evaluate", "linear_and_experts", "llama32_configs",
    "llama32_qat", "load_gguf", "load_pretrained", "quantize_pretrained", "register_operators", "write_card",
}  # fmt: skip
# Of the specification what takes a record: see tests/reference/schemes/test_schemes.py.
RECORDS = {"register"}


class Strange:
    """Nothing that any function takes."""


def test_the_tables_hold_every_function():
    specified = {name for name, home in ao_lab.HOMES.items() if home == "reference"}
    assert {name for name in specified if inspect.isfunction(getattr(ao_lab, name))} - RECORDS == set(
        SPECIFIED
    )
    functions = {name for name in ao_lab.HOMES if inspect.isfunction(getattr(ao_lab, name))} - specified
    assert functions == set(OTHERS) | REST


@pytest.mark.parametrize("name", SPECIFIED)
def test_what_is_no_array(name):
    for wrong in ("text", None, Strange()):
        with pytest.raises(TypeError, match=f"got {type(wrong).__name__}"):
            getattr(ao_lab, name)(wrong, *SPECIFIED[name])


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_model_and_no_tensor(name):
    arguments, said = OTHERS[name]
    for wrong in (3, None, Strange()):
        with pytest.raises(TypeError, match=f"{said}.*got {type(wrong).__name__}"):
            getattr(ao_lab, name)(wrong, *arguments)


@pytest.mark.parametrize("make", [torch.ones, np.ones, jnp.ones])
def test_arrays_are_no_quantized(make):
    for dequantize in (ao_lab.dequantize, fast.dequantize, ao_lab.jax.dequantize):
        with pytest.raises(
            TypeError, match=r"takes a Quantized.* got an array of dtype .* and shape \(4, 32\)"
        ):
            dequantize(make((4, 32)))


def test_a_quantized_tensor_has_its_own():
    with pytest.raises(TypeError, match="a QuantizedTensor has a dequantize"):
        ao_lab.dequantize(ao_lab.quantized(torch.ones(4, 32), "int8_rowwise"))


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_batch_that_vmap_made(packed):
    """Blocks say where their axis lies, so that it is one Quantized; with a scale of each whole array it is several, and the
    message says how both ways end."""
    batch = jax.vmap(lambda x: ao_lab.quantize(x, "mxfp4", packed=packed))(jnp.asarray(X))
    whole = ao_lab.dequantize(ao_lab.quantize(jnp.asarray(X), "mxfp4", packed=packed))
    assert jnp.array_equal(ao_lab.dequantize(batch), whole)
    assert jnp.array_equal(jax.vmap(ao_lab.dequantize)(batch), whole)
    batch = jax.vmap(lambda x: ao_lab.quantize(x, "nvfp4", packed=packed))(jnp.asarray(X))
    with pytest.raises(ValueError, match="vmap") as error:
        ao_lab.dequantize(batch)
    assert "packed=" not in str(error.value)


def test_codes_of_another_tensor():
    q = ao_lab.quantize(X, "mxfp4")
    other = ao_lab.quantize(X[:, :, :32], "mxfp4")
    wrong = type(q)(other.codes, q.scale, None, None, q.shape, q.axis, q.scheme)
    # Half as long: what packed codes of four bits would be.
    with pytest.raises(ValueError, match="belong in a Quantized with packed=True"):
        ao_lab.dequantize(wrong)
    wrong = type(q)(other.codes[:1], q.scale, None, None, q.shape, q.axis, q.scheme)
    with pytest.raises(ValueError, match="give the codes, the shape and the scheme of one quantize"):
        ao_lab.dequantize(wrong)


def test_unknown_names():
    """At most three names, and where all of them are."""
    for given, near in (
        ("mxfp8", "mxfp8_e4m3, mxfp8_e5m2"),
        ("nvfp5", "nvfp4"),
        ("MXFP4", "mxfp4"),
        ("int8", "int8_g32"),
    ):
        for function in (
            lambda name: ao_lab.quantize(ROW, name),
            lambda name: ao_lab.SchemeConfig(scheme=name),
        ):
            with pytest.raises(ValueError, match=f"unknown scheme '{given}'; .* are .*{near}") as error:
                function(given)
            names, own = str(error.value).split("; ")[1:]
            assert names.count(",") <= 2
            assert own.startswith(("one of your own is registered first", "schemes with such elements are"))
    with pytest.raises(
        ValueError, match=r"known are \S+, \S+, \S+ and \d+ more; `ao-lab schemes` lists them"
    ):
        ao_lab.quantize(ROW, "zzzz")
    with pytest.raises(
        ValueError,
        match=r"known are bfloat16, dynamic4, dynamic8 and \d+ more; `ao-lab formats` lists them",
    ):
        ao_lab.encode(ROW, "zzzz")


@pytest.mark.parametrize("operation", [torch.relu, torch.exp, lambda w: w.cumsum(0), lambda w: w.sort()])
def test_operations_that_there_are_not(operation):
    weight = nn.Parameter(ao_lab.quantized(torch.randn(4, 32), "int8_rowwise"), requires_grad=False)
    with pytest.raises(
        NotImplementedError, match=r"of a QuantizedTensor \(int8_rowwise\): dequantize\(\) it first"
    ) as error:
        operation(weight)
    assert len(str(error.value)) < 300
    assert len(OPERATIONS) > 30
