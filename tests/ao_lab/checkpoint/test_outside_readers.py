"""Every configuration and several architectures: `from_pretrained(folder)` in a process without ao_lab, bit for bit.

Our models multiply by kernel "dequantize", which computes as that client does; what other kernels may differ by is derived in
the last test, layer by layer.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import ao_lab
import fast
from ao_lab import Int4WeightOnlyConfig, SchemeConfig, quantize_, save_pretrained
from ao_lab.checkpoint.plain_readers import reading
from ao_lab.config.recipe import Recipe, integer_scheme, named
from ao_lab.tensor.quantized_tensor import quantized
from tests.ao_lab.config.test_every_config import ARGUMENTS
from tests.support.runs import forks

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
SCRIPT = Path(__file__).parent / "outside_script.py"
SIZES = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
DECODER = {**SIZES, "intermediate_size": 256, "max_position_embeddings": 64}
#: Biases; tied tables; heads; norms of queries; an encoder.
ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**DECODER, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(
        **DECODER, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True
    ),
    "opt": lambda: transformers.OPTConfig(
        **SIZES, ffn_dim=256, max_position_embeddings=64, word_embed_proj_dim=128
    ),
    "bert": lambda: transformers.BertConfig(**DECODER),
}
CLASSES = {"bert": "BertForMaskedLM"}
#: Nothing in compressed-tensors is like these.
WITHOUT = {
    ("Float8DynamicActivationInt4WeightConfig", 0), ("Float8WeightOnlyConfig", 1), ("Int8WeightOnlyConfig", 1),
    ("IntxWeightOnlyConfig", 0), ("LowBitWeightOnlyConfig", 0), ("LowBitWeightOnlyConfig", 1),
    ("LowBitWeightOnlyConfig", 2), ("MXWeightOnlyConfig", 1), ("NF4WeightOnlyConfig", 0),
    ("NVFP4DynamicActivationNVFP4WeightConfig", 0), ("SchemeConfig", 0),
}  # fmt: skip
CASES = [(name, i) for name, several in ARGUMENTS.items() for i in range(len(several))]
TOKENS = torch.arange(24).reshape(2, 12) + 4


def base(name, dtype, root):
    """A folder with random weights, as transformers saves it; inner layers large enough to quantize."""
    torch.manual_seed(0)
    config = ARCHITECTURES[name]()
    model = (
        getattr(transformers, CLASSES[name])(config)
        if name in CLASSES
        else transformers.AutoModelForCausalLM.from_config(config)
    )
    for part in model.parameters():
        nn.init.normal_(part, mean=float(part.dim() == 1), std=0.1)
    where = root / f"{name}-{dtype}"
    model.to(getattr(torch, dtype)).save_pretrained(where)
    return where, type(model)


def inner(module, name):
    return isinstance(module, nn.Linear) and "head" not in name and "cls." not in name


def expected(folder, model):
    """The outputs that the script compares with."""
    inputs = {"input_ids": TOKENS}
    with torch.no_grad():
        torch.save({"inputs": inputs, "logits": model(**inputs).logits}, folder / "expected.pt")


def write(folder, source, kind, config):
    """A quantized model of a folder, its layout chosen by itself.

    OPT gives its feed-forward layers inputs with two axes, of which that client takes one scale for all tokens, unless the
    configuration says that groups as long as a row have one.
    """
    model = kind.from_pretrained(source).eval()
    loop = (lambda m: m(input_ids=TOKENS)) if config.observer() is not None else None
    quantize_(model, config, inner, forward_loop=loop)
    saved = save_pretrained(model, folder)
    assert (saved.layout, saved.reasons) == ("compressed-tensors", ())
    assert not any("unknown" in line for line in saved.limits)  # a small input has reached every layer
    expected(folder, model)


def read_plainly(root):
    """What the script says of each folder."""
    done = forks.python(SCRIPT, root, server="transformers", cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.partition("RESULT")[2])


def wanted_cases(arch, dtype):
    """Llama with every configuration, in float32 with the first of each class, like the other architectures."""
    seen = set()
    for name, i in CASES:
        config = None
        if (name, i) not in WITHOUT:
            config = getattr(ao_lab, name)(**ARGUMENTS[name][i]).for_layout("compressed-tensors")
        every = (arch, dtype) == ("llama", "bfloat16")
        if config is None or (not every and name in seen):
            continue
        # Readers make weights whose scales are codes in bfloat16: those of float32 models are in ODD.
        if dtype == "float32" and config.recipe().weight.scale.storage.startswith("float8"):
            continue
        seen.add(name)
        yield f"{arch}-{dtype}-{name}-{i}", replace(config, kernel="dequantize")


#: Models whose heads are quantized as well: in one group, and in one of two.
HEADS = {
    "int4": Int4WeightOnlyConfig(group_size=32).for_layout("compressed-tensors"),
    "int8 inputs": ao_lab.Int8DynamicActivationInt8WeightConfig().for_layout("compressed-tensors"),
    "two groups": ao_lab.FqnToConfig(
        {
            "lm_head": SchemeConfig(scheme="int8_rowwise_cast"),
            "re:.*_proj": SchemeConfig(scheme="int4_g32_cast"),
        }
    ),
}
#: Inputs as the client quantizes them, beside scales that it rounds.
ROUNDED = SchemeConfig(scheme="int8_rowwise", activation_scheme="compressed_tensors.int8_token")
#: What is written by name alone: the dtype, the configuration, its limit, and what a plain reader does.
ODD = {
    "zero points": ("bfloat16", Int4WeightOnlyConfig(group_size=32), "dequantize: config.json", ""),
    "float32 scales": ("bfloat16", SchemeConfig(scheme="int8_rowwise"), "scales: loaders that keep quantized values", ""),
    "float32 scales, inputs": ("bfloat16", ROUNDED, "leaves inputs as they are", "differs by"),
    "bfloat16 weights": ("float32", SchemeConfig(scheme="mxfp4"), "matmuls with float32 inputs fail", "RuntimeError"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A function from a name and a dtype to the folder of a dense model and its class, each written once."""
    root = tmp_path_factory.mktemp("dense")
    transformers.utils.logging.disable_progress_bar()
    return cache(lambda arch, dtype: base(arch, dtype, root))


@pytest.fixture(scope="module")
def told(bases, tmp_path_factory):
    """What a process without ao_lab says of an architecture's folders, which are written when they are asked for."""

    @cache
    def of(arch):
        written = tmp_path_factory.mktemp(arch)
        for dtype in ("bfloat16", "float32") if arch == "llama" else ("bfloat16",):
            source, kind = bases(arch, dtype)
            for name, config in wanted_cases(arch, dtype):
                write(written / name, source, kind, config)
        if arch == "llama":
            write_others(written, bases)
        return read_plainly(written)

    return of


def write_others(written, bases):
    """Models with quantized heads, and those whose layout is asked for by name."""
    for name, config in HEADS.items():
        model = transformers.LlamaForCausalLM.from_pretrained(bases("llama", "bfloat16")[0]).eval()
        quantize_(model, config)
        save_pretrained(model, written / f"llama-head-{name}", layout="compressed-tensors")
        expected(written / f"llama-head-{name}", model)
    for name, (dtype, config, limit, _) in ODD.items():
        model = transformers.LlamaForCausalLM.from_pretrained(bases("llama", dtype)[0]).eval()
        quantize_(model, replace(config, kernel="dequantize"), inner)
        with pytest.warns(UserWarning, match="wrote layout 'ao_lab'.*for_layout") as warned:
            assert save_pretrained(model, written.parent / "own").layout == "ao_lab"
        assert str(warned[0].message).count("for_layout") == 1  # the way out is said once
        saved = save_pretrained(model, written / name, layout="compressed-tensors")
        assert any(limit in line for line in saved.limits), saved.limits
        expected(written / name, model)


def test_configurations_that_no_format_is_like():
    for name, i in CASES:
        config = getattr(ao_lab, name)(**ARGUMENTS[name][i])
        if (name, i) in WITHOUT:
            with pytest.raises(ValueError, match="compressed-tensors"):
                config.for_layout("compressed-tensors")
        else:
            assert type(config.for_layout("compressed-tensors")) is type(config)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plain_readers_compute_the_same(arch, told):
    found = {name: line for name, line in told(arch).items() if name.startswith(f"{arch}-")}
    assert len(found) >= 13
    assert {name: line for name, line in found.items() if line} == {}


def test_what_plain_readers_do_to_other_folders(told):
    """The limits that are told are those that there are."""
    lines = told("llama")
    for name, (*_, wrong) in ODD.items():
        assert lines[name].startswith(wrong) if wrong else not lines[name], lines[name]


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
@pytest.mark.parametrize("columns", [32, 64])
def test_zero_points_that_no_reader_unpacks_are_refused(rows, columns):
    """Those of few rows (a classifier's): the client's own unpacking is the measure, for every width."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    for bits in range(2, 9):
        t = quantized(torch.randn(rows, columns), Recipe(weight=integer_scheme(bits, 32, asymmetric=True)))
        shape = (rows, columns // 32)
        words = torch.zeros(-(-rows * bits // 32), shape[1], dtype=torch.int32)
        try:
            unpack_from_int32(words, bits, torch.Size(shape), packed_dim=0)
        except RuntimeError:
            with pytest.raises(ValueError, match=f"packed zero points of {rows} rows.*layout=.ao_lab"):
                reading(t)
        else:
            made = reading(t)
            assert made.tensors["weight_zero_point"].shape == words.shape
            assert made.dequantize


PRODUCTS = [
    ("int8_rowwise_cast", "compressed_tensors.int8_token"),
    ("fp8_rowwise_cast", "compressed_tensors.fp8_token"),
    ("fp8_tensorwise_cast", "compressed_tensors.fp8_tensor"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("weight", "inputs"), PRODUCTS)
def test_products_of_codes_and_the_readers_product(weight, inputs, dtype):
    """Kernel "auto" against the client's order: both near the exact product of what codes and scales stand for.

    With u the unit roundoff of the dtype and K terms in float32: a product of codes is off by at most
    K 2^-24 sum|x w| (floats; integers are exact), three roundings of float32 and one of the dtype. The client also rounds each
    x and each w to the dtype: (1 + u)^2 per term.
    """
    torch.manual_seed(0)
    x, dense = torch.randn(6, 256).to(dtype), torch.randn(32, 256).to(dtype)
    auto = quantized(dense, Recipe(weight=named(weight), activation=named(inputs)))
    q = fast.quantize(x, inputs)
    left = fast.decode(q.codes, q.scheme.element).double() * q.scale.double()
    right = fast.decode(auto.codes, auto.scheme.element).double() * auto.scale.double()
    exact, sums = left @ right.t(), left.abs() @ right.abs().t()
    u = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    wide = (1 + 256 * 2.0**-24) * (1 + 2.0**-24) ** 3
    ours = nn.functional.linear(x, auto)
    theirs = nn.functional.linear(fast.fake_quantize(x, inputs), auto.dequantize(dtype))
    assert bool(((ours.double() - exact).abs() <= sums * (wide * (1 + u) - 1)).all())
    assert bool(((theirs.double() - exact).abs() <= sums * (wide * (1 + u) ** 3 - 1)).all())
    # On a CPU integers alone are multiplied as codes; 8-bit floats are rounded to the dtype, as the client does.
    assert dtype == torch.float32 or torch.equal(ours, theirs) == weight.startswith("fp8")
