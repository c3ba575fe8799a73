"""The whole experiment at quick scale, what a limit leaves, the page from rows by hand, what ages rows."""

import itertools
from dataclasses import replace

import pytest
import torch

import ao_lab
from ao_lab.cli.app import main
from experiments.generate import page, run
from experiments.generate import run as experiment
from experiments.generate.tables import (
    BASE,
    COMPILED,
    DECODE,
    EAGER_DECODE,
    METHODS,
    TORCHAO,
    Stage,
    Table,
    tables_of,
)
from experiments.harness.rows import Journal
from tests.experiments.harness import tiny

pytest.importorskip("transformers")
OURS = [one.name for one in METHODS if one.frozen is None and one.library == BASE.library]


@pytest.fixture
def settings(tmp_path):
    return tiny.settings(tmp_path)


def test_rows_of_both_parts_and_their_page(settings):
    rows = experiment.run(settings, journal := Journal())
    assert len({row.key for row in rows}) == len(rows)
    found = {(row.setting, row.method) for row in rows if row.metric == experiment.OK}
    assert found == {
        (setting, name) for setting in ("batch 2, not compiled", "prefill of 64 tokens") for name in OURS
    }
    changes = {row.method: row.value for row in rows if row.metric == run.CHANGE}
    assert changes[BASE.name] == 0
    dynamic = {one.name for one in METHODS if one.dynamic}
    assert all(0 < changes[name] < 0.3 for name in dynamic.intersection(OURS))
    # On a CPU products are those of the dense weight.
    assert all(changes[name] < 0.01 for name in OURS if name not in dynamic)
    assert page.findings(rows) == []
    (section,) = page.sections(rows)
    assert [len(table.lines) for table in section.tables] == [len(OURS)] * 2
    before = {row.key: row.value for row in journal.rows}
    assert {row.key: row.value for row in experiment.run(settings, journal)} == before


def test_a_part_alone_and_nothing_after_the_limit(settings):
    rows = experiment.run(replace(settings, only=("prefill",)))
    assert {row.setting for row in rows} == {"prefill of 64 tokens"}
    assert experiment.run(replace(settings, seconds=1e-9)) == []


def test_a_model_whose_products_are_wrong_is_not_timed():
    stage = Stage(1, "cpu", divide=32, new=8, calls=1)

    class Wrong(type(METHODS[1])):
        def apply(self, model):
            super().apply(model)
            model.lm_head.register_forward_hook(lambda layer, inputs, outputs: outputs.flip(-1))

    wrong = Wrong(name="wrong", build=METHODS[1].build)
    found = run.Bench(0).measure(Table(stage, EAGER_DECODE, (BASE, wrong), 1))
    assert run.TIME in found[BASE.name]
    (status,) = found["wrong"]
    assert status.startswith("status: wrong: outputs differ by")


def test_logits_are_those_of_what_is_stored():
    """Rounding to few bits is no error: logits move by it, products of what was rounded do not."""
    stage = Stage(2, "cpu", divide=32, new=8, calls=1)
    rough = type(METHODS[1])(
        name="rough",
        build=lambda: ao_lab.IntxWeightOnlyConfig(weight_dtype="int2", granularity=ao_lab.PerGroup(32)),
    )
    found = run.Bench(0).measure(Table(stage, EAGER_DECODE, (BASE, rough), 1))["rough"]
    assert run.CHANGE in found, found
    assert found[run.CHANGE][0] < 0.01


def test_weights_of_a_library_that_does_not_say_what_they_are():
    class Hidden(torch.Tensor):
        def dequantize(self, *options):
            raise NotImplementedError

    weight = torch.randn(24, 16).to(torch.bfloat16)
    assert torch.equal(run.dense_weight(weight.as_subclass(Hidden)).as_subclass(torch.Tensor), weight)


def test_the_model_that_others_are_copies_of_never_generates(monkeypatch):
    """transformers keeps the compiled call with the model: a copy of one that has generated would run that one's layers."""
    bench = run.Bench(0)
    table = Table(Stage(1, "cpu", divide=32, new=8, calls=1), DECODE, (BASE, METHODS[1]), 1)
    made = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: made.append(function.__self__) or function)
    monkeypatch.setattr(run, "unique_graphs", itertools.count().__next__)
    found = bench.measure(table)
    assert all(run.TIME in found[method.name] for method in table.methods)
    base = bench.base(table)
    assert "_compiled_call" not in vars(base)
    first, second = dict.fromkeys(map(id, made))
    assert id(base) not in (first, second)


def test_what_torchao_sets_for_its_own_models_is_not_left_to_others():
    import torch._inductor.config as inductor

    torchao = pytest.importorskip("torchao.quantization.utils")
    before = inductor.get_config_copy()
    with run.kept_options():
        torchao.recommended_inductor_config_setter()
        assert inductor.coordinate_descent_tuning
    assert inductor.get_config_copy() == before


def test_a_compiled_program_that_computes_something_else_is_not_timed():
    stage = Stage(1, "cpu", divide=32, new=8, calls=1)
    table = Table(stage, DECODE, (BASE,), 2)
    model = run.Bench(0).base(table)
    # As if nothing was compiled: the same bits. Then a program of other weights.
    plain = stage.logits(model, 2, compiled=False)
    assert plain.shape == (2, model.config.vocab_size)
    assert torch.equal(plain, stage.logits(model, 2, compiled=False))
    original = Stage.logits

    def other(self, model, batch, compiled):
        return (
            original(self, model, batch, False).flip(-1) if compiled else original(self, model, batch, False)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "logits", other)
        with pytest.raises(run.Wrong, match="from those of the same model, not compiled"):
            run.change_by_compiling(table, BASE, model)


def test_one_wrong_row_of_many_is_seen():
    right = torch.randn(64, 500)
    wrong = right.clone()
    wrong[63] = torch.randn(500)
    assert run.checked(right * 1.1, right, 0.3, "from others") == pytest.approx(0.1)
    assert float((wrong - right).norm() / right.norm()) < 0.3
    with pytest.raises(run.Wrong, match="in a row from others"):
        run.checked(wrong, right, 0.3, "from others")


def test_calls_go_round_and_speeds_are_of_all_of_them(monkeypatch):
    """A host that becomes slower is slower for all methods alike; what fails in between stops alone."""
    stage, order = Stage(1, "cpu", divide=32, new=8, calls=3), []

    def steps(self, model, batch, compiled):
        order.append(name := next(name for name, one in ready.items() if one is model))
        if name == "b" and len(order) > 4:
            raise RuntimeError("stopped")
        # The second round is ten times as slow for all alike, and longer.
        second = 3 < len(order) < 7
        return [(2.0 if name == BASE.name else 1.0) * (10 if second else 1)] * (5 if second else 1)

    monkeypatch.setattr(Stage, "steps", steps)
    ready = {BASE.name: object(), "a": object(), "b": object()}
    found = {name: {} for name in ready}
    run.in_turn(Table(stage, EAGER_DECODE, (BASE,), 1), ready, found)
    assert order == [BASE.name, "a", "b", "a", "b", BASE.name, BASE.name, "a"]
    assert found["b"] == {"status: error: RuntimeError: stopped": (0.0, "")}
    assert found["a"][run.SPEED] == (2.0, "ratio")
    assert found[BASE.name][run.REPEAT][1] == "ratio"


def test_many_models_are_compiled_each_for_its_own_sizes():
    torch.compiler.reset()
    shapes = []

    def backend(graph, inputs):
        shapes.append(
            [one.meta["example_value"].shape for one in graph.graph.nodes if one.op == "placeholder"]
        )
        return graph

    def double(x):
        return x * 2

    with run.several_compiled():
        call = torch.compile(double, backend=backend)
        for size in range(2, 14):
            call(torch.zeros(size))
    assert len(shapes) == 12
    assert all(isinstance(length, int) for found in shapes for shape in found for length in shape)
    torch.compiler.reset()


def test_steps_leave_the_first_quarter_out():
    stage = Stage(1, "cpu", divide=32, new=8, calls=1)
    assert len(stage.steps(stage.model(0), 1, False)) == 8 - 1 - 2


def test_at_full_scale_what_compiles_comes_after_what_does_not():
    """Programs that a process has compiled, and the threads that compile, are no part of what eager mode's users have."""
    tables = [*tables_of(experiment.PARTS, "cuda")]
    compiles = [one.compiled for one in tables]
    assert compiles == sorted(compiles)
    first = tables[compiles.index(True)]
    assert (first.setting, first.stage.layers) == (f"batch 1, {COMPILED}", 32)
    (part,) = (one for one in tables if one.setting == f"batch 64, {COMPILED}")
    assert {one.name for one in first.methods} < {one.name for one in part.methods}


def test_beside_torchao_there_is_what_has_its_recipe():
    found = {table.setting: table for table in tables_of((DECODE,), "cuda") if table.beside}
    assert [*found] == [
        "batch 1, compiled, beside torchao",
        "batch 16, compiled, beside torchao",
        "batch 64, compiled, beside torchao int4wo",
        "batch 64, compiled, beside torchao int8wo",
        "batch 64, compiled, beside torchao fp8dq, rows",
    ]
    for table in found.values():
        theirs = {one.name for one in table.methods if one.library == TORCHAO}
        assert {one.peer for one in table.methods if one.peer} == theirs
        assert table.methods[0] is BASE
        assert all(one.frozen is None for one in table.methods)


def test_a_model_that_runs_another_ones_program_is_not_timed(monkeypatch):
    """Two models whose guards hold for each other: what is timed would be one program."""
    monkeypatch.setattr(run, "unique_graphs", lambda: 3)
    monkeypatch.setattr(Stage, "steps", lambda self, model, batch, compiled: [1.0])
    with pytest.raises(run.Wrong, match="another model's program"):
        run.warmed(Table(Stage(1, "cpu", divide=32), DECODE, (BASE,), 1), object())
    assert run.warmed(Table(Stage(1, "cpu", divide=32), EAGER_DECODE, (BASE,), 1), object()) >= 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "x"], "the parts are eager, prefill, decode"),
        (["--seconds", "0"], "--seconds is a positive limit"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, words):
    assert main(["reproduce", "generate", *arguments, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err
