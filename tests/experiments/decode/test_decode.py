"""Experiment `decode`: the model, its compiled generation, the checks before the clock, rows, and what is resumed."""

import copy
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import triton
from torch import nn
from triton.compiler import ASTSource

import ao_lab
from experiments.decode import page as decode_page
from experiments.decode import run
from experiments.decode.configs import (
    BASE,
    CONFIGS,
    DEPENDENT,
    OUR_CONFIGS,
    OURS,
    Config,
    chosen,
    stored_bytes,
)
from experiments.decode.model import (
    CachedAttention,
    CachedLlama,
    Decoding,
    Plan,
    PositionTables,
    compiled_programs,
    cuda_times,
    random_llama,
    sample,
)
from experiments.decode.page import missed, published_speedup
from experiments.decode.run import Bench, Memory, measure
from experiments.harness import revision
from experiments.harness.measuring import Wrong
from experiments.harness.paths import Paths
from experiments.harness.rows import Journal, Row, publish, read
from experiments.models.llama import LLAMA_3_1_8B, TINY, relative_change, scaled_frequencies
from experiments.ptq import run as ptq
from experiments.ptq.run import all_tasks
from experiments.report import pages
from experiments.report.results import Results, decoding, family, published
from experiments.runs import run as harness
from experiments.runs.settings import SERVED, settings_for
from fast.kernels.layers.attention import attention_kernel
from fast.layers.attention import WARPS, attend_one, checked_sizes
from tests.emulator.interpreter_process import lines_of
from tests.experiments.harness import tiny
from tests.fast.kernels.compiling.kernel_compiler import TARGET, machine

# The page of experiment `decode`: published values beside the real shapes alone, and missed targets.

SPEEDS = {"int8wo": 1.6, "float8wo": 1.3, "int4wo-64": 2.0}


def row(setting, method, metric, value, data="llama-3.1-8b-random", beside=None):
    return Row(
        experiment="decode",
        table=f"decode/full/{data}",
        setting=setting,
        method=method,
        metric=metric,
        value=value,
        unit="",
        published=beside,
        device="a GPU",
        seed=0,
    )


def rows(data="llama-3.1-8b-random", beside=True):
    made = []
    for config in CONFIGS:
        if config.method == "nvfp4wo":
            made.append(row(config.setting, config.method, "status: error: Oops", 0.0, data))
            continue
        speed = SPEEDS.get(config.method, 1.0) * (1.1 if config.setting == "torchao" else 1.0)
        values = {
            "status: ok": 1.0,
            "tokens/s": 200 * speed,
            "speedup over bfloat16": speed,
            "model size": 4.1 if "4" in config.method else 7.51,
            "peak memory": 9.0,
            "quantize time": 2.0,
            "quantize peak memory": 1.2 if config.method == "int8dq" else 1.05,
        }
        given = published(config.method) if beside else {}
        made += [
            row(config.setting, config.method, metric, value, data, given.get(metric))
            for metric, value in values.items()
        ]
    return made


def test_published_ratios_are_those_of_the_paper():
    ratios = {"int8wo": 1.57, "float8wo": 1.41, "int4wo-64": 1.90, "float8dq per-row": 1.22}
    assert {method: round(published_speedup(method), 2) for method in ratios} == ratios
    assert published("int4wo-64")["model size"] == 4.22
    assert published_speedup("int8dq") is None
    assert published("int8dq", "Llama-3-8B", "A100-80GB")["tokens/s"] == 8.61
    assert all(one.source for one in decoding())


def test_missed_targets():
    results = Results(rows())
    assert missed(results, "int8wo") == ["torchao's tokens/s 320 of 345"]
    assert missed(results, "float8wo") == ["published speedup 1.3 of 1.41", "torchao's tokens/s 260 of 280"]
    assert missed(results, "int8dq") == ["torchao's tokens/s 200 of 216", "peak of quantization 1.2 of 1.1"]
    assert missed(results, "nvfp4wo") == missed(results, "mxfp8wo") == []
    grown = [*rows(), row("ours", "int8wo", "model size", 7.60), row("ours", "int8wo", "tokens/s", 360.0)]
    assert missed(Results(grown), "int8wo") == ["published size 7.6 of 7.595"]


def test_the_page_of_the_real_shapes():
    (section,) = decode_page.sections(rows())
    text = " ".join(section.paragraphs)
    assert text.startswith("**Missed targets: 6 configurations.** int8wo (torchao's")
    assert "**Not measured: 2.** nvfp4wo of ours (error: Oops)" in text
    assert "library products**" not in text
    speed, memory, beside = section.tables
    by_name = {tuple(line[:2]): dict(zip(speed.columns, line, strict=True)) for line in speed.lines}
    line = by_name["int4wo-64", "ours"]
    assert (line["published tokens/s (H100)"], line["published over bfloat16"]) == ("241.4", "1.90")
    assert by_name["mxfp8wo", "ours"]["published tokens/s (H100)"] == ""
    assert by_name["nvfp4wo", "ours"]["tokens/s"] == ""
    assert [line[:2] for line in speed.lines[:2]] == [
        ["bfloat16", "baseline"],
        ["bfloat16, library products", "baseline"],
    ]
    pairs = [line[:2] for line in speed.lines]
    assert pairs.index(["int8wo", "torchao"]) == pairs.index(["int8wo", "ours"]) + 1
    line = next(line for line in memory.lines if line[:2] == ["int8wo", "ours"])
    assert line[2:6] == ["7.510", "7.52", "9.000", "11.05"]
    assert ["int8dq", "Llama-3-8B", "A100-80GB", "8.61", "0.09"] in [line[:5] for line in beside.lines]
    assert len(section.drawings) == 1


def test_the_fastest_bfloat16_is_said():
    text = " ".join(decode_page.sections(rows())[0].paragraphs)
    assert "**The fastest bfloat16 is 'bfloat16', 200.0 tokens/s**" in text
    (section,) = decode_page.sections(with_rates({"bfloat16, library products": 250.0}))
    assert "**The fastest bfloat16 is 'bfloat16, library products', 250.0 tokens/s**" in section.paragraphs[1]
    speed = section.tables[0]
    lines = {tuple(line[:2]): dict(zip(speed.columns, line, strict=True)) for line in speed.lines}
    assert lines["int4wo-64", "ours"]["over the fastest bfloat16"] == "1.60"
    assert "those of the column 'over bfloat16 beside it'" in section.paragraphs[1]
    assert "over bfloat16 beside it" in speed.columns


def with_rates(rates):
    """Rows with other tokens a second of some forms of bfloat16."""
    kept = [one for one in rows() if one.metric != "tokens/s" or one.method not in rates]
    return kept + [row("baseline", form, "tokens/s", rate) for form, rate in rates.items()]


def test_targets_are_compared_with_the_fastest_bfloat16():
    """Its fastest form, or the baseline as it ran beside any configuration."""
    assert len(missed(Results(with_rates({"bfloat16": 203.0})), "int8wo")) == 1
    for slow in (
        {"bfloat16": 205.0},
        {"bfloat16, library products": 205.0},
        {"bfloat16, dependent launches": 205.0},
    ):
        assert missed(Results(with_rates(slow)), "int8wo")[0].startswith("published speedup")
    beside = [*rows(), row("ours", "mxfp8wo", "bfloat16 before", 205.0)]
    assert missed(Results(beside), "int8wo")[0].startswith("published speedup")


def test_a_stand_in_is_beside_no_published_value():
    (section,) = decode_page.sections(rows("tiny-stand-in-random", beside=False))
    assert "proxy model" in section.title
    assert "**A proxy model**" in section.paragraphs[0]
    assert not section.drawings
    assert not any("published" in column for column in section.tables[0].columns)
    words = " ".join(cell for table in section.tables for line in table.lines for cell in line)
    assert "11.05" not in words
    assert "241.4" not in words


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    places = Paths(folder / "cache", folder / "reports")
    older = row("ours", "nvfp4wo", "tokens/s", 1.0, "tiny-stand-in-random")
    older = replace(older, table=older.table.replace("full", "quick"), device="cpu")
    publish(places.data / "decode.csv", [older])
    made = harness.reproduce(["decode"], "quick", "cpu", places, only=["int8wo", "bfloat16"])
    assert older in read(places.data / "decode.csv")
    return places, made


def test_a_part_is_reproduced_from_the_command(reproduced):
    places, made = reproduced
    assert any("of them measured now" in what for what, _ in made)
    page = (places.reports / "decode.md").read_text()
    assert "A tiny proxy model (short run, CPU)" in page
    assert set(OUR_CONFIGS) & set(page.split()) == {"int8wo", "nvfp4wo"}


def test_rows_of_several_runs_are_told_apart():
    mixed = [
        replace(one, commit="0832d6b6") if one.method in ("int8dq", "nvfp4wo") else one for one in rows()
    ]
    words = " ".join(decode_page.sections(mixed)[0].paragraphs)
    assert "**Not all at one commit**" in words
    assert "nvfp4wo of ours (error: Oops)" in words
    assert "Not all at one commit" not in " ".join(decode_page.sections(rows())[0].paragraphs)


def test_the_figure_is_drawn():
    (section,) = decode_page.sections(rows())
    picture = pages.svg(section.drawings[0].figure)
    assert "published (torchao), H100" in picture
    assert "int4wo-64" in picture


def test_comparisons_and_findings():
    found = decode_page.comparisons(rows())
    one = next(one for one in found if (one.method, one.metric) == ("int8wo", "tokens/s"))
    assert (one.model, one.published, one.published_on, one.measured, one.measured_on) == (
        "Llama-3.1-8B",
        198.85,
        "H100",
        320.0,
        "a GPU",
    )
    assert one.ratio == pytest.approx(320 / 198.85)
    assert {
        one.measured
        for one in found
        if one.model != "Llama-3.1-8B" or one.metric == "wikitext word perplexity"
    } == {None}
    speedup = next(
        one for one in found if one.metric == "tokens/s over bfloat16" and one.method == "int4wo-64"
    )
    assert (round(speedup.published, 2), speedup.measured) == (1.90, 2.0)
    told = decode_page.findings(rows())
    assert "int8wo generates 320 tokens/s on an a GPU" in told[0]
    assert "(published: 1.57 times, on an H100)" in told[0]
    assert decode_page.findings(rows("tiny-stand-in-random", beside=False)) == []


# Attention of the token that is generated: its kernel in the interpreter, and on a GPU beside torch's attention.


def test_the_kernel_in_the_interpreter():
    assert len(lines_of("producers", "attention")) == 7


def test_the_cache_is_asked_for_before_the_kernel_in_front_has_ended():
    """And nothing else: queries, rotations and results come after the wait."""
    types = {"position": "*i64", "scale": "fp32"}
    names = attention_kernel.arg_names[:8]
    signature = {name: types.get(name, "*bf16") for name in names}
    sizes = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "LENGTH": 232, "STEP": 256, "USE_PDL": True}
    source = ASTSource(
        attention_kernel,
        {**signature, **dict.fromkeys(sizes, "constexpr")},
        sizes,
        {(at,): [["tt.divisibility", 16]] for at in range(7)},
    )
    made = triton.compile(source, target=TARGET, options={"num_warps": WARPS, "launch_pdl": True})
    found = machine("attention_kernel", made.asm, 1)
    assert (found.local, found.stack) == (0, 0)
    # The kernel behind may begin only then.
    assert re.findall(r"griddepcontrol\.(\w+)", found.ptx) == ["wait", "launch_dependents"]
    before, after = "\n".join(found.order).split("ACQBULK")
    wide = [name for name in before.splitlines() if name.startswith("LDG") and "128" in name]
    assert len(wide) == 2 * 256 * 128 * 2 // (16 * 32 * WARPS)
    assert not re.search("^STG", before, re.MULTILINE)
    # The position, beside the cache.
    assert len(re.findall("^LDG", before, re.MULTILINE)) == len(wide) + 1
    assert re.search("^STG", after, re.MULTILINE)


def test_unsupported_sizes_raise():
    qkv, keys = torch.empty(1, 1, 8 * 64), torch.empty(1, 2, 40, 64)
    for wrong in (torch.empty(2, 2, 40, 64), keys.mT.contiguous().mT, torch.empty(1, 2, 40, 48)):
        with pytest.raises(ValueError, match="attend_one takes one token"):
            checked_sizes(qkv, wrong, wrong)
    with pytest.raises(ValueError, match="attend_one takes one token"):
        checked_sizes(qkv[:, :0], keys, keys)
    assert checked_sizes(qkv, keys, keys) == (2, 40, 64)


def test_shapes_without_a_gpu():
    qkv, keys = (torch.empty(size, device="meta") for size in ((1, 1, 8 * 64), (1, 2, 40, 64)))
    row, position = torch.empty(1, 64, device="meta"), torch.empty(1, device="meta")
    assert attend_one(qkv, row, row, position, keys, keys).shape == (1, 1, 4 * 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("position", [0, 1, 7, 255, 256, 299])
def test_on_cuda_it_is_attention(position):
    """Scores and sums of float32, as torch's: only the rounding of rotated elements and of the result differs."""
    torch.manual_seed(position)
    layer = CachedAttention(TINY).to("cuda", torch.bfloat16)
    cache = torch.randn(2, 1, TINY.kv_heads, 300, TINY.head_dim, device="cuda").bfloat16()
    qkv = torch.randn(1, 1, sum(layer.widths), device="cuda").bfloat16()
    index = torch.tensor([position], device="cuda")
    positions = PositionTables.of(TINY, 300, qkv).at(index, TINY.group)
    (keys, values), (other_keys, other_values) = cache.clone(), cache.clone()
    y = attend_one(qkv, positions.cosine, positions.sine, index, keys, values)
    expected = layer._attend(qkv, positions, other_keys, other_values)
    assert torch.equal(values, other_values)
    # Plain torch rounds both products of a rotation and their sum, the kernel the sum.
    torch.testing.assert_close(keys, other_keys, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(y, expected, rtol=2**-5, atol=2**-5)


PLAN = Plan(new=6, rounds=1, backend="aot_eager", graph=False)
PROMPT = torch.arange(32) * 7 % TINY.vocabulary
INT8 = next(config for config in CONFIGS if (config.setting, config.method) == (OURS, "int8wo"))


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def model():
    return random_llama(TINY, "cpu", 0)


def bench(tmp_path, **changes):
    return replace(Bench.of(tiny.settings(tmp_path)), plan=replace(PLAN, new=2, **changes))


def test_shapes_are_those_of_the_published_model():
    with torch.device("meta"):
        made = CachedLlama(LLAMA_3_1_8B)
    assert sum(parameter.numel() for parameter in made.parameters()) == 8_030_261_248
    linears = sum(layer.weight.numel() for layer in made.linears().values())
    assert 2 * linears / 1e9 == pytest.approx(15.01, abs=0.005)
    assert made.lm_head.weight is not made.model.embed_tokens.weight


def taken_apart(model):
    """A state_dict under transformers' names."""
    made = {}
    for name, value in model.state_dict().items():
        parts = value.split(model.model.layers[0].self_attn.widths) if "qkv_proj" in name else [value]
        names = [name.replace("qkv_proj", f"{one}_proj") for one in "qkv"] if "qkv_proj" in name else [name]
        made.update(zip(names, parts, strict=True))
    return made


def test_it_is_transformers_llama():
    """The same weights give the logits of an implementation that we did not write."""
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "llama3",
        "rope_theta": TINY.rope_base,
        "factor": TINY.rope_factor,
        "low_freq_factor": TINY.rope_low,
        "high_freq_factor": TINY.rope_high,
        "original_max_position_embeddings": TINY.rope_context,
    }
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocabulary,
        hidden_size=TINY.width,
        intermediate_size=TINY.feed_forward,
        num_hidden_layers=TINY.layers,
        num_attention_heads=TINY.heads,
        num_key_value_heads=TINY.kv_heads,
        head_dim=TINY.head_dim,
        rms_norm_eps=TINY.epsilon,
        rope_parameters=rope,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    ours = random_llama(TINY, "cpu", 0, torch.float64)
    theirs.load_state_dict(taken_apart(ours))
    assert torch.allclose(theirs.model.rotary_emb.inv_freq.float(), scaled_frequencies(TINY), rtol=1e-6)
    with torch.no_grad():
        expected = theirs(PROMPT[None]).logits[0]
    found = Decoding(ours, PLAN, PROMPT, compiled=False).prefill()
    # Rotations are float32 on both sides, made in another order.
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("method", [None, "int8wo", "int4wo-64", "float8dq per-row", "nvfp4wo"])
def test_compiled_generation_is_eager_generation(model, method):
    """Bit-equal logits and tokens; one compilation for all blocks, whatever their weights are."""
    made = copy.deepcopy(model)
    if method is not None:
        ao_lab.quantize_(made, OUR_CONFIGS[method]())
    torch._dynamo.utils.counters.clear()
    results = []
    for compiled in (False, True):
        generation = Decoding(made, PLAN, PROMPT, compiled=compiled)
        prompt = generation.prefill()
        step = generation.prepare()
        torch.manual_seed(1)
        assert len(generation.generate()) == PLAN.new
        results.append((prompt, step, torch.tensor(generation.tokens), *generation.state.keys))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_compiled_whole_is_the_same(model):
    steps = []
    for whole in (False, True):
        generation = Decoding(model, PLAN, PROMPT, whole=whole)
        generation.prefill()
        steps.append(generation.prepare())
    assert torch.equal(*steps)


def test_a_step_continues_the_prompt(model):
    """Tokens one at a time through the cache have the logits of the whole text at once."""
    wide = copy.deepcopy(model).double()
    generation = Decoding(wide, PLAN, PROMPT, compiled=False)
    generation.prefill()
    generation.generate()
    text = torch.cat([PROMPT, torch.tensor(generation.tokens)])
    last = generation.replay()
    whole = Decoding(wide, PLAN, text, compiled=False).prefill()
    assert torch.allclose(last[0], whole[-1], rtol=1e-9)


def test_sampling_takes_the_top_k_by_their_probability():
    plan = replace(PLAN, top_k=3, temperature=0.5)
    logits = torch.tensor([0.0, 2.0, -50.0, 1.0, 1.5, 0.9])
    drawn = torch.cat([sample(logits, plan) for _ in range(4000)])
    expected = torch.zeros(6)
    expected[[1, 3, 4]] = torch.softmax(logits[[1, 3, 4]] / 0.5, 0)
    found = torch.bincount(drawn, minlength=6) / 4000
    # Four standard deviations of a frequency among 4000.
    assert torch.all((found - expected).abs() <= 4 * (expected * (1 - expected) / 4000).sqrt())


def test_outputs_that_are_wrong():
    logits = torch.tensor([[1.0, 2.0]])
    assert relative_change(logits, None, 0.1, "") == (0.0, "ratio")
    assert relative_change(logits * 1.05, logits, 0.1, "")[0] == pytest.approx(0.05)
    with pytest.raises(Wrong, match=r"differ by 0\.200"):
        relative_change(logits * 1.2, logits, 0.1, "from bfloat16's")
    with pytest.raises(Wrong, match="more than"):
        relative_change(logits * 0, logits * 0, 0.1, "from bfloat16's")
    with pytest.raises(Wrong, match="not finite"):
        relative_change(torch.tensor([[1.0, torch.nan]]), logits, 0.1, "")


def test_a_wrong_product_is_not_timed(tmp_path, monkeypatch):
    def broken(model, config):
        ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig())
        weight = model.model.layers[0].self_attn.o_proj.weight
        weight.scale.fill_(torch.nan)

    monkeypatch.setattr(Config, "quantize", lambda self, model: broken(model, self))
    rows = measure(bench(tmp_path), [INT8], Journal())
    assert [row.metric for row in rows] == ["status: wrong: outputs are not finite"]


def test_an_unquantized_layer_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Config, "quantize", lambda self, model: None)
    (row,) = measure(bench(tmp_path), [INT8], Journal())
    assert row.metric.startswith("status: wrong: 11 linear layers were not quantized")


def test_rows_are_resumed_and_errors_are_statuses(tmp_path, monkeypatch):
    def out_of_order():
        raise RuntimeError("no such\n thing")

    failing = Config(setting=OURS, method="failing", build=out_of_order)
    path = tmp_path / "journal.csv"
    rows = measure(bench(tmp_path), [BASE, failing, INT8], Journal(path))
    kept = read(path)
    assert {row.method for row in kept} == {"bfloat16", "int8wo"}
    assert [r.metric for r in rows if r.method == "failing"] == ["status: error: RuntimeError: no such thing"]
    assert {row.table for row in rows} == {"decode/quick/tiny-stand-in-random"}
    assert {row.published for row in rows} == {None}
    values = {row.metric: row.value for row in rows if row.method == "int8wo"}
    assert values["bandwidth"] == pytest.approx(values["model size"] * values["tokens/s"])
    assert 0 < values["logits, change"] < 0.05
    assert not any(name.startswith(("peak", "quantize peak")) for name in values)
    # The second run measures what failed, and nothing else.
    asked = []
    monkeypatch.setattr(run, "measure_one", lambda bench, config: asked.append(config.method) or {})
    again = measure(bench(tmp_path), [BASE, failing, INT8], Journal(path))
    assert asked == ["failing"]
    assert [row for row in again if row.method != "failing"] == kept


def test_an_interrupted_run_keeps_what_was_measured(tmp_path, monkeypatch):
    def interrupted(bench, config):
        if config is INT8:
            raise KeyboardInterrupt
        return {"tokens/s": (1.0, "tokens/s")}

    monkeypatch.setattr(run, "measure_one", interrupted)
    path = tmp_path / "journal.csv"
    with pytest.raises(KeyboardInterrupt):
        measure(bench(tmp_path), [BASE, INT8], Journal(path))
    assert {row.method for row in read(path)} == {"bfloat16"}


def test_torchao_runs_and_leaves_the_compiler_as_it_was(tmp_path):
    pytest.importorskip("torchao")
    import torch._inductor.config as inductor

    before = (inductor.coordinate_descent_tuning, inductor.force_fuse_int_mm_with_mul)
    peer = next(c for c in CONFIGS if (c.setting, c.method) == ("torchao", "int8wo"))
    rows = measure(bench(tmp_path), [peer], Journal())
    assert {row.metric for row in rows} >= {"status: ok", "tokens/s"}
    assert (inductor.coordinate_descent_tuning, inductor.force_fuse_int_mm_with_mul) == before


def test_the_compiler_is_set_for_each_configuration():
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    before = cache_dir()
    for config in CONFIGS:
        with run.compiler(config, PLAN):
            assert inductor.coordinate_descent_tuning == config.tuned
            assert inductor.triton.enable_pdl == config.dependent
            assert (cache_dir() != before) == config.fresh_cache
    assert [c.method for c in CONFIGS if c.fresh_cache] == [DEPENDENT]
    assert all(c.dependent == (c.setting == "ours" or c.fresh_cache) for c in CONFIGS)


def test_programs_that_are_held_outlive_the_compilers_memory(monkeypatch):
    """A captured graph replays kernels whose programs a compilation from nothing makes the compiler forget."""
    from torch._inductor.codecache import PyCodeCache

    program = object()
    monkeypatch.setattr(PyCodeCache, "modules", [program])
    held = compiled_programs()
    with run.compiler(next(config for config in CONFIGS if config.fresh_cache), PLAN):
        assert program not in PyCodeCache.modules
    assert held == [program]


def test_a_missing_library_is_a_status(tmp_path, monkeypatch):
    monkeypatch.setattr(revision, "version_of", lambda library: "none")
    peer = next(config for config in CONFIGS if config.setting == "torchao")
    (row,) = measure(bench(tmp_path), [peer], Journal())
    assert row.metric == "status: missing: torchao is not installed"


def test_nothing_starts_after_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_one", lambda bench, config: {"tokens/s": (1.0, "")})
    clock = iter([0.0, run.SECONDS - 1, run.SECONDS + 1])
    rows = measure(replace(bench(tmp_path), clock=lambda: next(clock)), [BASE, INT8], Journal())
    assert [row.metric for row in rows] == [
        "tokens/s",
        "status: ok",
        "status: not run: the 455 s of a run were over",
    ]


def test_configurations_are_selected_by_name():
    assert chosen(()) == [config for config in CONFIGS if config.always]
    assert {config.setting for config in chosen(("int8wo",))} == {"ours", "torchao"}
    assert {config.method for config in chosen(("baseline",))} >= {"bfloat16, compiled whole"}
    with pytest.raises(
        ValueError, match=r"unknown configuration int7; the nearest is int8wo; there are .*int8wo"
    ):
        chosen(("int7",))


@pytest.mark.parametrize(
    ("method", "bits"),
    [("int8wo", 8), ("int4wo-64", 4 + 32 / 64), ("int4wo-64, integer zeros", 4 + 24 / 64), ("nvfp4wo", 4.5)],
)
def test_sizes_count_everything_inside(model, method, bits):
    made = copy.deepcopy(model)
    ao_lab.quantize_(made, OUR_CONFIGS[method]())
    weight = made.model.layers[0].mlp.gate_proj.weight
    rest = 4 * weight.shape[0] if method == "int8wo" else 4 if method == "nvfp4wo" else 0
    assert stored_bytes(weight) == weight.numel() * bits / 8 + rest
    assert stored_bytes(nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))) == 6


def test_accuracy_is_measured_of_every_configuration(tmp_path):
    """Experiment `ptq` has each configuration's schemes, on the small trained model."""
    tasks = {(task.method, task.activations) for task in all_tasks(settings_for("quick", "cpu", tmp_path))}
    for build in OUR_CONFIGS.values():
        recipe = build().recipe()
        assert (recipe.weight.name, recipe.activation and recipe.activation.name) in tasks


def test_a_scheme_without_a_record_is_measured(tmp_path):
    rows = ptq.run(replace(tiny.settings(tmp_path, ()), served=SERVED))
    found = {(row.setting, row.method): row.value for row in rows if row.metric == "bits per weight"}
    assert found["weights", SERVED[0]] == 4 + 24 / 64
    assert family(SERVED[0]) == "integer"


class FakeCuda:
    """As much of torch.cuda as a run touches, with memory that tests set."""

    allocated, reserved, most, most_reserved = 100, 120, 0, 0

    def __init__(self, monkeypatch):
        names = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
        fields = ("allocated", "reserved", "most", "most_reserved")
        for name, field in zip(names, fields, strict=True):
            monkeypatch.setattr(torch.cuda, name, lambda field=field: getattr(self, field))
        for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)


def test_memory_is_that_of_one_model(monkeypatch):
    fake = FakeCuda(monkeypatch)
    memory = Memory("cuda", 60)  # of the 100 bytes, 40 are another's
    memory.begin()
    fake.most, fake.most_reserved = 130, 150
    assert memory.peak_over_model() == pytest.approx(90 / 60)
    peaks = memory.peaks()
    assert peaks["peak memory"][0] == pytest.approx((150 - 60) / 1e9)
    assert peaks["peak memory, allocated"][0] == pytest.approx((130 - 40) / 1e9)
    assert (Memory("cpu", 60).peak_over_model(), Memory("cpu", 60).peaks()) == (None, {})


def test_the_order_of_capture_and_events(monkeypatch, model):
    """The path of a GPU on a fake one: warm up on a side stream, capture once, replay between events."""
    done = []

    class Stream:
        def wait_stream(self, other):
            done.append("wait")

    class Graph:
        def replay(self):
            done.append("replay")

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("record")

        def elapsed_time(self, other):
            return 2.0

    @contextmanager
    def during(what, **options):
        done.append("capture" if isinstance(what, Graph) else "beside")
        yield

    for name, fake in (("Stream", Stream), ("CUDAGraph", Graph), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", during)
    monkeypatch.setattr(torch.cuda, "graph", during)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    generation = Decoding(model, replace(PLAN, graph=True), PROMPT, compiled=False)
    generation.prefill()
    generation.prepare()
    assert done == ["wait", "beside", "wait", "capture", "replay"]
    done.clear()
    assert cuda_times(generation.replay, 3) == [0.002] * 3
    assert done == ["record", *["replay", "record"] * 3]
