"""The `task` and `train` sections of a study: a recipe's name, its overrides, or all of it.

Each is a table of keys, from which both the reader and the schema for editors are made, and a
function that turns what was read into its spec. Knows nothing of models.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from archsearch.errors import nearest
from archsearch.mqar import check_segment, last_query
from archsearch.recipes import CUSTOM, RECIPES, Recipe
from archsearch.spec import JustReadTwice, MqarSpec, Prompt, TrainSpec
from archsearch.study_file.grammar import (
    Cursor,
    Key,
    Kind,
    Rejected,
    Schema,
    choice,
    listing,
    number,
    one_or_list,
    or_none,
    section,
    switch,
    whole,
)

DEFAULT_TRAINING = "zoology-figure2"
"""Recipe whose training a task without a recipe takes."""

_RECIPE_NAME = replace(
    choice(tuple(RECIPES)),
    schema={"anyOf": [{"const": name, "description": each.doc} for name, each in RECIPES.items()]},
)
_SEGMENT = section(
    (
        Key("length", whole(4, 1 << 20), "Tokens of one sequence.", required=True),
        Key("pairs", whole(1, 1 << 18), "Key-value pairs in it.", required=True),
        Key("examples", whole(1, 10**8), "Number of sequences.", required=True),
    )
)
_MQAR = section(
    (
        Key("recipe", _RECIPE_NAME, "Recipe to start from; the other keys override its parts."),
        Key("vocab_size", whole(4, 1 << 24), "Number of different tokens."),
        Key("train", listing(_SEGMENT, distinct=False), "What is trained on, in this order."),
        Key("test", listing(_SEGMENT), "What is scored; the same for selection and report."),
        Key("power_a", number("a number above 0", above=0), "Exponent of the gaps' power law."),
        Key("random_filler", switch(), "Random tokens between the queries; token 0 if false."),
        Key("seed", whole(0, 2**32 - 1), "Seed of the data; the study's seed does not touch it."),
        Key(
            "prompt",
            choice(get_args(Prompt)),
            "What comes before the queries: the pairs (plain), the pairs twice, or the queried "
            "keys and the pairs (question_first). Default plain.",
        ),
    )
)


def _read_mqar(cursor: Cursor) -> MqarSpec:
    if not isinstance(cursor.value, dict):
        return RECIPES[_RECIPE_NAME.read(cursor)].task
    given = _MQAR.read(cursor)
    missing = [name for name in ("vocab_size", "train", "test") if name not in given]
    if missing and "recipe" not in given:
        raise cursor.refuse(f"without a recipe, these must be given: {', '.join(missing)}")
    base = RECIPES[given["recipe"]].task.model_dump() if "recipe" in given else {}
    task = MqarSpec.model_validate({**base, **given, "recipe": CUSTOM})
    for name, recipe in RECIPES.items():
        if task == recipe.task.model_copy(update={"recipe": CUSTOM, "seed": task.seed}):
            task = task.model_copy(update={"recipe": name})
    _check_segments(cursor, given, task)
    return task


def _check_segments(cursor: Cursor, given: Mapping[str, Any], task: MqarSpec) -> None:
    complete = True
    for part, segments in (("train", task.train), ("test", task.test)):
        said = [check_segment(task, segment) for segment in segments]
        if part not in given and any(said):
            # The segments are the recipe's, so it is the vocabulary that does not fit them.
            raise cursor.refuse(next(filter(None, said)), "vocab_size")
        shapes = [(segment.length, segment.pairs) for segment in segments]
        for index, (length, pairs) in enumerate(shapes):
            if part == "test" and (length, pairs) in shapes[:index]:
                said[index] = f"length {length} with {pairs} pairs is tested already"
            if said[index]:
                cursor.refuse(said[index], part, index)
                complete = False
    if not complete:
        raise Rejected


TASK = section(
    (
        Key(
            "mqar",
            Kind(
                f"{_RECIPE_NAME.accepts}, or a mapping",
                {"anyOf": [_RECIPE_NAME.schema, _MQAR.schema]},
                _read_mqar,
            ),
            "Multi-query associative recall: a recipe's name, or a mapping.",
            required=True,
        ),
    )
)


def read_task(cursor: Cursor) -> MqarSpec:
    """Read the section. Raises Rejected once every problem in it is noted."""
    task = TASK.read(cursor)["mqar"]
    assert isinstance(task, MqarSpec)
    return task


def recipe_of(cursor: Cursor) -> Recipe:
    """The recipe that a task section names, whose training the study starts from."""
    named = cursor.value.get("mqar") if isinstance(cursor.value, dict) else None
    if isinstance(named, dict):
        named = named.get("recipe")
    return RECIPES.get(str(named), RECIPES[DEFAULT_TRAINING])


def _literals(field: str) -> tuple[str, ...]:
    return get_args(TrainSpec.model_fields[field].annotation)


def _read_betas(cursor: Cursor) -> tuple[float, ...]:
    betas = _BETAS.read(cursor)
    if len(betas) != 2:
        raise cursor.expected("a list of two numbers, such as [0.9, 0.999]")
    return betas


_BETAS = listing(number("a number from 0 to below 1", minimum=0, below=1), distinct=False)
_POSITIVE = number("a number above 0", above=0)
_PAIR = Kind("a list of two numbers", {**_BETAS.schema, "minItems": 2, "maxItems": 2}, _read_betas)

_DEFAULTS = JustReadTwice()
_JUST_READ_TWICE = section(
    (
        Key(
            "mask_share",
            number("a number above 0 and below 1", above=0, below=1),
            f"Probability that a token of the prefix is masked. Default {_DEFAULTS.mask_share}.",
        ),
        Key(
            "mask_weight",
            number("a number, 0 or more", minimum=0),
            f"Weight of the masked tokens' loss. Default {_DEFAULTS.mask_weight}.",
        ),
        Key("prefix", whole(1, 1 << 20), "Tokens of the prefix; all before the queries."),
    )
)
_NEXT_TOKEN, _TWICE = "next_token", "just_read_twice"
_OBJECTIVE_ACCEPTS = f"{_NEXT_TOKEN}, {_TWICE}, or {{{_TWICE}: {{mask_share: 0.15}}}}"


def _read_objective(cursor: Cursor) -> JustReadTwice | None:
    value = cursor.value
    if value == _NEXT_TOKEN:
        return None
    if value == _TWICE:
        return _DEFAULTS
    if not isinstance(value, dict) or [*value] != [_TWICE]:
        name = next(iter(value), "") if isinstance(value, dict) else value
        raise cursor.expected(_OBJECTIVE_ACCEPTS, nearest(name, (_NEXT_TOKEN, _TWICE)))
    return JustReadTwice.model_validate(_JUST_READ_TWICE.read(cursor.at(_TWICE)))


_OBJECTIVE_SCHEMA: Schema = {
    "anyOf": [
        {"enum": [_NEXT_TOKEN, _TWICE]},
        {
            "type": "object",
            "properties": {_TWICE: _JUST_READ_TWICE.schema},
            "required": [_TWICE],
            "additionalProperties": False,
        },
    ]
}

TRAIN = section(
    (
        Key("learning_rates", one_or_list(_POSITIVE), "Every rate is trained; the best counts."),
        Key("seeds", whole(1, 1024), "Copies with different seeds, at every learning rate."),
        Key("epochs", whole(1, 10**6), "Passes over the training data."),
        Key("data", choice(_literals("data")), "Every epoch the same examples, or fresh ones."),
        Key("batch_size", whole(1, 10**6), "Sequences in one step of training."),
        Key("test_batch_size", whole(1, 10**6), "Sequences in one step of evaluation."),
        Key("weight_decay", number("a number, 0 or more", minimum=0), "AdamW's weight decay."),
        Key("betas", _PAIR, "AdamW's two averages."),
        Key("grad_clip", or_none(_POSITIVE), "Largest gradient norm of one copy; none for any."),
        Key("schedule", choice(_literals("schedule")), "How the learning rate falls to 0."),
        Key("warmup_steps", whole(0, 10**9), "Steps over which the learning rate rises."),
        Key(
            "embed_dropout",
            number("a number from 0 to below 1", minimum=0, below=1),
            "Share of embedding features that training drops.",
        ),
        Key("precision", choice(_literals("precision")), "Number format of the computation."),
        Key("rungs", whole(1, 1000), "Evaluations during training, evenly spaced."),
        Key(
            "objective",
            Kind(_OBJECTIVE_ACCEPTS, _OBJECTIVE_SCHEMA, _read_objective),
            f"Loss that training minimises. Default {_NEXT_TOKEN}.",
        ),
    )
)


def too_long_prefix(task: MqarSpec, train: TrainSpec) -> str:
    """Say which training segment a prefix leaves no query of; an empty string if none."""
    prefix = train.objective.prefix if train.objective is not None else None
    for segment in task.train:
        last = last_query(task, segment)
        if prefix is not None and prefix > last:
            return (
                f"found a prefix of {prefix} tokens; expected at most {last}, where the last query "
                f"of a training sequence of {task.length_of(segment)} tokens can stand"
            )
    return ""


def train_over(recipe: Recipe, given: Mapping[str, Any]) -> TrainSpec:
    """A recipe's training with what a study gives in its place."""
    return TrainSpec.model_validate({**recipe.train.model_dump(), **given})
