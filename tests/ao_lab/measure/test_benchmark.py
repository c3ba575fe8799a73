"""`benchmark`: layers and generate() in turn with what is not quantized; quantized models as they are; wrong input first."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ao_lab import Int4WeightOnlyConfig, QuantizedTensor, SchemeConfig, benchmark, quantize_, save_pretrained
from ao_lab.cli.app import main
from ao_lab.cli.terminal import kept_in
from ao_lab.install.revision import commit, processor
from ao_lab.measure.benchmark import Work, drift_of, kernel_of, layers_of, timed
from ao_lab.measure.times import Benchmark, KeptTimes, Timed, doubt_of, duration
from ao_lab.measure.turns import HostWatch, Plan, Span, slow_threads, with_threads
from fast.gemm.choose import Range
from tests.support.models.hf_models import save_llama

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:You passed `quantization_config`"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(
        "ao_lab.measure.benchmark.PLAN", Plan(rounds=2, warmup=1, seconds=0.1, fewest=2, span=1e-6)
    )
    monkeypatch.setattr("ao_lab.measure.benchmark.ROUNDS", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    model = save_llama(root / "base")
    quantize_(model, SchemeConfig(scheme="int8_rowwise"))
    save_pretrained(model, root / "ours", layout="ao_lab")
    save_pretrained(model, root / "compressed", layout="compressed-tensors")
    return root


def test_shapes_beside_bfloat16():
    found = benchmark(
        shapes=[(2, 64, 128)],
        configs={"four": Int4WeightOnlyConfig(group_size=32), "never": "int4_g256"},
        device="cpu",
    )
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["bfloat16", "four", "never"]
    assert rows["bfloat16"].speedup == 1
    assert 0 < rows["four"].seconds_20 <= rows["four"].seconds <= rows["four"].seconds_80
    assert rows["four"].kernel
    assert rows["never"].reason.startswith("groups of 256 divide the inputs of no layer (128)")
    assert rows["never"].seconds is None
    assert any("never, 2x64x128: groups of 256" in note for note in found.notes)
    assert len(found.to_frame()) == 3
    assert "2x64x128 four eager" in str(found)


def test_a_model_by_its_own_shapes(folder):
    seen = []
    found = benchmark(
        folder / "base",
        configs=["nf4"],
        batch=[3],
        new_tokens=2,
        device="cpu",
        progress=lambda *at: seen.append(at),
    )
    shapes = {row.shape: row.layers for row in found.of("linear")}
    assert shapes == {(3, 128, 128): 2, (3, 64, 128): 2, (3, 256, 128): 2, (3, 128, 256): 1, (3, 320, 128): 1}
    made = found.of("generate")
    assert [(row.name, row.mode, row.shape) for row in made] == [
        ("bfloat16", "eager", (3,)),
        ("nf4", "eager", (3,)),
    ]
    assert all(row.seconds > 0 for row in made)
    # Of about the same length are a round of generate(), three of which come first, and the layers of a shape.
    assert seen[0] == ("", 0, 8)
    assert seen[-1] == ("", 8, 8)
    assert [done for what, done, _ in seen if ", call " in what] == [0, 1, 2]
    assert [done for what, done, _ in seen if "x" in what] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("layout", ["ours", "compressed"])
def test_quantized_folders_are_timed_as_they_are(folder, layout):
    found = benchmark(folder / layout, batch=[1], new_tokens=2, device="cpu")
    assert {row.name for row in found.rows} == {"bfloat16", "as stored"}
    assert all(row.status == "ok" for row in found.rows)
    with pytest.raises(ValueError, match="is quantized already and is timed as it is"):
        benchmark(folder / layout, configs=["nf4"], device="cpu")


def test_layers_are_of_the_models_dtype(folder, monkeypatch):
    seen = []
    real = Work.calls
    monkeypatch.setattr(
        Work, "calls", lambda self, layer, shape: seen.append(layer.weight.dtype) or real(self, layer, shape)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    found = benchmark(model, configs=["nf4"], batch=[1], new_tokens=0, device="cpu")
    assert {row.name for row in found.rows} == {"float32", "nf4"}
    assert set(seen) == {torch.float32}


def test_models_in_training_are_timed_as_they_predict(folder, monkeypatch):
    """Dropout would be timed; afterwards they train again, and after an error too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto").train()
    seen = []

    def in_turn(self, models, *more):
        seen.extend(one.training for one in models.values())
        raise KeyError("a fault")

    monkeypatch.setattr(Work, "in_turn", in_turn)
    monkeypatch.setattr(Work, "layers", lambda *_: [])
    with pytest.raises(KeyError):
        benchmark(model, configs=["nf4"], batch=[1], new_tokens=2)
    assert seen == [False, False]
    assert all(module.training for module in model.modules())


def test_without_the_unquantized_layer_nothing_is_compared(monkeypatch):
    real = Work.layer

    def layer(self, shape, maker):
        if maker is None:
            raise torch.OutOfMemoryError("out of memory")
        return real(self, shape, maker)

    monkeypatch.setattr(Work, "layer", layer)
    found = benchmark(shapes=[(1, 64, 64)], configs=["nf4"], device="cpu")
    assert [(row.name, row.reason) for row in found.rows] == [("bfloat16", "OutOfMemoryError: out of memory")]


def test_faults_are_no_refusals(monkeypatch):
    """An error of a GPU ends the benchmark: what is timed after it would be wrong; so does one of our own code, with its
    traceback."""
    for error in (RuntimeError("CUDA error: an illegal memory access was encountered"), KeyError("a fault")):

        def layer(self, shape, maker, error=error):
            raise error

        monkeypatch.setattr(Work, "layer", layer)
        with pytest.raises(type(error)):
            benchmark(shapes=[(1, 64, 64)], configs=["nf4"], device="cpu")
    monkeypatch.setattr(Work, "run", lambda *_: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["bench", "--shape", "1,64,64"])


def test_what_no_graph_holds_is_timed_in_eager_mode_alone(monkeypatch):
    """With a stand-in for the GPU: a call that a recording refuses has its time, and the reason instead of a graph's."""

    class Watch(HostWatch):
        def capture(self, calls):
            if isinstance(calls[0].func.weight, QuantizedTensor):
                raise torch.AcceleratorError("operation not permitted when stream is capturing")
            return super().capture(calls)

    monkeypatch.setattr("ao_lab.measure.benchmark.watch_of", lambda device: Watch())
    monkeypatch.setattr(Work, "layer", lambda self, shape, maker: made(shape, maker))
    monkeypatch.setattr(Work, "calls", lambda self, layer, shape: [partial(layer, torch.ones(1, shape[2]))])

    def made(shape, maker):
        layer = torch.nn.Linear(shape[2], shape[1], bias=False)
        if maker is not None:
            maker(torch.nn.Sequential(layer))
        return layer

    work = Work("cuda", {"nf4": lambda module: quantize_(module, SchemeConfig(scheme="nf4"))})
    rows = work.layers((1, 64, 64), 1, None)
    assert [(row.name, row.mode, row.status == "ok") for row in rows] == [
        ("bfloat16", "eager", True),
        ("nf4", "eager", True),
        ("bfloat16", "CUDA graph", True),
        ("nf4", "CUDA graph", False),
    ]
    assert "no CUDA graph holds it: AcceleratorError: operation not permitted" in rows[-1].reason


def test_a_row_names_what_multiplies_its_tokens(monkeypatch):
    """On a GPU families change with the number of tokens."""
    layer = torch.nn.Linear(64, 64, bias=False)
    quantize_(torch.nn.Sequential(layer), SchemeConfig(scheme="nf4"))
    families = (Range(1, 8, "few"), Range(9, 128, "more"), Range(129, None, "many"))
    report = SimpleNamespace(layers=[SimpleNamespace(families=families, kernel="weight")])
    monkeypatch.setattr("ao_lab.measure.benchmark.explain", lambda model: report)
    assert [kernel_of(layer, tokens) for tokens in (1, 8, 9, 4096)] == ["few", "few", "more", "many"]
    report.layers[0].families = ()
    assert kernel_of(layer, 1) == "weight"
    report.layers[0].kernel = "fused, up to 1 token"
    assert [kernel_of(layer, tokens) for tokens in (1, 2)] == ["fused", "dequantize"]


def test_what_is_compiled_are_copies(folder):
    """Models are prepared for the compiler as users prepare them; without a GPU transformers runs them as they are."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto").eval()
    work = Work("cpu", {"nf4": lambda module: quantize_(module, SchemeConfig(scheme="nf4"))})
    rows = work.generation(model, None, 2, 2, "compiled")
    assert [(row.name, row.mode, row.status) for row in rows] == [
        ("bfloat16", "compiled", "ok"),
        ("nf4", "compiled", "ok"),
    ]
    assert model.generation_config.cache_implementation is None
    assert not any(isinstance(one, QuantizedTensor) for one in model.parameters())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give a model"),
        ({"shapes": [(1, 2)]}, "a shape is M,N,K"),
        ({"shapes": [(0, 8, 8)]}, "a shape is M,N,K"),
        ({"shapes": [(1, 8, 8)], "configs": ["nf5"]}, "the nearest is nf4"),
        ({"shapes": [(1, 8, 8)], "batch": [0]}, "--batch is 1 or more"),
        (
            {"shapes": [(1, 8, 8)], "configs": {"bfloat16": "nf4"}},
            "'bfloat16' is the name of a row of its own",
        ),
        ({"model": torch.nn.Linear(8, 8)}, r"Linear has no generate\(\) of transformers"),
        ({"shapes": [(1, 8, 8)], "compiled": True, "device": "cpu"}, "on GPUs alone"),
        ({"model": "some/model"}, "names on the Hub are not fetched"),
        ({"model": "."}, "has no config.json"),
    ],
)
def test_what_does_not_fit(given, said):
    with pytest.raises(ValueError, match=said):
        benchmark(**given)


def test_from_the_command_line(folder, capsys):
    assert main(["bench", "--shape", "2,64,128", "int8_rowwise", "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["rows"]] == ["bfloat16", "int8_rowwise"]
    assert main(["bench", "--shape", "2,64,128", "--configs", "nf4", "--device", "cpu"]) == 0
    assert "2x64x128" in capsys.readouterr().out
    assert main(["bench", "--shape", "2,64,100", "--configs", "nvfp4", "--device", "cpu"]) == 1, (
        "nothing was timed"
    )
    for wrong, said in (
        (["--shape", "2x64x128"], "write M,N,K"),
        (["--shape", "2,64"], "write M,N,K"),
        ([], "give a model"),
        (["--model", "nowhere"], "there is no folder nowhere"),
        (["--shape", "2,64,128", "Int4"], "the nearest are"),
        *(
            []
            if torch.cuda.is_available()
            else [(["--shape", "2,64,128", "--device", "cuda"], "torch sees no GPU")]
        ),
    ):
        assert main(["bench", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_head_tied_to_the_embedding_is_not_timed(tmp_path):
    """`ao-lab quantize` leaves it dense."""
    untied, tied = (save_llama(tmp_path / str(one), with_tokenizer=False, tied=one) for one in (False, True))
    assert set(layers_of(untied)) - set(layers_of(tied)) == {(320, 128)}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(2.399e-2, "24.0 ms"), (25.14e-6, "25.1 us"), (9.996e-4, "1.00 ms"), (1.5, "1.50 s"), (3e-8, "0.0300 us"),
     (119.9, "120 s"), (None, "-")],
)  # fmt: skip
def test_times_have_units_and_no_exponents(seconds, said):
    assert duration(seconds) == said


def test_a_speedup_is_the_median_of_the_rounds_ratios_and_says_where_it_is_noisy():
    """The medians say 4 to 4, the rounds that each is half as quick once: both stand in the row, and a word beside it."""
    base, own = timed("generate", {"dense": [1.0, 4.0, 8.0], "nf4": [2.0, 4.0, 4.0]}, "eager", (1,), 0, {})
    assert (own.seconds, own.baseline_seconds, own.speedup) == (4.0, 4.0, 1.0)
    assert own.speedup_20 < 1 < own.speedup_80
    assert "ratios spread" in own.doubt
    assert base.doubt == ""
    found = Benchmark("m", (base, own), {"device": "cpu", "load": 10.0, "cores": 2})
    assert found.generate_cells()[1][-1] == "1.00x (noisy)"
    assert found.notes[0].startswith("Load 10.0 on 2 cores: times are not reliable")
    assert found.notes[1].startswith("Noisy: nf4 1 eager: its rounds disagree")
    assert found.notes[2].startswith("On a CPU memory and files shrink, and most configurations are slower")
    on_gpu = Benchmark("m", (base, own), {"device": "cuda"}).notes
    assert not any(note.startswith("On a CPU") for note in on_gpu)
    ((title, lines),) = found.tables()
    assert (title, lines[0]) == (
        "generate() of m",
        ["batch", "configuration", "time a token", "baseline", "tokens/s", "speedup"],
    )
    assert [line[0] for line in lines[1:]] == ["1", ""]
    calm = Benchmark("m", (base,), {"device": "cpu", "load": 1.0, "cores": 2})
    assert calm.warnings == []


def test_times_of_a_table_have_one_unit():
    rows = timed("linear", {"dense": [2e-3], "nf4": [9e-4], "int8": [3e-3]}, "eager", (1, 2, 3), 0, {})
    cells = Benchmark("m", tuple(rows), {"device": "cpu"}).layer_cells()
    assert [line[3] for line in cells] == ["2.00 ms", "0.900 ms", "3.00 ms"]


def test_medians_that_contradict_the_rounds_are_noisy():
    assert "the medians' ratio is 2.00" in doubt_of(1.0, 2.0, 1.0, 1.1)
    assert doubt_of(1.0, 1.05, 1.0, 1.1) == ""


def test_layers_that_threads_wait_for_each_other_in_are_timed_with_one(monkeypatch):
    """As on a busy machine: no ratio of times that are known to be wrong, and the mode says so."""
    seen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)

    class Watch(HostWatch):
        def seconds(self, calls, *, cold=False):
            return [2e-5] * len(calls)

    spans = {name: Span(1, print, print) for name in ("dense", "nf4")}
    times = {"dense": [2.4e-2] * 3, "nf4": [3e-5] * 3, "again": [2.4e-2] * 3}
    assert slow_threads(Watch(), spans, times) == ["dense"]
    assert seen == [1, 2]
    monkeypatch.setattr("ao_lab.measure.benchmark.slow_threads", lambda *_: ["bfloat16"])
    rows = Work("cpu", {}).layers((1, 8, 8), 1, None)
    assert [row.mode for row in rows] == ["eager, 1 thread"]
    assert seen == [1, 2, 1, 2]
    found = Benchmark(None, tuple(rows), {"device": "cpu", "threads": 2})
    assert "1x8x8: timed with one thread, as 2 threads take more than twice" in found.notes[-1]


def test_a_baseline_that_drifts_is_doubted_and_all_doubts_are_one_paragraph():
    drift = drift_of([1.0, 1.0], [3.0, 3.0])
    assert "took 3.00 of its first time" in drift
    assert drift_of([1.0, 1.0], [1.2, 0.9]) == ""
    times = {"dense": [2.4e-2] * 3, "nf4": [3e-5] * 3}
    rows = timed("linear", times, "eager", (1, 1, 1), 0, {}, {"dense": drift})
    assert [row.doubt == drift for row in rows] == [True, True]
    other = timed("linear", times, "eager", (2, 1, 1), 0, {}, {"dense": drift_of([1.0], [2.0])})
    noisy = timed("linear", {"dense": [1.0, 2.0], "nf4": [1.0, 0.1]}, "eager", (4, 1, 1), 0, {})
    found = Benchmark(None, (*rows, *other, *noisy), {"device": "cpu", "threads": 1})
    (told,) = (one for one in found.warnings if one.startswith("Noisy"))
    assert told.count("the unquantized layer took another time") == told.count("its rounds disagree") == 1


def test_a_stopped_call_goes_on_with_what_was_timed(folder, tmp_path, monkeypatch):
    """Layers of a shape are kept together, generate() by configuration; other conditions are refused.

    What is kept is no part of what is left.
    """
    given = {
        "configs": ["nf4", "int8_rowwise"],
        "batch": [1],
        "new_tokens": 2,
        "device": "cpu",
        "out": tmp_path,
    }
    real, done = Work.in_turn, []

    def in_turn(self, models, *more):
        if done:
            raise KeyboardInterrupt
        done.append(list(models))
        return real(self, models, *more)

    monkeypatch.setattr(Work, "in_turn", in_turn)
    with pytest.raises(KeyboardInterrupt):
        benchmark(folder / "base", **given)
    before = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    monkeypatch.setattr(Work, "in_turn", real)
    monkeypatch.setattr("ao_lab.measure.benchmark.timed_threads", lambda *_: pytest.fail("kept rows say it"))
    seen = []
    found = benchmark(folder / "base", **given, progress=lambda *at: seen.append(at))
    assert [row["seconds"] for row in before] == [row.seconds for row in found.of("generate")[: len(before)]]
    assert seen[0] == ("", 0, 3 + 5)
    monkeypatch.setattr(Work, "layers", lambda *_: pytest.fail("layers were timed again"))
    assert benchmark(folder / "base", **given).rows == found.rows
    assert [row.name for row in found.of("generate")] == ["bfloat16", "nf4", "int8_rowwise"]
    assert isinstance(found.rows[0], Timed)
    kept = json.loads((tmp_path / "benchmark.json").read_text())
    assert kept["conditions"]["prompt_tokens"] == 16
    assert {"torch", "transformers"} <= kept["conditions"]["versions"].keys()
    assert {row["commit"] for row in kept["rows"]} == {commit()}
    assert [row["date"] for row in kept["rows"][:2]] == [row["date"] for row in before], (
        "kept rows keep theirs"
    )
    assert all(row.date for row in found.rows)
    assert f"cpu ({processor()})" in found.notes[-1]
    assert "a prompt of 16 tokens and 2 new ones, prefill in the time" in found.notes[-1]
    with pytest.raises(ValueError, match="other conditions: --rounds was 2, now 9; choose"):
        benchmark(folder / "base", **given, rounds=9)
    (tmp_path / "benchmark.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no times of ao-lab bench"):
        benchmark(folder / "base", **given)


def test_a_refused_configuration_is_not_why_all_is_timed_again(tmp_path, monkeypatch):
    """A refusal is kept beside the times of its shape; full memory is not, and the load of the busiest call is told."""
    given = {"shapes": [(2, 64, 128)], "configs": ["nf4", "int4_g256"], "device": "cpu", "out": tmp_path}
    loads = iter((50.0, 0.5, 0.5))
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    first, real = benchmark(**given), Work.layers
    monkeypatch.setattr(Work, "layers", lambda *_: pytest.fail("layers were timed again"))
    again = benchmark(**given)
    assert again.rows == first.rows
    assert [row.status for row in again.rows] == ["ok", "ok", "failed"]
    assert any(one.startswith("Load 50.0 on") for one in again.warnings)
    file = tmp_path / "benchmark.json"
    kept = json.loads(file.read_text())
    kept["rows"][2]["reason"] = "OutOfMemoryError: CUDA out of memory"
    file.write_text(json.dumps(kept))
    monkeypatch.setattr(Work, "layers", real)
    assert benchmark(**given).rows[2].reason.startswith("groups of 256 divide the inputs of no layer (128)")


def test_what_was_kept_of_generate_has_its_baseline_behind_a_failure(monkeypatch):
    kept = KeptTimes(None, {})
    kept.measured(timed("generate", {"float32": [2.0], "nf4": [1.0]}, "eager", (1,), 0, {}))
    work = Work("cpu", {"never": refuse, "nf4": refuse}, torch.float32, kept=kept)
    monkeypatch.setattr("ao_lab.measure.benchmark.check_language_model", lambda *_: None)
    assert [row.name for row in work.generation(nn.Linear(2, 2), None, 1, 2, "eager")] == [
        "never",
        "float32",
        "nf4",
    ]


def refuse(module):
    raise ValueError("no such layers")


def test_what_a_stopped_command_says(tmp_path):
    assert kept_in(None, "benchmark.json") == "nothing was kept (--out DIR does)"
    assert kept_in(tmp_path, "benchmark.json").startswith("nothing was measured yet")
    (tmp_path / "benchmark.json").touch()
    assert "what was measured is in" in kept_in(tmp_path, "benchmark.json")


def test_generate_is_timed_with_the_threads_that_the_dense_model_needs(folder, tmp_path, monkeypatch):
    """One for all models where all threads wait for each other; the mode and the note say so, and a resumed call keeps it."""
    used = []
    monkeypatch.setattr("ao_lab.measure.benchmark.timed_threads", lambda *_: 1)
    monkeypatch.setattr(Work, "layers", lambda *_: [])

    def in_turn(self, models, *more):
        used.append(torch.get_num_threads())
        return {name: [1.0, 1.0] for name in models}

    monkeypatch.setattr(Work, "in_turn", in_turn)
    given = {"batch": [1], "new_tokens": 2, "device": "cpu", "out": tmp_path}
    with with_threads(2):
        found = benchmark(folder / "base", configs=["nf4"], **given)
        monkeypatch.setattr("ao_lab.measure.benchmark.timed_threads", lambda *_: 2)
        found = benchmark(folder / "base", configs=["nf4", "int8_rowwise"], **given)
    assert used == [1, 1]
    assert {row.mode for row in found.of("generate")} == {"eager, 1 thread"}
    assert [row.name for row in found.of("generate")] == ["bfloat16", "nf4", "int8_rowwise"]
    assert any("generate() of batch 1: timed with one thread, as 2 threads" in note for note in found.notes)


def test_generate_on_a_crowded_host_is_noisy(monkeypatch):
    """However few rounds agree: two of a busy minute say nothing of a speedup."""
    monkeypatch.setattr("os.getloadavg", lambda: (10.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("ao_lab.measure.benchmark.check_language_model", lambda *_: None)
    work = Work("cpu", {"nf4": lambda model: None}, torch.float32, rounds=2, threads={1: 1})
    monkeypatch.setattr(work, "in_turn", lambda *_: {"float32": [2.0, 2.0], "nf4": [1.0, 1.0]})
    base, own = work.generation(nn.Linear(2, 2), None, 1, 2, "eager")
    assert (base.doubt, own.doubt) == ("", "the host had more than 3 processes to run on 2 cores")
    monkeypatch.setattr("os.getloadavg", lambda: (2.9, 0.0, 0.0))
    again = Work("cpu", {"nf4": lambda model: None}, torch.float32, rounds=2, threads={1: 1})
    monkeypatch.setattr(again, "in_turn", lambda *_: {"float32": [2.0, 2.0], "nf4": [1.0, 1.0]})
    assert [row.doubt for row in again.generation(nn.Linear(2, 2), None, 1, 2, "eager")] == ["", ""]
