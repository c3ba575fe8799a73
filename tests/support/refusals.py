"""What a call says when it refuses its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(
    error: type[Exception] | tuple[type[Exception], ...],
    words: str,
    call: Callable[..., Any],
    /,
    *arguments: Any,
    **options: Any,
) -> None:
    """Assert that call(*arguments, **options) raises this error, and says what matches these words."""
    with pytest.raises(error, match=words):
        call(*arguments, **options)
