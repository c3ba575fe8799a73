"""Experiment `qat_overhead`: the models, what is counted, rows, resumption, and what a failure leaves."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from ao_lab.measure.turns import HostWatch, Plan
from experiments.harness import registry
from experiments.harness.measuring import Wrong
from experiments.harness.paths import Paths
from experiments.harness.rows import Journal, Row, publish
from experiments.models.llama import LLAMA_3_2_3B, LLAMA_3_8B_TWO_LAYERS, TINY, TINY_TWO_LAYERS
from experiments.qat_overhead import page as qat_overhead_page
from experiments.qat_overhead import run
from experiments.qat_overhead.page import MEMORY, TIME, missed, overheads, published
from experiments.qat_overhead.run import (
    COMPILED,
    EAGER,
    GPU_GROUPS,
    TINY_GROUPS,
    WARMUP,
    Bench,
    measure,
    remaining,
)
from experiments.qat_overhead.step import (
    BY_ROWWISE,
    CODES,
    INT4,
    INT8_INT4,
    KERNELS,
    LORA,
    OURS,
    PLAIN,
    RECIPES,
    TORCHAO,
    VARIANTS,
    DecoderLayers,
    ModelWithLoss,
    Trainer,
    Variant,
    linear_shapes,
    random_model,
    rounding_bytes,
)
from experiments.report import pages
from experiments.report.results import Results
from experiments.report.targets import percent_over
from experiments.runs.settings import settings_for
from tests.experiments.harness import tiny

# The page of experiment `qat_overhead`: targets of the real shapes alone, published values, what was not measured.

COSTS = {"ours": (6.5, 2.0), LORA: (-10.0, -20.0), "torchao": (80.0, 70.0), "bfloat16": (0.0, 0.0)}


def row(method, metric, value, data=LLAMA_3_8B_TWO_LAYERS.name, setting="eager"):
    return Row(
        experiment="qat_overhead",
        table=f"qat_overhead/full/{data}",
        setting=setting,
        method=method,
        metric=metric,
        value=value,
        unit="",
        device="a GPU",
        seed=0,
    )


def rows(data=LLAMA_3_8B_TWO_LAYERS.name, costs=COSTS):
    made = []
    for setting in ("eager", "compiled"):
        for variant in VARIANTS:
            time, memory = costs[LORA if variant.lora else variant.library]
            made.append(row(variant.method, "status: ok", 1.0, data, setting))
            made.append(row(variant.method, TIME, time, data, setting))
            made.append(row(variant.method, MEMORY, memory, data, setting))
            if variant is PLAIN:
                made.append(row(variant.method, "time again over plain", 0.25, data, setting))
            else:
                made.append(row(variant.method, "bytes to round", 8.6, data, setting))
    return made


def text(section):
    return " ".join(section.paragraphs)


def test_targets_are_of_ours_alone():
    assert missed(Results(rows())) == []
    late = missed(Results(rows(costs={**COSTS, "ours": (8.04, 5.5)})))
    assert len(late) == 8
    assert late[:2] == [
        f"ours, {INT8_INT4}, eager: time over plain 8.04 of 8 %",
        f"ours, {INT8_INT4}, eager: peak memory over plain 5.5 of 5 %",
    ]
    assert f"ours, {INT4}, compiled: peak memory over plain 5.5 of 5 %" in late
    late = missed(Results(rows(costs={**COSTS, LORA: (0.5, -20.0)})))
    assert late[0] == f"ours, {INT8_INT4}, LoRA, eager: time over plain 0.5 of 0 %"
    assert len(late) == 2
    assert missed(Results([])) == []


def test_published_costs_follow_from_published_rates():
    found = {(model, hardware, source[:12]): costs for model, hardware, source, _, *costs in overheads()}
    # 1408.8 and 737.7 tokens a second, 13.8 and 14.5 GB: -47.6% is +91%.
    time, memory = found["Llama-3.2-3B", "GPU not stated", "pytorch/ao c"]
    assert (time, memory) == (pytest.approx(90.97, abs=0.01), pytest.approx(5.07, abs=0.01))
    time, memory = found["Llama-3-8B", "GPU not stated", "pytorch/ao c"]
    assert (time, memory) == (pytest.approx(48.7, abs=0.01), pytest.approx(86.9, abs=0.05))
    assert len(found) == 5
    assert {one.model for one in published()} == {"Llama-3-8B", "Llama-3.2-3B"}
    assert all(one.source for one in published())


def test_sections_of_the_real_shapes():
    (section,) = qat_overhead_page.sections(rows())
    assert section.title == "Two blocks of Llama-3-8B (a GPU)"
    assert "All 12 values that have a target meet it." in text(section)
    assert "**Targets of ours**: 8% time and 5% peak memory" in text(section)
    assert "eager +0.25%, compiled +0.25%" in text(section)
    assert len(section.drawings) == 1
    (table,) = section.tables
    assert len(table.lines) == 2 * len(VARIANTS)
    assert all(len(line) == len(table.columns) for line in table.lines)
    (late,) = qat_overhead_page.sections(rows(costs={**COSTS, "ours": (9.0, 1.0)}))
    assert text(late).startswith(
        "**Missed targets: 4.** ours, int8 dynamic, int4 g32, eager: time over plain 9.0 of 8 %"
    )


def test_published_values_stand_beside_the_whole_model_alone():
    (whole,) = qat_overhead_page.sections(rows(LLAMA_3_2_3B.name))
    assert [table.caption for table in whole.tables][-1] == "Published, for comparison"
    assert "arget" not in text(whole)
    (stand_in,) = qat_overhead_page.sections(rows(TINY_TWO_LAYERS.name, {**COSTS, "ours": (900.0, 0.0)}))
    assert stand_in.paragraphs[0].startswith("**A proxy model**")
    assert len(stand_in.tables) == 1
    assert not stand_in.drawings
    assert "issed targets" not in text(stand_in)


def test_published_ratios_are_beside_the_same_model_and_recipe():
    found = [
        one for one in qat_overhead_page.comparisons(rows(LLAMA_3_2_3B.name)) if one.measured is not None
    ]
    assert [(one.model, one.method, one.metric) for one in found] == [
        ("Llama-3.2-3B", "QAT 8da4w", "throughput over plain training"),
        ("Llama-3.2-3B", "QAT 8da4w", "peak memory over plain training"),
    ]
    assert found[0].published == pytest.approx(0.524)
    assert found[0].measured == pytest.approx(1 / 1.065)
    assert found[1].measured == pytest.approx(1.02)
    others = qat_overhead_page.comparisons([*rows(), *rows(TINY_TWO_LAYERS.name)])
    assert len(others) == len(published())
    assert {one.measured for one in others} == {None}


def test_what_was_not_measured_is_said():
    made = [one for one in rows() if one.method != f"torchao, {INT4}"]
    made.append(row(f"torchao, {INT4}", "status: missing: torchao is not installed", 0.0))
    (section,) = qat_overhead_page.sections(made)
    assert f"**Not measured: 1.** torchao, {INT4}, eager (missing: torchao is not installed)." in text(
        section
    )


def test_the_page_is_written(tmp_path):
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    publish(
        places.data / "qat_overhead.csv", [*rows(), *rows(LLAMA_3_2_3B.name), *rows(TINY_TWO_LAYERS.name)]
    )
    page = pages.make_page(places, "qat_overhead")
    assert page is not None
    assert len(page.sections) == 3
    assert len(page.pictures) == 4  # each in two widths
    assert registry.EXPERIMENTS["qat_overhead"].part_of == "qat"


MINE = Variant(library=OURS, recipe=INT8_INT4)
ADAPTED = replace(MINE, lora=True)
PLAN = Plan(rounds=2, warmup=0, seconds=1.0, fewest=2)
GROUP = replace(TINY_GROUPS[0], variants=(PLAIN, MINE), plan=PLAN)


class Script(HostWatch):
    """Calls nothing, and says that plain training takes 10 ms, ours 11, and plain again 10.1; 5 after another variant."""

    settled = (10e-3, 11e-3, 10.1e-3)

    def seconds(self, calls, *, cold=False):
        count = len(calls) // (WARMUP + 1)
        assert [call.__self__ for call in calls[:: WARMUP + 1]] == [
            call.__self__ for call in calls[WARMUP :: WARMUP + 1]
        ]
        settled = self.settled if count == 3 else (self.settled[0], self.settled[2])
        return [one for last in settled for one in (*[5e-3] * WARMUP, last)]


def bench(folder, groups=(GROUP,), watch=None):
    return Bench(tiny.settings(folder), groups, watch or Script())


def values(rows, method, setting=EAGER):
    return {row.metric: row.value for row in rows if (row.method, row.setting) == (method, setting)}


def trainer(whole=False, shape=TINY_TWO_LAYERS):
    return Trainer.of(shape, 2, 16, "cpu", 0, whole=whole)


def one_of_each_kind(group):
    """The group with the first variant of each library, of adapters, and of each way of products; the former two where layers
    are run one by one, as what is compiled or has a head keeps and rounds the same of them."""
    kinds = {}
    for one in group.variants:
        if group is TINY_GROUPS[0] or not (one.lora or one.library == TORCHAO):
            kinds.setdefault((one.library, one.lora, one.products), one)
    return replace(group, variants=tuple(kinds.values()))


@pytest.fixture(scope="module", params=["day", pytest.param("all", marks=pytest.mark.nightly)])
def quick(request, tmp_path_factory):
    """The groups and the rows of a whole run of the stand-ins, by day of a variant of each kind."""
    groups = TINY_GROUPS if request.param == "all" else tuple(map(one_of_each_kind, TINY_GROUPS))
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(run, "TINY_GROUPS", groups)
        # However slow the machine is: what a limit of seconds leaves is another test's.
        settings = replace(tiny.settings(tmp_path_factory.mktemp("cache")), seconds=1e6)
        return groups, run.run(settings)


def test_shapes_are_those_of_published_models():
    with torch.device("meta"):
        whole, blocks = ModelWithLoss(LLAMA_3_2_3B, 8), DecoderLayers(LLAMA_3_8B_TWO_LAYERS, 8)
    assert sum(parameter.numel() for parameter in whole.parameters()) == 3_212_749_824
    linears = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    assert sum(parameter.numel() for parameter in blocks.parameters()) == 2 * (linears + 2 * 4096)
    assert all(group.tokens == 8192 for group in GPU_GROUPS)
    blocks_of = [(one.part, one.setting) for one in GPU_GROUPS if one.shape is LLAMA_3_8B_TWO_LAYERS]
    assert blocks_of == [(EAGER, EAGER), (COMPILED, COMPILED), ("products", EAGER), ("products", COMPILED)]


def test_it_is_transformers_llama():
    """The same weights give the loss and the gradients of an implementation that we did not write."""
    transformers = pytest.importorskip("transformers")
    shape = replace(TINY, rope_factor=32.0)
    rope = {
        "rope_type": "llama3",
        "rope_theta": shape.rope_base,
        "factor": shape.rope_factor,
        "low_freq_factor": shape.rope_low,
        "high_freq_factor": shape.rope_high,
        "original_max_position_embeddings": shape.rope_context,
    }
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.epsilon,
        max_position_embeddings=131072,
        rope_parameters=rope,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    ours = random_model(shape, 24, "cpu", 0, whole=True, dtype=torch.float64)
    theirs = transformers.LlamaForCausalLM(config).double()
    renamed = {"model." + name.removeprefix("blocks."): tensor for name, tensor in ours.state_dict().items()}
    theirs.load_state_dict({**renamed, "lm_head.weight": ours.embed_tokens.weight})
    tokens = torch.arange(48).reshape(2, 24) * 7 % shape.vocabulary
    loss, expected = ours(tokens), theirs(tokens, labels=tokens).loss
    # Rotations and the loss itself are float32.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    pairs = (
        (ours.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad),
        (
            ours.blocks.layers[0].self_attn.k_proj.weight.grad,
            theirs.model.layers[0].self_attn.k_proj.weight.grad,
        ),
    )
    for mine, right in pairs:
        assert float((mine - right).norm() / right.norm()) < 1e-5


def test_bytes_of_rounding():
    """Read and written, in forward and in backward: 8 bytes of an element."""
    layers = [(3, 5), (7, 5)]
    assert rounding_bytes(RECIPES[INT4], layers, 11) == 8 * (15 + 35)
    assert rounding_bytes(RECIPES[INT8_INT4], layers, 11) == 8 * (15 + 35 + 2 * 55)
    with torch.device("meta"):
        shapes = linear_shapes(DecoderLayers(LLAMA_3_8B_TWO_LAYERS, 8))
    assert len(shapes) == 14
    assert rounding_bytes(RECIPES[INT8_INT4], shapes, 8192) == 8_589_934_592


def test_rows_of_a_group(tmp_path):
    rows = measure(bench(tmp_path), Journal())
    plain, ours = values(rows, PLAIN.method), values(rows, MINE.method)
    assert plain["time"] == pytest.approx(10.0)
    assert plain["time over plain"] == 0.0
    assert plain["time again over plain"] == pytest.approx(1.0)
    assert ours["time"] == pytest.approx(11.0)
    assert ours["time over plain"] == pytest.approx(10.0)
    assert ours["tokens/s"] == pytest.approx(16 / 11e-3)
    assert ours["bytes to round"] * 1e9 == rounding_bytes(
        RECIPES[INT8_INT4], linear_shapes(trainer().model), 16
    )
    assert ours["time to round at the copy rate"] == pytest.approx(ours["bytes to round"] / 4.3)
    assert "bytes to round" not in plain
    assert {row.table for row in rows} == {f"qat_overhead/quick/{TINY_TWO_LAYERS.name}"}
    assert percent_over(3.0, 2.0) == 50.0


def test_a_run_of_the_stand_ins(quick):
    """Every variant gives numbers; ours keeps exactly what plain training keeps, torchao's several times as much."""
    groups, made = quick
    missing = [row for row in made if row.metric.startswith("status: ") and row.metric != "status: ok"]
    assert [row.metric for row in missing if "not installed" not in row.metric] == []
    for group in groups:
        rows = [row for row in made if row.table.endswith(group.shape.name)]
        for variant in group.variants:
            found = values(rows, variant.method, group.setting)
            if "status: ok" not in found:
                continue
            assert found["time"] > 0
            kept = found["kept for backward over plain"]
            # With adapters weights need no inputs, adapters their small activations.
            limits = (-30, 10) if variant.lora else (100, 1e5) if variant.library == "torchao" else (0, 0)
            # On a CPU the recipe's operands are emulated in float32.
            if variant.products != BY_ROWWISE:
                assert limits[0] <= kept <= limits[1]
            assert ("bytes to round" in found) == (variant.rounds and not variant.products)
            assert 0 < found.get("change by products", 0.01) < 0.1
            assert (group.setting == COMPILED) == ("change by compiling" in found)
            assert found.get("change by compiling", 0.0) < 0.01
    # A compiled block makes again what is cheap to make.
    eager, compiled = (values(made, PLAIN.method, setting) for setting in (EAGER, COMPILED))
    assert compiled["kept for backward"] < eager["kept for backward"]


def test_adapters_alone_are_trained():
    one = trainer()
    dense = one.own_bytes()
    ADAPTED.prepare(one.model)
    trained = {name for name, parameter in one.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(name.endswith(("lora_a", "lora_b")) for name in trained)
    # Four bits and a scale of 32 bits for 32 of them, where there were 16 bits.
    assert one.own_bytes() < 0.6 * dense
    one.first_step()
    assert sum(parameter.grad is not None for parameter in one.model.parameters()) == 0


def test_finished_rows_are_not_measured_again(tmp_path):
    journal = Journal(tmp_path / "rows.csv")
    measure(bench(tmp_path), journal)

    class Never(HostWatch):
        def seconds(self, calls, *, cold=False):
            raise AssertionError("measured again")

    again = measure(bench(tmp_path, watch=Never()), Journal(tmp_path / "rows.csv"))
    assert len(again) == len(journal.rows)


def test_a_missing_variant_is_measured_beside_plain_training(tmp_path):
    """Whose own rows stay those of the first run."""
    other = Variant(library=OURS, recipe=INT4)
    assert remaining((PLAIN, MINE, other), {PLAIN, MINE}) == (PLAIN, other)
    journal = Journal()
    measure(bench(tmp_path), journal)
    before = values(journal.rows, PLAIN.method)

    class Slower(Script):
        settled = (20e-3, 30e-3, 20e-3)

    rows = measure(bench(tmp_path, (replace(GROUP, variants=(PLAIN, MINE, other)),), Slower()), journal)
    assert values(rows, PLAIN.method) == before
    assert values(rows, other.method)["time over plain"] == pytest.approx(50.0)


@pytest.mark.parametrize("broken", [PLAIN, MINE])
def test_a_failure_is_no_row_of_the_journal(tmp_path, monkeypatch, broken):
    def prepare(variant, model):
        if variant == broken:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Variant, "prepare", prepare)
    journal = Journal()
    rows = measure(bench(tmp_path), journal)
    assert "status: error: RuntimeError: out of memory" in values(rows, broken.method)
    assert broken.method not in {row.method for row in journal.rows}
    other = values(rows, (MINE if broken == PLAIN else PLAIN).method)
    assert list(other) == ["status: not run: plain training failed"] if broken == PLAIN else "time" in other


def test_nothing_starts_after_the_deadline(tmp_path):
    late = bench(tmp_path)
    late.clock = lambda: late.until + 1
    rows = measure(late, journal := Journal())
    assert journal.rows == []
    assert {row.metric for row in rows} == {"status: not run: the 150 s of a run were over"}


def test_a_lost_gradient_is_found():
    made = trainer()
    made.first_step()
    lost = made.model.layers[1].mlp.up_proj
    lost.forward = lambda x: torch.nn.functional.linear(x, lost.weight.detach())
    with pytest.raises(Wrong, match=r"1 parameters have no finite gradient: layers\.1\.mlp\.up_proj\.weight"):
        made.first_step()
    del lost.forward
    made.gradient[0, 0, 0] = float("inf")
    with pytest.raises(Wrong, match="no finite gradient"):
        made.first_step()


def test_a_model_is_compiled_once():
    """One program for all blocks and for every way in which the model is stepped."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    made = trainer()
    made.output()
    made.compile("aot_eager")
    made.first_step()
    made.saved_bytes()
    made.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_kept_memory_counts_each_tensor_once():
    """x of a linear layer and its output that a product keeps twice; the layer's own weight is not counted."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))

        def forward(self, x):
            y = self.first(x)
            return self.second(y) * y

    made = Trainer(Twice(), torch.ones(4, 8, requires_grad=True), torch.ones(4, 8))
    # y, and what the second layer makes of it: 4 x 8 float32 each; the batch itself is not counted.
    assert made.saved_bytes() == 2 * 4 * 8 * 4
    assert made.inputs.grad is None


def test_products_of_codes_are_those_of_the_converted_layer():
    """Integers and 8-bit floats: the output in training has the bits of the model after step convert."""
    from ao_lab import QATConfig, quantize_

    for recipe, kernel in KERNELS.items():
        one = trainer()
        Variant(library=OURS, recipe=recipe, products=CODES).prepare(one.model)
        trained = one.output()
        quantize_(one.model, QATConfig(RECIPES[recipe].ours(kernel), step="convert"))
        assert torch.equal(one.output(), trained)
        other = trainer()
        Variant(library=OURS, recipe=recipe).prepare(other.model)
        assert not torch.equal(other.output(), trained)


def test_products_by_a_recipe_round_first():
    from ao_lab.qat.layers import LowPrecisionQATLinear

    one = trainer()
    Variant(library=OURS, recipe=INT4, products=BY_ROWWISE).prepare(one.model)
    kinds = {type(module) for module in one.model.modules() if isinstance(module, nn.Linear)}
    assert kinds == {LowPrecisionQATLinear}


def test_a_part_is_measured_alone(tmp_path):
    settings = replace(settings_for("quick", "cpu", tmp_path), only=("products",), seconds=30.0)
    made = run.Bench.of(settings)
    assert [one.part for one in made.groups] == ["products"]
    assert made.seconds == 30.0
    with pytest.raises(ValueError, match="unknown part 'fast' of qat_overhead"):
        run.check_parts(["fast"])


def test_variants_prepare_the_linear_layers_of_the_blocks():
    from ao_lab.qat.layers import QATLinear

    for variant in VARIANTS:
        if variant.missing():
            continue
        made = trainer(whole=True)
        variant.prepare(made.model)
        linears = [module for module in made.model.modules() if isinstance(module, nn.Linear)]
        assert len(linears) == 14
        ours = [isinstance(module, QATLinear) for module in linears]
        assert all(ours) if variant.library == OURS and not variant.lora else not any(ours)
        assert (type(linears[0]) is nn.Linear) == (variant is PLAIN)
