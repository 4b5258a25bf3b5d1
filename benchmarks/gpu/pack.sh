#!/bin/sh
# Packs the packages that `python -m benchmarks gpu` needs besides jax, flax and optax into a folder of wheels, for a
# machine without a package registry. Run it where there is one; it installs nothing.
#
#   benchmarks/gpu/pack.sh FOLDER [VERSION]        VERSION of that machine's Python (3.12)
#   PYTHON=python3.12 benchmarks/gpu/pack.sh ...   the interpreter whose pip downloads (python3)
#
# There: make gpu PYTHON=... ARGS='--wheels FOLDER'. What that machine has already goes before what lies in FOLDER.
set -eu
folder=${1:?usage: benchmarks/gpu/pack.sh FOLDER [VERSION]}
version=${2:-3.12}
most=40960 # KiB

fetch() {
  "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --implementation cp \
    --python-version "$version" --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --dest "$folder" "$@"
}

mkdir -p "$folder"
rm -f "$folder"/*.whl
fetch --no-deps jmp jaxtyping wadler-lindig dm-haiku equinox # they ask for jax and numpy, which are there
fetch rich pytest # with what they need

size=$(du -sk "$folder" | cut -f1)
echo "$folder: $(ls "$folder" | wc -l) wheels, $size KiB"
test "$size" -le "$most" || { echo "more than $most KiB" >&2; exit 1; }
