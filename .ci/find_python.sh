#!/bin/sh
# Prints the path of a Python to make environments from.
#
#   find_python.sh MIN [MAX]     e.g. "3.11", or "3.11 3.11" for exactly that one
#
# The newest of 3.13, 3.12 and 3.11 that lies within MIN..MAX, then whatever python3 is. Each is looked for in all of
# PATH, then among pyenv's versions, and counts only if it really runs, has the version it should and can make an
# environment: a pyenv shim may stand in PATH for a version that is not switched on, and some systems ship a Python
# without ensurepip. With PYTHON set in the environment, only that one is considered.
# Prints nothing on stdout, says why on stderr and exits 1 where there is none.
set -u
min=${1:?usage: find_python.sh MIN [MAX]}
max=${2:-3.999}

usable() { # prints the real path of the interpreter $1, or fails
  "$1" - "$min" "$max" 2>/dev/null <<'EOF'
import os, sys
import ensurepip, venv
low, high = (tuple(map(int, arg.split("."))) for arg in sys.argv[1:])
if not low <= sys.version_info[:2] <= high:
    sys.exit(1)
# Inside an environment, the interpreter it was made from: the environment may be the one about to be re-made.
print(sys.executable if sys.prefix == sys.base_prefix else os.path.realpath(sys.executable))
EOF
}

if [ -n "${PYTHON:-}" ]; then
  usable "$PYTHON" && exit 0
  echo "PYTHON=$PYTHON does not run, has no venv and ensurepip, or is not within $min..$max" >&2
  exit 1
fi

for name in python3.13 python3.12 python3.11 python3; do
  old_ifs=$IFS
  IFS=:
  for dir in $PATH; do
    [ -x "$dir/$name" ] && usable "$dir/$name" && exit 0
  done
  IFS=$old_ifs
  for candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/"$name"; do
    [ -x "$candidate" ] && usable "$candidate" && exit 0
  done
done
echo "no Python within $min..$max found in PATH or among pyenv's versions; name one: PYTHON=/path/to/python" >&2
exit 1
