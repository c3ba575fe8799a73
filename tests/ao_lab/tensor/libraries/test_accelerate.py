"""accelerate's sizes and hooks; loops with all kinds of layers are in tests/ao_lab/tensor/loops."""

from types import SimpleNamespace

import pytest
import torch

import ao_lab
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

    from ao_lab.tensor import libraries

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
