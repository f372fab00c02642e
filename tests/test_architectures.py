"""Published architectures: their sizes are the papers', and a search can begin near them."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from archsearch.arch import NO_MIXER, ArchSpec, LayerSpec
from archsearch.architectures import PUBLISHED, Published, project, published_architecture
from archsearch.catalogue import CONTEXTS, architecture_values
from archsearch.cli import app
from archsearch.cost import parameters
from archsearch.errors import SpecError, UsageError
from archsearch.model_spec import ModelSpec, Option, Slot
from archsearch.propose.corners import warm_start
from archsearch.study_file import load_study


def counted(published: Published) -> int:
    return parameters(published.build(), published.vocab_size)


def bounds(written: str) -> tuple[float, float]:
    """Counts that a published one stands for: 2 % around it, or all that round to two digits."""
    digits, unit = written[:-1], {"M": 1e6, "B": 1e9}[written[-1]]
    value = float(digits) * unit
    coarse = 0.05 * unit if re.fullmatch(r"\d\.\d", digits) else 0.0
    slack = max(0.02 * value, coarse)
    return value - slack, value + slack


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: one.name)
def test_parameters_are_those_published(published: Published) -> None:
    low, high = bounds(published.parameters)
    assert low <= counted(published) <= high, f"{counted(published):,}"


def test_every_family_is_there() -> None:
    families = dict.fromkeys(one.family for one in PUBLISHED)
    assert " ".join(families) == (
        "transformer_pp llama_swa based jrt_rnn samba mamba_swa_mlp mamba_mlp mamba mamba2 "
        "sliding_gla sliding_retnet gdn gdn_hybrid natsl natsl_hybrid retnet gla rwkv"
    )
    sizes = {one.name for one in PUBLISHED if one.family in ("samba", "based", "natsl_hybrid")}
    assert sizes == {
        *("samba-421M", "samba-1.3B", "samba-1.7B", "samba-3.8B"),
        *("based-363M", "based-1.35B", "natsl_hybrid-793M", "natsl_hybrid-380M"),
    }


def test_a_family_is_its_first_size_and_a_wrong_name_lists_all() -> None:
    assert published_architecture("samba").name == "samba-421M"
    with pytest.raises(UsageError, match=r"no architecture 'sambo'; did you mean 'samba'.*rwkv"):
        published_architecture("sambo")


def test_layouts_are_those_of_the_papers() -> None:
    based = published_architecture("based-363M").build()
    mixers = [layer.mixer for layer in based.layers]
    assert len(mixers) == 27 and mixers.count("base_conv") == 17
    assert [i for i, name in enumerate(mixers) if name == "linear_attention"] == [1, 6, 11, 16, 21]
    assert [i for i, name in enumerate(mixers) if name == "sliding_window"] == [2, 7, 12, 17, 22]
    samba = published_architecture("samba-1.7B").build()
    assert [layer.mixer for layer in samba.layers] == ["mamba", "sliding_window"] * 12
    hybrid = [layer.mixer for layer in published_architecture("natsl_hybrid").build().layers]
    assert (hybrid.count("gated_delta"), hybrid.count("chunk_routed")) == (15, 6)


def test_state_grows_only_where_the_layout_says() -> None:
    def growth(name: str) -> float:
        first, *_, last = architecture_values(name)["contexts"]
        return float(last["state_bytes"]["maximum"] / first["state_bytes"]["maximum"])

    assert growth("transformer_pp") == pytest.approx(CONTEXTS[-1] / CONTEXTS[0], rel=1e-3)
    assert growth("mamba") == growth("gdn") == growth("based") == 1.0
    at = architecture_values("natsl_hybrid")["contexts"][-1]["state_bytes"]
    assert at["minimum"] < at["expected"] < at["maximum"]


def test_show_prints_one_and_all() -> None:
    runner = CliRunner()
    every = runner.invoke(app, ["show", "arch"])
    assert every.exit_code == 0 and all(one.name in every.output for one in PUBLISHED)
    one = runner.invoke(app, ["show", "arch", "samba-421M"])
    assert one.exit_code == 0
    assert "0, 2, 4, 6, 8, 10: mamba (" in one.output and "131,072" in one.output
    assert "published: 421M" in one.output


SPACE = ModelSpec(
    width=(32, 64),
    repeat=(1, 2),
    layers=(
        Slot(options=(Option(mixer="base_conv"),)),
        Slot(
            options=(
                Option(mixer="attention"),
                Option(mixer="linear_attention", fields={"feature_dim": (4, 8, 24)}),
                Option(mixer=NO_MIXER),
            )
        ),
        Slot(
            options=(
                Option(mixer="sliding_window", fields={"window": (16, 48, 128)}),
                Option(mixer="attention"),
            )
        ),
    ),
)


def test_projection_takes_what_is_offered_and_nearest() -> None:
    assignment = project(SPACE, published_architecture("based-363M").build())
    layers = assignment.arch.layers
    assert [one.mixer for one in layers] == ["base_conv", "linear_attention", "sliding_window"]
    assert (layers[1].fields["feature_dim"], layers[2].fields["window"]) == (8, 48)
    assert assignment.arch.width == 64
    assert assignment.params["layer1.mixer"] == "linear_attention"


def test_projection_leaves_out_what_is_not_offered() -> None:
    arch = ArchSpec(width=32, layers=(LayerSpec(mixer="gated_delta", fields={}),))
    layers = project(SPACE, arch).arch.layers
    assert [one.mixer for one in layers] == ["base_conv", "sliding_window"]


STUDY = """\
study: near-published
model: {width: 32, layers: [base_conv, {one_of: [attention, linear_attention]}]}
task: {mqar: tiny}
search: {warm_start: [based, transformer_pp, smallest]}
"""


def test_a_study_begins_with_published_architectures(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    first, second, *_ = warm_start(load_study(path))
    assert [one.arch.layers[1].mixer for one in (first, second)] == [
        "linear_attention",
        "attention",
    ]
    assert first.arch.layers[1].fields["feature_dim"] == 16
    path.write_text(STUDY.replace("[based", "[basad"))
    with pytest.raises(SpecError, match="did you mean 'based'"):
        load_study(path)
