"""accelerate's sizes and hooks; loops with all kinds of layers are in tests/ao_lab/tensor/loops."""

from types import SimpleNamespace

import pytest
import torch

from tests.ao_lab.tensor.loops.situations import logits, with_tables

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


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
    """Once, however often it is registered; models without quantized weights go accelerate's way. On ranks: tensor/loops."""
    from accelerate.utils import fsdp_utils

    from ao_lab.tensor.libraries import accelerate_fsdp

    first = fsdp_utils.fsdp2_load_full_state_dict
    accelerate_fsdp.register()
    assert fsdp_utils.fsdp2_load_full_state_dict is first
    assert first.of_ao_lab
    with pytest.raises(KeyError, match="missing from full state dict"):
        first(SimpleNamespace(is_main_process=True), torch.nn.Linear(2, 2), {})
