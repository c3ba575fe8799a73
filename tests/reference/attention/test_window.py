"""`Window`: what a query sees as computed, and in which slot a token is."""

import numpy as np
import pytest

from reference.attention.attention import attention
from reference.attention.window import Window

WINDOWS = [Window(), Window(3), Window(0, 2), Window(0, 0, 4), Window(5, 2, 4), Window(2, 1, 8)]


@pytest.mark.parametrize("window", WINDOWS)
def test_seen_token_by_token(window):
    """By its definition, of every query; a call with several tokens is as many calls with one."""
    together = window.seen(20, 20, 20, True)[0, 0]
    for at in range(20):
        length = at + 1
        first = min(length - window.residual, length - length % window.group)
        expected = [key < window.sinks or key >= first for key in range(20)]
        assert together[at].tolist() == expected
        assert window.seen(1, 20, length, False)[0, 0, 0].tolist() == expected


@pytest.mark.parametrize("window", WINDOWS)
def test_slots(window):
    """After tokens one by one, a slot holds the position that is said, and all that are seen as computed have one."""
    held = {}
    for length in range(1, 30):
        at = length - 1
        if at < window.sinks:
            held[at] = at
        elif window.ring:
            held[window.sinks + (at - window.sinks) % window.ring] = at
        said = {slot: int(window.position(slot, length)) for slot in range(window.slots)}
        for slot, position in held.items():
            assert said[slot] == position
        seen = np.flatnonzero(window.seen(1, length, length, True)[0, 0, 0])
        assert set(seen.tolist()) <= set(held.values())


def test_each_query_sees_its_own():
    """Attention to stored and computed keys at once is that of each query with its own mixture."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v = (draw(size).astype(np.float32) for size in ((1, 2, 6, 8), (1, 1, 9, 8), (1, 1, 9, 8)))
    rough_k, rough_v = np.round(k), np.round(v)
    window = Window(2, 1, 4)
    y = attention(q, rough_k, rough_v, causal=True, computed=(k, v), window=window, out_dtype="float64")
    for t in range(6):
        length = 9 - 6 + t + 1
        near = window.seen(1, 9, length, True)[0, 0, 0][None, None, :, None]
        one = attention(q[:, :, t : t + 1], np.where(near, k, rough_k), np.where(near, v, rough_v), length=length, causal=True,
                        out_dtype="float64")  # fmt: skip
        np.testing.assert_allclose(y[:, :, t : t + 1], one, rtol=1e-13)


@pytest.mark.parametrize("fields", [{"residual": -1}, {"sinks": 1.0}, {"group": 0}])
def test_refused(fields):
    with pytest.raises(ValueError, match="is a number of tokens"):
        Window(**fields)
