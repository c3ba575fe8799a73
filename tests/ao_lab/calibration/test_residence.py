"""One block at a time on the device: the bits of a model that is there as a whole, and weights that stay in their files."""

import gc
from collections import Counter
from pathlib import Path

import pytest
import torch

from ao_lab import (
    QuantizedTensor,
    explain,
    quantize_,
    quantize_pretrained,
)
from ao_lab.calibration.methods import AWQ, GPTQ, AutoRound, BiasCorrection, Clip, LowRank
from ao_lab.calibration.residence import Copies, Residence
from ao_lab.calibration.tokens import Moments
from ao_lab.checkpoint.streaming import dense_of_files
from tests.ao_lab.calibration.test_run import INT4, assert_same, inputs, stack

transformers = pytest.importorskip("transformers")
METHODS = (AWQ(ratios=4), Clip(), GPTQ())
TOKENS = [{"input_ids": torch.arange(i, i + 4 * 24).reshape(4, 24) % 250} for i in (0, 50, 100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "methods", [METHODS, pytest.param((Clip(), AutoRound(steps=2)), marks=pytest.mark.nightly)]
)
def test_a_streamed_folder_has_the_bits_of_a_resident_model(folder, tmp_path, methods):
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    report = quantize_(resident, INT4, calibration=TOKENS, methods=methods)
    for resume in (None, tmp_path / "blocks", tmp_path / "blocks"):
        streamed = quantize_pretrained(folder, INT4, calibration=TOKENS, methods=methods, resume=resume)
        assert_same(streamed, resident)
        assert str(explain(streamed)) == str(report)
    assert torch.equal(streamed(**TOKENS[0]).logits, resident(**TOKENS[0]).logits)


def test_a_prefix_without_calibration_is_refused(folder):
    with pytest.raises(ValueError, match="give calibration too"):
        quantize_pretrained(folder, INT4, prefix="float")


def test_one_block_is_copied_at_a_time_and_weights_stay_in_their_files(folder, tmp_path):
    model = dense_of_files(folder)
    homes = {name: p.data_ptr() for name, p in model.named_parameters()}
    seen = []

    def copied(*_):
        away = [n for n, p in model.named_parameters() if n in homes and p.data_ptr() != homes[n]]
        blocks = {n.split(".")[2] for n in away if ".layers." in n and not is_quantized(model, n)}
        seen.append((blocks, [n for n in away if ".layers." not in n]))

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(copied)
    quantize_(model, INT4, device="cpu", calibration=TOKENS, methods=METHODS[1:], resume=tmp_path)
    assert {len(blocks) for blocks, _ in seen} == {1}
    assert all(not outside for _, outside in seen)
    for name, parameter in model.named_parameters():
        if not is_quantized(model, name):
            assert parameter.data_ptr() == homes[name], name
    maps = Path("/proc/self/maps").read_text()
    codes = model.model.layers[0].mlp.up_proj.weight.codes
    lines = [line for line in maps.splitlines() if str(tmp_path) in line]
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    assert any(first <= codes.data_ptr() < last for first, last in spans)


def copies_of(folder, monkeypatch, batches):
    """How often modules of each class were copied in a calibration by so many batches, and its words."""
    copied, said = Counter(), []

    def enter(self):
        copied[type(self.modules[0]).__name__] += 1
        entered(self)

    entered = Copies.enter
    with monkeypatch.context() as patched:
        patched.setattr(Copies, "enter", enter)
        quantize_pretrained(
            folder,
            INT4,
            calibration=[TOKENS[0]] * batches,
            methods=(GPTQ(damping=0.01),),
            progress=lambda name, *_: said.append(name),
        )
    return copied, said


def test_a_block_is_copied_once_for_all_batches_of_the_first_pass(folder, monkeypatch):
    """Once for the first batch, once for the others, once for the walk; the embedding for the first, and for the others."""
    copied, said = copies_of(folder, monkeypatch, 7)
    assert copied["LlamaDecoderLayer"] == 3 * 3
    assert copied["Embedding"] == 2
    begun = [f"inputs of the blocks, batch {number} of 7" for number in range(1, 8)]
    blocks = [f"inputs of the blocks: model.layers.{index}" for index in range(3)]
    assert said[: said.index("model.layers.0: statistics of its inputs")] == [
        "inputs of the blocks",
        *begun,
        *blocks,
    ]


def test_a_module_that_stays_between_calls_goes_before_a_block_comes():
    """Also where another has its weight: both are where they were."""
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(8, 4), "norm": torch.nn.RMSNorm(4), "head": torch.nn.Linear(4, 8)}
    )
    model["blocks"] = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    model["head"].weight = model["embed"].weight
    homes = {name: p.data_ptr() for name, p in model.named_parameters()}

    def away():
        return [name for name, p in model.named_parameters() if p.data_ptr() != homes[name]]

    residence = Residence(model, {"blocks.0": model["blocks"][0]}, torch.device("cpu"))
    with residence.placed():
        x = model["embed"](torch.arange(3))
        assert away() == []
        with residence.around():
            model["norm"](x)
            assert away() == ["norm.weight"]
            model["embed"](torch.arange(3))
            assert away() == ["embed.weight"]
            kept = model["embed"].weight.data_ptr()
            model["norm"](x)
            model["embed"](torch.arange(3))
            assert (away(), model["embed"].weight.data_ptr()) == (["embed.weight"], kept)
            # Larger by a bias: it stays in place of the other.
            model["head"](x)
            assert away() == ["embed.weight", "head.bias"]
            model["blocks"][0](x)
            assert away() == ["embed.weight", "head.bias"]
        model["blocks"][0](x)
        assert away() == ["blocks.0.weight", "blocks.0.bias"]
    assert away() == []


def is_quantized(model, name):
    return isinstance(model.get_parameter(name), QuantizedTensor)


def test_gains_and_biases_that_change_go_home():
    """Smoothed norms, corrected biases, and residuals; a layer that stays dense keeps its memory."""
    model, expected = stack(), stack()
    home = model.blocks[0].three.weight.data_ptr()
    given = {
        "filter_fn": lambda m, n: n.startswith("blocks") and n[-3:] in ("one", "two"),
        "methods": (AWQ(ratios=4), Clip(), LowRank(4), BiasCorrection()),
    }
    quantize_(model, INT4, device="cpu", calibration=inputs(), **given)
    quantize_(expected, INT4, calibration=inputs(), **given)
    assert_same(model, expected)
    assert not torch.equal(model.blocks[0].norm.weight, stack().blocks[0].norm.weight)
    assert model.blocks[0].three.weight.data_ptr() == home


@pytest.mark.parametrize("changed", [False, True])
def test_a_weight_that_two_layers_share_goes_home(changed):
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    block[1].weight = block[0].weight
    home = block[0].weight.data_ptr()
    copies = Copies(list(block.modules()), torch.device("cpu"))
    copies.enter()
    assert block[1].weight is block[0].weight
    assert block[0].weight.data_ptr() != home
    copies.leave(changed)
    assert block[1].weight is block[0].weight
    assert block[0].weight.data_ptr() == home


@pytest.mark.parametrize("at", ["capture", 4])
def test_a_call_that_fails_leaves_no_block_on_the_device(at):
    """And every weight as it was or quantized."""
    model, before = stack(), stack()
    homes = {name: p.data_ptr() for name, p in model.named_parameters()}
    batches = inputs()

    def stop(name, done, total):
        if done == at:
            raise KeyboardInterrupt

    def failing():
        yield batches[0]
        raise KeyboardInterrupt

    data = failing() if at == "capture" else batches
    with pytest.raises(KeyboardInterrupt):
        quantize_(model, INT4, device="cpu", calibration=data, methods=(GPTQ(),), progress=stop)
    assert sum(is_quantized(model, name) for name in homes) == (0 if at == "capture" else 4)
    for name, parameter in model.named_parameters():
        if not is_quantized(model, name):
            assert parameter.data_ptr() == homes[name]
            assert torch.equal(parameter, before.get_parameter(name))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_models_that_a_function_builds(folder, tmp_path):
    from safetensors.torch import save_file

    save_file(stack().state_dict(), tmp_path / "model.safetensors")
    given = {"calibration": inputs(), "methods": (GPTQ(),)}
    streamed, expected = quantize_pretrained(tmp_path, INT4, build=stack, **given), stack()
    quantize_(expected, INT4, **given)
    assert_same(streamed, expected)


def test_a_device_without_values_is_refused():
    model = stack()
    with pytest.raises(
        ValueError, match=r"device='meta' has no values to calibrate with; quantize_ changed nothing"
    ):
        quantize_(model, INT4, device="meta", calibration=inputs(), methods=(GPTQ(),))
    assert all(map(torch.equal, model.parameters(), stack().parameters()))


def test_methods_without_data_and_refusals(folder):
    made = quantize_pretrained(folder, INT4, methods=(Clip("none"),))
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    quantize_(resident, INT4, methods=(Clip("none"),))
    assert_same(made, resident)
    with pytest.raises(ValueError, match="give calibration"):
        quantize_pretrained(folder, INT4, methods=(GPTQ(),))
    with pytest.raises(ValueError, match=r"no config\.json"):
        quantize_pretrained(folder / "nowhere", INT4, methods=(Clip("none"),))


def test_moments_go_with_the_last_stack_that_reads_them(monkeypatch):
    """Those of a block's first layers are no more when its last one is quantized, and the products that GPTQ has read when it
    is through: what is held out judges."""
    alive = []

    def count(name, done, total):
        gc.collect()
        if name.endswith(".weight"):
            alive.append(sum(type(one) is Moments and one.value is not None for one in gc.get_objects()))

    quantize_(stack(), INT4, calibration=inputs(), methods=(Clip(), GPTQ()), progress=count)
    assert alive[:3] == [3, 3, 1], alive


def test_a_mean_of_products_takes_the_place_of_their_sum():
    x = torch.randn(40, 32, dtype=torch.float64)
    sums, means = Moments(), Moments()
    sums.update(x)
    means.update(x)
    means.finish()
    means.finish()
    assert torch.equal(sums.hessian, means.hessian)
    assert means.hessian is means.value
    assert torch.equal(sums.mean_squares, means.mean_squares)
    for made, wanted in (
        (means.rotated(8), sums.rotated(8)),
        (means.scaled(x[0].abs()), sums.scaled(x[0].abs())),
    ):
        torch.testing.assert_close(made.hessian, wanted.hessian, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="are finished"):
        means.update(x)


def test_moments_that_are_rotated_last_give_their_memory():
    """With the bits of a copy; those that others need stay."""
    x = torch.randn(40, 32, dtype=torch.float64)
    kept, given = Moments(), Moments()
    for one in (kept, given):
        one.update(x)
        one.finish()
    memory, before = given.value.data_ptr(), kept.value.clone()
    made, wanted = given.rotated(8, last=True), kept.rotated(8)
    assert torch.equal(made.value, wanted.value)
    assert torch.equal(made.total, wanted.total)
    assert made.value.data_ptr() == memory
    assert given.value is None
    assert torch.equal(kept.value, before)
