"""`sparsify_`: whole models, pruned block by block as one would by hand; tied weights, transposed ones, errors on the way."""

import gc
import io

import pytest
import torch
from torch import nn

import reference
from ao_lab import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    QuantizedTensor,
    SparseQuantizedTensor,
    SparsityConfig,
    explain,
    quantize_,
    sparsify_,
)
from ao_lab.calibration.statistics import Hessian
from ao_lab.sparsity import api
from experiments.models.llama import LanguageModel, ModelSettings, rotary_tables
from tests.support.quantized_weights import same

pytestmark = pytest.mark.usefixtures("few_objects")

TOKENS = [torch.arange(i, i + 24).reshape(2, 12) for i in (0, 50, 100)]
SCORES = {"wanda": reference.wanda_scores, "ria": reference.ria_scores}


def language_model(dtype=torch.float32):
    torch.manual_seed(0)
    return LanguageModel(ModelSettings(layers=2, width=64, feed_forward=128)).to(dtype)


def is_sparse(w, kept=2, group=4):
    return bool(((w != 0).reshape(-1, group).sum(-1) <= kept).all())


def by_hand(model, score):
    """The model pruned by the reference alone: inputs of each layer by hooks, block by block."""
    from experiments.models.llama import frequencies

    positions = torch.arange(TOKENS[0].shape[-1])
    tables = rotary_tables(positions, frequencies(model.config, positions.device))
    hidden = [model.model.embed_tokens(tokens) for tokens in TOKENS]
    for block in model.model.layers:
        sums = {}

        def add(module, args, sums=sums):
            sums[module] = reference.square_sums(args[0], sums.get(module))

        handles = [m.register_forward_pre_hook(add) for m in block.modules() if isinstance(m, nn.Linear)]
        for x in hidden:
            block(x, *tables)
        for handle in handles:
            handle.remove()
        for module, value in sums.items():
            mask = reference.prune(module.weight, scores=SCORES[score](module.weight, value))
            module.weight.copy_(torch.where(torch.as_tensor(mask), module.weight, 0.0))
        hidden = [block(x, *tables) for x in hidden]
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", list(SCORES))
def test_weights_are_those_of_the_reference_by_hand(score, dtype):
    model = language_model(dtype)
    with torch.no_grad():
        expected = by_hand(language_model(dtype), score)
    report = sparsify_(model, SparsityConfig(score=score), calibration=TOKENS)
    assert len(report.changed) == 14
    assert {layer.tokens for layer in report.changed} == {72}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name


def test_later_blocks_see_what_pruned_blocks_make():
    """Not what the dense ones made: the masks of the last block differ from those by dense inputs."""
    model, dense = language_model(), language_model()
    for each in (model, dense):
        each.model.layers[0].mlp.down_proj.weight.data *= 50  # so that the first block matters to the second
    sparsify_(model, SparsityConfig(score="wanda"), calibration=TOKENS)
    only_last = SparsityConfig(score="wanda")
    sparsify_(dense, only_last, lambda m, name: name.startswith("model.layers.1"), calibration=TOKENS)
    ours, theirs = (m.model.layers[1].mlp.up_proj.weight for m in (model, dense))
    assert is_sparse(ours)
    assert is_sparse(theirs)
    assert not torch.equal(ours, theirs)


def test_magnitude_is_prune():
    model, dense = language_model(), language_model()
    parameters = dict(model.named_parameters())
    calls = []
    report = sparsify_(model, SparsityConfig("1:4"), progress=lambda *told: calls.append(told))
    for name, parameter in dense.named_parameters():
        expected = parameter.detach()
        if name in {layer.name for layer in report.changed}:
            expected = expected * torch.as_tensor(reference.prune(parameter, pattern="1:4"))
            assert is_sparse(model.get_parameter(name), kept=1)
        assert torch.equal(model.get_parameter(name), expected)
        assert model.get_parameter(name) is parameters[name]
    assert [call[1:] for call in calls] == [(i, 14) for i in range(1, 15)]
    assert {layer.zeros for layer in report.changed} == {0.75}
    assert "lm_head.weight" in {layer.name for layer in report.left}


def test_sparsegpt_beats_wanda_beats_magnitude():
    """Mean squared error of the outputs of one block, on the inputs that it was pruned by."""
    torch.manual_seed(0)
    scales = torch.logspace(-1, 1, 64)[torch.randperm(64)]
    x = (torch.randn(8, 32, 24) @ torch.randn(24, 64) + 0.1 * torch.randn(8, 32, 64)) * scales
    weights, errors = torch.randn(32, 64), {}
    for score in ("magnitude", "wanda", "sparsegpt"):
        layer = nn.Sequential(nn.Linear(64, 32, bias=False))
        layer[0].weight.data.copy_(weights)
        options = {} if score == "magnitude" else {"calibration": list(x), "blocks": ""}
        sparsify_(layer, SparsityConfig(score=score), **options)
        assert is_sparse(layer[0].weight)
        errors[score] = float((layer(x).detach() - x @ weights.T).square().mean())
    assert errors["sparsegpt"] < 0.8 * errors["wanda"]
    assert errors["wanda"] < errors["magnitude"]


def test_sparsegpt_of_a_model():
    model = language_model()
    report = sparsify_(model, SparsityConfig(score="sparsegpt"), calibration=TOKENS, offload=True)
    assert all(is_sparse(model.get_parameter(layer.name)) for layer in report.changed)
    assert all(layer.loss > 0 and layer.damping == 0.01 and layer.floor == 0 for layer in report.changed)
    assert model(TOKENS[0]).isfinite().all()


def test_transposable_masks_are_sparse_both_ways():
    model = language_model()
    report = sparsify_(model, SparsityConfig(score="wanda", transposable=True), calibration=TOKENS)
    for layer in report.changed:
        weight = model.get_parameter(layer.name)
        assert is_sparse(weight)
        assert is_sparse(weight.T.contiguous())


def test_transposed_weights_are_pruned_along_their_first_axis():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    report = sparsify_(model, SparsityConfig(score="wanda"), calibration=TOKENS)
    assert {layer.kind for layer in report.changed} == {"Conv1D"}
    assert len(report.changed) == 8
    for layer in report.changed:
        weight = model.get_parameter(layer.name)
        assert is_sparse(weight.T.contiguous())
        assert not is_sparse(weight)
    assert model.config.use_cache is True
    assert model.training


def test_llama_of_transformers():
    """Arguments by keywords, masks, a cache that is off while data run."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    batches = [{"input_ids": tokens, "attention_mask": mask} for tokens in TOKENS]
    report = sparsify_(model, SparsityConfig(score="wanda"), calibration=batches)
    assert len(report.changed) == 14
    assert all(is_sparse(model.get_parameter(layer.name)) for layer in report.changed)
    assert "2:4 by wanda" in str(explain(model))
    cached = [{"input_ids": TOKENS[0], "use_cache": True}]
    with pytest.raises(ValueError, match=r"was given (past_key_values|cache), which grows"):
        sparsify_(transformers.LlamaForCausalLM(config), SparsityConfig(score="wanda"), calibration=cached)


class Tied(nn.Module):
    """Two linear layers with one weight, which a table has as well."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.table = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x) * 3)


def test_tied_weights_stay_tied_and_see_all_inputs():
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(5, 8)
    with torch.no_grad():
        sums = reference.square_sums(model.first(x) * 3, reference.square_sums(x))
        scores = reference.wanda_scores(model.first.weight, sums)
        expected = model.first.weight * torch.as_tensor(reference.prune(model.first.weight, scores=scores))
    report = sparsify_(model, SparsityConfig(score="wanda"), calibration=[x], blocks="")
    assert [layer.name for layer in report.changed] == ["first.weight", "second.weight"]
    assert model.first.weight is model.second.weight
    assert torch.equal(model.first.weight, expected)


def test_a_weight_that_a_table_shares_becomes_the_layers_own():
    model = Tied()
    model.table.weight = model.first.weight
    before = model.table.weight.detach().clone()
    report = sparsify_(model, SparsityConfig())
    assert torch.equal(model.table.weight, before)
    assert model.first.weight is model.second.weight
    assert is_sparse(model.first.weight)
    assert model.first.weight.requires_grad
    reason = {layer.name: layer.reason for layer in report.layers}["first.weight"]
    assert reason == "Linear; was shared with table.weight, which stays dense"


def test_inputs_of_zeros_are_said():
    layer = nn.Sequential(nn.Linear(8, 8))
    report = sparsify_(layer, SparsityConfig(score="sparsegpt"), calibration=[torch.zeros(2, 8)], blocks="")
    assert report.layers[0].score == "magnitude"
    assert "not sparsegpt decided but magnitude" in report.layers[0].reason


@pytest.mark.parametrize("score", ["wanda", "ria", "sparsegpt"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e20])
def test_inputs_that_tell_nothing_change_nothing(score, value):
    """Found in the whole model, before the first of its weights is pruned."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].bias.data[3] = value
    with pytest.raises(
        ValueError, match=r"1\.weight is given (NaN or infinity|values up to 1e\+20) by batch 0"
    ):
        sparsify_(model, SparsityConfig(score=score), calibration=[torch.randn(5, 8)], blocks="")
    assert all((layer.weight != 0).all() for layer in model)


@pytest.mark.parametrize("score", ["wanda", "ria", "sparsegpt"])
def test_sums_that_overflow_are_found_before_their_block_is_pruned(score):
    """Each square is within float32, their sum is not; of a block behind one that is pruned."""
    config, x = SparsityConfig(score=score), torch.full((8, 8), 1.5e19)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"^0\.weight: sums of squared inputs .* overflow float32") as error:
        sparsify_(model, config, calibration=[x], blocks="", filter_fn=lambda m, name: name == "0")
    assert error.value.__notes__ == ["sparsify_ stopped before it changed a weight"]

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    model = Blocks()
    model.layers[0][1].bias.data += 1.5e19
    with pytest.raises(ValueError, match=r"^layers\.1\.0\.weight: sums") as error:
        sparsify_(
            model, config, calibration=[torch.randn(8, 8)], filter_fn=lambda m, name: name != "layers.1.1"
        )
    assert "2 of 3 weights pruned" in error.value.__notes__[0]
    assert all((layer.weight != 0).all() for layer in model.layers[1])


def test_an_error_of_one_weight_names_it(monkeypatch):
    def fail(w, config, statistic):
        raise ValueError("no damping mends it")

    monkeypatch.setattr(api, "prune_weight", fail)
    with pytest.raises(ValueError, match="no damping") as error:
        sparsify_(nn.Sequential(nn.Linear(8, 8)), SparsityConfig())
    assert error.value.__notes__ == ["this is of 0.weight", "sparsify_ stopped before it changed a weight"]


def test_an_error_on_the_way_says_what_is_pruned():
    model, dense = language_model(), language_model()

    def stop(name, done, total):
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        sparsify_(model, SparsityConfig(score="wanda"), calibration=TOKENS, progress=stop)
    assert (
        "stopped with 9 of 14 weights pruned (model.layers.0.self_attn.q_proj.weight"
        in error.value.__notes__[0]
    )
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, dense.get_parameter(n))]
    assert len(changed) == 9
    assert all(is_sparse(model.get_parameter(name)) for name in changed)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert model.training


@pytest.mark.parametrize(
    "config",
    [Int8WeightOnlyConfig(), IntxWeightOnlyConfig(), Float8WeightOnlyConfig()],
    ids=lambda c: type(c).__name__,
)
def test_symmetric_codes_keep_the_zeros(config):
    model = language_model()
    report = sparsify_(model, SparsityConfig())
    zeros = {layer.name: model.get_parameter(layer.name) == 0 for layer in report.changed}
    quantized = quantize_(model, config, lambda m, name: name.startswith("model.layers"))
    assert {layer.sparsity for layer in quantized.changed} == {"2:4 by magnitude"}
    for name, zero in zeros.items():
        weight = model.get_parameter(name)
        assert isinstance(weight, QuantizedTensor)
        assert (weight.dequantize()[zero] == 0).all()
        assert is_sparse(weight.dequantize())


def test_inside_inference_mode():
    model, expected = language_model(), language_model()
    with torch.inference_mode():
        sparsify_(model, SparsityConfig(score="wanda"), calibration=[tokens.clone() for tokens in TOKENS])
    sparsify_(expected, SparsityConfig(score="wanda"), calibration=TOKENS)
    assert all(torch.equal(p, expected.get_parameter(name)) for name, p in model.named_parameters())
    model(TOKENS[0]).sum().backward()


def test_autocast_sums_what_products_take():
    """Inputs in bfloat16, which the mask of float32 inputs differs from."""
    layer, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(9, 64)
    dense = layer[0].weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        sparsify_(layer, SparsityConfig(score="wanda"), calibration=[x], blocks="")
    scores = reference.wanda_scores(dense, reference.square_sums(x.to(torch.bfloat16)))
    assert torch.equal(layer[0].weight, dense * torch.as_tensor(reference.prune(dense, scores=scores)))


def test_one_block_of_statistics_is_held_at_a_time():
    """Four Hessians: of queries, keys and values, of the output, of gate and up, of down."""
    gc.collect()  # those that errors of earlier tests hold
    alive = []

    def count(name, done, total):
        alive.append(sum(type(each) is Hessian for each in gc.get_objects()))

    sparsify_(language_model(), SparsityConfig(score="sparsegpt"), calibration=TOKENS, progress=count)
    assert alive == [4] * 14


# `sparsify_` with compressed storage: the pruned weight itself, in half of its bytes and the places.

STORED_DTYPES = (torch.bfloat16, torch.float16)


def two_layers(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(dtype)


@pytest.mark.parametrize("dtype", STORED_DTYPES)
@pytest.mark.parametrize("score", ["magnitude", "wanda"])
def test_weights_are_those_of_dense_storage(dtype, score):
    dense, ours = two_layers(dtype), two_layers(dtype)
    data = None if score == "magnitude" else [torch.randn(16, 64, dtype=dtype)]
    sparsify_(dense, SparsityConfig(score=score), calibration=data, blocks=None if data is None else "")
    config = SparsityConfig(score=score, storage="compressed")
    report = sparsify_(ours, config, calibration=data, blocks=None if data is None else "")
    assert str(config).endswith("compressed")
    for a, b, layer in zip((dense[0], dense[2]), (ours[0], ours[2]), report.changed, strict=True):
        assert isinstance(b.weight, nn.Parameter)
        assert isinstance(b.weight, SparseQuantizedTensor)
        assert not b.weight.requires_grad
        assert same(a.weight.detach(), b.weight.dequantize())
        assert (layer.storage, layer.shape) == ("compressed", tuple(a.weight.shape))
        assert layer.bytes == a.weight.nbytes // 2 + a.weight.numel() // 8 + 4
        assert f"compressed, {layer.bytes} bytes" in str(layer)
    x = torch.randn(3, 64, dtype=dtype)
    with torch.no_grad():
        assert same(ours(x), dense(x))
    told = explain(ours).layers[0]
    assert (told.sparsity, told.storage) == (f"2:4 by {score}", "compressed")


def test_weights_that_are_sparse_already_are_compressed_as_they_are():
    made = two_layers(torch.bfloat16)
    sparsify_(made, SparsityConfig())
    before = made[0].weight.detach().clone()
    sparsify_(made, SparsityConfig(storage="compressed"))
    assert same(made[0].weight.dequantize(), before)


def test_transposed_layers_and_shared_weights():
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(32, 64).to(torch.bfloat16)
    nn.init.normal_(layer.weight)
    dense = layer.weight.detach().clone()
    sparsify_(layer, SparsityConfig(storage="compressed"))
    kept = layer.weight.dequantize()
    assert layer.weight.shape == (64, 32)
    assert ((kept != 0).reshape(16, 4, 32).sum(1) == 2).all()
    assert same(kept[kept != 0], dense[kept != 0])
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert layer(x).shape == (3, 32)
    made = two_layers(torch.bfloat16)
    made.add_module("twin", nn.Linear(64, 96, dtype=torch.bfloat16))
    made.twin.weight = made[0].weight
    original = made.twin.weight.detach().clone()
    sparsify_(made, SparsityConfig(storage="compressed"), lambda module, name: name == "0")
    assert same(made.twin.weight.detach(), original)
    assert isinstance(made[0].weight, SparseQuantizedTensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"storage": "packed"}, "storage"),
        ({"storage": "compressed", "pattern": "1:4"}, "pattern '2:4' only"),
        ({"storage": "compressed", "pattern": "4:8"}, "pattern '2:4' only"),
    ],
)
def test_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        SparsityConfig(**change)


def test_what_is_refused_changes_nothing():
    made = two_layers(torch.float32)
    before = made[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"holds bfloat16 and float16, got torch\.float32"):
        sparsify_(made, SparsityConfig(storage="compressed"))
    assert torch.equal(made[0].weight, before)
    made = two_layers(torch.bfloat16)
    sparsify_(made, SparsityConfig(storage="compressed"))
    weight = made[0].weight
    with pytest.raises(ValueError, match="in 2:4 storage already"):
        sparsify_(made, SparsityConfig(storage="compressed"))
    assert made[0].weight is weight


def test_state_dicts():
    made, other = two_layers(torch.bfloat16), two_layers(torch.bfloat16)
    sparsify_(made, SparsityConfig(storage="compressed"))
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(other[0].weight, made[0].weight)
