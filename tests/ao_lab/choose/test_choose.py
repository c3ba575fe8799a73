"""`choose_`: scores, budgets, what is measured, and the model that stays as it was."""

import pytest
import torch

import ao_lab
from ao_lab import Bits, SchemeConfig, choose_

transformers = pytest.importorskip("transformers")
OPTIONS = {f"int{bits}": SchemeConfig(scheme=f"int{bits}_g32_asymmetric") for bits in (2, 3, 4)}


def tiny(layers=2, scale=4.0, **fields):
    """A random Llama whose predictions are not flat."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **fields,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model


def batches(count=4, shape=(2, 16), seed=1):
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(96, shape, generator=generator) for _ in range(count)]


def test_the_choice_keeps_the_budget_and_is_no_worse_than_uniform_options():
    model = tiny()
    choice = choose_(model, batches(), OPTIONS, Bits(3.9))
    fitting = [one for one in choice.trials if one.fits]
    assert choice.measured == min(one.measured for one in fitting)
    report = ao_lab.quantize_(model, choice.plan)
    chosen = [layer for layer in report.layers if layer.scheme]
    assert sum(layer.bytes for layer in chosen) == choice.trial.cost
    assert choice.trial.cost * 8 <= 3.9 * sum(model.get_parameter(layer.name).numel() for layer in chosen)
