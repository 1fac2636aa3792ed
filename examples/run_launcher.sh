#!/bin/bash
# Runs a launcher of this directory, which takes an active environment's Python, or .venv's where that has no packages.
root=$(dirname "${BASH_SOURCE[0]}")/..
for python in python python3 "$root/.venv/bin/python"; do
  # tried: a name on the PATH may be a version manager's stub for a Python that is not there
  if "$python" -c "" 2>/dev/null; then
    exec "$python" "$root/examples/$1" "${@:2}"
  fi
done
echo "roll-opd: no Python found; run \`make setup\` in $(cd "$root" && pwd) to create .venv" >&2
exit 1
