"""Experts: which tokens were sent to each, what those of few tokens are lent, and experts that are one batched weight."""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import fast
from ao_lab import (
    Int8StaticActivationInt8WeightConfig,
    PerTensor,
    SchemeConfig,
    linear_and_experts,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from ao_lab.calibration import experts as module
from ao_lab.calibration.experts import ExpertWatch, Source, fingerprints, lend
from ao_lab.calibration.methods import AWQ, GPTQ, HQQ, AutoRound, Clip, Rotate
from ao_lab.calibration.tokens import HELD_OUT, PADDING, TRAIN, SplitMoments, Tokens
from ao_lab.transforms.walk import Capture
from tests.ao_lab.calibration.test_run import (
    INT4,
    Block,
    assert_same,
    check_padding_changes_no_bit,
    inputs,
    stack,
)
from tests.support.quantized_weights import same

F = nn.functional
TOKENS = [torch.arange(i, i + 4 * 24).reshape(4, 24) % 250 for i in (0, 50, 100)]


class Routed(Block):
    """Each token goes to one of three experts, of two layers each, by a channel."""

    def __init__(self):
        super().__init__()
        self.ends = (-1e9, -0.5, 1e8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x):
        flat, y = x.reshape(-1, 32), torch.zeros_like(x).reshape(-1, 32)
        for low, high, expert in zip(self.ends, (*self.ends[1:], 1e9), self.experts, strict=True):
            chosen = (flat[:, 0] > low) & (flat[:, 0] <= high)
            if chosen.any():
                y[chosen] = expert(flat[chosen])
        return super().forward(x + y.reshape(x.shape))


def routed(seed=0):
    torch.manual_seed(seed)
    model = stack()
    model.blocks = nn.ModuleList([Routed(), Routed()])
    return model


def by_hand(model, batches):
    """(n, H) by expert of the tokens to learn from, and of all."""
    x = torch.cat([one.reshape(-1, 16, 32) for one in batches])
    held = torch.arange(len(x)) % 10 == 9
    flat = x[~held].reshape(-1, 32)
    first, ends = flat[:, 0], (*model.blocks[0].ends, 1e9)
    rows = [flat[(first > low) & (first <= high)].double() for low, high in pairwise(ends)]
    return [len(one) for one in rows], [one.T @ one / max(len(one), 1) for one in rows], flat.double()


def test_an_expert_is_quantized_by_its_tokens_and_the_average_of_all():
    """(n_e H_e + c H_all) / (n_e + c) with c its inputs; one that no token reached has the average."""
    model, batches = routed(), inputs(6)
    counts, hessians, flat = by_hand(model, batches)
    assert counts[2] == 0
    before = copy.deepcopy(model.blocks[0])
    every = flat.T @ flat / len(flat)
    report = quantize_(model, INT4, calibration=batches, methods=(GPTQ(damping=0.1),))
    told = {layer.name: layer for layer in report.layers}
    for e, (count, own) in enumerate(zip(counts, hessians, strict=True)):
        layer = told[f"blocks.0.experts.{e}.0.weight"]
        assert f"{count} tokens were sent to it, 32 of all experts' average are added" in layer.reason
        assert layer.calibrated.tokens == count
        w, h = before.experts[e][0].weight, (count * own + 32 * every) / (count + 32)
        scales = fast.search_scales(w, "int4_g32", weights=h.diagonal(), norm=3)
        made = fast.gptq(w, h, "int4_g32", scales=scales, order="activation", damping=0.1)
        assert layer.calibrated.method == "gptq"
        weight = model.blocks[0].experts[e][0].weight
        assert torch.equal(weight.dequantize(), fast.dequantize(made.quantized))
    # What experts make inside themselves follows their tokens.
    assert "64 of all experts' average" in told["blocks.0.experts.1.2.weight"].reason
    assert told["blocks.0.experts.1.2.weight"].calibrated.tokens == counts[1]
    assert not any("padding and held-out tokens" in layer.reason for layer in report.layers)


def test_padding_changes_no_bit_of_experts():
    check_padding_changes_no_bit(routed, inputs(6))


class Gated(nn.Module):
    """Two layers of an expert read one tensor."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.down(F.relu(self.gate(x)) * self.up(x))


ENDS = (-1e9, -0.5, 1e8)


def gated(ends=ENDS):
    model = routed()
    for block in model.blocks:
        block.experts, block.ends = nn.ModuleList(Gated() for _ in range(3)), ends
    return model


@pytest.mark.parametrize("ends", [ENDS, (-1e9, 1e7, 1e8)])
def test_all_layers_of_an_expert_without_tokens_are_lent_to(ends):
    """Whether its siblings saw some of the tokens, or one of them all."""
    report = quantize_(gated(ends), INT4, calibration=inputs(6), methods=(GPTQ(),))
    told = {layer.name: layer.calibrated for layer in report.layers}
    for name in ("gate", "up", "down"):
        one = told[f"blocks.0.experts.2.{name}.weight"]
        assert one.notes[0] == "0 tokens were sent to it, 32 of all experts' average are added", name
        assert one.method == "gptq"


def test_static_scales_of_experts_without_tokens_are_refused_before_any_change():
    model = gated()
    model.blocks[0].ends = (-1e9, -0.5, 0.5)
    before = copy.deepcopy(model)
    config = Int8StaticActivationInt8WeightConfig(granularity=PerTensor())
    with pytest.raises(
        ValueError, match=r"changed nothing. No input was seen by blocks.1.experts.2.gate.weight"
    ):
        quantize_(
            model,
            config,
            lambda m, n: "blocks" in n and isinstance(m, nn.Linear),
            calibration=inputs(),
            methods=(GPTQ(),),
        )
    assert all(map(torch.equal, model.parameters(), before.parameters()))


def test_experts_without_any_token_are_an_error():
    model = routed()
    model.blocks[1].ends = (1e8, 2e8, 3e8)
    with pytest.raises(
        ValueError, match=r"changed nothing. No input was seen by blocks.1.experts.0.0.weight"
    ):
        quantize_(model, INT4, calibration=inputs(), methods=(GPTQ(),))


def test_rows_are_told_by_their_bits():
    """Of two alike the first; a row that is none of the source leaves all untold."""
    x = torch.randn(40, 16).bfloat16()
    x[7] = x[3]
    roles = torch.arange(40, dtype=torch.int8) % 3
    source = Source.of(x, roles)
    rows = torch.tensor([5, 7, 3, 3, 39])
    assert torch.equal(source.roles_of(x[rows]), roles[[5, 3, 3, 3, 39]])
    other = x[rows].clone()
    other[2, 5] = torch.nextafter(other[2, 5], torch.tensor(9.0).bfloat16())
    assert source.roles_of(other) is None
    assert fingerprints(x[:0]).shape == (0,)
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert fingerprints(x.to(dtype)).unique().numel() == 39


def test_a_mean_is_lent_in_place_of_nothing():
    group = [SplitMoments(), SplitMoments(), SplitMoments()]
    x, y = torch.randn(50, 8), torch.randn(3, 8)
    group[0].train.update(x)
    group[1].train.update(y)
    lend(group)
    assert [(one.train.seen, one.train.borrowed) for one in group] == [(50, 8), (3, 8), (0, 8)]
    both = torch.cat([x, y]).double()
    for one, own in zip(group, (x, y, y[:0]), strict=True):
        wanted = (own.double().T @ own.double() + 8 * (both.T @ both) / 53) / (len(own) + 8)
        torch.testing.assert_close(one.train.hessian, wanted)
        torch.testing.assert_close(one.train.mean, (own.double().sum(0) + 8 * both.mean(0)) / (len(own) + 8))
        assert one.train.largest is not None
        assert one.held_out.count == 0


def mixtral(kind="Mixtral", implementation="grouped_mm", **more):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=256, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2,
        experts_implementation=implementation, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def seeded(model):
    """With random weights where transformers begins with zeros."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "experts" in name or "router" in name or "gate.weight" in name:
            parameter.data.normal_(0, 0.2, generator=generator)
    return model


class Apart(nn.Module):
    """Transformers' experts with a layer for each matrix."""

    def __init__(self, fused):
        super().__init__()
        self.experts = nn.ModuleList()
        for up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
            pair = nn.Module()
            pair.up, pair.down = nn.Linear(64, 64, bias=False), nn.Linear(32, 64, bias=False)
            pair.up.weight, pair.down.weight = nn.Parameter(up.detach()), nn.Parameter(down.detach())
            self.experts.append(pair)

    def forward(self, x, index, weights):
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            place, token = torch.where((index == number).T)
            if len(token):
                gate, up = expert.up(x[token]).chunk(2, dim=-1)
                result.index_add_(0, token, expert.down(F.silu(gate) * up) * weights[token, place, None])
        return result


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [pytest.param("Mixtral", "int4_g32", marks=pytest.mark.nightly), ("Qwen3Moe", "mxfp4")],
)
def test_batched_experts_have_the_codes_of_experts_apart(kind, scheme):
    """As transformers builds them, and with a layer for each matrix."""
    fused, apart = mixtral(kind, "eager"), mixtral(kind, "eager")
    for layer in apart.model.layers:
        layer.mlp.experts = Apart(layer.mlp.experts)
    config, given = SchemeConfig(scheme=scheme), {"calibration": TOKENS, "methods": (Clip(), GPTQ())}
    report = quantize_(fused, config, linear_and_experts, **given)
    quantize_(apart, config, lambda m, n: linear_and_experts(m, n) and "gate" not in n, **given)
    for one, two in zip(fused.model.layers, apart.model.layers, strict=True):
        for e, expert in enumerate(two.mlp.experts.experts):
            assert torch.equal(one.mlp.experts.gate_up_proj[e].dequantize(), expert.up.weight.dequantize())
            assert torch.equal(one.mlp.experts.down_proj[e].dequantize(), expert.down.weight.dequantize())
    results = {layer.name: layer for layer in report.changed if "experts" in layer.name}
    assert len(results) == 4
    assert all(layer.calibrated.ratio < 1 for layer in results.values())
    assert all("tokens were sent to an expert" in layer.reason for layer in results.values())
    assert sum(layer.calibrated.tokens for layer in results.values()) == 4 * 2 * 11 * 24


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
@pytest.mark.parametrize("other", ["grouped_mm", "batched_mm"])
def test_all_products_of_experts_are_seen_as_those_one_by_one(kind, other):
    """Moments of `grouped_mm` and `bmm` are those of single products, with the same tokens held out."""
    x = torch.randn(20, 64)
    roles = torch.tensor([TRAIN, HELD_OUT, PADDING, TRAIN]).repeat(5).to(torch.int8)
    found = []
    for implementation in ("eager", other):
        layer = seeded(mixtral(kind, implementation)).model.layers[0].mlp
        tokens = Tokens(Capture({}), [roles])
        tokens.source = Source.of(x, roles)
        target = type("Target", (), {"name": "w", "parameter": layer.experts.gate_up_proj})
        down = type("Target", (), {"name": "v", "parameter": layer.experts.down_proj})
        with ExpertWatch([target, down], tokens, False) as watch, torch.no_grad():
            layer(x[None])
        found.append(watch.moments)
    for name in ("w", "v"):
        for one, two in zip(found[0][name], found[1][name], strict=True):
            for kind in ("train", "held_out"):
                ours, theirs = getattr(one, kind), getattr(two, kind)
                assert ours.count == theirs.count
                if ours.count:
                    torch.testing.assert_close(ours.hessian, theirs.hessian, rtol=1e-5, atol=1e-6)
        assert sum(one.train.count for one in found[0][name]) == 2 * 10
        assert sum(one.held_out.count for one in found[0][name]) == 2 * 5


def test_experts_share_the_outer_scale_of_their_weight_and_are_saved(tmp_path):
    model = mixtral()
    config = SchemeConfig(scheme="nvfp4")
    report = quantize_(
        model,
        config,
        linear_and_experts,
        calibration=TOKENS,
        methods=(Rotate(), AWQ(ratios=2), Clip(), GPTQ()),
    )
    weight, dense = (
        model.model.layers[0].mlp.experts.down_proj,
        mixtral().model.layers[0].mlp.experts.down_proj,
    )
    assert torch.equal(weight.outer, fast.quantize(dense, "nvfp4").outer)
    told = {layer.name: layer.reason for layer in report.changed}
    assert "neither rotated nor learned" in told["model.layers.0.mlp.experts.down_proj"]
    save_pretrained(model, tmp_path)
    read = load_pretrained(tmp_path)
    assert same(read.model.layers[0].mlp.experts.down_proj, weight)
    with torch.no_grad():
        assert torch.equal(read(TOKENS[0]).logits, model(TOKENS[0]).logits)


@pytest.mark.nightly
def test_a_killed_call_goes_on_behind_experts(tmp_path):
    one, two = mixtral(), mixtral()
    given = {"calibration": TOKENS, "methods": (Clip(), AutoRound(steps=1)), "resume": tmp_path}
    first = quantize_(one, INT4, linear_and_experts, **given)
    second = quantize_(two, INT4, linear_and_experts, **given)
    assert_same(two, one)
    assert str(first) == str(second)


def test_experts_whose_inputs_overflow_are_an_error():
    """What they make inside themselves is seen by no check of the model's first run."""
    model = mixtral()
    model.model.layers[0].mlp.experts.gate_up_proj.data[2] *= 1e11
    with pytest.raises(
        ValueError,
        match=r"layers.0.mlp.experts.down_proj\[2\].*: sums of squared inputs",
    ):
        quantize_(model, INT4, linear_and_experts, calibration=TOKENS, methods=(GPTQ(),))


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: [row @ w[e] for e in range(3) for row in x],
        lambda x, w: [w.mT[e] @ row for e in range(3) for row in x],
        lambda x, w: [w.mT[e] @ x.T for e in range(3)],
        torch.matmul,
        lambda x, w: x[None] @ w,
        lambda x, w: torch.bmm(x.expand(3, 4, 16), w),
    ],
)
def test_rows_of_all_experts_are_seen_however_they_are_multiplied(product):
    """By vectors, from either side, or by one matrix of tokens for all of them; sparse matrices go by."""
    x, weight = torch.randn(4, 16), nn.Parameter(torch.randn(3, 16, 8))
    target = type("Target", (), {"name": "w", "parameter": weight})
    with ExpertWatch([target], None, False) as watch, torch.no_grad():
        product(x, weight)
        x.to_sparse() @ x.T
    for one in watch.moments["w"]:
        assert one.train.count == 4
        # Products and sums of float32 rows in float64.
        torch.testing.assert_close(one.train.hessian, x.T.double() @ x.double() / 4, rtol=1e-12, atol=1e-12)


def test_memory_of_a_copy_that_is_gone_is_no_copy():
    weight = nn.Parameter(torch.randn(3, 16, 16))
    target = type("Target", (), {"name": "w", "parameter": weight})
    with ExpertWatch([target], None, False) as watch, torch.no_grad():
        copied = weight[torch.tensor([0])]
        x = torch.empty(0).set_(copied.untyped_storage(), 0, (4, 16))
        del copied
        x @ weight[1]
    assert [one.train.count for one in watch.moments["w"]] == [0, 4, 0]


class Turned(Block):
    """All tokens go to both of two experts, whose weights are (experts, in, out), or (experts, out, in)."""

    def __init__(self, is_transposed):
        super().__init__()
        torch.manual_seed(3)
        up, down = torch.randn(2, 32, 64), torch.randn(2, 64, 32)
        self.is_transposed = is_transposed
        self.up = nn.Parameter(up if is_transposed else up.mT.contiguous())
        self.down = nn.Parameter(down if is_transposed else down.mT.contiguous())

    def forward(self, x):
        up, down = (self.up, self.down) if self.is_transposed else (self.up.mT, self.down.mT)
        return super().forward(x + sum(torch.relu(x @ up[e]) @ down[e] for e in range(2)))


@pytest.mark.parametrize(
    ("scheme", "methods"),
    [
        ("int4_g32_asymmetric", (Clip(), GPTQ())),
        ("nvfp4", (Clip(), GPTQ())),
        ("mxfp4", (GPTQ(order="groups"),)),
        ("int3_g32", (HQQ(),)),
        ("int8_rowwise", (Clip("none"),)),
        ("fp8_rowwise", (GPTQ(),)),
    ],
)
def test_experts_stored_in_out_have_the_codes_of_experts_stored_out_in(scheme, methods):
    """Codes, scales and zero points are stored as rounding stores those of the whole weight."""
    weights, config = [], SchemeConfig(scheme=scheme)
    for turned in (True, False):
        model = stack()
        model.blocks = nn.ModuleList([Turned(turned)])
        dense = model.blocks[0].up.detach().clone()
        data = {"calibration": inputs(6)} if any(one.calibrates for one in methods) else {}
        report = quantize_(model, config, lambda m, n: isinstance(m, Turned), methods=methods, **data)
        weights.append((model.blocks[0].up, model.blocks[0].down))
        results = {layer.name: layer.calibrated for layer in report.changed}
        assert {one.method.split(" + ")[-1] for one in results.values()} == {methods[-1].name}
        whole = fast.quantize(dense, scheme, axis=-2 if turned else -1)
        parts = ("scale", "zero", "outer")
        shapes = [[None if part is None else part.shape for part in (getattr(q, n) for n in parts)]
                  for q in (whole, weights[-1][0].stored)]  # fmt: skip
        assert shapes[0] == shapes[1]
    for one, two in zip(*weights, strict=True):
        assert one.block_axis == -2
        assert torch.equal(one.dequantize(), two.dequantize().mT)


def test_a_report_says_what_each_expert_got():
    model = seeded(mixtral("GptOss"))
    report = quantize_(model, INT4, linear_and_experts, calibration=TOKENS, methods=(Clip(), GPTQ()))
    layer = next(one for one in report.changed if one.name.endswith("layers.1.mlp.experts.down_proj"))
    whole, experts = layer.calibrated, layer.calibrated.experts
    assert (sum(one.tokens for one in experts), len(experts)) == (whole.tokens, 4)
    assert sum(one.error for one in experts) == whole.error
    for i, one in enumerate(experts):
        assert f"expert {i}: {one.method} of {one.tokens} tokens {one.ratio:.3f}" in layer.reason
    many = replace(whole, experts=experts * 3)
    assert "4 more experts" in str(many)
    assert "expert 8" not in str(many)


def test_blocks_along_the_outputs_of_experts_are_refused():
    model = mixtral()
    config = SchemeConfig(scheme="int4_g32", axis=-2)
    with pytest.raises(ValueError, match="axis=-2 runs them along its outputs"):
        quantize_(model, config, linear_and_experts, calibration=TOKENS, methods=(GPTQ(),))


def test_experts_that_cannot_stand_alone_are_rounded():
    kind, scheme, why = "Mixtral", "int8_tensorwise", "its scales span experts"
    model, expected = mixtral(kind), mixtral(kind)
    config = SchemeConfig(scheme=scheme)
    report = quantize_(model, config, linear_and_experts, calibration=TOKENS, methods=(GPTQ(),))
    told = {layer.name: layer.reason for layer in report.changed}
    assert told["model.layers.1.mlp.experts.gate_up_proj"].endswith(f"rounded to nearest, {why}")
    quantize_(expected, config, linear_and_experts)
    ours, theirs = (m.model.layers[1].mlp.experts.gate_up_proj for m in (model, expected))
    assert same(ours, theirs)


def test_methods_without_data_take_experts_too():
    model = mixtral()
    dense = copy.deepcopy(model.model.layers[0].mlp.experts.down_proj)
    quantize_(model, INT4, linear_and_experts, methods=(Clip("none"),))
    weight = model.model.layers[0].mlp.experts.down_proj
    for e in range(4):
        scales = fast.search_scales(dense[e], "int4_g32")
        assert torch.equal(
            weight[e].dequantize(), fast.dequantize(fast.quantize(dense[e], "int4_g32", scales=scales))
        )


def test_names_of_experts():
    model = routed()
    lists = module.lists_of_experts(model, ["blocks.0", "blocks.1"])
    assert lists == ("blocks.0.experts", "blocks.1.experts")
    assert module.place_of_expert("blocks.1.experts.12.0.weight", lists) == "blocks.1.experts.*.0.weight"
    assert module.place_of_expert("blocks.1.one.weight", lists) is None
    assert module.expert_of("blocks.1.experts.12.0.weight", lists) == "blocks.1.experts.12"
    assert module.expert_of("blocks.1.one.weight", lists) is None
    names = [f"blocks.{b}.experts.{e}.{i}.weight" for b in (0, 1) for e in (0, 1) for i in (0, 2)]
    assert module.siblings(names, lists)[0] == ["blocks.0.experts.0.0.weight", "blocks.0.experts.1.0.weight"]
    assert module.reached_by_siblings(names, lists, names[1:2]) == {"blocks.0.experts.1.2.weight"}
