"""A stand-in for lm-evaluation-harness: what it is given is noted, and each task has the same made-up results."""

import importlib.util
import sys
import types


def install(monkeypatch):
    """Put it in place of the harness; the notes: arguments of simple_evaluate, of HFLM and of TaskManager by name."""
    calls = {}

    def evaluate(**given):
        calls.update(given)
        print("Determined largest batch size: 64")
        results = {"alias": "made_up", "acc,none": 0.5, "acc_stderr,none": 0.25, "sample_len": 4}
        return {"results": {"made_up": results}, "n-shot": {"made_up": 2}}

    def wrapped(pretrained, tokenizer, batch_size):
        calls.update(batch_size=batch_size)
        calls.setdefault("models", []).append(pretrained)
        return pretrained, tokenizer

    def manager(include_path):
        calls.update(include_path=include_path)
        return types.SimpleNamespace(all_tasks=["made_up", "mmlu"])

    harness = types.ModuleType("lm_eval")
    harness.__spec__ = importlib.util.spec_from_loader("lm_eval", None)
    harness.simple_evaluate = evaluate
    models = types.ModuleType("lm_eval.models.huggingface")
    models.HFLM = wrapped
    found = types.ModuleType("lm_eval.tasks")
    found.TaskManager = manager
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", models)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", found)
    return calls
