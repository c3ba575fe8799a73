"""HSTU: what a token sees, jagged and padded batches, and that it learns to rank.

Histories as examples: what is trained on and what is held out, and that an HSTU learns from them.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from experiments.data.item_sequences import ItemSequences, books
from experiments.models.click_training import ClickTraining
from experiments.models.hstu import (
    DLRM_V3,
    HSTU,
    ML_3B,
    TINY,
    HSTUConfig,
    Sequences,
    blocked_attention,
    candidate_index,
    entries,
    padded_attention,
    random_batch,
    ranking_loss,
)
from experiments.models.sequence_training import NEXT, RATED, Examples, small, train, trained_quality


def model(config=TINY, attention=padded_attention, seed=0):
    """Random weights, tables of the bias too."""
    torch.manual_seed(seed)
    made = HSTU(config, attention).double()
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return made


def part(batch, user, drop=()):
    """One user of a batch as a batch; without the candidates whose numbers are in `drop`."""
    begin, length, candidates = sum(batch.lengths[:user]), batch.lengths[user], batch.candidates[user]
    keep = [i for i in range(length) if i - (length - candidates) not in drop]
    at = torch.tensor(keep) + begin
    return Sequences(
        batch.items[at], batch.actions[at], batch.times[at], (len(keep),), (candidates - len(drop),)
    )


def by_formula(layer, x, times, history):
    """The equations of the module, token by token, for one user."""
    config, (w, b) = layer.config, (layer.uvqk.weight, layer.uvqk.bias)
    u, v, q, k = (layer.input_norm(x) @ w.T + b).split(config.widths, -1)
    u, *qkv = (
        (functional.silu(one) for one in (u, v, q, k))
        if config.activate_all
        else (functional.silu(u), v, q, k)
    )
    v, q, k = (one.unflatten(-1, (config.heads, -1)) for one in qkv)
    out = torch.zeros_like(v)
    for i in range(len(x)):
        for j in [*range(min(i + 1, history)), *([i] if i >= history else [])]:
            score = (q[i] * k[j]).sum(-1) * config.factor
            if layer.attention.bias is not None:
                seconds = max(1, int(times[i] - times[j]))
                bucket = min(seconds.bit_length() - 1, config.buckets - 1)
                score = (
                    score
                    + layer.attention.bias.positions[max(0, min(i, history) - j)]
                    + layer.attention.bias.times[bucket]
                )
            out[i] += functional.silu(score)[:, None] / config.length * v[j]
    o = out.flatten(1)
    gated = u * layer.attention_norm(o)
    return x + layer.output(torch.cat((u, o, gated), -1) if config.concatenate else gated)


@pytest.mark.parametrize(
    "changed", [{}, {"activate_all": True, "concatenate": False, "relative_bias": False, "scale": 1.0}]
)
@pytest.mark.parametrize("attention", [padded_attention, blocked_attention])
def test_a_layer_is_the_papers_equations(changed, attention, monkeypatch):
    monkeypatch.setattr("experiments.models.hstu.BLOCK", 7)
    config = replace(TINY, length=20, **changed)
    layer = model(config, attention).layers[0]
    batch = random_batch(config, 1, 5, seed=1)
    x = torch.randn(batch.longest, config.width, dtype=torch.float64)
    expected = by_formula(layer, x, batch.times, batch.longest - 5)
    torch.testing.assert_close(layer(x, batch.layout()), expected, rtol=1e-12, atol=1e-12)


def test_entries_are_those_of_plain_indexing():
    """Values and gradients: sums of quarters are exact in any order."""
    table = torch.arange(6.0, requires_grad=True)
    index = torch.arange(24).reshape(2, 3, 4) * 5 % 6
    gradient = torch.arange(24.0).reshape(2, 3, 4) / 4
    plain, mine = table[index], entries(table, index)
    assert torch.equal(plain, mine)
    wanted, found = (torch.autograd.grad(one, table, gradient)[0] for one in (plain, mine))
    assert torch.equal(wanted, found)


@pytest.mark.parametrize("attention", [padded_attention, blocked_attention])
@pytest.mark.parametrize("relative_bias", [True, False])
def test_users_and_candidates_do_not_see_each_other(attention, relative_bias):
    """Logits of a user in a batch, alone, and without some of the candidates are the same."""
    config = replace(TINY, relative_bias=relative_bias)
    net, batch = model(config, attention), random_batch(config, 3, 4, seed=2)
    together = net(batch).unflatten(0, (3, 4))
    for user in range(3):
        torch.testing.assert_close(net(part(batch, user)), together[user])
        torch.testing.assert_close(net(part(batch, user, drop=(0, 2))), together[user][[1, 3]])


@pytest.mark.parametrize("attention", [padded_attention, blocked_attention])
@pytest.mark.parametrize("users", [0, 2])
def test_no_tokens(attention, users):
    """Of no user, and of users without any."""
    empty = torch.zeros(users, 0, dtype=torch.int64)
    batch = Sequences.of_padded(empty, empty, empty, (0,) * users, (0,) * users)
    assert model(attention=attention)(batch).shape == (0, 1)


def test_padding_is_not_read():
    batch, net = random_batch(TINY, 2, 3, seed=3), model()
    layout = batch.layout()
    items, actions, times = (layout.pad(one) for one in (batch.items, batch.actions, batch.times))
    behind = torch.arange(batch.longest) >= torch.tensor(batch.lengths)[:, None]
    filled = [torch.where(behind, 5, one) for one in (items, actions, times)]
    again = Sequences.of_padded(*filled, batch.lengths, batch.candidates)
    torch.testing.assert_close(net(again), net(batch), rtol=0, atol=0)


def test_actions_of_candidates_are_not_read():
    """They are what is predicted."""
    batch, net = random_batch(TINY, 2, 3, seed=4), model()
    actions = batch.actions.clone()
    actions[candidate_index(batch)] += 1
    actions %= TINY.actions
    torch.testing.assert_close(net(replace(batch, actions=actions)), net(batch), rtol=0, atol=0)


def test_it_learns_to_rank():
    """A candidate is wanted where the user has taken its item before; log loss falls below that of the base rate."""
    config = replace(TINY, items=16, length=24, actions=2)
    net = HSTU(config)
    torch.manual_seed(0)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=5e-3), []
    for step in range(120):
        batch = random_batch(config, 16, 6, seed=step)
        at = candidate_index(batch).view(16, 6)
        ends = torch.tensor(batch.lengths).cumsum(0)
        labels = torch.stack([
            torch.isin(batch.items[at[user]], batch.items[ends[user] - batch.lengths[user] : ends[user] - 6])
            for user in range(16)
        ])  # fmt: skip
        loss = ranking_loss(net(batch), labels.flatten()[:, None])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate = float(labels.float().mean())
        base = -(rate * torch.tensor(rate).log() + (1 - rate) * torch.tensor(1 - rate).log())
        losses.append(loss.item() / base.item())
    assert sum(losses[-10:]) / 10 < 0.8


def test_exact_shapes_of_the_records():
    """uvqk 512 to 2048, output 1536 to 512 (DLRMv3); a table of a million items is not filled here."""
    with torch.device("meta"):
        net = HSTU(DLRM_V3)
        other = HSTU(ML_3B)
    assert [tuple(one.weight.shape) for one in (net.layers[0].uvqk, net.layers[0].output)] == [
        (2048, 512),
        (512, 1536),
    ]
    assert (len(net.layers), len(other.layers)) == (5, 16)
    assert tuple(other.layers[0].output.weight.shape) == (256, 256)


@pytest.mark.parametrize(
    ("lengths", "candidates", "words"),
    [
        ((3, 2), (1, 1), "add up to 5 tokens"),
        ((2, 2), (3, 0), "among its tokens"),
        ((4,), (1, 1), "candidates"),
    ],
)
def test_batches_that_do_not_fit_together(lengths, candidates, words):
    with pytest.raises(ValueError, match=words):
        Sequences(*(torch.zeros(4, dtype=torch.int64) for _ in range(3)), lengths, candidates)


def test_wrong_sizes_and_users_that_are_too_long():
    with pytest.raises(ValueError, match="heads of an HSTU is 1 or more"):
        HSTUConfig(name="x", items=3, heads=0)
    with pytest.raises(ValueError, match="drop the oldest"):
        HSTU(replace(TINY, length=3))(random_batch(TINY, 1, 1, seed=0))


def histories(users=30, length=20, seed=0):
    """Users of 12 to 20 events; odd items are rated 5, even ones 1."""
    rng = np.random.default_rng(seed)
    items = rng.integers(1, 40, (users, length)).astype(np.int32)
    for user in range(users):
        items[user, : user % 9] = 0
    actions = np.where(items == 0, 0, np.where(items % 2, 5, 1)).astype(np.int32)
    return ItemSequences("drawn", items, actions, 40)


def test_rated_events_are_candidates_once_and_later_than_training():
    examples = Examples(histories(), RATED, history=6, candidates=3)
    first, until = examples.parted
    events = {(user, place) for user in range(30) for place in range(20) if place >= first[user]}
    shown = [(u, place) for u, end in examples.held_out_ends for place in range(end, min(end + 3, 20))]
    assert len(shown) == len(set(shown))
    assert set(shown) == {(u, place) for u, place in events if place >= until[u]}
    for user, end in examples.ends:
        assert first[user] < end <= until[user] - 3
    batch, labels = examples.batch(examples.ends[:5], np.random.default_rng(0))
    assert batch.candidates == (3,) * 5
    assert max(batch.lengths) <= 9
    last = np.cumsum(batch.lengths)
    for at, (user, end) in enumerate(examples.ends[:5]):
        own = examples.data.items[user, end : end + 3]
        assert batch.items[last[at] - 3 : last[at]].tolist() == own.tolist()
        assert labels[3 * at : 3 * at + 3, 0].tolist() == (own % 2).tolist()


def test_the_next_item_stands_beside_drawn_ones():
    examples = Examples(histories(), NEXT, history=6, candidates=4)
    assert examples.ends[:, 0].max() < 25 <= examples.held_out_ends[:, 0].min()
    batch, labels = examples.batch(examples.ends[:8], np.random.default_rng(0))
    shown = batch.items[np.concatenate([np.arange(end - 4, end) for end in np.cumsum(batch.lengths)])]
    for at, (user, end) in enumerate(examples.ends[:8]):
        own = int(examples.data.items[user, end])
        some = shown[4 * at : 4 * at + 4]
        assert some[0] == own
        assert labels[4 * at : 4 * at + 4, 0].tolist() == (some == own).float().tolist()
    first, second = (next(examples.held_out(16, None)) for _ in range(2))
    assert np.array_equal(first[0].items, second[0].items)


def test_an_hstu_learns_which_items_are_liked():
    examples = Examples(histories(80), RATED, history=6, candidates=3)
    plan = ClickTraining(steps=60, batch=64, rate=5e-3, table_rate=0.3)
    found = trained_quality(lambda: HSTU(small(examples, 16)), None, examples, plan, 0)
    assert found.auc > 0.8
    assert found.entropy < 0.9
    with pytest.raises(ValueError, match=r"in step \d+; a lower rate may help"):
        train(HSTU(small(examples, 16)), examples, ClickTraining(steps=20, batch=8, rate=1e30), 0)


def test_too_few_events():
    with pytest.raises(
        ValueError, match=r"drawn: no example of the training part; 30 candidates are too many"
    ):
        Examples(histories(), RATED, candidates=30)


def test_books_are_stored(tmp_path):
    with pytest.raises(ValueError, match="corpus-path"):
        books(tmp_path)
    (tmp_path / "sequences").mkdir()
    items = np.arange(1, 7, dtype=np.int32).reshape(2, 3)
    np.savez(tmp_path / "sequences" / "prose-128.npz", items=items, size=9, name="words of prose-1")
    found = books(tmp_path)
    assert (found.items.tolist(), found.actions.tolist(), found.size) == (items.tolist(), [[1] * 3] * 2, 9)
