#!/bin/sh
# Prints the path of a Python 3.12 to 3.14 that can make virtual environments, or says on stderr what to install.
# Order: $PYTHON, python3.13, python3.12, python3, then pyenv's versions, the newest first.

usable() {
    "$1" - <<'PY' 2>/dev/null
import sys
if not (3, 12) <= sys.version_info[:2] <= (3, 14):
    sys.exit(1)
import ensurepip, venv
print(sys.executable)
PY
}

pyenv_versions() {
    # shellcheck disable=SC2012  # ls of a glob that may match nothing; names have no blanks
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3 2>/dev/null | sort -rV
}

if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is no Python 3.12 to 3.14 with venv and ensurepip; looking for another." >&2
fi
for candidate in python3.13 python3.12 python3 $(pyenv_versions); do
    usable "$candidate" && exit 0
done

cat >&2 <<'TEXT'
No Python 3.12, 3.13 or 3.14 with venv and ensurepip was found. Install one, for example
    Debian 13, Ubuntu 24.04 or newer:   apt install python3 python3-venv
    macOS:                              brew install python@3.13
    anywhere, with pyenv:               pyenv install 3.13
or say where it is:                     make PYTHON=/path/to/python3.13 ...
TEXT
exit 1
