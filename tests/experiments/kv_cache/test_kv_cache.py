"""Experiment `kv_cache`: its numbers, and what its page says of rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from ao_lab.kv_cache.cache import use_kv_cache_
from experiments.data import texts
from experiments.harness.measuring import Deadline
from experiments.harness.rows import Journal, Row
from experiments.kv_cache import decode_attention, generation, needle, page, run, speed, speed_page
from experiments.kv_cache.decode_attention import Heads, Size
from experiments.kv_cache.run import ALL, CHAINS, ERROR, LAST
from experiments.runs.settings import RealModels, settings_for


def test_sums_fail_in_one_chain():
    assert run.sum_error(16384, None) > 0.05
    assert run.sum_error(16384, 128) < 1e-3


def test_predictions_of_an_unrounded_cache_are_the_models():
    """Token by token from a cache that rounds nothing."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 64, (2, 12))
    with torch.no_grad():
        expected = model(ids).logits
        found = run.FromCache(model, "bfloat16")(ids)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_real_model(folder, tmp_path, monkeypatch):
    """Recipes by part of the windows; what failed is told of and measured again by the next run."""
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setattr(run, "CONTEXTS", {"quick": ()})
    monkeypatch.setattr(run, "HAYSTACKS", {"quick": ()})
    asked = RealModels(models=(str(folder),), windows=2, length=16)
    settings = replace(settings_for("quick", "cpu", tmp_path), models=asked.models, asked=asked)
    read_back, journal, read = run.read_back, Journal(), []

    def without_fp8(bench, recipe):
        read.append(recipe)
        if recipe == "fp8":
            raise ValueError("no fp8 today")
        return read_back(bench, recipe)

    monkeypatch.setattr(run, "read_back", without_fp8)
    rows = run.run(settings, journal)
    said = {(one.setting, one.method): one.metric for one in rows if one.metric.startswith("status")}
    failed, others = "status: error: ValueError: no fp8 today", ["bfloat16", "fp8_residual", "int4"]
    assert said == {(part, recipe): failed if recipe == "fp8" else "status: ok"
                    for part in (ALL, LAST) for recipe in ("fp8", *others)}  # fmt: skip
    assert {one.method for one in journal.rows} == set(others)
    # Both parts of a window are of the same predictions.
    assert [one for one in read if one != "fp8"] == others
    monkeypatch.setattr(run, "read_back", read_back)
    rows = run.run(settings, journal)
    assert {one.metric for one in rows if one.metric.startswith("status")} == {"status: ok"}
    change = {one.method: one.value for one in rows if (one.setting, one.metric) == (ALL, "KL")}
    # All of so few tokens are read as computed.
    assert 0 <= change["bfloat16"] == change["int4"] == change["fp8_residual"] < change["fp8"]
    beside = {one.method: one.value for one in rows if (one.setting, one.metric) == (ALL, run.BESIDE)}
    assert beside["bfloat16"] == beside["fp8"] == 0 < beside["fp8_residual"] == beside["int4"]


def test_needles():
    """A short training finds needles from every cache; one chain of FP8 sums errs more than short ones over a long context."""
    models = [needle.trained(needle.Plan(steps=150, length=128, longest=2048))]
    for method in needle.METHODS:
        assert needle.asked(models, 1024, method, 3).found > 0.9
    assert needle.asked(models, 1024, "exact", 1).unlike == 0
    q, k, v = (x.numpy() for x in models[0].states(needle.contexts(1, 32768, np.random.default_rng(0))[0]))
    exact, one, parts = (needle.attended(q, k, v, *needle.METHODS[method]) for method in
                         ("exact", "fp8 sums, one chain", "fp8 sums, chains of 128"))  # fmt: skip
    assert np.linalg.norm(one - exact) > 3 * np.linalg.norm(parts - exact)


def row(table, setting, method, metric, value):
    return Row(experiment="kv_cache", table=table, setting=setting, method=method, metric=metric, value=value, unit="",
               device="cpu", seed=0)  # fmt: skip


def test_page():
    rows = [row("sums/full/uniform-weights", tokens, method, ERROR, value) for tokens in ("1024", "131072")
            for method, value in zip(CHAINS, (0.5, 1e-4), strict=True)]  # fmt: skip
    rows += [row("needle/full/uniform-noise", "131072", method, metric, 12.0) for method in needle.METHODS
             for metric in (run.FOUND, run.UNLIKE)]  # fmt: skip
    known = {
        "perplexity, change": 0.05,
        "loss, change": 0.0,
        "loss, standard error of the change": 0.01,
        "windows": 4.0,
        "tokens of a window": 512.0,
        "KL": 0.003,
        "KL, standard error": 1e-4,
        run.GROWING: 100.0,
    }
    rows += [row("real m/full/text", ALL, "fp8", metric, value) for metric, value in known.items()]
    found = page.findings(rows)
    assert found[0] == "FP8 sums over 131072 tokens lose 50% in one chain and 0.01% in chains of 128."
    assert found[1].startswith(
        "Of needles among 131072 tokens are found 12% (exact), 12% (fp8 sums, one chain)"
    )
    # Student's t of three degrees of freedom: 3.18 times a standard error of 1 percent.
    assert "fp8 +0.1 ± 3.2%" in found[3]
    assert page.main_finding(rows).startswith(found[2].removesuffix("."))
    assert found[1].rstrip(".") in page.main_finding(rows)
    saturated = [replace(one, value=100.0) if one.metric == run.FOUND else one for one in rows]
    assert "the test tells none apart" in page.findings(saturated)[1]
    assert "needle" not in page.main_finding(saturated)
    assert [section.title.split(" (")[0] for section in page.sections(rows)] == ["FP8 sums", "A needle", "m"]
    assert "unquantized" not in found[2]
    assert "No row is of an unquantized cache" in page.sections(rows)[-1].paragraphs[-1]
    rows += [row("real m/full/text", ALL, "int4", metric, value) for metric, value in known.items()]
    first = page.sections(rows)[-1].paragraphs[0]
    assert "int4 leaves the first 4 and the latest 64 tokens unquantized, fp8 none" in first
    assert "fp8_residual, which leaves the same in 8 bits, has no row" in first


def test_recipes_stand_beside_those_that_leave_the_same_tokens_and_an_unquantized_cache():
    """KL by tokens that stay unquantized, the attention's own; bytes a token with those tokens; the run of most text."""
    recipes = {
        "bfloat16": (0.0004, 400),
        "fp8": (0.005, 200),
        "fp8_residual": (0.003, 200),
        "int4": (0.004, 100),
    }
    rows = [row("real m/full/text", ALL, recipe, metric, value)
            for recipe, (kl, held) in recipes.items() for metric, value in {
                "KL": kl, "KL, standard error": 1e-4, "windows": 4.0, "tokens of a window": 512.0, run.GROWING: held,
                run.BESIDE: 51200.0 if page.near(recipe) else 0.0}.items()]  # fmt: skip
    less = [
        replace(one, device="z", value=64.0 if one.metric == "tokens of a window" else one.value)
        for one in rows
    ]
    assert page.findings(rows + less) == [
        "m (short run, CPU, 4 windows of 512 tokens, text), KL from its own predictions, nats: fp8 0.00500 ± 0.00032; with the "
        "first 4 and the latest 64 tokens unquantized fp8_residual 0.00300 ± 0.00032, int4 0.00400 ± 0.00032; the same "
        "attention over an unquantized cache 0.00040 ± 0.00032."
    ]
    section = page.sections(rows)[-1]
    assert "a KL of 0.00040 ± 0.00032" in section.paragraphs[-1]
    table = section.tables[0]
    assert table.columns[-2:] == ["bytes a token, 512 tokens", "bytes a token, 8192 tokens"]
    held = {line[0]: line[-2:] for line in table.lines if line[1] == ALL}
    assert held == {
        "bfloat16": ["400", "400"],
        "fp8": ["200", "200"],
        "fp8_residual": ["300", "206"],
        "int4": ["200", "106"],
    }


def test_decode_attention_is_timed_and_what_is_missing_or_fails_says_so(monkeypatch):
    def broken(q, held):
        raise ValueError("no call")

    def late(q, held):
        """Fails when what was captured is replayed: five calls name kernels, warm up and find how many are timed at once."""
        calls = []

        def call():
            calls.append(q)
            if len(calls) > 5:
                raise ValueError("no replay")
            return speed.PEERS[speed.TRANSFORMERS](q, held)()

        return call

    peers = {**speed.PEERS, "broken": broken, "absent": broken, "late": late}
    monkeypatch.setattr(speed, "PEERS", peers)
    monkeypatch.setattr(speed, "NEEDS", {"absent": "no_such_package"})
    monkeypatch.setattr(speed, "ON_CPUS", (*speed.ON_CPUS, "late", "broken", "absent"))
    found = speed.measure(Size(1, 16), Heads(4, 2, 64), "cpu", 1e9, ("fp8",))
    for name in ("fp8", *speed.ON_CPUS[:-3]):
        assert found[name][speed.TIME][0] > 0
    assert list(found["late"]) == ["status: error: ValueError: no replay"]
    # A code a channel and a float32 scale a token, of keys and of values of two heads; at a byte a nanosecond.
    assert found["fp8"][speed.COPY][0] == pytest.approx(2 * 2 * 16 * (64 + 4) / 1e3)
    assert "status: missing: no_such_package is not installed" in found["absent"]
    assert "status: error: ValueError: no call" in found["broken"]


def test_every_peer_computes_the_attention_of_the_bfloat16_cache():
    """Those of a CPU, and ours."""
    torch.manual_seed(0)
    heads, size = Heads(4, 2, 64), Size(2, 12)
    held = decode_attention.filled(run.RECIPES["bfloat16"], size, heads, "cpu")
    assert int(held.length) == 12
    q = decode_attention.queries(size, heads, "cpu")
    k, v = (x.codes.repeat_interleave(2, 1).float() for x in (held.keys, held.values))
    expected = torch.softmax(q.float() @ k.mT * 64**-0.5, -1) @ v
    made = [speed.PEERS[name](q, held)() for name in speed.ON_CPUS]
    for y in (decode_attention.ours(q, held)(), made[0], made[1].transpose(1, 2)):
        # Weights and results are rounded to bfloat16, 2^-9 of each.
        assert (y.float() - expected).norm() < 2 * 2**-9 * expected.norm()


@pytest.mark.parametrize(
    ("mine", "base", "expected"),
    [([3, 3], [4, 5], 1024.0), ([6, 4], [4, 8], 1024 + 1024 / 3), ([3, 9], [4, 5], float("inf"))],
)
def test_break_even(mine, base, expected):
    assert speed_page.break_even([1024, 2048], mine, base) == pytest.approx(expected)


def test_times_as_parts_of_a_run(tmp_path, monkeypatch):
    """Recipes that --only names alone; what the journal has is not measured again, and a deadline starts nothing."""
    monkeypatch.setitem(speed.SIZES, "cpu", (Size(1, 16),))
    small = replace(generation.GENERATED["cpu"], context=4, new=4, first=2)
    monkeypatch.setattr(generation, "ANSWERS", 1)
    monkeypatch.setitem(generation.GENERATED, "cpu", small)
    for cases in (generation.STEPPED, generation.ANSWERED):
        monkeypatch.setitem(cases, "cpu", replace(cases["cpu"], context=70))
    only = ("speed", "generate", "generate_long", "step", "fp8")
    settings = replace(settings_for("quick", "cpu", tmp_path), only=only)
    journal = Journal()
    assert run.run(replace(settings, seconds=-1.0), journal) == []
    rows = run.run(settings, journal)
    times = {(one.table.split("/")[0], one.method) for one in rows if one.metric == "time" and one.value > 0}
    own = generation.OWN
    answered = {one.setting for one in rows if one.table.startswith("generate/")}
    assert answered == {cases["cpu"].setting for cases in (generation.GENERATED, generation.ANSWERED)}
    assert times == {
        ("speed", "fp8"), *(("speed", name) for name in speed.ON_CPUS), ("generate", own), ("generate", "fp8"),
        ("step", own), ("step", "fp8"),
    }  # fmt: skip
    monkeypatch.setattr(speed, "measure", None)
    monkeypatch.setattr(generation, "stepped", None)
    monkeypatch.setattr(generation, "generated", None)
    monkeypatch.setattr(generation, "answered", None)
    assert run.run(settings, journal) == rows
    with pytest.raises(ValueError, match="unknown part 'fp9' of kv_cache"):
        run.check_parts(["fp9"])


def test_methods_that_fail_leave_the_others_their_times(monkeypatch):
    """While a method begins, and in its turn; a deadline that is over starts none."""
    case, calls = replace(generation.GENERATED["cpu"], context=4, new=4, first=2), []
    monkeypatch.setattr(generation, "ANSWERS", 2)

    class Half(generation.Arm):
        def answer(self, prompt, case):
            calls.append(self.model.config._attn_implementation)
            if calls.count("ao_lab") == 2:
                raise RuntimeError("late")
            return super().answer(prompt, case)

    def use(model, recipe):
        if recipe == "int4":
            raise ValueError("at once")
        return use_kv_cache_(model, recipe)

    monkeypatch.setattr(generation, "Arm", Half)
    monkeypatch.setattr(generation, "use_kv_cache_", use)
    names = generation.methods_of(generation.GENERATE, ["int4", "fp8"])
    found = generation.generated(case, "cpu", names, Deadline(None))
    assert list(found) == names
    assert (found[generation.OWN]["answers"][0], found[generation.OWN]["time"][0] > 0) == (2, True)
    assert (list(found["int4"]), list(found["fp8"])) == (
        ["status: error: ValueError: at once"],
        ["status: error: RuntimeError: late"],
    )
    late = generation.generated(case, "cpu", names, Deadline(-1.0))
    assert [next(iter(one))[:15] for one in late.values()] == ["status: not run"] * 3


def timed(kind, setting, method, metric, value):
    return Row(experiment="kv_cache", table=f"{kind}/full/random", setting=setting, method=method, metric=metric, value=value,
               unit="us", device="H200", seed=0)  # fmt: skip


def test_the_page_of_times():
    rows = [timed("speed", f"{batch} x {tokens}", method, "time", us * tokens / 1024)
            for batch in (1, 64) for tokens in (1024, 8192) for method, us in (("bfloat16", 60.0), ("fp8", 30.0),
                                                                               ("SDPA, flash", 50.0))]  # fmt: skip
    case = generation.GENERATED["cuda"].setting
    rows += [
        timed("generate", case, method, "time", ms)
        for method, ms in ((generation.OWN, 13.5), ("bfloat16", 3.0))
    ]
    attention, generated = page.sections(rows)
    assert attention.tables[0].lines[0][:2] == ["1024", "60.0"]
    assert attention.tables[-1].lines == [["1", "1024"], ["64", "1024"]]
    assert next(one[3:5] for one in generated.tables[0].lines if one[1] == "bfloat16") == ["4.50", "1.00"]
    assert "64 x 8192 tokens, us a call: bfloat16 480, fp8 240, SDPA (flash) 400" in page.findings(rows)[0]
    of_attention, of_models = page.targets_by_run(rows)
    missed = {target.name for target in of_attention.targets if target.reached is False}
    assert missed == {f"bfloat16, {batch} sequences: speed over the best peer, {tokens} tokens"
                      for batch in (1, 64) for tokens in (1024, 8192)}  # fmt: skip
    assert {target.name: target.reached for target in of_attention.targets} | dict.fromkeys(missed, True) == {
        **{f"{name} at 64 x 8192": reached for name, reached in
           (("bfloat16", True), ("fp8", True), ("int4", None), ("int4_tokens", None))},
        **{f"{name}, {batch} sequences: speed over the best peer, {tokens} tokens": True
           for name in ("bfloat16", "fp8") for batch in (1, 64) for tokens in (1024, 8192)},
        "fp8: break-even with bfloat16, one sequence": True,
    }  # fmt: skip
    assert [target.reached for target in of_models.targets] == [True]


def test_compiled_steps_are_compared_with_each_other():
    """Beside steps that are not; on a CPU there are none."""
    names = generation.methods_of(generation.STEP, ["bfloat16", "fp8"])
    assert [name for name in names if name.endswith(generation.COMPILED)] == [
        "bfloat16, compiled",
        "fp8, compiled",
    ]
    assert generation.methods_of(generation.STEP, ["fp8"], compiled=False) == [generation.OWN, "fp8"]
    assert generation.methods_of(generation.LONG, ["fp8"]) == ["fp8, prepared", "fp8", generation.OWN]
    assert speed_page.base_of("int4 weights, int4, prepared") == "bfloat16, prepared"
    assert generation.recipe_of_method("int4 weights, int4_tokens, compiled") == "int4_tokens"
    case = generation.STEPPED["cuda"].setting
    times = {"bfloat16": 11.0, "fp8": 9.0, "bfloat16, compiled": 8.0, "fp8, compiled": 6.0}
    rows = [timed("step", case, method, "time", ms) for method, ms in times.items()]
    (section,) = page.sections(rows)
    assert [line[4] for line in section.tables[0].lines] == ["1.00", "1.22", "1.00", "1.33"]
    (of_steps,) = page.targets_by_run(rows)
    assert [(target.name, target.reached) for target in of_steps.targets if target.reached is not None] == [
        (f"fp8, compiled, {case}: speed over bfloat16", True)
    ]


def test_methods_that_are_timed_in_turn_are_published_together():
    """A later run of fewer methods leaves none of an earlier one beside it."""
    from experiments.runs.run import merged

    def row(method, date):
        return Row(experiment="kv_cache", table="step/full/random-weights", setting="model", method=method, metric="time",
                   value=1.0, unit="ms", device="NVIDIA H200", seed=0, date=date)  # fmt: skip

    before = [row("bfloat16", "2026-11-29T00:00:00Z"), row("int4", "2026-11-29T00:00:00Z")]
    assert [one.method for one in merged("kv_cache", before, [row("bfloat16", "2026-11-30T00:00:00Z")])] == [
        "bfloat16"
    ]
