"""Rules of the code base that a reader may rely on, checked on the source itself."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "archsearch": ROOT / "archsearch",
    "archsearch_plugins": ROOT / "plugins" / "archsearch_plugins",
    "archsearch_kernels": ROOT / "kernels" / "archsearch_kernels",
}

LAYERS: dict[str, int] = {
    module: layer
    for layer, modules in enumerate(
        [
            "errors device pareto units space snapshot",
            "mixer model_spec yaml_file",
            "registry spec",
            "arch mqar optimiser recipes stopping",
            "idle",
            "messages feed compose display testing kernel_check",
            "records model architectures",
            "cost execution front store cluster just_read_twice members grouped",
            "group profile bundle measures study_file report tables",
            "population memory",
            "checkpoint",
            "trial tracking progress gate export locate browse catalogue",
            "propose checks",
            "coordinator preview bench_trials bench_kernels",
            "launch",
            "cli",
            "__main__",
        ]
    )
    for module in modules.split()
}
"""archsearch module -> layer. A module imports only from lower layers."""

HOMES: dict[str, set[str]] = {
    "ray": {"cluster"},
    "sqlalchemy": {"store", "migrations"},
    "alembic": {"store", "migrations"},
    "mlflow": {"tracking"},
    "typer": {"cli"},
    "optuna": {"propose"},
    "matplotlib": {"report"},
    "ruamel": {"yaml_file"},
}
"""Service library -> the modules of archsearch that may import it."""


def sources() -> list[Path]:
    return sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))


def imported_modules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_faults(package: str, module: str, source: str) -> list[str]:
    """Say which imports of one file point the wrong way."""
    forbidden = {
        "archsearch_kernels": ("archsearch", "archsearch_plugins"),
        "archsearch": ("archsearch_plugins",),
        "archsearch_plugins": (),
    }[package]
    faults = []
    for name in imported_modules(source):
        top, _, rest = name.partition(".")
        if top in forbidden:
            faults.append(f"{package}.{module} imports {name}")
        if package == top == "archsearch" and rest:
            target = rest.split(".")[0]
            if target in LAYERS and target != module and LAYERS[target] >= LAYERS[module]:
                faults.append(f"{module} (layer {LAYERS[module]}) imports {target}")
    return faults


def module_of(package: str, path: Path) -> str:
    return path.relative_to(PACKAGES[package]).parts[0].removesuffix(".py")


def test_imports_point_to_lower_layers() -> None:
    faults = []
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            module = module_of(package, path)
            if package == "archsearch" and module not in ("__init__", "migrations"):
                assert module in LAYERS, f"archsearch.{module} has no layer; give it one"
            if module in LAYERS or package != "archsearch":
                faults += layer_faults(package, module, path.read_text())
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("package", "module", "source"),
    [
        ("archsearch", "mixer", "from archsearch.coordinator import run_study"),
        ("archsearch", "population", "def late():\n    import archsearch.trial"),
        ("archsearch", "registry stopping", "from archsearch_plugins import attention"),
        ("archsearch_kernels", "family", "from archsearch.errors import ArchsearchError"),
    ],
)
def test_planted_upward_import_is_found(package: str, module: str, source: str) -> None:
    assert layer_faults(package, module, source)


def test_service_libraries_have_one_home() -> None:
    faults = []
    for path in PACKAGES["archsearch"].rglob("*.py"):
        module = module_of("archsearch", path)
        for name in imported_modules(path.read_text()):
            homes = HOMES.get(name.split(".")[0])
            if homes is not None and module not in homes:
                faults.append(f"{module} imports {name}; its home is {', '.join(sorted(homes))}")
    assert not faults, "\n".join(faults)


def test_importing_archsearch_loads_nothing_heavy() -> None:
    program = (
        "import sys, archsearch\n"
        "heavy = ['ray', 'mlflow', 'sqlalchemy', 'typer', 'optuna', 'triton', 'torch']\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_defining_a_mixer_loads_no_service_and_touches_no_device() -> None:
    program = (
        "import sys\n"
        "from archsearch.registry import load_mixer, mixer_names\n"
        "[load_mixer(name) for name in mixer_names()]\n"
        "import torch\n"
        "heavy = ['ray', 'mlflow', 'sqlalchemy', 'typer', 'optuna', 'triton']\n"
        "print([name for name in heavy if name in sys.modules], torch.cuda.is_initialized())\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[] False"


def test_files_stay_short() -> None:
    files = [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    long = [(path.name, len(path.read_text().splitlines())) for path in files]
    assert not [(name, lines) for name, lines in long if lines > 400]


def test_functions_stay_short() -> None:
    long = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                if lines > 40:
                    long.append(f"{path.name}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in sources() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_no_drawer_modules() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
    assert not [path for path in sources() if path.stem in drawers]


def test_folders_do_not_shadow_packages() -> None:
    """A regular package of that name elsewhere must win over our folders."""
    for folder in ("plugins", "kernels", "studies", "tests", "benchmarks"):
        assert not (ROOT / folder / "__init__.py").exists()
