#!/usr/bin/env bash
# create_venv.sh DIR [PYTHON]: makes the virtual environment DIR, or says what is missing for it.
set -euo pipefail
directory=$1
shift

candidates=("$@")
[ $# -gt 0 ] || candidates=(python3.11 python3.12 python3.13 python3.14 python3)

too_old='' incomplete=''
for python in "${candidates[@]}"; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    too_old="$python is Python $version"
  elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    incomplete=$version
  else
    echo "==> Creating $directory with Python $version"
    exec "$python" -m venv "$directory"
  fi
done

if [ -n "$incomplete" ]; then
  echo "Python $incomplete is here, but its venv module is not complete." >&2
  echo "Debian and Ubuntu have it in a package: apt install python$incomplete-venv" >&2
else
  echo "Python 3.11 or newer is needed; looked for: ${candidates[*]}${too_old:+ ($too_old)}." >&2
  echo "Debian 12, Ubuntu 24.04 and newer: apt install python3 python3-venv" >&2
  echo "Elsewhere: make PYTHON=/path/to/python3.11 ..." >&2
fi
exit 1
