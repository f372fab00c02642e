#!/usr/bin/env bash
# install.sh VENV [EXTRAS]: make a virtual environment and install archsearch in it, editable, with
# the versions of requirements.lock. A machine without an NVIDIA driver gets the CPU build of torch
# and downloads no CUDA library; TORCH=cpu or TORCH=cuda says it for another machine.
set -euo pipefail
cd "$(dirname "$0")"
venv=$1
extras=${2:+[$2]}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "archsearch needs Python 3.11 or newer; $python is $("$python" -V). Set PYTHON=..." >&2; exit 1; }
"$python" -m venv "$venv" ||
  { echo "Making $venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }

torch=$(grep -E '^torch==' requirements.lock)
build=cuda
if [ ! -e /proc/driver/nvidia/version ]; then build=cpu; fi
build=${TORCH:-$build}
if [ "$build" = cpu ] && [ "$(uname -sm)" = "Linux x86_64" ]; then torch=$torch+cpu; fi
"$venv/bin/pip" install -q "$torch" || {
  echo "$torch was not found. Where pip does not see PyTorch's CPU builds, name their index as" >&2
  echo "pytorch.org's installation page gives it: PIP_EXTRA_INDEX_URL=... make install" >&2
  exit 1
}
locked=(-c requirements.lock)
if [ -n "${UNLOCKED:-}" ]; then locked=(); fi
"$venv/bin/pip" install -q "${locked[@]}" -e ".$extras"
