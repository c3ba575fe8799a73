"""A thousand broken folders: each ends in one clear error, or loads what was saved; the model changes wholly or not at all."""

import random
import resource
import shutil
from collections import Counter

import pytest

from ao_lab.checkpoint import api, records
from tests.ao_lab.checkpoint.corrupted import mutations
from tests.ao_lab.checkpoint.corrupted.mutated_files import Case, limits, made_bases, outcome
from tests.ao_lab.checkpoint.corrupted.mutations import BUILT, CONFIGS, FILES, SHARDED

pytest.importorskip("transformers")
COUNT = 1000


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Valid folders by name."""
    return made_bases(tmp_path_factory.mktemp("valid"))


def run(bases, folder, seeds, only=()):
    """Outcomes by kind, and the complaints, of mutations with these seeds; `only` of these ways, to the first complaint."""
    names, counts, wrong = list(bases), Counter(), []
    with limits():
        for seed in seeds:
            rng = random.Random(seed)
            base = bases[names[seed % len(names)]]
            kinds = only or [
                *FILES,
                *CONFIGS,
                *(SHARDED * 3 if base[1] else ()),
                *(BUILT * 4 if base[3] else ()),
            ]
            mutate = kinds[(seed // len(names)) % len(kinds)] if seed < COUNT // 2 else rng.choice(kinds)
            case = Case(base[0], folder / "model")
            mutate(rng, case)
            case.write()
            how, complaint = outcome(case, base)
            shutil.rmtree(case.folder)
            if (folder / "executed").exists():
                complaint = "something was executed"
                (folder / "executed").unlink()
            counts[how] += 1
            if complaint:
                wrong.append(f"seed {seed} {names[seed % len(names)]} {mutate.__name__}: {complaint}")
                if only:
                    break
    return counts, wrong


@pytest.mark.filterwarnings("ignore")
def test_a_thousand_broken_folders(bases, tmp_path):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts, wrong = run(bases, tmp_path, range(COUNT))
    assert not wrong, f"{len(wrong)} of {COUNT}:\n" + "\n".join(wrong[:40])
    assert counts["error"] + counts["loaded"] == COUNT
    assert counts["error"] > 0.7 * COUNT
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    print(f"{dict(counts)}, peak memory grew by {grown:.0f} MB")
    assert grown < 300


def test_what_was_not_broken_loads(bases, tmp_path):
    for name, base in bases.items():
        case = Case(base[0], tmp_path / name)
        case.write()
        assert outcome(case, base) == ("loaded", ""), name


NOTHING = {
    "check_specs": (records, mutations.same_size_dtype, mutations.other_shape, mutations.resize_tensor),
    "_check_description": (records, mutations.record_block, mutations.record_other),
    "_check_names": (records, mutations.shared_names),
    "_check_dense": (records, mutations.same_size_dtype),
    "_check_said": (records, mutations.said_twice),
    "check_scheme_fields": (records, mutations.record_value, mutations.record_block),
    "check_state": (api, mutations.drop_tensor, mutations.other_shape, mutations.rename_tensor),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOTHING)
def test_without_a_check_it_is_noticed(bases, tmp_path, monkeypatch, name):
    module, *kinds = NOTHING[name]
    monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    assert run(bases, tmp_path, range(COUNT), kinds)[1] != []
