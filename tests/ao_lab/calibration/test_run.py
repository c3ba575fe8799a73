"""`quantize_` with calibration and methods: models quantized block by block as by hand; what is refused and what stays."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import fast
from ao_lab import (
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerTensor,
    QATConfig,
    QuantizedTensor,
    SchemeConfig,
    explain,
    quantize_,
)
from ao_lab.calibration.checks import unsupported_reason
from ao_lab.calibration.methods import AWQ, GPTQ, HQQ, METHODS, BiasCorrection, Clip, Smooth, ordered
from ao_lab.config.recipe import Recipe
from experiments.models.llama import LanguageModel, ModelSettings
from reference import SCHEMES
from tests.support.quantized_weights import same

TOKENS = [torch.arange(i, i + 4 * 24).reshape(4, 24) % 250 for i in (0, 50, 100)]
INT4 = SchemeConfig(scheme="int4_g32")
#: Zero points that are floats.
HQQ_SCHEME = replace(
    SCHEMES["hqq.int4_g64"], name="hqq_g32", scale=replace(SCHEMES["hqq.int4_g64"].scale, block=32)
)


def language_model(dtype=torch.float32, layers=2):
    torch.manual_seed(0)
    model = LanguageModel(ModelSettings(layers=layers, width=64, feed_forward=128))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # channels of different sizes
            parameter.data.mul_(torch.exp(torch.randn_like(parameter)))
    return model.to(dtype)


class Block(nn.Module):
    """Two layers that read one tensor, and a third."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.one, self.two, self.three = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return x + self.three(torch.relu(self.one(y)) + self.two(y))


class Stack(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(32, 8)

    def forward(self, x, attention_mask=None):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(seed=0, **options):
    torch.manual_seed(seed)
    return Stack(**options)


def inputs(count=3, sequences=4, seed=1):
    """Channels that differ in size and are correlated."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(32, 32, generator=generator) * torch.logspace(-1, 1, 32)
    return [torch.randn(sequences, 16, 32, generator=generator) @ mix for _ in range(count)]


def weights(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


def assert_same(one, two):
    first, second = dict(one.named_parameters()), dict(two.named_parameters())
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert same(parameter, second[name]), name


def by_hand(model, config, batches, method):
    """The model quantized layer by layer: inputs by hooks, codes by the array functions alone."""
    scheme = config.recipe().weight
    hidden = [x.clone() for x in batches]
    with torch.no_grad():
        for block in model.blocks:
            seen = {m: [] for m in (block.one, block.two, block.three)}
            handles = [
                m.register_forward_pre_hook(lambda m, args, mine=mine: mine.append(args[0]))
                for m, mine in seen.items()
            ]
            for x in hidden:
                block(x)
            for handle in handles:
                handle.remove()
            for layers in ((block.one, block.two), (block.three,)):  # those that read one tensor together
                rows = torch.cat(seen[layers[0]])  # twelve sequences; the tenth is held out
                train = rows[torch.arange(len(rows)) != 9].reshape(-1, rows.shape[-1]).double()
                held = rows[9].double()
                w = torch.cat([layer.weight for layer in layers])
                found = [
                    fast.quantize(layer.weight, scheme) for layer in layers
                ]  # each with outer scales of its own
                plain = torch.cat([fast.dequantize(q) for q in found])
                made = method(layers, train.T @ train / len(train), held.T @ held / len(held), scheme)
                errors = [((v - w).double() @ held.T).square().sum(1) for v in (plain, made)]
                first = 0
                for layer in layers:
                    part = slice(first, first + len(layer.weight))
                    better = float(errors[1][part].sum()) <= float(errors[0][part].sum())
                    layer.weight.copy_((made if better else plain)[part])
                    first += len(layer.weight)
            hidden = [block(x) for x in hidden]
    return model


def matrices(layers, scheme):
    """The weights as they are quantized: below each other, but where each has an outer scale."""
    dense = [layer.weight for layer in layers]
    return dense if SCHEMES[scheme.name].outer is not None else [torch.cat(dense)]


def searched(layers, h, held, scheme):
    found = []
    for w in matrices(layers, scheme):
        scales = fast.search_scales(w, scheme, weights=h.diagonal())
        found.append(fast.dequantize(fast.quantize(w, scheme, scales=scales)))
    return torch.cat(found)


def by_gptq(layers, h, held, scheme):
    found = []
    for w in matrices(layers, scheme):
        # Cubes: GPTQ makes up for small errors, not for those of clipped weights.
        scales = fast.search_scales(w, scheme, weights=h.diagonal(), norm=3)
        damping = fast.held_out_damping(w, h, held, scheme, scales=scales, order="activation")
        made = fast.gptq(w, h, scheme, scales=scales, order="activation", damping=damping)
        found.append(fast.dequantize(made.quantized))
    return torch.cat(found)


@pytest.mark.parametrize("scheme", ["int4_g32", "int3_g32_asymmetric", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(("methods", "rule"), [((Clip(),), searched), ((GPTQ(), Clip()), by_gptq)])
def test_codes_are_those_of_the_array_functions_by_hand(methods, rule, scheme):
    """Block by block, by inputs that the quantized blocks before make, in the order of methods whatever the tuple's."""
    config, batches = SchemeConfig(scheme=scheme), inputs()
    model, expected = stack(), by_hand(stack(), config, batches, rule)
    report = quantize_(model, config, calibration=batches, methods=methods)
    taken = {
        layer.name for layer in report.changed if layer.calibrated and layer.calibrated.method != "rounding"
    }
    assert len(taken) >= 5
    for name, weight in weights(model).items():
        if name.startswith("blocks"):
            assert torch.equal(weight.dequantize(), expected.get_parameter(name)), name
    first = report.layers[0].calibrated
    assert (first.tokens, first.held_out) == (11 * 16, 16)


def test_later_blocks_see_what_quantized_blocks_make():
    """Not what the dense ones made."""
    model, alone = stack(), stack()
    quantize_(model, INT4, calibration=inputs(), methods=(GPTQ(),))
    only = SchemeConfig(scheme="int4_g32")
    quantize_(alone, only, lambda m, n: n.startswith("blocks.1"), calibration=inputs(), methods=(GPTQ(),))
    ours, theirs = (m.blocks[1].one.weight for m in (model, alone))
    assert not torch.equal(ours.codes, theirs.codes)


@pytest.mark.parametrize(
    "methods", [(Clip(),), (GPTQ(),), (AWQ(),), (Smooth(), Clip()), (AWQ(), Clip(), GPTQ())]
)
@pytest.mark.parametrize(
    "config", [Int4WeightOnlyConfig(group_size=32), Int8DynamicActivationInt8WeightConfig()]
)
def test_no_layer_is_worse_than_rounding_on_held_out_tokens(config, methods):
    model = language_model()
    report = quantize_(model, config, calibration=TOKENS, methods=methods)
    results = [layer.calibrated for layer in report.changed if layer.calibrated]
    assert len(results) == 14
    assert all(result.ratio <= 1 for result in results)
    assert any(result.ratio < 0.95 for result in results)
    assert all(result.held_out == 24 and result.tokens == 11 * 24 for result in results)
    assert "of rounding's output error on 24 held-out tokens" in str(report)


def test_what_would_be_worse_is_rounded_and_says_so():
    """Moments of a few tokens that others do not resemble."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16))
    dense = copy.deepcopy(model)
    odd = [torch.randn(9, 4, 2) @ torch.randn(2, 32) * 10, torch.randn(1, 4, 32)]
    report = quantize_(model, INT4, calibration=odd, methods=(GPTQ(damping=0.0),), blocks="")
    (layer,) = report.changed
    assert layer.calibrated.method == "rounding"
    assert layer.calibrated.ratio == 1
    assert re.search(r"gptq would have [\d.]+ of rounding's error and was not used", layer.reason)
    quantize_(dense, INT4)
    assert_same(model, dense)


def test_methods_without_data():
    """Scales of the least error of the weights alone."""
    model, dense = stack(), stack()
    report = quantize_(model, INT4, methods=("clip",) and (Clip(weights="none"),))
    for name, weight in weights(model).items():
        w = dense.get_parameter(name)
        expected = fast.quantize(w, "int4_g32", scales=fast.search_scales(w, "int4_g32"), packed=True)
        assert torch.equal(weight.codes, expected.codes)
        assert torch.equal(weight.scale, expected.scale)
    assert {layer.calibrated.method for layer in report.changed} == {"clip"}


def padded(batches):
    """Five tokens of padding before those of each sequence."""
    mask = torch.cat([torch.zeros(4, 5), torch.ones(4, 16)], 1).long()
    return [{"x": torch.cat([torch.randn(4, 5, 32), x], 1), "attention_mask": mask} for x in batches]


def check_padding_changes_no_bit(make, batches):
    """GPTQ of two models alike, with and without padding."""
    model, expected = make(), make()
    quantize_(model, INT4, calibration=padded(batches), methods=(GPTQ(),))
    quantize_(expected, INT4, calibration=batches, methods=(GPTQ(),))
    assert_same(model, expected)


def test_padding_changes_no_bit():
    check_padding_changes_no_bit(stack, inputs())


@pytest.mark.parametrize("offload", [False, True])
def test_what_is_outside_of_the_blocks_is_rounded(offload):
    model, expected = stack(), stack()
    calls, batches = [], inputs()
    report = quantize_(
        model, INT4, calibration=batches, methods=(Clip(),), offload=offload, progress=lambda *told: calls.append(told)
    )  # fmt: skip
    quantize_(expected, INT4)
    assert same(model.head.weight, expected.head.weight)
    told = {layer.name: layer.reason for layer in report.layers}
    assert told["head.weight"].endswith(
        "; rounded to nearest, it is outside of the blocks, or shared between them"
    )
    phases = [
        "inputs of the blocks",
        *(f"inputs of the blocks, batch {number} of {len(batches)}" for number in range(1, len(batches) + 1)),
        *(f"{name}: statistics of its inputs" for name in ("blocks.0", "blocks.1")),
    ]
    assert [name for name, *_ in calls if name in phases] == phases
    assert [call[1:] for call in calls if call[0] not in phases] == [(i, 7) for i in range(1, 8)]
    assert str(explain(model)) == str(report)


def test_transposed_weights_and_shared_ones():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    report = quantize_(model, INT4, calibration=TOKENS, methods=(AWQ(), GPTQ()))
    results = [layer.calibrated for layer in report.changed]
    assert len(results) == 8
    assert all(result.ratio < 1 for result in results)
    assert model(TOKENS[0]).logits.isfinite().all()


def test_bits_are_those_of_layers_apart():
    """Layers that read one tensor are quantized as one matrix."""
    together, apart = stack(), stack()
    quantize_(
        together,
        INT4,
        lambda m, n: n.startswith("blocks.0"),
        calibration=inputs(),
        methods=(GPTQ(damping=0.01),),
    )
    for name in ("one", "two", "three"):
        full = f"blocks.0.{name}"
        other = stack()
        quantize_(
            other, INT4, lambda m, n, f=full: n == f, calibration=inputs(), methods=(GPTQ(damping=0.01),)
        )
        setattr(apart.blocks[0], name, getattr(other.blocks[0], name))
    for name in ("one", "two", "three"):
        ours, theirs = (getattr(m.blocks[0], name).weight for m in (together, apart))
        assert same(ours, theirs)
        assert ours.codes.untyped_storage().nbytes() == ours.codes.nbytes


def test_joined_layers_have_one_outer_scale():
    """Loaders that join queries, keys and values, or gate and up, take one for all."""
    model = language_model()
    quantize_(model, SchemeConfig(scheme="nvfp4_pow2"), calibration=TOKENS, methods=(Clip(), GPTQ()))
    for block in model.model.layers:
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            parent = block.self_attn if "q_proj" in names else block.mlp
            outers = [getattr(parent, name).weight.outer for name in names]
            assert all(torch.equal(one, outers[0]) for one in outers)


def test_values_of_a_scheme_for_each_layer():
    model = stack()
    config = FqnToConfig({"re:.*one": INT4, "re:.*three": Int8WeightOnlyConfig()})
    report = quantize_(model, config, calibration=inputs(), methods=(GPTQ(),))
    assert {layer.scheme for layer in report.changed} == {"int4_g32", "int8_rowwise"}
    assert all(layer.calibrated for layer in report.changed)


def test_methods_are_records_classes_or_names_in_one_order():
    assert ordered((GPTQ, "clip", AWQ(4))) == (AWQ(4), Clip(), GPTQ())
    assert METHODS["gptq"] is GPTQ


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"methods": (GPTQ(),)}, ValueError, "gptq needs calibration data; give calibration="),
        ({"methods": (Clip(), GPTQ())}, ValueError, "clip and gptq need calibration data"),
        ({"calibration": []}, ValueError, "none is given; give methods="),
        ({"calibration": [], "methods": (GPTQ(),)}, ValueError, "calibration has no batches"),
        ({"calibration": torch.ones(4, 32), "methods": (GPTQ(),)}, TypeError, "an iterable of batches"),
        ({"methods": ("gtpq",)}, ValueError, "gtpq.*did you mean|gtpq"),
        ({"methods": "gptq"}, TypeError, r"methods is a tuple such as \(Clip\(\), GPTQ\(\)\)"),
        ({"methods": (3,)}, TypeError, "methods holds records such as"),
        ({"methods": (GPTQ(), GPTQ("stored"))}, ValueError, "GPTQ twice"),
        ({"methods": (AWQ(), Smooth())}, ValueError, "Smooth and AWQ do the same"),
        ({"blocks": "blocks"}, ValueError, "give calibration too"),
        ({"calibration": inputs(1, 1, 0)[:1], "methods": (GPTQ(),), "blocks": "heads"}, ValueError, "no module"),
        ({"calibration": [torch.randn(1, 8, 32)], "methods": (GPTQ(),)}, ValueError, "8 tokens.*32 is the least"),
        ({"calibration": [torch.full((4, 16, 32), torch.nan)], "methods": (GPTQ(),)}, ValueError, "NaN or infinity"),
        ({"calibration": [torch.ones(4, 16, 5)], "methods": (GPTQ(),)}, RuntimeError, "size"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_changes(given, error, said):
    model = stack()
    before = copy.deepcopy(model)
    with pytest.raises(error, match=said):
        quantize_(model, INT4, **given)
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert not weights(model)


def test_weights_and_configurations_that_methods_do_not_take():
    model = stack()
    given = {"calibration": inputs(), "methods": (GPTQ(),)}
    with pytest.raises(ValueError, match="QATConfig does not; leave methods and calibration out"):
        quantize_(model, QATConfig(INT4, step="prepare"), **given)
    with pytest.raises(ValueError, match="axis=-2 runs them along its outputs"):
        quantize_(model, SchemeConfig(scheme="int4_g32", axis=-2), **given)
    model.blocks[1].two.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"blocks.1.two.weight: weights hold NaN"):
        quantize_(model, INT4, **given)
    assert not weights(model)


def test_schemes_that_draw_are_refused():
    drawn = replace(SCHEMES["int4_g32"], name="drawn", rounding="stochastic")
    assert "needs random_bits" in unsupported_reason(Recipe(weight=drawn), (GPTQ(),))
    assert unsupported_reason(Recipe(weight=SCHEMES["int4_g32"]), (AWQ(), Clip(), GPTQ())) is None


def test_layers_that_no_data_reach_are_refused():
    model = stack()
    model.blocks[1].four = nn.Linear(32, 32)
    with pytest.raises(ValueError, match=r"changed nothing. No input was seen by blocks.1.four.weight"):
        quantize_(model, INT4, calibration=inputs(), methods=(GPTQ(),))
    assert not weights(model)


def test_an_interruption_leaves_each_weight_whole():
    model, finished = stack(), stack()

    def stop(name, done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        quantize_(model, INT4, calibration=inputs(), methods=(GPTQ(),), progress=stop)
    assert "stopped with 4 of 7 weights quantized" in caught.value.__notes__[0]
    quantize_(finished, INT4, calibration=inputs(), methods=(GPTQ(),))
    for name, weight in weights(model).items():
        assert same(weight, finished.get_parameter(name))
    assert len(weights(model)) == 4
    assert "blocks.1.two.weight" in {layer.name for layer in explain(model).left}


def test_half_a_pair_is_never_left(monkeypatch):
    """An error between a producer and its readers puts both back; until then each weight is judged once."""
    from ao_lab.calibration import smoothing

    model, before = language_model(), language_model()
    judged, error = [], smoothing.Smoothing._error
    monkeypatch.setattr(
        smoothing.Smoothing, "_error", lambda self, name: (judged.append(name), error(self, name))[1]
    )

    def fails(module, factors):
        raise MemoryError

    monkeypatch.setattr(smoothing, "scale_inputs", fails)
    with pytest.raises(MemoryError):
        quantize_(model, INT4, calibration=TOKENS, methods=(AWQ(),))
    assert all(map(torch.equal, model.parameters(), before.parameters()))
    assert len(judged) == len(set(judged)) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [Smooth(), AWQ(ratios=5)])
def test_smoothed_models_are_the_same_function(method, dtype):
    """All but what is quantized: in a scheme of 8 bits outputs stay where they were."""
    model = language_model(dtype)
    with torch.no_grad():
        before = model(TOKENS[0]).double()
        report = quantize_(model, Int8WeightOnlyConfig(), calibration=TOKENS, methods=(method,))
        after = model(TOKENS[0]).double()
    assert (
        sum(layer.calibrated.method.startswith(method.name) for layer in report.changed if layer.calibrated)
        >= 4
    )
    plain = language_model(dtype)
    quantize_(plain, Int8WeightOnlyConfig())
    with torch.no_grad():
        rounded = plain(TOKENS[0]).double()
    assert (after - before).norm() <= 1.1 * (rounded - before).norm()


# Static scales of inputs, found in the same walk.


def static(**options):
    return Int8StaticActivationInt8WeightConfig(granularity=PerTensor(), **options)


@pytest.mark.parametrize("methods", [(), (Clip(),)])
def test_static_scales_are_those_of_the_inputs_in_the_walk(methods):
    model, expected = stack(), stack()
    inside = lambda m, n: n.startswith("blocks") and isinstance(m, nn.Linear)  # noqa: E731
    report = quantize_(model, static(), inside, calibration=inputs(), methods=methods)
    assert all(layer.calibrated for layer in report.changed)
    first = lambda m, n: n in ("blocks.0.one", "blocks.0.two")  # noqa: E731
    quantize_(expected, static(), first, forward_loop=lambda m: [m(x) for x in inputs()])
    for name in ("one", "two"):
        ours, theirs = (getattr(m.blocks[0], name).weight for m in (model, expected))
        assert torch.equal(ours.input_scale, theirs.input_scale)
        assert methods or same(ours, theirs)
    dense = stack()
    quantize_(dense, static(), inside, forward_loop=lambda m: [m(x) for x in inputs()])
    assert not torch.equal(model.blocks[1].one.weight.input_scale, dense.blocks[1].one.weight.input_scale)


def test_static_scales_are_those_of_smoothed_inputs():
    model, seen = language_model(), []
    inside = lambda m, n: n.endswith("layers.0.self_attn.q_proj")  # noqa: E731
    report = quantize_(model, static(), inside, calibration=TOKENS, methods=(Smooth(),))
    (layer,) = report.changed
    assert layer.calibrated.method == "smooth"
    projection = model.model.layers[0].self_attn.q_proj
    projection.register_forward_pre_hook(lambda m, args: seen.append(args[0].abs().max()))
    for tokens in TOKENS:
        model(tokens)
    assert torch.allclose(projection.weight.input_scale, max(seen) / 127, rtol=1e-6)


def test_static_scales_outside_of_the_blocks_are_refused():
    model = stack()
    with pytest.raises(
        ValueError, match=r"head.weight: calibration finds static scales only for layers in blocks"
    ):
        quantize_(model, static(), calibration=inputs(), methods=(Clip(),))
    with pytest.raises(ValueError, match="calibration finds static scales too; leave forward_loop"):
        quantize_(model, static(), calibration=inputs(), methods=(Clip(),), forward_loop=lambda m: None)
    assert not weights(model)


# HQQ and corrected biases.


def test_hqq_needs_no_data_and_a_scheme_of_its_own():
    model, dense = stack(), stack()
    report = quantize_(model, SchemeConfig(scheme=HQQ_SCHEME), methods=(HQQ(),))
    for name, weight in weights(model).items():
        q = fast.hqq(dense.get_parameter(name), HQQ_SCHEME)
        taken = [layer.calibrated.method for layer in report.changed if layer.name == name] == ["hqq"]
        assert torch.equal(weight.zero, q.zero) == taken
    assert sum(layer.calibrated.method == "hqq" for layer in report.changed) >= 4
    with pytest.raises(ValueError, match=r"blocks.0.one.weight: .*changed nothing"):
        quantize_(stack(), SchemeConfig(scheme="int4_g32_asymmetric"), methods=(HQQ(),))
    with pytest.raises(ValueError, match="Clip and HQQ do the same"):
        quantize_(stack(), INT4, methods=(HQQ(), Clip("none")))


def test_gptq_takes_the_zero_points_of_hqq():
    model = stack()
    report = quantize_(model, SchemeConfig(scheme=HQQ_SCHEME), calibration=inputs(), methods=(HQQ(), GPTQ()))
    methods = {layer.calibrated.method for layer in report.changed if layer.calibrated}
    assert "hqq + gptq" in methods


def test_biases_are_corrected_for_the_mean_of_the_inputs():
    batches = [x + 3 for x in inputs()]
    model, plain = stack(), stack()
    given = {"filter_fn": lambda m, n: n == "blocks.0.one", "calibration": batches}
    quantize_(plain, INT4, methods=(Clip(),), **given)
    report = quantize_(model, INT4, methods=(Clip(), BiasCorrection()), **given)
    (layer,) = report.changed
    assert layer.calibrated.method == "clip + bias"
    assert same(model.blocks[0].one.weight, plain.blocks[0].one.weight)
    rows = stack().blocks[0].norm(torch.cat(batches).detach())
    train = rows[torch.arange(12) != 9].reshape(-1, 32).double()
    dense = stack().blocks[0].one
    off = (dense.weight.double() - plain.blocks[0].one.weight.dequantize().double()) @ train.mean(0)
    assert torch.allclose(model.blocks[0].one.bias.double(), dense.bias.double() + off, atol=1e-6)
    held = rows[9].double().detach()
    errors = [
        float((held @ (m.blocks[0].one.weight.dequantize().double() - dense.weight.double().detach()).T
               + m.blocks[0].one.bias.double().detach() - dense.bias.double().detach()).square().sum() / 16)
        for m in (plain, model)
    ]  # fmt: skip
    assert errors[1] < errors[0]
    assert layer.calibrated.error == pytest.approx(errors[1])


def test_layers_without_a_bias_say_so():
    model = language_model()
    report = quantize_(model, INT4, calibration=TOKENS, methods=(Clip(), BiasCorrection()))
    assert all("no bias of its own" in layer.reason for layer in report.changed if layer.calibrated)


def test_blocks_may_see_what_the_float_model_makes(tmp_path):
    """Then they do not depend on how those before them were quantized, and the report says so."""
    model, alone = stack(), stack()
    given = {"calibration": inputs(), "methods": (GPTQ(),), "prefix": "float"}
    report = quantize_(model, INT4, **given)
    quantize_(alone, INT4, lambda m, n: n.startswith("blocks.1"), calibration=inputs(), methods=(GPTQ(),))
    for name in ("one", "two", "three"):
        assert same(getattr(model.blocks[1], name).weight, getattr(alone.blocks[1], name).weight)
    assert "by inputs of the float model" in report.layers[0].reason
    quantize_(stack(), INT4, **given, resume=tmp_path)
    with pytest.raises(ValueError, match="another call: methods differ"):
        quantize_(stack(), INT4, **{**given, "prefix": "quantized"}, resume=tmp_path)
    with pytest.raises(ValueError, match="prefix"):
        quantize_(stack(), INT4, **{**given, "prefix": "dense"})


def test_methods_can_be_imported_from_the_room_that_they_are_about():
    import ao_lab
    from ao_lab import calibration
    from ao_lab.calibration.methods import ORDER

    for kind in ORDER:
        assert getattr(calibration, kind.__name__) is kind is getattr(ao_lab, kind.__name__)
