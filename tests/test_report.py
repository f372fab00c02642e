"""The report shows what the records say, loads nothing, and cannot be broken by a name."""

import json
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import samples

from archsearch.front import hypervolume_of, ranked
from archsearch.records import TrialState, losses
from archsearch.registry import load_mixer
from archsearch.report import html_report, hypervolume_history, png_report
from archsearch.report.values import family, is_logarithmic, page_values, spread

STUDY = samples.sample_study()
TRIALS = samples.sample_trials(STUDY, 24)


def values_in(page: str) -> dict:
    """The JSON a browser would read out of the page."""
    # A browser ends a script at `</script`, whatever follows.
    found = re.findall(r'<script type="application/json" id="values">(.*?)</script', page, re.S)
    assert len(found) == 1
    return json.loads(found[0])


class Parts(HTMLParser):
    """Elements of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))


def loads_something(page: str) -> list[str]:
    """What a browser would fetch for this page."""
    faults = [
        f"<{tag} {name}={value}>"
        for tag, attributes in Parts(page).found
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action", "poster", "background")
    ]
    faults += re.findall(r"@import[^;]*|url\([^)]*\)", page)
    faults += re.findall(r"\b(?:fetch|XMLHttpRequest|WebSocket|EventSource|importScripts)\b", page)
    return faults


def test_page_shows_every_trial_and_the_front() -> None:
    values = values_in(html_report(STUDY, TRIALS))
    assert [row["number"] for row in values["trials"]] == list(range(24))
    shown = {row["number"] for row in values["trials"] if row["rank"] == 0}
    assert shown == {trial.number for trial, rank in ranked(STUDY, TRIALS) if rank == 0}
    by_number = {trial.number: trial for trial in TRIALS}
    for row in values["trials"]:
        if row["state"] == "complete":
            assert row["metrics"] == by_number[row["number"]].metrics


def test_page_loads_nothing() -> None:
    page = html_report(STUDY, TRIALS)
    assert loads_something(page) == []
    # The only address in it is the name of the SVG namespace, which no browser fetches.
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert "localStorage" not in page


@pytest.mark.parametrize(
    "planted",
    ['<script src="https://cdn.example/x.js"></script>', "@import 'x.css';", "fetch('/x')"],
)
def test_planted_load_is_found(planted: str) -> None:
    assert loads_something(html_report(STUDY, TRIALS).replace("</body>", planted + "</body>"))


def test_names_and_messages_cannot_become_markup() -> None:
    attack = "</script ><img src=x onerror=alert(1)><!--<script>&lt;{{script}}\u2028"
    study = replace(STUDY, name=attack, stop_reason=attack)
    failed = replace(TRIALS[5], message=attack)
    complete = samples.with_mixer(TRIALS[0], attack, {attack: attack})
    page = html_report(study, [complete, failed])
    kinds = [tag for tag, _ in Parts(page).found]
    assert "img" not in kinds
    assert kinds.count("script") == 2
    values = values_in(page)
    assert values["study"] == attack
    assert values["trials"][0]["detail"]["layers"][1]["mixer"] == attack
    assert attack in values["failures"][0]["trials"][0]["message"]


def test_script_writes_texts_only_as_text() -> None:
    page = html_report(STUDY, TRIALS)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)


@pytest.mark.parametrize(
    "trials",
    [
        [],
        TRIALS[:1],
        [TRIALS[5]],
        [trial for trial in TRIALS if trial.state is TrialState.FAILED],
        [trial for trial in TRIALS if trial.state is not TrialState.COMPLETE],
        [replace(TRIALS[0], state=TrialState.PENDING, finished_at=None, evaluation=None)],
        [replace(trial, evaluation=None, profile=None) for trial in TRIALS],
    ],
    ids=["none", "one", "one-failed", "failures", "no-complete", "pending", "no-details"],
)
def test_report_of_a_study_with_little_in_it(trials: list) -> None:
    assert len(values_in(html_report(STUDY, trials))["trials"]) == len(trials)
    assert png_report(STUDY, trials).startswith(b"\x89PNG")


def test_numbers_json_cannot_hold_are_left_out() -> None:
    broken = replace(TRIALS[0], metrics=TRIALS[0].metrics | {"prefill_ms": float("nan")})
    values = values_in(html_report(STUDY, [broken]))
    assert values["trials"][0]["metrics"]["prefill_ms"] is None


def test_failures_are_grouped_with_their_reasons() -> None:
    groups = {row["reason"]: row for row in page_values(STUDY, TRIALS)["failures"]}
    failed = [trial for trial in TRIALS if trial.state is TrialState.FAILED]
    over = [trial for trial in TRIALS if trial.state is TrialState.INFEASIBLE]
    assert groups["diverged"]["count"] == len(failed) > 0
    assert groups["over a limit"]["count"] == len(over) > 0
    assert groups["over a limit"]["trials"][0]["message"] == over[0].violations[0]


def test_hypervolume_history_ends_at_the_hypervolume_and_never_falls() -> None:
    history = hypervolume_history(STUDY, TRIALS)
    complete = [trial for trial in TRIALS if trial.state is TrialState.COMPLETE]
    assert [done for done, _ in history] == list(range(1, len(complete) + 1))
    volumes = [volume for _, volume in history]
    assert volumes == sorted(volumes)
    assert volumes[-1] == pytest.approx(hypervolume_of(STUDY, TRIALS), rel=1e-12)
    for done, volume in history:
        assert volume == pytest.approx(hypervolume_of(STUDY, complete[:done]), rel=1e-12)


def test_shares_count_layers_on_and_off_the_front() -> None:
    ranks = {trial.number: rank for trial, rank in ranked(STUDY, TRIALS)}
    shares = page_values(STUDY, TRIALS)["shares"]
    assert [row["layer"] for row in shares] == [0, 1]
    on = [trial for trial in TRIALS if ranks.get(trial.number) == 0]
    assert shares[0]["on"] == {"base_conv": len(on)}
    for mixer in ("attention", "gated_delta"):
        count = sum(trial.arch.layers[1].mixer == mixer for trial in on)
        assert shares[1]["on"].get(mixer, 0) == count


def test_a_mixer_that_fails_to_say_its_state_does_not_spoil_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaves(*_: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(load_mixer("attention").Config, "state_spec", leaves)
    assert "attention" in html_report(STUDY, TRIALS)


def test_family_is_the_searched_mixer() -> None:
    assert {family(STUDY.spec, trial.arch) for trial in TRIALS} <= {
        "attention",
        "sliding_window",
        "linear_attention",
        "gated_delta",
    }


def test_spread_is_over_the_seeds_of_the_chosen_rate() -> None:
    trial = TRIALS[0]
    chosen = [m.report_recall for m in trial.evaluation.members if m.learning_rate == 1e-2]
    assert spread(trial) == (min(chosen), max(chosen))


def test_spread_counts_a_seed_that_diverged() -> None:
    trial = next(trial for trial in TRIALS if trial.evaluation is not None)
    assert trial.evaluation is not None
    rate = trial.evaluation.learning_rate
    members = [
        member.model_copy(update={"diverged": True, "report_recall": 0.0})
        if (member.learning_rate, member.seed) == (rate, 0)
        else member
        for member in trial.evaluation.members
    ]
    evaluation = trial.evaluation.model_copy(update={"members": tuple(members)})
    low, high = spread(replace(trial, evaluation=evaluation)) or (1.0, 1.0)
    assert (low, high > 0) == (0.0, True)


def test_losses_are_counted_once_for_each_architecture() -> None:
    failed = next(trial for trial in TRIALS if trial.failure is not None)
    again = replace(failed, number=99, state=TrialState.DUPLICATE, duplicate_of=failed.number)
    assert losses([failed, again]) == {"diverged": [(failed, failed.message)]}


def test_axis_is_logarithmic_for_state_and_never_with_zeros() -> None:
    assert is_logarithmic("state_bytes", [100.0, 200.0])
    assert not is_logarithmic("state_bytes", [0.0, 200.0])
    assert not is_logarithmic("decode_ms", [1.0, 9.0])
    assert is_logarithmic("decode_ms", [1.0, 10.0])


def test_picture_has_the_size_of_a_picture_and_is_the_same_twice() -> None:
    picture = png_report(STUDY, TRIALS)
    width, height = struct.unpack(">II", picture[16:24])
    assert (width, height) == (1800, 780)
    assert picture == png_report(STUDY, TRIALS)


def test_same_records_give_the_same_page() -> None:
    assert html_report(STUDY, TRIALS) == html_report(STUDY, TRIALS)
