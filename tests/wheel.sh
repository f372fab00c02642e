#!/usr/bin/env bash
# Build the wheel, install it in a clean virtual environment away from the checkout, and check what
# it puts there.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

git -C "$root" archive HEAD | tar -x -C "$work" --one-top-level=source
${PYTHON:-python3} -m venv "$work/venv"
torch=$(grep -E '^torch==' "$root/requirements.lock")
if [ ! -e /proc/driver/nvidia/version ] && [ "$(uname -sm)" = "Linux x86_64" ]; then
  torch=$torch+cpu
fi
"$work/venv/bin/pip" install -q "$torch"
"$work/venv/bin/pip" wheel -q --no-deps -w "$work/dist" "$work/source"
"$work/venv/bin/pip" install -q -c "$root/requirements.lock" "$work"/dist/archsearch-*.whl

cd "$work"
export PYTHONSAFEPATH=1
venv/bin/python - dist/archsearch-*.whl <<'PYTHON'
import importlib.util
import sys
import zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
expected = {"archsearch", "archsearch_plugins", "archsearch_kernels"}
assert tops == expected, f"the wheel's top-level modules are {tops}, not {expected}"
for name in ("kernels", "plugins", "studies", "tests", "benchmarks"):
    assert importlib.util.find_spec(name) is None, f"'{name}' is importable as a top-level module"
for package in expected:
    assert f"{package}/py.typed" in names, f"{package} ships no py.typed"
print("wheel: top-level modules are", ", ".join(sorted(tops)))
PYTHON
venv/bin/archsearch --version
venv/bin/archsearch mixers
venv/bin/archsearch schema > schema.json
venv/bin/archsearch run "$work/source/studies/quickstart.yaml" --dry-run
test ! -e archsearch.db && test ! -e mlflow.db
