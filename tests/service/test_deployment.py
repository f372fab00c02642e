"""docker-compose.yml: a study runs through its services, and none of them answers a stranger."""

import re
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import grpc
import optuna
import psycopg
import pytest
from deployed import HOST, ROOT, Deployment, interpolated, listening, made_secrets, read_compose
from mlflow import MlflowClient
from playwright.sync_api import expect, sync_playwright
from raylets import RAY

from archsearch.records import TrialRecord, TrialState
from archsearch.store import Store

STUDY = """
study: tiny
model:
  width: 16
  layers:
    - base_conv
    - one_of:
        - attention: {heads: 1, kv_heads: 0}
        - sliding_window: {window: [4, 8], heads: 1}
task: {mqar: tiny}
train: {learning_rates: [1e-2], seeds: 1, epochs: 1}
search: {sampler: random, trials: 3}
resources: {parallel: 2}
"""
CHROMIUM = "/usr/bin/chromium"
ENOUGH_MS = 60_000
SECRETS = re.compile("PASSWORD|SECRET|TOKEN")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Every service on the CPU, two workers, and a study that has run."""
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(folder, made_secrets(folder)) as deployment:
        (folder / "studies/quickstart.yaml").write_text(STUDY)
        for service in (
            "postgres",
            "ray-head",
            "databases",
            "dashboard",
            "optuna-dashboard",
            "mlflow",
            "ray-worker-cpu",
            "ray-worker-cpu",
            "coordinator",
        ):
            deployment.start(service)
        deployment.finish("coordinator")
        yield deployment


def database(deployment: Deployment, role: str, password: str, name: str) -> str:
    return f"postgresql://{role}:{password}@{deployment.address(5432)}/{name}"


@pytest.fixture(scope="module")
def storage(deployment: Deployment) -> str:
    password = deployment.secrets["ARCHSEARCH_DB_PASSWORD"]
    url = database(deployment, "archsearch", password, "archsearch")
    return url.replace("postgresql:", "postgresql+psycopg:")


@pytest.fixture(scope="module")
def trials(storage: str) -> list[TrialRecord]:
    with Store(storage) as store:
        return store.trials("tiny")


def test_the_study_is_complete_in_the_database(storage: str, trials: list[TrialRecord]) -> None:
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    assert len(complete) == 3
    assert all(Path(trial.weights_path).is_file() for trial in complete)
    shown = optuna.storages.RDBStorage(storage)
    try:
        states = [
            trial.state.name for trial in optuna.load_study(study_name="tiny", storage=shown).trials
        ]
    finally:
        shown.remove_session()
        shown.engine.dispose()
    assert states.count("COMPLETE") == len(trials)


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")
def test_the_study_is_complete_in_mlflow(
    deployment: Deployment,
    trials: list[TrialRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", deployment.secrets["MLFLOW_PASSWORD"])
    client = MlflowClient(tracking_uri=f"http://{deployment.address(5000)}")
    experiment = client.get_experiment_by_name("tiny").experiment_id
    runs = {run.data.tags["archsearch.key"]: run for run in client.search_runs([experiment])}
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    assert set(runs) == {"tiny/summary", *(f"tiny/{trial.number}" for trial in complete)}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    summary = runs["tiny/summary"].info.run_id
    report = Path(client.download_artifacts(summary, "report.html", tmp_path)).read_text()
    assert all(trial.arch.layers[1].mixer in report for trial in complete)


def test_the_dashboard_shows_the_study_in_a_browser(
    deployment: Deployment, trials: list[TrialRecord]
) -> None:
    signed_in: Any = {
        "username": "archsearch",
        "password": deployment.secrets["DASHBOARD_PASSWORD"],
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(http_credentials=signed_in)
        page.set_default_timeout(ENOUGH_MS)
        page.goto(f"http://{deployment.address(8080)}/dashboard/")
        page.get_by_role("link", name=re.compile("tiny")).click()
        page.get_by_role("link", name="Trials (List)").click()
        expect(page.get_by_text(f"{len(trials)} Trials", exact=True)).to_be_visible()
        for trial in trials:
            listed = page.get_by_text(f"Trial {trial.optuna_number}", exact=True)
            expect(listed).to_be_visible()
        browser.close()


def status(
    url: str, name: str = "", password: str = "", host: str = "", method: str = "GET"
) -> int:
    """The HTTP status of an answer."""
    request = urllib.request.Request(url, method=method)
    if name:
        signed = b64encode(f"{name}:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {signed}")
    if host:
        request.add_header("Host", host)
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize(
    ("port", "path", "user", "secret"),
    [
        (5000, "/api/2.0/mlflow/experiments/search?max_results=1", "admin", "MLFLOW_PASSWORD"),
        (5000, "/", "admin", "MLFLOW_PASSWORD"),
        (8080, "/api/studies", "archsearch", "DASHBOARD_PASSWORD"),
        (8080, "/dashboard/", "archsearch", "DASHBOARD_PASSWORD"),
    ],
)
def test_web_servers_ask_for_a_password(
    deployment: Deployment, port: int, path: str, user: str, secret: str
) -> None:
    url = f"http://{deployment.address(port)}{path}"
    assert status(url) == 401
    assert status(url, user, "guessed") == 401
    assert status(url, user, deployment.secrets[secret]) == 200


def test_mlflow_refuses_another_host_name_and_its_health_check_would_say_so(
    deployment: Deployment,
) -> None:
    assert deployment.check("mlflow") == 0
    url = f"http://{deployment.address(5000)}/api/2.0/mlflow/experiments/search?max_results=1"
    password = deployment.secrets["MLFLOW_PASSWORD"]
    assert status(url, "admin", password, host="elsewhere:5000") == 403


def test_nobody_writes_through_the_dashboard(deployment: Deployment) -> None:
    url = f"http://{deployment.address(8080)}/api/studies/1"
    password = deployment.secrets["DASHBOARD_PASSWORD"]
    assert status(url, "archsearch", password, method="DELETE") == 403
    assert status(url, "archsearch", password) == 200


def test_postgresql_lets_in_nobody_without_his_password(deployment: Deployment) -> None:
    own = deployment.secrets["MLFLOW_DB_PASSWORD"]
    for role, password, name, said in (
        ("postgres", "", "postgres", "no password supplied"),
        ("archsearch", "guessed", "archsearch", "password authentication failed"),
        ("mlflow", own, "archsearch", "permission denied for database"),
    ):
        with pytest.raises(psycopg.OperationalError, match=said):
            psycopg.connect(database(deployment, role, password, name))
    psycopg.connect(database(deployment, "mlflow", own, "mlflow")).close()


RAY_METHODS = [
    f"/ray.rpc.{name}"
    for name in (
        "NodeInfoGcsService/GetAllNodeInfo",
        "NodeManagerService/GetNodeStats",
        "ObjectManagerService/Pull",
        "CoreWorkerService/GetCoreWorkerStats",
        "ReporterService/GetTraceback",
        "RayletDriver/ClusterInfo",
    )
]
"""One method of every gRPC server that Ray has."""


def ray_answers(address: str) -> set[str]:
    """How a gRPC server answers one who has no token."""
    answers = set()
    with grpc.insecure_channel(address) as channel:
        for method in RAY_METHODS:
            try:
                channel.unary_unary(method)(b"", timeout=10)
                answers.add("OK")
            except grpc.RpcError as error:
                answers.add(error.code().name)
    return answers


def test_no_open_port_answers_a_stranger(deployment: Deployment) -> None:
    """Whatever the services listen on, documented or not."""
    faults, own = {}, deployment.port(8081)
    for address, port in listening(deployment.processes()):
        if port == own:
            assert address == "127.0.0.1"  # optuna-dashboard, of which only nginx knows
            continue
        where = f"{HOST if address == '0.0.0.0' else address}:{port}"
        try:
            answer = {str(status(f"http://{where}/"))}
        except (OSError, HTTPException):  # it does not speak HTTP/1
            answer = ray_answers(where)
        if not answer & {"401", "403", "UNAUTHENTICATED"} or "OK" in answer:
            faults[where] = answer
    assert faults == {}


def test_ray_refuses_who_has_no_token(deployment: Deployment) -> None:
    for token in ("", "0" * 64):
        environment = {
            "PATH": "/usr/bin:/bin",
            "RAY_AUTH_MODE": "token" if token else "disabled",
            "RAY_AUTH_TOKEN": token,
        }
        done = subprocess.run(
            [RAY, "health-check", "--address", deployment.address(6379)],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, "InvalidAuthToken" in done.stderr) == (1, True)


def test_the_databases_job_runs_again_and_changes_nothing(
    deployment: Deployment, storage: str, trials: list[TrialRecord]
) -> None:
    deployment.start("databases")
    deployment.finish("databases")
    with Store(storage) as store:
        assert store.trials("tiny") == trials


def test_nothing_starts_without_secrets(tmp_path: Path) -> None:
    secrets = made_secrets(tmp_path)
    assert len(set(secrets.values())) == len(secrets) and all(map(len, secrets.values()))
    compose = read_compose()
    interpolated(compose, secrets)
    for name in secrets:
        with pytest.raises(LookupError, match=f"{name} is missing"):
            interpolated(compose, secrets | {name: ""})
    for said in compose["services"].values():
        for name, value in said.get("environment", {}).items():
            if SECRETS.search(name):
                assert re.fullmatch(r"\$\{\w+:\?.+\}", value), name
    ignored = subprocess.run(["git", "check-ignore", "-q", ".env"], cwd=ROOT)
    assert ignored.returncode == 0


def test_ports_are_published_on_the_loopback_alone() -> None:
    services = read_compose()["services"].values()
    ports = [port for said in services for port in said.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_workers_have_the_token_and_no_other_secret() -> None:
    services = read_compose()["services"]
    for name in ("ray-head", "ray-worker-cpu", "ray-worker-gpu"):
        said = services[name]
        assert {key for key in said["environment"] if SECRETS.search(key)} == {"RAY_AUTH_TOKEN"}
        assert said["networks"] == ["ray"] and "volumes" not in said
    assert services["ray-worker-cpu"]["command"] == services["ray-worker-gpu"]["command"]


def test_nothing_runs_as_root() -> None:
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")[2:]
    assert [stage.split()[2] for stage in stages] == ["cpu", "gpu"]
    for stage in stages:
        lines = [line.split()[0] for line in stage.splitlines() if line[:1].isupper()]
        assert lines[-2:] == ["USER", "WORKDIR"] and "USER archsearch" in stage
    for name, said in read_compose()["services"].items():
        assert said.get("user") == ("postgres" if name == "postgres" else None)
        assert said["cap_drop"] == ["ALL"]
        assert said["security_opt"] == ["no-new-privileges:true"]
