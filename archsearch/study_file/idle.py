"""Fields that a study lists for a layer although they make no difference to any choice there.

A mixer says by `Config.canonical` what makes no difference; here its fields are tried with what
the study chooses among and with a few values besides. Knows nothing of what else a study says.
"""

import itertools
from collections.abc import Iterator, Sequence

from archsearch.model_spec import Option, Slot
from archsearch.registry import canonical_config, mixer_fields
from archsearch.space import Field, Value
from archsearch.study_file.fields import describe_value
from archsearch.study_file.grammar import Cursor
from archsearch.study_file.mixers import ONE_OF, PARTS

_MAX_TRIES = 5000


def refuse_idle(cursor: Cursor, slot: Slot, widths: Sequence[int]) -> bool:
    """Note every listed field of a layer that makes no difference; True if there is none."""
    complete = True
    for option, inner in _written(cursor, slot):
        assert isinstance(inner.value, dict)
        listed = [name for name in option.fields if name in inner.value]
        for name in listed:
            if _is_idle(option, name, widths):
                said = f"makes no difference{_beside(option, name, listed)}; leave it out"
                inner.refuse(said, name, at_key=True)
                complete = False
        if PARTS in inner.value:
            parts = zip(range(len(option.parts)), option.parts, strict=True)
            found = [refuse_idle(inner.at(PARTS).at(i), part, widths) for i, part in parts]
            complete = complete and all(found)
    return complete


def _written(cursor: Cursor, slot: Slot) -> Iterator[tuple[Option, Cursor]]:
    """Each mixer that the study narrows, and where it says so."""
    value = cursor.value
    searched = isinstance(value, dict) and ONE_OF in value
    for i, option in enumerate(slot.options):
        at = cursor.at(ONE_OF).at(i) if searched else cursor
        if isinstance(at.value, dict) and isinstance(at.value[option.mixer], dict):
            yield option, at.at(option.mixer)


def _is_idle(option: Option, name: str, widths: Sequence[int]) -> bool:
    """True if no value of a field is told apart from another, whatever else is chosen."""
    field = mixer_fields(option.mixer)[name]
    if {*option.fields[name]} == {field.default}:
        return False
    values = dict.fromkeys((*option.fields[name], *_tried(field)))
    others = {key: one for key, one in option.fields.items() if key != name}
    choices = itertools.product(widths, itertools.product(*others.values()))
    compared = False
    for width, chosen in itertools.islice(choices, _MAX_TRIES):
        given = dict(zip(others, chosen, strict=True))
        forms = [canonical_config(option.mixer, width, {**given, name: value}) for value in values]
        known = [form for form in forms if form is not None]
        if any(form != known[0] for form in known[1:]):
            return False
        compared = compared or len(known) > 1
    return compared and next(choices, None) is None


def _tried(field: Field) -> tuple[Value, ...]:
    """Values of a field among which there must be a difference if it ever makes one."""
    if field.domain is not None or isinstance(field.default, str):
        return (field.default, *field.candidates)
    if isinstance(field.default, bool):
        return (field.default, not field.default)
    return (field.default, field.default + 1)


def _beside(option: Option, name: str, listed: Sequence[str]) -> str:
    """The other fields that may be why: what is listed, and what by default is no number."""
    said = []
    for key, field in mixer_fields(option.mixer).items():
        if key != name and (key in listed or isinstance(field.default, str | bool)):
            values = option.fields.get(key, (field.default,))
            said.append(f"{key} {' or '.join(map(describe_value, values))}")
    return f" with {', '.join(said)}" if said else ""
