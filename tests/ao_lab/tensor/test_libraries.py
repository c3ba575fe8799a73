"""What PEFT, accelerate and torch's asynchronous checkpoints do with quantized layers; their loops are in test_loops.

PEFT's methods train, merge within a rounding, come apart again, and the merged model is saved.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import ao_lab
from ao_lab import QuantizedTensor, SparseQuantizedTensor
from ao_lab.tensor import libraries
from ao_lab.tensor.libraries import make_dense
from tests.support.loops import IDS, adapted, logits, model, twin, with_tables

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
LAYERS = {"target_modules": ["q_proj", "up_proj"]}
SQUARE = {"target_modules": ["q_proj"]}
#: By name: the configuration's class and its fields.
METHODS = {
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True, **LAYERS}),
    "PiSSA, fast": ("LoraConfig", {"r": 4, "init_lora_weights": "pissa_niter_4", **LAYERS}),
    "OLoRA": ("LoraConfig", {"r": 4, "init_lora_weights": "olora", **LAYERS}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "VeRA": ("VeraConfig", {"r": 4, **SQUARE}),
    "LoHa": ("LoHaConfig", {"r": 4, **LAYERS}),
    "LoKr": ("LoKrConfig", {"r": 4, **LAYERS}),
    "OFT": ("OFTConfig", {"oft_block_size": 32, **LAYERS}),
    "HRA": ("HRAConfig", {"r": 4, **LAYERS}),
    "RoAd": ("RoadConfig", LAYERS),
    "RandLoRA": ("RandLoraConfig", {"r": 8, **SQUARE}),
    "MiSS": ("MissConfig", {"r": 4, **LAYERS}),
    "SHiRA": ("ShiraConfig", {"r": 4, **LAYERS}),
    "DeLoRA": ("DeloraConfig", {"r": 4, **LAYERS}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10, **LAYERS}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 10, **LAYERS}),
    "table": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens"]}),
}
DAY = ("IA3", "MiSS", "OLoRA")


@pytest.mark.parametrize("kind", ["int8 weight-only", "nf4"])
@pytest.mark.parametrize(
    "method", [one if one in DAY else pytest.param(one, marks=pytest.mark.nightly) for one in METHODS]
)
def test_methods(method, kind):
    import peft

    name, fields = METHODS[method]
    torch.manual_seed(0)
    with_adapters = peft.get_peft_model(with_tables(kind), getattr(peft, name)(**fields))
    trained = [p for p in with_adapters.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    with_adapters(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert all(p.grad is not None for p in trained)
    with_adapters.eval()
    close = 0.02 if kind == "int8 weight-only" else 0.3
    before = logits(with_adapters)
    with_adapters.merge_adapter()
    assert (logits(with_adapters) - before).norm() < close * before.norm()
    with_adapters.unmerge_adapter()
    assert (logits(with_adapters) - before).norm() < close * before.norm()
    merged = with_adapters.merge_and_unload(safe_merge=True)
    assert (logits(merged) - before).norm() < close * before.norm()
    assert isinstance(merged.model.layers[0].self_attn.q_proj.weight, QuantizedTensor)


def test_adapters_are_left_in_high_precision():
    """Of a model that has adapters already their weights still train, whatever a filter accepts."""
    with_adapters = adapted(twin(model("int8 weight-only")))
    report = ao_lab.quantize_(
        with_adapters, ao_lab.NF4WeightOnlyConfig(), lambda module, name: "layers" in name
    )
    left = {layer.name: layer.reason for layer in report.left if "lora_" in layer.name}
    trained = {name for name, parameter in with_adapters.named_parameters() if parameter.requires_grad}
    assert {*left} == trained
    assert all("an adapter of peft" in str(reason) for reason in left.values())


def test_what_saving_says_is_true(tmp_path):
    """merge_and_unload() makes a model plain that save_pretrained refuses before; of 2:4 storage unload() does."""
    with_adapters = adapted(model("int8 weight-only"))
    with pytest.raises(ValueError, match=r"Linear of peft; merge_and_unload\(\) merges them"):
        ao_lab.save_pretrained(with_adapters.base_model.model, tmp_path)
    merged = with_adapters.merge_and_unload()
    ao_lab.save_pretrained(merged, tmp_path, layout="ao_lab")
    assert torch.equal(logits(ao_lab.load_pretrained(tmp_path)), logits(merged))
    sparse = model("2:4")
    before, with_adapters = logits(sparse), adapted(sparse)
    with pytest.raises(ValueError, match=r"on 2:4 storage, .* unload\(\) leaves"):
        ao_lab.save_pretrained(with_adapters.base_model.model, tmp_path)
    unloaded = with_adapters.unload()
    ao_lab.save_pretrained(unloaded, tmp_path, layout="ao_lab")
    assert torch.equal(logits(ao_lab.load_pretrained(tmp_path)), before)


def test_models_that_were_read_quantized(tmp_path):
    """By HfConfig, and from a folder of ours: adapters are merged as into a model of `quantize_`."""
    import transformers

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, **size)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    model("int8 weight-only").save_pretrained(tmp_path / "quantized")
    read = transformers.AutoModelForCausalLM.from_pretrained
    asked = ao_lab.HfConfig(ao_lab.Int8WeightOnlyConfig())
    for made in (read(tmp_path / "dense", quantization_config=asked), read(tmp_path / "quantized")):
        with_adapters = adapted(made.eval())
        before = logits(with_adapters)
        merged = with_adapters.merge_and_unload()
        assert isinstance(merged.model.layers[0].mlp.up_proj.weight, QuantizedTensor)
        assert (logits(merged) - before).norm() < 0.02 * before.norm()


def test_copies_that_train(tmp_path):
    """They learn, are written with the adapters, and are there again beside the quantized base."""
    import peft

    with_adapters = adapted(with_tables("int8 weight-only"), modules_to_save=["lm_head"])
    head = with_adapters.base_model.model.lm_head
    assert isinstance(head.original_module.weight, QuantizedTensor)
    copy = head.modules_to_save["default"].weight
    start = copy.detach().clone()
    optimizer = torch.optim.AdamW([p for p in with_adapters.parameters() if p.requires_grad], lr=1e-3)
    with_adapters(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert not torch.equal(copy, start)
    with_adapters.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(with_tables("int8 weight-only"), tmp_path)
    assert torch.equal(logits(again), logits(with_adapters))
    assert type(again.merge_and_unload().lm_head.weight) is nn.Parameter


def test_copies_of_tied_weights_stay_tied():
    net = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 32, bias=False))
    net[1].weight = net[0].weight
    ao_lab.quantize_(net, ao_lab.Int8WeightOnlyConfig(), lambda module, name: True)
    make_dense(net)
    assert type(net[0].weight) is nn.Parameter
    assert net[0].weight is net[1].weight


@pytest.mark.nightly
def test_experts():
    """`target_parameters` adds to weights of three axes."""
    import peft
    import transformers

    from ao_lab.transforms.layers import linear_and_experts

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **size)
    made = transformers.MixtralForCausalLM(config).eval()
    ao_lab.quantize_(made, ao_lab.Int8WeightOnlyConfig(), linear_and_experts)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    fields = {"target_modules": [], "target_parameters": targets, "init_lora_weights": False}
    with_adapters = peft.get_peft_model(made, peft.LoraConfig(r=4, **fields))
    before = logits(with_adapters)
    merged = with_adapters.merge_and_unload()
    assert (logits(merged) - before).norm() < 0.02 * before.norm()
    assert isinstance(merged.model.layers[0].mlp.experts.down_proj, QuantizedTensor)


# accelerate's sizes and hooks.


def test_sizes_of_parts_of_a_model():
    import accelerate

    made = with_tables("int4 weight-only")
    sizes = accelerate.utils.compute_module_sizes(made)
    for name, module in made.named_modules():
        assert sizes[name] == sum(t.nbytes for t in [*module.parameters(), *module.buffers()]), name
    assert (
        accelerate.utils.compute_module_sizes(made, dtype=torch.bfloat16)["lm_head"]
        == made.lm_head.weight.nbytes
    )
    special = accelerate.utils.compute_module_sizes(made, special_dtypes={"lm_head.weight": torch.bfloat16})
    assert special["lm_head"] == 2 * made.lm_head.weight.numel()


def test_tied_weights_that_are_offloaded():
    """Each weight comes back as itself: accelerate looks tied ones up by address."""
    import accelerate

    made = with_tables("int8 weight-only")
    made.config.tie_word_embeddings = True
    made.tie_weights()
    before = logits(made)
    places = dict.fromkeys(["model.embed_tokens", "lm_head", "model.norm", "model.rotary_emb"], "cpu")
    accelerate.dispatch_model(made, {**places, "model.layers.0": "cpu"}, main_device="cpu", force_hooks=True)
    assert torch.equal(logits(made), before)
    accelerate.hooks.remove_hook_from_submodules(made)
    accelerate.cpu_offload(made, execution_device="cpu")
    assert {p.device.type for p in made.parameters()} == {"meta"}
    for _ in range(2):
        assert torch.equal(logits(made), before)


def test_what_fills_shards_from_one_rank():
    """Once, however often it is registered; models without quantized weights go accelerate's way. On ranks: test_loops."""
    from accelerate.utils import fsdp_utils

    first = fsdp_utils.fsdp2_load_full_state_dict
    libraries.register_accelerate()
    assert fsdp_utils.fsdp2_load_full_state_dict is first
    assert first.of_ao_lab
    with pytest.raises(KeyError, match="missing from full state dict"):
        first(SimpleNamespace(is_main_process=True), torch.nn.Linear(2, 2), {})


@pytest.mark.parametrize("place", ["layer", "parent", "disk"])
def test_offloaded_weights_are_refused(place, tmp_path):
    """Placeholders have no values, and hooks would restore dense ones; nothing changes. Watching inputs needs no weights."""
    import accelerate

    def offload(model):
        if place == "disk":
            places = {"0": "cpu", "1": "disk"}
            accelerate.dispatch_model(
                model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
            )
        else:
            classes = ["Sequential"] if place == "parent" else None
            accelerate.cpu_offload(model, torch.device("cpu"), preload_module_classes=classes)

    def refused(model, config):
        kinds, weights = [type(one) for one in model], [one.weight for one in model]
        with pytest.raises(
            ValueError, match=r"[01]\.weight.*offloaded by accelerate.*remove_hook_from_module"
        ):
            ao_lab.quantize_(model, config)
        assert [type(one) for one in model] == kinds
        assert all(one.weight is weight for one, weight in zip(model, weights, strict=True))

    int8 = ao_lab.Int8WeightOnlyConfig()
    lora = ao_lab.QATConfig(int8, step="prepare", lora=ao_lab.LoRA(rank=2))
    prepare, convert = (ao_lab.QATConfig(int8, step=step) for step in ("prepare", "convert"))
    for before, config in ((None, int8), (None, prepare), (None, lora), (prepare, convert), (int8, lora)):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        if before is not None:
            ao_lab.quantize_(model, before)
        offload(model)
        refused(model, config)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    offload(model)
    static = ao_lab.Int8StaticActivationInt8WeightConfig()
    assert len(ao_lab.calibrate(model, static, lambda m: m(torch.ones(2, 64)))) == 2
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    ao_lab.quantize_(model, int8)
    assert {type(one.weight) for one in model} == {ao_lab.QuantizedTensor}


# What `torch.distributed.checkpoint.async_save` copies, before it writes.

STAGED = {
    "int4": lambda: ao_lab.Int4WeightOnlyConfig(group_size=32),
    "tensorwise": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(),
    "two scales": lambda: ao_lab.NVFP4WeightOnlyConfig(),
    "flat": lambda: ao_lab.NF4WeightOnlyConfig(),
    "2:4": lambda: ao_lab.Int8WeightOnlyConfig(sparsity="2:4"),
}


@pytest.mark.parametrize("config", STAGED.values(), ids=STAGED)
def test_staged_weights_are_copies(config):
    """Of both kinds, once where two names hold one, in the memory of the checkpoint before, and without a change of theirs."""
    torch.manual_seed(0)
    model, stager = nn.Sequential(nn.Linear(64, 64)), StateDictStager()
    ao_lab.sparsify_(model, ao_lab.SparsityConfig("2:4"))
    ao_lab.quantize_(model, config())
    weight, wanted = model[0].weight, model[0].weight.dequantize()
    staged = stager.stage({"weight": weight, "tied": weight, "bias": model[0].bias})
    assert type(staged["weight"]) is type(weight.data)
    assert staged["weight"] is staged["tied"]
    with torch.no_grad():
        weight.copy_(torch.zeros(64, 64))
    assert torch.equal(staged["weight"].dequantize(), wanted)
    again = stager.stage({"weight": weight})["weight"]
    assert again.codes.data_ptr() == staged["weight"].codes.data_ptr()
    assert not again.dequantize().any()
    assert isinstance(weight, SparseQuantizedTensor) == (config is STAGED["2:4"])


def test_a_second_registration_changes_nothing():
    changed = StateDictStager._offload_tensor
    libraries.register_async_checkpoints()
    assert StateDictStager._offload_tensor is changed
