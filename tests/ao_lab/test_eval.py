"""What a model knows of a text, against sums that are written out."""

import math

import pytest
import torch
from torch import nn

from ao_lab import SchemeConfig, quantize_
from ao_lab.checkpoint.model_card import results_section
from ao_lab.eval import (
    Tokens,
    Windows,
    built_in,
    measured,
    results_of,
    standard_error,
    text_of,
    told_values,
    weight_errors,
    windows_of,
)

#: Logarithms are float32, below 16 here and within 2**-20; perplexity per word takes the exponential of some nine.
CLOSE = 16 * 2.0**-20
ALL = ("perplexity", "accuracy", "agreement")


class Model(nn.Module):
    """Logits from a table: what follows depends on the last token alone."""

    def __init__(self, seed, spread=2.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(16, 16, generator=generator) * spread)

    def forward(self, ids):
        return self.table[ids]


def windows():
    ids = torch.randint(16, (3, 8), generator=torch.Generator().manual_seed(0))
    return Windows(ids, bytes=96, words=12)


def test_only_what_windows_need_is_encoded():
    """Windows are those of the whole text, however many characters a token stands for; the rest of a long text is not read."""

    def encode(text, each):
        seen.append(len(text))
        words = [text[at : at + each] for at in range(0, len(text), each)]
        ids = torch.tensor([sum(map(ord, word)) % 97 + 100 * (len(word) < each) for word in words])
        return Tokens(ids, [min(at + each, len(text)) for at in range(0, len(text), each)])

    text = "".join(chr(97 + at * at % 26) for at in range(100_000))
    for each, most in ((1, 1000), (5, 10_000), (70, 100_000)):
        seen = []
        made = windows_of(text, lambda given, each=each: encode(given, each), 8, 10)
        whole = encode(text, each).ids[:80].reshape(10, 8)
        assert torch.equal(made.ids, whole)
        assert made.bytes == 80 * each
        assert max(seen[:-1]) <= most
    assert len(windows_of("abc" * 4, lambda given: encode(given, 1), 8, 10).ids) == 1


def test_a_gpu_is_waited_for_once(monkeypatch):
    w, waits = windows(), []
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, read=read, name=name: waits.append(name) or read(x))
    measured(Model(0), w, Model(1))
    assert waits == ["tolist"]


def test_numbers_are_those_of_their_definitions():
    model, base, w = Model(0), Model(1), windows()
    got = results_of(measured(model, w, base), w, ALL)
    p, q = (torch.log_softmax(m.table.detach()[w.ids[:, :-1]].double(), -1) for m in (model, base))
    wanted = w.ids[:, 1:]
    losses = -p.gather(2, wanted[..., None])[..., 0]
    assert got["perplexity"]["loss"] == pytest.approx(losses.mean().item(), rel=CLOSE, abs=CLOSE)
    assert got["perplexity"]["token_perplexity"] == pytest.approx(
        math.exp(losses.mean()), rel=CLOSE, abs=CLOSE
    )
    assert got["perplexity"]["bits_per_byte"] == pytest.approx(
        losses.sum().item() / (96 * 7 / 8) / math.log(2)
    )
    assert got["perplexity"]["word_perplexity"] == pytest.approx(
        math.exp(losses.sum() / (12 * 7 / 8)), rel=CLOSE
    )
    assert got["perplexity"]["loss_stderr"] == pytest.approx(
        (losses.mean(1).std() / 3**0.5).item(), rel=CLOSE, abs=CLOSE
    )
    assert got["accuracy"]["accuracy"] == pytest.approx(
        (p.argmax(-1) == wanted).double().mean().item(), rel=CLOSE, abs=CLOSE
    )
    assert got["agreement"]["agreement"] == pytest.approx(
        (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    )
    kl = (q.exp() * (q - p)).sum(-1).mean()
    assert got["agreement"]["kl"] == pytest.approx(kl.item(), rel=CLOSE)
    assert got["agreement"]["kl"] > 0.1
    per_window = (q.exp() * (q - p)).sum(-1).mean(1)
    assert got["agreement"]["kl_stderr"] == pytest.approx((per_window.std() / 3**0.5).item(), rel=1e-3)
    base_loss = -q.gather(2, wanted[..., None]).mean()
    assert got["agreement"]["loss_difference"] == pytest.approx(
        (losses.mean() - base_loss).item(), rel=CLOSE, abs=CLOSE
    )


def test_a_model_agrees_with_itself():
    w = windows()
    got = results_of(measured(Model(0), w, Model(0)), w, ALL)["agreement"]
    assert (got["agreement"], got["kl"], got["loss_difference"], got["loss_difference_stderr"]) == (
        1.0,
        0.0,
        0.0,
        0.0,
    )


def test_impossible_tokens():
    """A base without any probability for a token adds nothing there; a model without adds infinity."""
    model, base, w = Model(0), Model(0), windows()
    with torch.no_grad():
        base.table[:, 3] = -torch.inf
    assert math.isfinite(results_of(measured(model, w, base), w, ALL)["agreement"]["kl"])
    assert results_of(measured(base, w, model), w, ALL)["agreement"]["kl"] == math.inf
    with torch.no_grad():
        base.table[:, w.ids[0, 1]] = -torch.inf
    assert results_of(measured(base, w), w, ("perplexity",))["perplexity"]["token_perplexity"] == math.inf


def letters(text):
    return Tokens(torch.tensor([ord(letter) for letter in text]), list(range(1, len(text) + 1)))


def test_windows_know_their_text():
    made = windows_of("ab cd \u00e9f gh ij", letters, 4, 3)
    assert made.ids.shape == (3, 4)
    assert (made.bytes, made.words, made.predicted) == (13, 4, 9)
    assert windows_of("abcdefgh", letters, 4, 1).ids.shape == (1, 4)
    with pytest.raises(ValueError, match="one window has 20"):
        windows_of("abc", letters, 20, 3)


def test_windows_that_begin_with_tokens_of_the_tokenizer():
    """They predict all of their text, its first token from what the tokenizer puts before it."""
    made = windows_of("ab cd \u00e9f gh ij", letters, 5, 3, [7])
    assert made.ids.shape == (3, 5)
    assert made.ids[:, 0].tolist() == [7, 7, 7]
    assert (made.bytes, made.words, made.predicted, made.share) == (13, 4, 12, 1.0)
    assert windows_of("abcdef", letters, 5, 3, [7, 8]).predicted == 6
    with pytest.raises(ValueError, match="a window of 2 tokens has no room for text after the 2 that"):
        windows_of("abc", letters, 2, 3, [7, 8])
    ids = torch.randint(16, (3, 8), generator=torch.Generator().manual_seed(0))
    for beginning in (1, 2):
        w = Windows(ids, bytes=96, words=12, beginning=beginning)
        got = results_of(measured(Model(0), w, Model(1)), w, ALL)
        p = torch.log_softmax(Model(0).table.detach()[ids[:, beginning - 1 : -1]].double(), -1)
        losses = -p.gather(2, ids[:, beginning:, None])[..., 0]
        assert got["perplexity"]["loss"] == pytest.approx(losses.mean().item(), rel=CLOSE, abs=CLOSE)
        assert got["perplexity"]["bits_per_byte"] == pytest.approx(losses.sum().item() / 96 / math.log(2))
        assert got["agreement"]["kl"] > 0.1


def test_errors_of_weights():
    torch.manual_seed(0)
    model, base = (nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)) for _ in range(2))
    base.load_state_dict(model.state_dict())
    quantize_(model, SchemeConfig(scheme="int4_g32"))
    errors = [(a.weight.dequantize() - b.weight).double() for a, b in zip(model, base, strict=True)]
    wanted = sum(e.square().sum() for e in errors) / sum(b.weight.double().square().sum() for b in base)
    assert weight_errors(model, base) == {"int4_g32": pytest.approx(wanted.sqrt().item())}
    assert weight_errors(base, model) == {}


def test_values_are_rounded_to_their_error_in_cards_as_in_tables():
    """Half of a 95% interval, by Student's t: 2.365 standard errors of 8 windows, 3.182 of 4 examples."""
    tasks = {
        "perplexity": {"token_perplexity": 3.41376e8, "loss": 19.6485, "loss_stderr": 0.56},
        "made_up": {"acc": 0.5, "acc_stderr": 0.25, "sample_len": 4, "alias": "no number"},
    }
    assert [told for *_, told in told_values(tasks, 8)] == ["3.414e+08", "19.6 ± 1.3", "0.50 ± 0.80", "4"]
    shown = results_section({"tasks": tasks, "windows": 8})
    assert "19.6 ± 1.3" in shown
    assert "±: half of a 95% interval" in shown


def test_a_single_window_says_no_errors():
    one = Windows(windows().ids[:1], bytes=32, words=4)
    got = results_of(measured(Model(0), one, Model(1)), one, ALL)
    assert not [name for found in got.values() for name in found if name.endswith("_stderr")]
    assert "loss" in got["perplexity"]


def test_standard_errors():
    assert standard_error([3.0]) == 0.0
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_texts(tmp_path):
    text = built_in()
    assert text.name.startswith("sympy-")
    assert len(text.text) > 10**5
    assert built_in() == text
    (tmp_path / "a.txt").write_text("one two")
    assert text_of(str(tmp_path / "a.txt")).text == "one two"
    assert text_of(str(tmp_path / "a.txt")).name.startswith("a.txt-")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="no UTF-8"):
        text_of(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(ValueError, match="is empty"):
        text_of(str(tmp_path / "a.txt"))
