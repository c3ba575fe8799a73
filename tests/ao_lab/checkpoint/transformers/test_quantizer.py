"""Sizes and resized tables of transformers' models with quantized weights; tests/ao_lab/tensor/test_loops.py has all kinds."""

import pytest
import torch

import ao_lab
from ao_lab import QuantizedTensor, quantized
from ao_lab.checkpoint.transformers.methods import joined
from tests.support.loops import logits, with_tables
from tests.support.quantized_weights import KINDS, same, weight


@pytest.mark.parametrize("scheme", KINDS)
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
        with pytest.raises(ValueError, match=r"lm_head is in training with \w+.* beside its weight"):
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
