"""A person with a browser finds the front in MLflow and uses the report: real Chromium and server.

With ARCHSEARCH_SCREENSHOTS=FOLDER, where FOLDER holds the databases of a finished study, that study
is shown instead of a made-up one, and the pictures of the documentation are taken anew.
"""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import samples
from playwright.sync_api import Browser, FrameLocator, Page, expect, sync_playwright
from servers import MlflowServer, free_port

from archsearch.front import ranked
from archsearch.records import StudyRecord, TrialRecord, TrialState
from archsearch.report import html_report
from archsearch.store import Store
from archsearch.tracking import summary_address, sync

# MLflow 3.17 uses a loader strategy that SQLAlchemy 2.1 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --disable-quic --no-first-run"
)
PICTURES = Path(__file__).parent.parent.parent / "docs" / "images"
SHOWN_FOLDER = os.environ.get("ARCHSEARCH_SCREENSHOTS")
ENOUGH_MS = 60_000
"""Longest wait for a page that takes seconds on a quiet machine."""


@dataclass
class Published:
    """A study that MLflow shows, and what must be seen of it."""

    folder: Path
    study: StudyRecord
    trials: list[TrialRecord]

    @property
    def front(self) -> set[int]:
        return {trial.number for trial, rank in ranked(self.study, self.trials) if rank == 0}

    @property
    def complete(self) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.state is TrialState.COMPLETE]

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.folder / 'mlflow.db'}"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    if SHOWN_FOLDER is not None:
        folder = Path(SHOWN_FOLDER).resolve()
        with Store(f"sqlite:///{folder / 'archsearch.db'}") as store:
            name = store.studies()[0]
            return Published(folder, store.study(name), store.trials(name))
    folder = tmp_path_factory.mktemp("browser")
    made_up = samples.sample_study(folder=folder)
    with Store(made_up.spec.tracking.storage, create=True) as store:
        ledger = samples.begin(store, made_up)
        samples.add(store, ledger, samples.sample_trials(made_up, 24))
        sync(store, made_up.name, made_up.spec.tracking.mlflow)
        return Published(folder, store.study(made_up.name), store.trials(made_up.name))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM.exists(), f"no browser at {CHROMIUM}; install it with: apt-get install chromium"
    with sync_playwright() as playwright:
        # Playwright makes a fresh profile folder for every launch.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS.split())
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    page.set_default_timeout(ENOUGH_MS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    page.close()
    assert faults == []


def check_report(report: Page | FrameLocator, published: Published) -> None:
    """What every place that shows the report must show."""
    marks = report.locator("#panels svg .mark")
    expect(marks).to_have_count(2 * len(published.complete), timeout=ENOUGH_MS)
    assert report.locator("#panels .front-line").count() == 2
    for name in ("state", "decode latency"):
        picture = report.locator(f'svg[aria-label="recall against {name}"]')
        expect(picture.locator(".mark")).to_have_count(len(published.complete))
    rows = report.locator("#front tbody tr")
    shown = {int(row.get_attribute("data-trial")) for row in rows.all()}
    assert shown == published.front
    assert report.locator("#hypervolume path").count() == 1


def test_plain_mlflow_ui_finds_the_front_and_opens_the_report(
    page: Page, published: Published
) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    with MlflowServer(published.folder, "ui") as server:  # no option: the defaults must do
        summary = summary_address(published.uri, published.study.name)
        experiment = re.match(r"/#/experiments/\d+", summary).group()
        page.goto(f"{server.url}{experiment}/runs?workflowType=machine_learning")
        search(page, "tags.front = 'true'")
        names = page.get_by_role("link", name=re.compile(r"^\d+: "))
        expect(names).to_have_count(len(published.front))
        assert {int(name.split(":")[0]) for name in names.all_inner_texts()} == published.front
        if SHOWN_FOLDER is not None:
            picture_of_front(page)
        search(page, "tags.state = 'summary'")
        page.get_by_role("link", name="summary").click()
        page.get_by_role("tab", name="Artifacts").click()
        page.get_by_text("report.html", exact=True).click()
        assert "allow-same-origin" not in page.locator("iframe").get_attribute("sandbox")
        report = page.frame_locator("iframe")
        check_report(report, published)
        report.locator("#front tbody tr").first.click()
        number = report.locator("#front tbody tr").first.get_attribute("data-trial")
        expect(report.locator("#picked")).to_have_text(number)
        page.goto(f"{server.url}{summary}")  # where `archsearch ui` points
        check_report(page.frame_locator("iframe"), published)
        assert [url for url in requests if not url.startswith((server.url, "blob:"))] == []


def test_ui_command_serves_the_summary_and_ends_with_ctrl_c(published: Published) -> None:
    command = [Path(sys.executable).parent / "archsearch", "ui", published.study.name]
    command += ["--port", str(free_port()), "--mlflow", published.uri]
    command += ["--storage", f"sqlite:///{published.folder / 'archsearch.db'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        address = said.split()[-1].split("/#/")
        assert address[1] in summary_address(published.uri, published.study.name)
        with urllib.request.urlopen(f"{address[0]}/version") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address[0]}/version")


def search(page: Page, question: str) -> None:
    box = page.get_by_placeholder(re.compile("metrics.rmse"))
    box.fill(question)
    box.press("Enter")


def picture_of_front(page: Page) -> None:
    """Show the objectives as columns, and take the picture of the documentation."""
    page.get_by_label("Close").last.click()
    page.get_by_role("button", name="Columns", exact=True).click()
    wanted = ("recall", "state_bytes", "decode_ms", "parameters")
    for column in ("Dataset", "Source", "Models", *wanted):
        page.get_by_placeholder("Search columns").fill(column)
        page.get_by_role("dialog").get_by_text(column, exact=True).first.click()
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 1500, "height": 640})
    page.screenshot(path=PICTURES / "mlflow_front.png")


def test_report_works_from_a_file_without_a_server(
    page: Page, published: Published, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(html_report(published.study, published.trials), encoding="utf-8")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    check_report(page, published)
    if SHOWN_FOLDER is not None:
        page.set_viewport_size({"width": 1280, "height": 960})
        page.screenshot(path=PICTURES / "report.png", full_page=True)
    assert requests == [path.as_uri()]


def test_report_answers_to_hover_click_sort_and_filter(
    page: Page, published: Published, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    path.write_text(html_report(published.study, published.trials), encoding="utf-8")
    page.goto(path.as_uri())
    one = min(published.front)
    mark = page.locator(f'#panels .mark[data-trial="{one}"]').first
    mark.hover(force=True)
    expect(page.locator("#tip")).to_be_visible()
    expect(page.locator("#tip")).to_contain_text(re.compile(r"^#\d+ "))
    mark.focus()
    mark.press("Enter")  # as a click, for those who use no mouse
    expect(page.locator(f'#front tr[data-trial="{one}"]')).to_have_class("picked")
    expect(page.locator("#picked")).to_have_text(str(one))
    expect(page.locator("#detail code")).to_contain_text(f"archsearch export {one} ")
    page.get_by_label("front only").check()
    expect(page.locator("#panels .mark")).to_have_count(2 * len(published.front))
    page.get_by_label("front only").uncheck()
    page.locator("#legend button").first.click()
    assert page.locator("#panels .mark").count() < 2 * len(published.complete)
    check_sorting(page)
    page.locator("#panels select").first.select_option("parameters")
    expect(page.locator('svg[aria-label="recall against parameters"]')).to_have_count(1)


def check_sorting(page: Page) -> None:
    column = page.locator("#front tbody td:nth-child(3)")  # recall
    for order in (sorted, lambda values: sorted(values, reverse=True)):
        page.locator("#front thead button", has_text=re.compile("^recall$")).click()
        values = [float(text) for text in column.all_inner_texts()]
        assert values == order(values)
    expect(page.locator("#front th").nth(2)).to_have_attribute("aria-sort", "descending")


@pytest.mark.parametrize("count", [0, 1])
def test_report_of_a_study_that_has_just_begun(page: Page, tmp_path: Path, count: int) -> None:
    study = samples.sample_study()
    path = tmp_path / "report.html"
    path.write_text(html_report(study, samples.sample_trials(study, count)), encoding="utf-8")
    page.goto(path.as_uri())
    expect(page.locator(".mark")).to_have_count(2 * count)
    expect(page.locator("#settings dt")).not_to_have_count(0)
