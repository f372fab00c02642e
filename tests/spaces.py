"""Made-up spaces for property tests: slots, blocks, ratios and ties, small enough to be walked."""

from hypothesis import strategies as st

from archsearch.compose import count
from archsearch.model_spec import Block, ChannelOption, ModelSpec, Option, Piece, Ratio, Share, Slot
from archsearch.space import Value

FIELDS: dict[str, dict[str, tuple[Value, ...]]] = {
    "attention": {"heads": (1, 2, 4), "rope": (False, True)},
    "sliding_window": {"window": (4, 8, 16), "heads": (1, 2)},
    "base_conv": {"kernel": (2, 3)},
    "none": {},
}


def some(values: tuple[Value, ...]) -> st.SearchStrategy[tuple[Value, ...]]:
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


@st.composite
def options(draw: st.DrawFn, mixer: str) -> Option:
    fields = FIELDS[mixer]
    listed = draw(st.lists(st.sampled_from([*fields]), unique=True)) if fields else []
    return Option(mixer=mixer, fields={name: draw(some(fields[name])) for name in listed})


SLOTS = (
    st.lists(st.sampled_from([*FIELDS]), min_size=1, max_size=3, unique=True)
    .flatmap(lambda mixers: st.tuples(*(options(mixer) for mixer in mixers)))
    .map(lambda chosen: Slot(options=chosen))
)
CHANNELS = st.sampled_from(
    [
        (ChannelOption(),),
        (ChannelOption(kind="swiglu", ratio=(2.0, 4.0)),),
        (ChannelOption(), ChannelOption(kind="swiglu", ratio=(2.0, 4.0))),
    ]
)
PLAIN = st.builds(
    ModelSpec,
    width=some((8, 16)),
    layers=st.lists(SLOTS, min_size=1, max_size=2).map(tuple),
    repeat=some((1, 2)),
    channel_mixer=CHANNELS,
)
UNTIED = some(("mixer", "heads", "window", "kernel")) | st.just(())
PRESENT = SLOTS.filter(lambda slot: all(option.mixer != "none" for option in slot.options))


@st.composite
def ratios(draw: st.DrawFn) -> Ratio:
    """Two shares of at most a half each, so that both fit at every depth."""
    shares = st.builds(
        Share,
        layer=PRESENT,
        share=some((0.0, 0.25, 1 / 3, 0.5)),
        place=some(("early", "late", "spread")),
    )
    mix = draw(st.lists(shares, min_size=1, max_size=2).map(tuple))
    return Ratio(of=draw(some((2, 4, 6))), mix=mix, rest=draw(PRESENT), untied=draw(UNTIED))


def blocks(inside: st.SearchStrategy[Piece]) -> st.SearchStrategy[Block]:
    layers = st.lists(inside, min_size=1, max_size=2).map(tuple)
    return st.builds(Block, repeat=some((1, 2, 3)), layers=layers, untied=UNTIED)


@st.composite
def stacked(draw: st.DrawFn) -> ModelSpec:
    """A model of slots, ratios and blocks, in which one tied slot may stand in several places."""
    tied = draw(SLOTS).model_copy(update={"tie": "local"})
    pieces = SLOTS | st.just(tied) | ratios()
    layers = draw(st.lists(pieces | blocks(pieces), min_size=1, max_size=3).map(tuple))
    return ModelSpec(width=(8,), layers=layers, repeat=draw(some((1, 2))))


STACKED = stacked().filter(lambda model: 1 < count(model) <= 400)
MODELS = PLAIN | STACKED
