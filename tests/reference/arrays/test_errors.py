"""Arguments that are names: every spelling of a dtype, with the same bits; and hints for unknown names that can be followed."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import ao_lab
import ao_lab.jax
import fast
import reference
from ao_lab.cli.app import main
from ao_lab.kv_cache.recipe import recipe_of
from ao_lab.testing import assert_same_bits, fill
from experiments.harness.registry import EXPERIMENTS
from reference import FORMATS
from reference.arrays.namespace import LISTED, lookup, spelled
from reference.attention.quantized import attention_recipe_of
from tests.support.refusals import refused

SPELLINGS = {
    "float16": ["float16", "f2", "half", np.float16, np.dtype("float16"), jnp.float16, torch.float16],
    "bfloat16": ["bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), jnp.bfloat16, torch.bfloat16],
    "float32": ["float32", "f4", "single", np.float32, np.dtype("f4"), jnp.float32, torch.float],
    "float64": ["float64", float, np.float64, torch.double],
}
CASES = [(name, spelling) for name, spellings in SPELLINGS.items() for spelling in spellings]
NONE = ["flaot16", ">f4", np.int8, np.ones(3), None, 4, ["f4"], torch.int64, object()]
X = np.random.default_rng(0).standard_normal((4, 64), np.float32)
Q = reference.quantize(X, "fp8_rowwise")


@pytest.mark.parametrize(("name", "spelling"), CASES, ids=[f"{n}-{s!r:.30}" for n, s in CASES])
def test_spellings(name, spelling):
    assert spelled(spelling) == name
    want = reference.dequantize(Q, name)
    assert_same_bits(reference.dequantize(Q, spelling), want)
    q = reference.Quantized(*map(torch.from_numpy, (Q.codes, Q.scale)), None, None, Q.shape, Q.axis, Q.scheme)
    assert_same_bits(fast.dequantize(q, spelling), want)
    if name != "float64":
        assert reference.matmul(X, X.T, out_dtype=spelling).dtype == want.dtype
        assert reference.linear(X, Q, out_dtype=spelling).dtype == want.dtype
        assert reference.linear_error_bound(X, Q, out_dtype=spelling).shape == (4, 4)
        assert fast.matmul(q.codes.float(), q.codes.float().T, out_dtype=spelling).dtype == getattr(
            torch, name
        )
        narrow = jnp.asarray(X)
        assert ao_lab.jax.dequantize(ao_lab.jax.quantize(narrow, "fp8_rowwise"), spelling).dtype == want.dtype
    assert fill("specials", (3,), dtype=spelling).dtype == want.dtype


@pytest.mark.parametrize("wrong", NONE, ids=lambda value: f"{value!r:.20}")
def test_what_is_none_is_named(wrong):
    for call in (reference.dequantize, ao_lab.jax.dequantize, fast.dequantize):
        with pytest.raises(
            ValueError, match=r"dtype is one of float32, bfloat16, float16, float64, as a name, np\.dtype"
        ):
            call(Q, wrong)
    refused(ValueError, "out_dtype is one of", reference.matmul, X, X.T, out_dtype=wrong)


def test_sparse_products():
    w = torch.from_numpy(X).bfloat16()
    stored = reference.compress(w, "2:4")
    for out_dtype in ("float16", np.float16, torch.float16):
        assert fast.linear_sparse(w, *stored, out_dtype=out_dtype).dtype == torch.float16
        assert reference.linear_sparse(w, *stored, out_dtype=out_dtype).dtype == torch.float16
    with pytest.raises(ValueError, match="out_dtype is one of float32, bfloat16, float16, int32"):
        fast.linear_sparse(w, *stored, out_dtype="int4")


def test_short_names_of_floats_find_the_long_ones():
    with pytest.raises(ValueError, match="the nearest are float4_e2m1fn"):
        lookup("fp4", FORMATS, "format")


def test_refused_names_are_told_with_the_nearest():
    """By the helper that refuses for them, or by `and_nearest`."""
    model, files = torch.nn.Sequential(torch.nn.Linear(64, 32)), {"layout": "compresed-tensors"}
    for nearest, call, *args in (
        ("bfloat16", reference.dequantize, Q, "bflaot16"),
        ("rowwise", ao_lab.convert_for_training_, model, "rowise"),
        ("fp8", attention_recipe_of, "fp9"),
        ("fp8", recipe_of, "FP9"),
        ("wanda", ao_lab.SparsityConfig, "2:4", "wnda"),
        ("compressed-tensors", lambda: ao_lab.save_pretrained(model, "x", **files)),
    ):
        with pytest.raises(ValueError, match=f"; the nearest is {nearest}(;|$)"):
            call(*args)


@pytest.mark.parametrize("what", LISTED)
def test_what_a_hint_names_is_a_command(what, capsys):
    names = dict.fromkeys("abcde")
    with pytest.raises(ValueError, match=f"known are a, b, c and 2 more; `ao-lab {what}s` lists them"):
        lookup("nosuch", names, what)
    assert main([f"{what}s"]) == 0
    assert capsys.readouterr().out


def test_names_that_no_command_lists_are_given():
    assert main(["reproduce", "nosuch"]) == 2
    with pytest.raises(ValueError, match=f"known are {', '.join(sorted(EXPERIMENTS))}$"):
        lookup("nosuch", EXPERIMENTS, "experiment")
    with pytest.raises(ValueError, match=r"known are 0, 1, 10 and 97 more$"):
        lookup("nosuch", dict.fromkeys(map(str, range(100))), "task")
