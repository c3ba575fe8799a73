"""Checkpoints' tensors under the names of transformers' modules: quantized weights go where transformers puts dense ones."""

import copy
import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

import ao_lab
from ao_lab import (
    FqnToConfig,
    QuantizedTensor,
    SchemeConfig,
    linear_and_experts,
    load_pretrained,
    quantize_,
    quantized,
    save_pretrained,
)
from ao_lab.checkpoint.experts import mapping_of, read_while_loading
from ao_lab.checkpoint.io.shards import look_at
from ao_lab.checkpoint.matrix_rows import STEP, gathered, row_numbers
from ao_lab.cli.app import main
from ao_lab.config.recipe import Recipe, named
from tests.ao_lab.checkpoint.formats.folders.published_layouts import FP8, deepseek, write
from tests.support.models.expert_models import MODELS, TOKENS, model_of, saved
from tests.support.models.torch_products import by_torch

# Mixtures of experts through `ao-lab quantize` and `save_pretrained`: plain transformers computes what our model computes.

#: Those that do not, and Llama 4, whose experts transformers replaces before it reads compressed-tensors.
BATCHES = ("gpt_oss", "granitemoe", "llama4")
COMPRESSED = "compressed-tensors"


def plain(folder, **given):
    """What a user without this library's classes gets; every parameter must come from the folder."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, told = load(folder, dtype=torch.bfloat16, output_loading_info=True, **given)
    assert not any(told.values()), told
    return model


def logits(model):
    with torch.no_grad():
        return by_torch(model)(TOKENS).logits


def same_state(a, b):
    """Whether two models hold the same codes, scales, recipes and dense tensors."""
    first, second = a.state_dict(), b.state_dict()
    assert set(first) == set(second)
    for name, x in first.items():
        y = second[name]
        if not isinstance(x, QuantizedTensor):
            assert torch.equal(x, y), name
            continue
        assert x.meta == y.meta, name
        for part, mine in x.parts.items():
            other = y.parts[part]
            assert (mine is None) == (other is None), (name, part)
            assert mine is None or torch.equal(mine, other), (name, part)


def made(name, scheme, filter_fn=linear_and_experts):
    """A model whose configuration is for plain readers."""
    model = model_of(name)
    quantize_(model, SchemeConfig(scheme=scheme).for_layout(COMPRESSED), filter_fn)
    return model


MATRICES = ("deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize("name", MATRICES)
def test_plain_transformers_computes_the_same(tmp_path, name):
    model = made(name, "int4_g32")
    saved = save_pretrained(model, tmp_path, layout=COMPRESSED)
    assert saved.layout == COMPRESSED
    assert torch.equal(logits(plain(tmp_path)), logits(model))
    same_state(load_pretrained(tmp_path), model)


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "int8_g64", "mxfp4", "int5_rowwise", "mxfp6_e2m3"])
def test_every_scheme_that_transformers_reads(tmp_path, scheme):
    model = made("mixtral", scheme)
    save_pretrained(model, tmp_path, layout=COMPRESSED)
    assert torch.equal(logits(plain(tmp_path)), logits(model))
    same_state(load_pretrained(tmp_path), model)


@pytest.mark.filterwarnings("ignore:You passed")
def test_float32_scales_make_float32_experts(tmp_path):
    """What is left between the two models is transformers' own: products with experts in float32."""
    model = model_of("mixtral")
    dense = copy.deepcopy(model)
    quantize_(model, SchemeConfig(scheme="int4_g32"), linear_and_experts)
    save_pretrained(model, tmp_path, layout=COMPRESSED)
    read = plain(tmp_path, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    for name, value in model.state_dict().items():
        if isinstance(value, QuantizedTensor):
            path, _, leaf = name.rpartition(".")
            kind = torch.float32 if value.dim() == 3 else torch.bfloat16
            parameter = torch.nn.Parameter(value.dequantize(kind))
            assert torch.equal(parameter, read.get_parameter(name))
            setattr(dense.get_submodule(path), leaf, parameter)
    assert torch.equal(logits(read), logits(dense))


@pytest.mark.parametrize("name", [*MATRICES, "gpt_oss", "granitemoe"])
def test_dense_experts_beside_quantized_layers(tmp_path, name):
    """Without a filter experts stay dense; transformers reads them under the names of its modules."""
    model = made(name, "int4_g32", None)
    assert not any(isinstance(p, QuantizedTensor) and p.dim() == 3 for p in model.parameters())
    save_pretrained(model, tmp_path, layout=COMPRESSED)
    assert torch.equal(logits(plain(tmp_path)), logits(model))
    same_state(load_pretrained(tmp_path), model)


def test_experts_alone(tmp_path):
    model = made("qwen3_moe", "int4_g32", lambda module, path: path.endswith("experts"))
    save_pretrained(model, tmp_path, layout=COMPRESSED)
    assert torch.equal(logits(plain(tmp_path)), logits(model))
    same_state(load_pretrained(tmp_path), model)


def test_experts_in_another_scheme_than_attention(tmp_path):
    model = model_of("mixtral")
    schemes = {
        r"re:.*self_attn.*": SchemeConfig(scheme="int8_g32"),
        r"re:.*experts": SchemeConfig(scheme="int4_g32"),
    }
    quantize_(model, FqnToConfig(schemes).for_layout(COMPRESSED))
    save_pretrained(model, tmp_path, layout=COMPRESSED)
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    assert any("experts" in target for group in groups.values() for target in group["targets"])
    assert torch.equal(logits(plain(tmp_path)), logits(model))


@pytest.mark.parametrize("experts", ["int4_g32", None])
def test_experts_beside_attention_with_zero_points(tmp_path, experts):
    """transformers dequantizes experts by their own group of config_groups, and reads dense ones as they are."""
    model = model_of("mixtral")
    schemes = {r"re:.*self_attn.*": SchemeConfig(scheme="int4_g32_asymmetric_bf16", kernel="dequantize")}
    if experts:
        schemes[r"re:.*experts"] = SchemeConfig(scheme=experts).for_layout(COMPRESSED)
    quantize_(model, FqnToConfig(schemes))
    saved = save_pretrained(model, tmp_path)
    assert (saved.layout, any("several schemes" in line for line in saved.limits)) == (COMPRESSED, False)
    assert torch.equal(logits(plain(tmp_path)), logits(model))
    same_state(load_pretrained(tmp_path), model)


def test_experts_with_zero_points_are_refused(tmp_path):
    model = model_of("mixtral")
    quantize_(model, SchemeConfig(scheme="int4_g32_asymmetric"), linear_and_experts)
    with pytest.raises(
        ValueError, match=r"experts\.gate_up_proj: transformers does not load.*for_layout.*layout=.ao_lab"
    ):
        save_pretrained(model, tmp_path / "out", layout=COMPRESSED)
    assert not (tmp_path / "out").exists()


def test_names_are_those_of_published_checkpoints(tmp_path):
    """vLLM knows no others; what stays dense is named for it and for transformers."""
    save_pretrained(made("mixtral", "int4_g32"), tmp_path, layout=COMPRESSED)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    block = "model.layers.0.block_sparse_moe"
    for projection in ("w1", "w2", "w3"):
        assert {
            f"{block}.experts.3.{projection}.weight_{part}" for part in ("packed", "scale", "shape")
        } <= names
    assert f"{block}.gate.weight" in names
    assert not any("gate_up_proj" in name for name in names)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"{block}.gate", "model.layers.0.mlp.gate"} <= set(ignored)


@pytest.mark.parametrize("name", BATCHES)
def test_what_plain_transformers_cannot_read_is_not_written(tmp_path, name):
    model = made(name, "int4_g32")
    with pytest.raises(ValueError, match="compressed-tensors cannot store this model"):
        save_pretrained(model, tmp_path / "plain", layout=COMPRESSED)
    saved = save_pretrained(model, tmp_path / "own", layout="ao_lab")
    assert saved.layout == "ao_lab"
    same_state(load_pretrained(tmp_path / "own"), model)
    assert torch.equal(logits(plain(tmp_path / "own")), logits(model))


def test_dense_weights_of_patched_experts_would_be_lost(tmp_path):
    """Llama 4 with attention alone: transformers would load random experts."""
    with pytest.raises(ValueError, match="transformers replaces Llama4TextExperts"):
        save_pretrained(made("llama4", "int4_g32", None), tmp_path, layout=COMPRESSED)


@pytest.mark.parametrize(
    ("scheme", "activation", "message"),
    [
        ("nvfp4", None, "does not load experts in nvfp4"),
        ("mxfp8_e4m3", None, "does not load experts in mxfp8_e4m3"),
        ("fp8_128x128", None, "does not load experts in fp8_128x128"),
        ("fp8_tensorwise", None, "does not load experts in fp8_tensorwise"),
        ("int4_g32_asymmetric", None, "does not load experts in int4_g32_asymmetric"),
        ("fp8_rowwise", "fp8_rowwise", "quantizes none of their inputs"),
    ],
)
def test_schemes_that_transformers_misreads(tmp_path, scheme, activation, message):
    model = model_of("qwen3_moe")
    quantize_(model, SchemeConfig(scheme=scheme, activation_scheme=activation), linear_and_experts)
    with pytest.raises(ValueError, match=message):
        save_pretrained(model, tmp_path, layout=COMPRESSED)


def test_the_rule_of_what_is_read_is_of_fields():
    assert read_while_loading(Recipe(weight=named("int4_g48")))
    assert read_while_loading(Recipe(weight=named("int3_rowwise_bf16")))
    assert not read_while_loading(Recipe(weight=named("int8_tensorwise")))


def test_experts_in_two_schemes(tmp_path):
    model = model_of("mixtral")
    schemes = {
        "re:.*gate_up_proj": SchemeConfig(scheme="int8_g32"),
        "re:.*down_proj": SchemeConfig(scheme="int4_g32"),
    }
    quantize_(model, FqnToConfig(schemes).for_layout(COMPRESSED))
    with pytest.raises(ValueError, match="several schemes"):
        save_pretrained(model, tmp_path, layout=COMPRESSED)


def bytes_of_experts(folder):
    """Bytes of a folder's tensors that belong to experts."""
    found = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = [file.get_tensor(name) for name in file.keys() if ".experts." in name]  # noqa: SIM118
        found += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return found


@pytest.mark.filterwarnings("ignore:save_pretrained wrote layout")
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"])
def test_the_command_shrinks_experts(tmp_path, name, capsys):
    """int4 in groups of 128 with 16-bit scales takes 4.125 bits a weight, with float32 scales 4.25, of 16."""
    source, target = tmp_path / "dense", tmp_path / "int4"
    saved(name, source)
    layout = "ao_lab" if name in BATCHES else COMPRESSED
    assert main(["quantize", str(source), str(target), "--config", "int4_g128", "--layout", layout]) == 0
    before, after = bytes_of_experts(source), bytes_of_experts(target)
    # Biases of gpt-oss stay; shapes of matrices are 16 bytes each.
    assert 3.5 < before / after < 3.9
    assert "experts.gate_up_proj" in capsys.readouterr().out
    model = load_pretrained(target)
    assert sum(isinstance(p, QuantizedTensor) and p.dim() == 3 for p in model.parameters()) == 2
    assert torch.equal(logits(load_pretrained(target)), logits(model))


def test_the_command_leaves_routers_and_says_so(tmp_path, capsys):
    source = tmp_path / "dense"
    saved("qwen2_moe", source)
    arguments = [
        "quantize",
        str(source),
        str(tmp_path / "out"),
        "--config",
        "nf4",
        "--layout",
        "ao_lab",
        "--json",
    ]
    assert main(arguments) == 0
    rows = {row["layer"]: row for row in json.loads(capsys.readouterr().out)["layers"]}
    gate = rows["model.layers.0.mlp.shared_expert_gate.weight"]
    assert gate["scheme"] == ""
    assert "routes tokens" in gate["reason"]
    assert rows["model.layers.0.mlp.experts.down_proj"]["scheme"] == "nf4"


def test_the_command_skips_experts(tmp_path, capsys):
    source = tmp_path / "dense"
    saved("mixtral", source)
    arguments = [
        "quantize",
        str(source),
        str(tmp_path / "out"),
        "--config",
        "nf4",
        "--layout",
        "ao_lab",
        "--json",
    ]
    assert main([*arguments, "--skip", "experts"]) == 0
    rows = {row["layer"]: row for row in json.loads(capsys.readouterr().out)["layers"]}
    assert rows["model.layers.0.mlp.experts.down_proj"]["reason"] == "--skip experts"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_sizes_say_what_is_stored(name):
    model, config = model_of(name), SchemeConfig(scheme="int4_g32")
    planned = ao_lab.model_size(model, config, linear_and_experts)
    quantize_(model, config, linear_and_experts)
    assert planned.bytes == ao_lab.model_size(model).bytes


def stacked(scheme, shapes, numbers):
    """Matrices of random numbers, quantized each, put together; and the same of their values."""
    matrices = [quantized(torch.randn(shape), scheme) for shape in shapes]
    return gathered(lambda index: matrices[index], numbers), [m.dequantize() for m in matrices]


SCHEMES = ["int4_g32", "int8_rowwise_asymmetric", "mxfp6_e2m3", "fp8_128x128", "int3_g64", "int4_g32_bf16"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_with_two_projections(scheme):
    """transformers stacks each projection, then concatenates: rows of gate before rows of up, expert by expert."""
    shapes = [(128, 256)] * 6
    columns = row_numbers(shapes)
    numbers = torch.cat([torch.stack(columns[:3]), torch.stack(columns[3:])], 1)
    made, values = stacked(scheme, shapes, numbers)
    expected = torch.cat([torch.stack(values[:3]), torch.stack(values[3:])], 1)
    assert made.shape == (3, 256, 256)
    assert torch.equal(made.dequantize(), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pieces_of_a_fused_matrix(scheme):
    whole = row_numbers([(384, 256)])[0]
    for part, chunk in enumerate(whole.chunk(3)):
        torch.manual_seed(0)
        made, values = stacked(scheme, [(384, 256)], chunk)
        assert torch.equal(made.dequantize(), values[0].chunk(3)[part])


def test_rows_in_any_order():
    """Interleaved rows too, where every row has scales of its own."""
    shapes = [(8, 64), (8, 64)]
    numbers = torch.cat(row_numbers(shapes)).reshape(2, 8, 1).transpose(0, 1).reshape(16, 1)
    made, values = stacked("int4_g32", shapes, numbers)
    assert torch.equal(made.dequantize(), torch.stack(values, 1).reshape(16, 64))


def test_a_scale_each_becomes_a_block_each():
    shapes = [(32, 64)] * 4
    numbers = torch.stack(row_numbers(shapes))
    made, values = stacked("fp8_tensorwise", shapes, numbers)
    assert made.scheme.scale.block == (32, 64)
    assert torch.equal(made.dequantize(), torch.stack(values))


@pytest.mark.parametrize(
    ("scheme", "shapes", "message"),
    [
        ("fp8_128x128", [(96, 128), (96, 128)], "blocks of 128 rows do not end where its parts do"),
        ("nvfp4", [(32, 64), (32, 64)], "have an outer each"),
        ("nf4", [(32, 64), (32, 64)], "blocks of flat:64"),
    ],
)
def test_what_would_have_to_be_rounded_again_is_refused(scheme, shapes, message):
    with pytest.raises(ValueError, match=message):
        stacked(scheme, shapes, torch.cat(row_numbers(shapes)))


def test_schemes_that_differ_and_rows_that_become_columns_are_refused():
    matrices = [quantized(torch.randn(32, 64), scheme) for scheme in ("int4_g32", "int8_rowwise")]
    with pytest.raises(ValueError, match="quantized in int4_g32 and in int8_rowwise"):
        gathered(lambda index: matrices[index], torch.cat(row_numbers([(32, 64)] * 2)))
    with pytest.raises(ValueError, match="its rows become columns"):
        gathered(lambda index: matrices[index], row_numbers([(32, 64)])[0].t())


def test_numbers_of_rows_are_all_different():
    columns = row_numbers([(3, 5), (2, 3, 4), (1, 1)])
    assert [tuple(c.shape) for c in columns] == [(3, 1), (2, 3, 1), (1, 1)]
    assert torch.cat([c.reshape(-1) for c in columns]).unique().numel() == 10
    assert int(columns[1][0, 0, 0]) == STEP


@pytest.mark.parametrize("name", MATRICES)
def test_dense_experts_of_a_quantized_folder(tmp_path, name):
    """Attention in FP8, experts as dense matrices: transformers' own operations put these together."""
    model = model_of(name)
    tensors = dict(revert_weight_conversion(model, model.state_dict()))
    key = next(key for key in tensors if key.endswith("o_proj.weight"))
    tensors[key], tensors[f"{key}_scale_inv"] = tensors[key].to(torch.float8_e4m3fn), torch.ones(1, 1)
    write(tmp_path, model, tensors, FP8)
    made = load_pretrained(tmp_path).state_dict()
    for path, dense in model.state_dict().items():
        if not isinstance(made[path], QuantizedTensor):
            assert torch.equal(made[path], dense), path


@pytest.mark.parametrize("name", sorted(MODELS))
def test_our_own_layout_is_named_as_modules_are(tmp_path, name):
    model = model_of(name)
    from ao_lab import linear_and_experts, quantize_

    quantize_(model, SchemeConfig(scheme="nf4"), linear_and_experts)
    save_pretrained(model, tmp_path, layout="ao_lab")
    with torch.no_grad():
        assert torch.equal(load_pretrained(tmp_path)(TOKENS).logits, model(TOKENS).logits)


def test_an_expert_that_is_dense_among_quantized_ones_is_named(tmp_path):
    deepseek(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"some of the tensors it is made from are quantized, and .*experts\.2\.down_proj"
    ):
        load_pretrained(tmp_path)


def test_blocks_that_cross_projections_are_refused_before_anything_changes(tmp_path):
    """Experts of 64 rows in blocks of 128: gate and up would share a scale."""
    deepseek(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [
        name
        for name in tensors
        if ".experts." in name and name.endswith(("gate_proj.weight", "up_proj.weight"))
    ]:
        tensors[name] = tensors[name][:64].contiguous()
    for name in [name for name in tensors if ".experts." in name and name.endswith("down_proj.weight")]:
        tensors[name] = tensors[name][:, :64].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**fields, "moe_intermediate_size": 64, "n_shared_experts": 2})
    )
    with pytest.raises(ValueError, match=r"experts.gate_up_proj.*blocks of 128 rows do not end"):
        load_pretrained(tmp_path)


def test_models_that_are_not_transformers_are_left_alone():
    assert mapping_of(torch.nn.Linear(2, 2)) is None


def beside_in(folder, shapes):
    """More tensors in a folder's file, and their values."""
    path = folder / "model.safetensors"
    torch.manual_seed(1)
    more = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file({**load_file(path), **more}, path, metadata={"format": "pt"})
    return more


#: Models whose files hold a head that predicts later tokens, which transformers does not load: class, fields, names.
PREDICTING = {
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {"layer_types": ["full_attention"], "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        {"mtp.fc.weight": (64, 128), "mtp.layers.0.mlp.experts.0.gate_proj.weight": (32, 64), "mtp.norm.weight": (64,)},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 32,
            "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 0,
        },
        {
            "model.layers.61.eh_proj.weight": (64, 128), "model.layers.61.self_attn.q_a_proj.weight": (32, 64),
            "model.layers.61.mlp.experts.0.gate_proj.weight": (32, 64),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["auto", pytest.param("ao_lab", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", PREDICTING)
def test_the_command_keeps_heads_that_transformers_does_not_load(tmp_path, capsys, name, layout):
    """In high precision, told, and neither plain transformers nor ao_lab stumbles over them."""
    kind, fields, shapes = PREDICTING[name]
    kind = getattr(transformers, kind)
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    }  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    source, target = tmp_path / "in", tmp_path / "out"
    kind(kind.config_class(**sizes, **fields)).to(torch.bfloat16).save_pretrained(source)
    more = beside_in(source, {**shapes, "model.nobody.weight": (3, 3)})
    given = ["--config", "Int8WeightOnlyConfig", "--layout", layout, "--json"]
    assert main(["quantize", str(source), str(target), *given]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"] == ("compressed-tensors" if layout == "auto" else layout)
    assert [line.partition(" tensors")[0] for line in told["tensors"]] == [
        "kept in high precision: 3",
        "left out: 1",
    ]
    card = (target / "README.md").read_text()
    assert all(line in card for line in told["tensors"])
    found = look_at(target)
    kept = found.read(shapes)
    assert all(torch.equal(kept[one], more[one]) for one in shapes)
    assert "model.nobody.weight" not in found.specs
    ignored = json.loads((target / "config.json").read_text())["quantization_config"].get("ignore", [])
    matrices = {one.removesuffix(".weight") for one, shape in shapes.items() if len(shape) > 1}
    assert matrices <= set(ignored) or layout == "ao_lab"
    with pytest.warns(UserWarning, match="3 tensors of .* were left out"):
        ours = load_pretrained(target)
    theirs, loading = kind.from_pretrained(target, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
