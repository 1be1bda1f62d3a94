#!/bin/sh
# make_venv.sh DIR EXTRAS [FREE]: a virtual environment in DIR with this project (editable), its extras and the pins of
# constraints.txt, less the packages that the regular expression FREE matches (a copy of the pins lies in DIR).
# A DIR that is there is kept if its Python runs and is new enough, else made anew.
set -eu
dir=$1 extras=$2 free=${3:-}
here=$(dirname "$0")

if ! "$dir/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
    python=$("$here/find_python.sh")
    echo "Making $dir with $python" >&2
    "$python" -m venv --clear "$dir"
fi
if [ -n "$free" ]; then
    grep -vE "^($free)==" constraints.txt > "$dir/constraints.txt"
else
    cp constraints.txt "$dir/constraints.txt"
fi
echo "Installing gdn_jax[$extras] into $dir (a few minutes: on Linux, torch brings several GB of CUDA libraries)" >&2
"$dir/bin/python" -m pip install -qq --disable-pip-version-check -c "$dir/constraints.txt" -e ".[$extras]"
