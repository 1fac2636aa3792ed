#!/bin/bash
# Run a launcher of this directory with the active environment's Python, or with .venv's if that lacks packages.
root=$(dirname "${BASH_SOURCE[0]}")/..
for python in python python3 "$root/.venv/bin/python"; do
  # a name on the PATH may be a version manager's stub without a Python
  if "$python" -c "" 2>/dev/null; then
    exec "$python" "$root/examples/$1" "${@:2}"
  fi
done
echo "roll-opd: no Python found; run \`make setup\` in $(cd "$root" && pwd) to create .venv" >&2
exit 1
