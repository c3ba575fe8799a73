"""Methods of transformers' models: `save_pretrained` of quantized models reads back bit for bit, or is an error; sizes."""

import copy
import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ao_lab
from ao_lab import (
    HfConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    LoRA,
    QATConfig,
    QuantizedTensor,
    SparseTrainingConfig,
    load_pretrained,
    lora_state_dict,
    quantize_,
    quantize_pretrained,
    quantized,
    save_pretrained,
    sparsify_,
)
from ao_lab.checkpoint.configuration import REFUSAL
from ao_lab.checkpoint.transformers.methods import bytes_of, joined, warn_of_frozen
from ao_lab.transforms.report import names_in
from tests.support.loops import logits, with_tables
from tests.support.models.hf_models import dense_model, everything
from tests.support.quantized_weights import KINDS as WEIGHT_KINDS
from tests.support.quantized_weights import same, weight

transformers = pytest.importorskip("transformers")
from tests.support.distributed.ranks import check_on_ranks  # noqa: E402
from tests.support.models.hf_models import KINDS, assert_same_weights, outputs, quantized_model  # noqa: E402
from tests.support.runs import forks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
transformers.utils.logging.disable_progress_bar()
INT8 = Int8WeightOnlyConfig()
INPUTS = {"input_ids": torch.arange(6)[None]}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_quantize(kind, tmp_path):
    """Read by transformers, by ao_lab, saved again in shards and read again."""
    model, _ = quantized_model(kind, "int4_g32_asymmetric")
    model.save_pretrained(tmp_path)
    read = getattr(transformers, kind).from_pretrained(tmp_path)
    assert_same_weights(model, read)
    assert_same_weights(read, load_pretrained(tmp_path))
    read.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_weights(model, getattr(transformers, kind).from_pretrained(tmp_path))
    assert (tmp_path / "generation_config.json").is_file() == model.can_generate()
    assert not list(tmp_path.glob("model*"))


def test_models_of_every_origin(tmp_path):
    """quantize_, quantize_pretrained, HfConfig, copies and models that were loaded: the same folder, and ordinary models."""
    dense_model("LlamaForCausalLM")[0].save_pretrained(tmp_path / "dense")
    auto = transformers.AutoModelForCausalLM
    first = auto.from_pretrained(tmp_path / "dense")
    quantize_(first, INT8)
    second = quantize_pretrained(tmp_path / "dense", INT8)
    third = auto.from_pretrained(tmp_path / "dense", quantization_config=HfConfig(INT8))
    assert [getattr(m, "is_quantized", False) for m in (first, second, third)] == [False, False, True]
    for number, model in enumerate((first, second, third, copy.deepcopy(third), load_pretrained)):
        folder = tmp_path / str(number)
        model = load_pretrained(tmp_path / "0") if model is load_pretrained else model
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        assert config["quantization_config"] == {
            "quant_method": "ao_lab",
            "version": 1,
            "weights": "ao_lab.safetensors",
        }
        assert_same_weights(first, auto.from_pretrained(folder))


def test_dense_models_are_saved_as_ever(tmp_path):
    model, _ = dense_model("LlamaForCausalLM")
    model.save_pretrained(tmp_path, variant="other")
    assert (tmp_path / "model.other.safetensors").is_file()
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path, variant="other")
    assert torch.equal(outputs(model, INPUTS), outputs(read, INPUTS))
    quantized, _ = quantized_model("LlamaForCausalLM", "nf4")
    quantized.save_pretrained(tmp_path / "quantized")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "quantized")
    read.dequantize()
    read.save_pretrained(tmp_path / "dense")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "dense")
    assert not any(isinstance(p, QuantizedTensor) for p in again.parameters())
    assert torch.equal(outputs(read, INPUTS), outputs(again, INPUTS))
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


@pytest.mark.parametrize("lora", [None, LoRA(rank=4, rounds="sum")])
def test_models_in_training_are_saved_dense_with_a_warning(lora, tmp_path):
    """Checkpoints of Trainer: the training weights; the converted model is saved quantized and without a warning."""
    model, _ = dense_model("LlamaForCausalLM")
    quantize_(model, QATConfig(INT8, step="prepare", lora=lora))
    told = r"a training checkpoint: .*model\.layers\.0.* saved dense; .*step='convert'"
    with pytest.warns(UserWarning, match=told) as warned:
        model.save_pretrained(tmp_path / "checkpoint")
    assert len([one for one in warned if one.category is UserWarning]) == 1
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()
    quantize_(model, QATConfig(INT8, step="convert"))
    model.save_pretrained(tmp_path / "converted")
    assert_same_weights(model, transformers.LlamaForCausalLM.from_pretrained(tmp_path / "converted"))


@pytest.mark.parametrize(
    "given", [{"variant": "a"}, {"state_dict": {}}, {"push_to_hub": True}, {"distributed_checkpoint": True}]
)
def test_other_formats_are_refused(given, tmp_path):
    """Before anything is written."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    with pytest.raises(
        ValueError, match=rf"{next(iter(given))}= is not supported for .* ao_lab\.save_pretrained"
    ):
        model.save_pretrained(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
    model.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not (tmp_path / "out").exists()


def test_push_to_hub_saves_the_same_way(tmp_path, monkeypatch):
    """`model.push_to_hub(name)` saves into a folder of its own and uploads what is there."""
    import transformers.utils.hub as hub

    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    uploaded = []

    def upload(self, folder, *args, **kwargs):
        uploaded.append(load_pretrained(folder))

    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    monkeypatch.setattr(
        hub, "create_and_tag_model_card", lambda *a, **k: type("Card", (), {"save": lambda s, p: None})()
    )
    api = type("Api", (), {"create_repo": lambda self, name, **k: type("Url", (), {"repo_id": name})()})
    monkeypatch.setattr(hub, "hf_api", api)
    model.push_to_hub("owner/little")
    assert_same_weights(model, uploaded[0])


def test_sizes():
    assert [bytes_of(x) for x in (7, "7", "5GB", "1.5kb", "2MiB")] == [7, 7, 5 * 10**9, 1500, 2**21]
    with pytest.raises(ValueError, match="such as '5GB'"):
        bytes_of("a lot")


@pytest.mark.parametrize("how", ["HfConfig", "quantize_"])
def test_trainer(how, tmp_path):
    """Quantized weights are frozen, what is dense trains, which is said; and the checkpoint is a folder that reads back."""
    pytest.importorskip("accelerate", reason="Trainer needs it")
    dense_model("LlamaForCausalLM")[0].save_pretrained(tmp_path / "dense")
    given = {"quantization_config": HfConfig(INT8)} if how == "HfConfig" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **given)
    if not given:
        quantize_(model, INT8)
    codes = model.model.layers[0].mlp.up_proj.weight.codes.clone()
    table = model.model.embed_tokens.weight.detach().clone()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    told = r"weights of the model are quantized and frozen.*only \d+ unquantized parameters train \(model\.embed_tokens.*peft"
    with pytest.warns(UserWarning, match=told):
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    assert not torch.equal(table, model.model.embed_tokens.weight)
    assert torch.equal(codes, model.model.layers[0].mlp.up_proj.weight.codes)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-2")
    assert_same_weights(model, read)
    assert read.generate(INPUTS["input_ids"], max_new_tokens=2).shape == (1, 8)


def test_the_models_own_state(tmp_path):
    """`save_pretrained(..., state_dict=accelerator.get_state_dict(model))` is what training scripts write."""
    model, _ = quantized_model("LlamaForCausalLM", "int4_g32")
    model.save_pretrained(tmp_path, state_dict=model.state_dict(), is_main_process=True)
    assert_same_weights(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    copied = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"state_dict= is not supported for .* unless it is model.state_dict\(\)"
    ):
        model.save_pretrained(tmp_path, state_dict=copied)


# `save_pretrained` of transformers' models in training: shared state once, adapters, and what a later prepare says.


TRAINING_INT8 = IntxWeightOnlyConfig("int8")


def tied(**options):
    model, _ = dense_model("LlamaForCausalLM", tie_word_embeddings=True)
    quantize_(model, QATConfig(TRAINING_INT8, **options), everything)
    return model


@pytest.mark.parametrize("options", [{"learn_scales": True}, {"start_step": 1}])
def test_tied_layers_write_their_state_once(options, tmp_path):
    """As the tied weight is; loaded into a model that is prepared in the same way it is what it was."""
    model = tied(**options)
    for name, value in model.state_dict().items():
        if name.endswith(("qat_scale", "qat_step")):
            value.copy_(2 * value + 1)
    with pytest.warns(
        UserWarning, match=r"from_pretrained leaves qat_(scale|step) out: prepare .* load model.safetensors"
    ):
        model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        state = [name for name in file.keys() if "qat_" in name]  # noqa: SIM118
    assert [name for name in state if name.startswith("lm_head")] == []
    assert "model.embed_tokens.qat_scale" in state or "model.embed_tokens.qat_step" in state
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"tensors of an earlier training .*embed_tokens.* starts them anew.*load_state"
    ):
        quantize_(read, QATConfig(TRAINING_INT8, **options), everything)
    read.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    for name, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name


def test_sparse_layers_say_what_is_left_out(tmp_path):
    model, _ = dense_model("LlamaForCausalLM")
    config = SparseTrainingConfig(masks="recomputed", every=100)
    sparsify_(model, config)
    with pytest.warns(
        UserWarning, match="train sparse, .* from_pretrained leaves sparse_mask, sparse_step out"
    ):
        model.save_pretrained(tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="tensors of an earlier training .* sparsify_ starts them anew"):
        sparsify_(read, config)
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_(other, SparseTrainingConfig())  # its masks are found from what was loaded


def test_adapters_and_the_weights_beside_them(tmp_path):
    """The folder has both; plain readers get the quantized model, prepared ones the adapters too."""
    model, _ = dense_model("LlamaForCausalLM")
    quantize_(model, QATConfig(TRAINING_INT8, lora=LoRA(rank=2, dtype=torch.float32)))
    for part in lora_state_dict(model).values():
        part.add_(0.01)
    kind = type(model.lm_head)
    with pytest.warns(
        UserWarning, match=r"adapters in training.*from_pretrained leaves them out.*save_adapter"
    ):
        model.save_pretrained(tmp_path)
    assert type(model.lm_head) is kind
    assert {"lm_head.lora_a", "lm_head.weight.codes"} <= set(names_in(tmp_path / "ao_lab.safetensors"))
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(base.lm_head.weight.codes, model.lm_head.weight.codes)
    with pytest.raises(ValueError, match=r"lm_head\.lora_a.*which the model lacks"):
        ao_lab.load_pretrained(tmp_path)


def test_adapters_are_what_trains():
    """`Trainer` warns of a quantized model that nothing was added to, and of none with adapters."""
    model, _ = dense_model("LlamaForCausalLM")
    quantize_(model, TRAINING_INT8)
    with pytest.warns(UserWarning, match="quantized and frozen, and there are no adapters"):
        warn_of_frozen(model)
    quantize_(model, QATConfig(TRAINING_INT8, lora=LoRA(rank=2)))
    warn_of_frozen(model)


def test_headers_that_are_none_have_no_names(tmp_path):
    for content in (b"", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"{]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert list(names_in(tmp_path / "model.safetensors")) == []


# Models that transformers shards while it reads them: the weights of one process, from our folders and dense ones.


@pytest.mark.parametrize("when", ["day", pytest.param("night", marks=pytest.mark.nightly)])
def test_two_ranks(when, tmp_path):
    """tp_plan by day; experts over ranks and FSDP2, all kinds and schemes, by night. NF4's columns are refused by name. Caches
    whose heads are split.
    """
    check_on_ranks("hf.run", tmp_path, when)


# Sizes and resized tables of transformers' models with quantized weights; tests/ao_lab/tensor/test_loops.py has all kinds.


@pytest.mark.parametrize("scheme", WEIGHT_KINDS)
def test_rows_that_stay(scheme):
    """Their codes, where scales belong to rows; else the whole is quantized anew."""
    t = quantized(weight(64, 128), scheme)
    more, fewer = torch.cat([t.dequantize(), weight(8, 128, seed=1)]), t.dequantize()[:32]
    for dense in (more, fewer):
        made = joined(t, dense)
        rows = min(64, len(dense))
        assert made.shape == dense.shape
        assert made.recipe == t.recipe
        if scheme in ("fp8_tensorwise", "fp8_128x128", "nvfp4", "nf4"):
            assert torch.equal(made, quantized(dense, scheme))
        else:
            assert same(made.dequantize()[:rows], t.dequantize()[:rows])
            assert same(
                made.dequantize()[rows:],
                quantized(dense[rows:], scheme).dequantize() if rows < len(dense) else fewer[:0],
            )


def test_resized_models_are_saved_and_read(tmp_path):
    made = with_tables("int8 weight-only")
    before = made.lm_head.weight.detach()
    made.resize_token_embeddings(80)
    assert (
        made.config.vocab_size == made.lm_head.weight.shape[0] == made.model.embed_tokens.num_embeddings == 80
    )
    assert torch.equal(made.lm_head.weight[:64], before)
    assert not made.lm_head.weight.requires_grad
    made.save_pretrained(tmp_path)
    again = type(made).from_pretrained(tmp_path)
    assert isinstance(again.lm_head.weight, QuantizedTensor)
    assert torch.equal(logits(again), logits(made))
    weight = made.lm_head.weight
    made.resize_token_embeddings(80)
    assert made.lm_head.weight is weight


def test_tied_tables_stay_one():
    made = with_tables("int8 weight-only")
    made.config.tie_word_embeddings = True
    made.tie_weights()
    made.resize_token_embeddings(72, mean_resizing=False)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert made.lm_head.weight.shape == (72, 64)


def tied_llama():
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("storage", ["dense", "compressed"])
def test_tables_that_pruning_parts_are_not_tied_again(storage):
    made = tied_llama().bfloat16()
    ao_lab.sparsify_(made, ao_lab.SparsityConfig(storage=storage), lambda module, name: name == "lm_head")
    pruned = made.lm_head.weight
    made.tie_weights()
    assert made.lm_head.weight is pruned
    assert made.config.tie_word_embeddings is False


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens"])
def test_tables_that_quantizing_parts_are_not_tied_again(layer, tmp_path):
    made = tied_llama()
    ao_lab.quantize_(made, ao_lab.Int8WeightOnlyConfig(), lambda module, name: name.endswith("q_proj"))
    assert made.config.tie_word_embeddings is True
    ao_lab.quantize_(made, ao_lab.Int8WeightOnlyConfig(), lambda module, name: name == layer)
    assert made.config.tie_word_embeddings is False
    made.tie_weights()
    made.resize_token_embeddings(72, mean_resizing=False)
    weights = {"lm_head": made.lm_head.weight, "model.embed_tokens": made.model.embed_tokens.weight}
    assert [name for name, one in weights.items() if isinstance(one, QuantizedTensor)] == [layer]
    ao_lab.save_pretrained(made, tmp_path)
    assert torch.equal(logits(ao_lab.load_pretrained(tmp_path)), logits(made))


INT4 = ao_lab.Int4WeightOnlyConfig(group_size=32)
#: The first of each pair leaves a head that has nothing of its rows beside its weight.
PREPARED = {
    "QAT": lambda made, layers: ao_lab.quantize_(made, ao_lab.QATConfig(INT4), layers),
    "low precision": lambda made, layers: ao_lab.convert_for_training_(made, "rowwise", layers),
    "learned scales": lambda made, layers: ao_lab.quantize_(
        made, ao_lab.QATConfig(INT4, learn_scales=True), layers
    ),
    "adapters": lambda made, layers: ao_lab.quantize_(
        made, ao_lab.QATConfig(INT4, lora=ao_lab.LoRA(rank=2)), layers
    ),
    "masks": lambda made, layers: ao_lab.sparsify_(made, ao_lab.SparseTrainingConfig(), layers),
}


@pytest.mark.parametrize("kind", PREPARED)
def test_heads_in_training_stay_what_they_are(kind):
    """transformers makes a plain layer; tensors beside the weight would keep their rows, so that nothing runs any more."""
    made = tied_llama()
    made.config.tie_word_embeddings = False
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
    PREPARED[kind](made, lambda module, name: name == "lm_head")
    head, before = made.lm_head, logits(made)
    if kind in ("QAT", "low precision"):
        made.resize_token_embeddings(80)
        assert made.lm_head is head
        assert (head.out_features, len(head.weight), made.config.vocab_size) == (80, 80, 80)
        assert torch.equal(logits(made)[..., :64], before)
        logits(made)
    else:
        with pytest.raises(ValueError, match=r"lm_head has \w+.* beside its weight"):
            made.resize_token_embeddings(80)
        assert made.model.embed_tokens.weight.shape == head.weight.shape == (64, 64)
        assert torch.equal(logits(made), before)
    made.resize_token_embeddings(len(head.weight))


def test_sizes_of_models_that_were_read_quantized(tmp_path):
    made = with_tables("int8 weight-only")
    made.save_pretrained(tmp_path)
    again = type(made).from_pretrained(tmp_path)
    stored = sum(t.nbytes for t in [*again.parameters(), *again.buffers()])
    assert again.get_memory_footprint() == stored
    assert again.get_memory_footprint(return_buffers=False) == sum(p.nbytes for p in again.parameters())
    assert again.hf_quantizer.param_element_size(again, "lm_head.weight", again.lm_head.weight) < 1.1
    assert ao_lab.QuantizedTensor in {type(p) for p in again.parameters()}


# Without `import ao_lab` transformers refuses folders in our layout, of every architecture, and says what to do.


#: In a process that has not imported ao_lab and cannot, wherever it is installed: every way to a model, and what came of it.
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.modules["ao_lab"] = None
import transformers
told = {}
def tried(name, load, *args, **kwargs):
    try:
        told[name] = type(load(*args, **kwargs)).__name__
    except Exception as error:
        told[name] = [type(error).__name__, str(error)]
for kind, folder in json.loads(sys.argv[1]).items():
    tried(kind, getattr(transformers, kind).from_pretrained, folder)
    tried(kind + " trunk", transformers.AutoModel.from_pretrained, folder)
folder = json.loads(sys.argv[1])["LlamaForCausalLM"]
auto = transformers.AutoModelForCausalLM
tried("pipeline", transformers.pipeline, "text-generation", model=folder)
tried("safetensors", auto.from_pretrained, folder, use_safetensors=True)
tried("pickles", auto.from_pretrained, folder, use_safetensors=False)
tried("variant", auto.from_pretrained, folder, variant="fp16")
tried("configuration of one's own", auto.from_pretrained, folder, config=transformers.LlamaConfig())
tried("another head", transformers.AutoModelForSequenceClassification.from_pretrained, folder)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What transformers says without ao_lab, by what was tried."""
    root = tmp_path_factory.mktemp("folders")
    folders = {}
    for kind in KINDS:
        folders[kind] = str(root / kind)
        limit = 50_000 if kind == "GPT2LMHeadModel" else 10**9
        save_pretrained(
            quantized_model(kind, "nf4")[0], folders[kind], layout="ao_lab", max_shard_bytes=limit
        )
    done = forks.python("-c", SCRIPT, json.dumps(folders), server="transformers", cwd=root)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-200:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 2 * len(KINDS) + 6
    return found


def test_nothing_is_loaded(told):
    assert [name for name, what in told.items() if not isinstance(what, list)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_says_what_to_do(kind, told):
    for name in (kind, f"{kind} trunk"):
        assert told[name][0] in ("ValueError", "OSError")
        assert REFUSAL in told[name][1]


def test_other_ways(told):
    for name in ("pipeline", "safetensors", "pickles", "variant", "another head"):
        assert REFUSAL in told[name][1], name
    # There the folder's configuration is not read: the files are missing by their names.
    assert "no file named model.safetensors" in told["configuration of one's own"][1]
