#!/bin/sh
# install.sh FOLDER EXTRAS WHEELS: a virtual environment in FOLDER with the wheel of the folder WHEELS and its extras.
# Other wheels of WHEELS are taken before those of an index. Arguments of pip, such as an index, come from its
# environment (PIP_INDEX_URL, PIP_NO_INDEX, PIP_FIND_LINKS).
set -eu
[ $# -eq 3 ] || { echo "usage: install.sh FOLDER EXTRAS WHEELS" >&2; exit 2; }
wheel=$(find "$3" -name 'tilewright-*.whl' | sort | tail -n 1)
[ -n "$wheel" ] || { echo "install.sh: there is no wheel in $3; make one with 'make wheel'" >&2; exit 1; }
# Debian and Ubuntu have Python without venv and pip, which are packages of their own.
if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends python3 python3-venv
  rm -rf /var/lib/apt/lists/*
fi
python3 -m venv "$1"
"$1/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --find-links "$3" "$wheel[$2]"
"$1/bin/tilewright" --version
