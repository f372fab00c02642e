"""Fixtures that tests of several parts share."""

from typing import cast

import pytest
import torch
from archsearch_kernels import family


@pytest.fixture
def triton_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have linear attention's table choose, on CUDA, a backend with programs for some fields."""
    table = cast(dict[tuple[str, torch.dtype], str], family("linear_attention").auto)
    monkeypatch.setitem(table, ("cuda", torch.bfloat16), "triton")
