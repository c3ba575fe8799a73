"""Choices by problem: found again in another process, never half written, for one device and its versions."""

import json
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ao_lab import tune
from ao_lab.gemm import choices, cusparselt
from ao_lab.gemm.choices import SUBSETS, Candidate, Choice, Problem, nearest, problem_of, rows_range

CPU = torch.device("cpu")
PROBLEM = Problem("output", "fp8_rowwise", "fp8_rowwise", 4096, 1024, 64, "torch.bfloat16")


@pytest.fixture(autouse=True)
def cache(no_choices):
    return no_choices


def test_rows_of_a_range():
    assert [rows_range(rows) for rows in (0, 1, 2, 3, 4, 5, 16384, 16385)] == [1, 1, 2, 4, 4, 8, 16384, 32768]


MADE = Choice(
    PROBLEM, "emulate", (Candidate("scaled_mm", reason="no GPU"), Candidate("emulate", 1e-3, 1e-5, 0.03))
)


def saved_file():
    path = choices.path_of(CPU)
    choices.save([MADE], path, choices.device_name(CPU))
    return path


def asked(shape=(64, 4096, 1024), dtype=torch.bfloat16):
    return choices.tuned("output", "fp8_rowwise", "fp8_rowwise", shape, dtype, CPU)


def asked_of(accumulation, experts=0):
    lengths, kinds = (64, 4096, 1024), ("fp8_rowwise", "fp8_rowwise")
    return choices.tuned("output", *kinds, lengths, torch.bfloat16, CPU, accumulation, experts)


def test_accumulations_and_experts_have_choices_of_their_own():
    table, fast = choices.choices_for(CPU), replace(PROBLEM, accumulation="fast")
    table.add(replace(MADE, problem=fast))
    assert [asked_of("fast"), asked_of("precise"), asked(), asked_of("fast", 8)] == [
        "emulate",
        None,
        None,
        None,
    ]
    table.add(replace(MADE, problem=replace(fast, experts=8), kernel="scaled_mm"))
    assert [asked_of("fast"), asked_of("fast", 8), asked_of("fast", 4)] == ["emulate", "scaled_mm", None]


def test_of_a_file_without_accumulations_inference_alone_is_read():
    path, served = saved_file(), replace(MADE, problem=replace(PROBLEM, direction="inference"))
    choices.save([served], path, choices.device_name(CPU))
    content = json.loads(path.read_text())
    for one in content["choices"]:
        del one["problem"]["accumulation"], one["problem"]["experts"]
    path.write_text(json.dumps({**content, "format": choices.BEFORE}))
    choices.forget()
    assert choices.choices_for(CPU).found == {served.problem: served}
    choices.save([MADE], path, choices.device_name(CPU))
    choices.forget()
    assert choices.choices_for(CPU).found == {served.problem: served, PROBLEM: MADE}


def test_nearest_range():
    measured = [(16, "a"), (64, "b"), (1024, "c"), (8192, "c")]
    expected = {1: None, 4: "a", 8: "a", 16: "a", 32: "b", 64: "b", 128: "b", 256: "c", 512: "c"}
    expected |= {2048: "c", 4096: "c", 16384: "c", 32768: "c", 65536: None}
    assert {rows: nearest(rows, measured) for rows in expected} == expected
    assert nearest(8, []) is None
    assert nearest(64, [(1, "a"), (8192, "b")]) is None  # too far from either, and they differ


def test_a_choice_is_not_carried_to_rows_of_candidates_that_were_not_measured():
    """Of 8 rows "fused" was no candidate, of one and of two it is."""
    beyond = Candidate("fused", reason="for more than 2 tokens it uses dequantize", most_rows=2)
    problem = Problem("inference", "", "int4_g32", 64, 64, 8, "torch.bfloat16")
    many = Choice(problem, "dequantize", (Candidate("dequantize", 1e-3), beyond))
    table = choices.choices_for(CPU)

    def carried():
        return [table.kernel(replace(problem, rows=rows)) for rows in (1, 2, 4, 8, 16, 32)]

    table.add(many)
    assert carried() == [None, None, "dequantize", "dequantize", "dequantize", "dequantize"]
    both = (Candidate("dequantize", 1e-3), Candidate("fused", 2e-3))
    table.add(Choice(replace(problem, rows=1), "dequantize", both))
    assert carried()[:3] == ["dequantize", "dequantize", "dequantize"]
    choices.save(table, choices.path_of(CPU), choices.device_name(CPU))
    choices.forget()
    assert choices.choices_for(CPU).found[problem] == many


def test_tokens_are_the_rows_of_every_direction():
    assert problem_of("output", "", "", (40, 64, 128), torch.float32).rows == 64
    assert problem_of("input_grad", "", "", (40, 128, 64), torch.float32).rows == 64
    one, other = (problem_of("weight_grad", "", "", (64, 128, m), torch.float32) for m in (40, 50))
    assert one == other == Problem("weight_grad", "", "", 128, 64, 64, "torch.float32")


def test_what_is_saved_is_read_again():
    assert asked() is None
    saved_file()
    assert asked() is None  # files are read once
    choices.forget()
    assert choices.choices_for(CPU).found == {PROBLEM: MADE}
    assert (
        asked() == asked((33, 4096, 1024)) == asked((32, 4096, 1024)) == asked((65, 4096, 1024)) == "emulate"
    )
    for other in ((64, 4096, 1025), (64, 4095, 1024), (1, 4096, 1024), (512, 4096, 1024)):
        assert asked(other) is None
    assert asked(dtype=torch.float16) is None


def test_a_new_choice_is_seen_at_once():
    table = choices.choices_for(CPU)
    table.add(MADE)
    assert asked() == "emulate"
    table.add(replace(MADE, kernel="scaled_mm"))
    assert asked() == "scaled_mm"


def test_deterministic_is_the_default():
    choices.choices_for(CPU).add(MADE)
    with choices.default_choices():
        assert asked() is None
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert asked() is None
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked() == "emulate"


def test_other_versions_have_another_file(monkeypatch):
    first = choices.path_of(CPU)
    monkeypatch.setattr(choices, "_version", lambda package: "9.9")
    assert choices.path_of(CPU) != first


BROKEN = {
    "no JSON": lambda content: "{",
    "another format": lambda content: {**content, "format": 1},
    "another device": lambda content: {**content, "device": "NVIDIA B300"},
    "a list": lambda content: [content],
    "no choices": lambda content: {k: v for k, v in content.items() if k != "choices"},
    "an unknown field": lambda content: {
        **content,
        "choices": [{**content["choices"][0], "problem": {"m": 1}}],
    },
    "an unknown kernel": lambda content: {
        **content,
        "choices": [{**content["choices"][0], "kernel": "gone"}],
    },
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_gives_no_choices_and_is_replaced(change):
    path = saved_file()
    content = change(json.loads(path.read_text()))
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    choices.forget()
    with pytest.warns(
        UserWarning, match=r"holds no choices.*remove it, .*ao_lab\.tune.*follow the default rules"
    ):
        assert asked() is None
    assert choices.choices_for(CPU).found == {}  # once is enough
    assert asked() is None
    saved_file()
    choices.forget()
    assert asked() == "emulate"


def test_subsets_of_a_training_step_are_checked():
    assert SUBSETS[0] == "output+input_grad+weight_grad"
    assert SUBSETS[-1] == "dense"
    assert len(SUBSETS) == 8
    training = replace(PROBLEM, direction="training", b="")
    for kernel, known in (("output+weight_grad", True), ("weight_grad+output", False), ("dense", True)):
        content = {"format": choices.FORMAT, "device": "d"}
        content["choices"] = [
            {"problem": vars(training), "kernel": kernel, "candidates": [{"kernel": kernel}]}
        ]
        if known:
            assert choices.choices_of(content, "d")[0].kernel == kernel
        else:
            with pytest.raises(ValueError, match="is not a kernel for training"):
                choices.choices_of(content, "d")


def test_two_processes_add_to_one_file():
    path, other = saved_file(), replace(PROBLEM, rows=128)
    choices.save([replace(MADE, problem=other)], path, choices.device_name(CPU))
    choices.forget()
    assert set(choices.choices_for(CPU).found) == {PROBLEM, other}


def a_file_for_the_folder(cache):
    (cache / "tuned").write_text("a file")
    return "Not a directory"


def a_folder_for_the_file(cache):
    choices.path_of(CPU).mkdir(parents=True)
    return "Is a directory"


def a_folder_of_everybody(cache):
    saved_file().parent.chmod(0o777)
    return "can be written by other users"


def a_loop_of_links(cache):
    (cache / "tuned").symlink_to(cache / "tuned")
    return "symbolic links"


@pytest.mark.parametrize(
    "spoil", [a_file_for_the_folder, a_folder_for_the_file, a_folder_of_everybody, a_loop_of_links]
)
def test_a_cache_that_cannot_be_read_gives_no_choices(cache, spoil):
    """Choices are an option: layers run by the default rules, and one warning says why."""
    words = spoil(cache)
    choices.forget()
    with pytest.warns(UserWarning, match=f"{words}.*follow the default rules"):
        assert asked() is None
    assert asked((512, 4096, 1024)) is None


def test_without_a_home_there_are_no_choices(monkeypatch):
    monkeypatch.delenv("AO_LAB_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(choices.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    choices.forget()
    assert asked() is None
    assert cusparselt.known("cpu", 64, 64, 1, "torch.int8") is None
    with pytest.raises(OSError, match="set AO_LAB_CACHE"):
        tune(torch.nn.Linear(4, 4), torch.ones(1, 4))


def test_a_write_that_fails_leaves_the_old_file(monkeypatch):
    path = saved_file()
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        choices.save([], path, "other")
    assert path.read_text() == before


def test_lengths_that_fake_tensors_leave_open(cache):
    """Outside of a tracer's own frame, where a compiler asks what a weight of open lengths gives: they are no key."""
    sizes = ShapeEnv()
    n, k = (sizes.create_unbacked_symint() for _ in range(2))
    device = torch.device("cpu")
    assert choices.tuned("inference", "a", "b", (1, n, k), torch.bfloat16, device) is None
    assert choices.tuned("inference", "a", "b", (1, n, 16), torch.bfloat16, device) is None
