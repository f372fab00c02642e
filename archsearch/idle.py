"""Fields of a layer that are searched and make no difference beside what is chosen already.

A mixer tells which by `Config.canonical`; here its candidates are compared. Knows nothing of stacks
and of how a space is searched.
"""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import cast

from archsearch.arch import LayerSpec
from archsearch.registry import canonical_config, load_mixer
from archsearch.space import Part, Value

_MOST = 256
"""Choices that are compared; where there are more, a field is taken to matter."""

_Chosen = tuple[tuple[str, Value], ...]
_Searched = tuple[tuple[str, tuple[Value, ...]], ...]


def is_idle(
    mixer: str,
    width: int,
    chosen: Mapping[str, Value],
    parts: Sequence[LayerSpec],
    rest: _Searched,
) -> bool:
    """True if the first field of the rest makes no difference, whatever is chosen after it.

    Args:
        chosen: fields of the mixer with their values.
        parts: of a mixer that is made of mixers.
        rest: the other fields with their candidates.
    """
    if len(rest[0][1]) == 1 or math.prod(len(values) for _key, values in rest) > _MOST:
        return False
    within = tuple((part.mixer, tuple(part.fields.items())) for part in parts)
    code = cast(Hashable, load_mixer(mixer))
    return _compare(code, mixer, width, tuple(chosen.items()), within, rest)


@lru_cache(maxsize=4096)
def _compare(
    _code: Hashable,
    mixer: str,
    width: int,
    chosen: _Chosen,
    within: tuple[tuple[str, _Chosen], ...],
    rest: _Searched,
) -> bool:
    """As `is_idle`; the code is an argument because the file of a mixer can be read anew."""
    parts = tuple(Part(name, dict(fields)) for name, fields in within)
    (first, values), *later = rest
    for others in itertools.product(*(candidates for _key, candidates in later)):
        given = {**dict(chosen), **dict(zip((key for key, _ in later), others, strict=True))}
        forms = [canonical_config(mixer, width, {**given, first: one}, parts) for one in values]
        if forms[0] is None or any(form != forms[0] for form in forms):
            return False
    return True
