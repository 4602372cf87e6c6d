#!/bin/sh
# pip-install locked EXTRA...     what requirements.lock pins for these extras, each file checked against its hash
# pip-install free REQUIREMENT... what stands outside the lock file; wheels in /wheels go first
# pip-install project             this project itself, without asking any index
set -eu
kind=$1
shift
[ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca
pip=/opt/kvasir/bin/pip
case $kind in
locked)
  python3 tools/select_lock.py "$@" >/tmp/selected.lock
  $pip install --require-hashes --only-binary=:all: -r /tmp/selected.lock
  ;;
free) $pip install --find-links /wheels "$@" ;;
project) $pip install --no-deps --no-build-isolation --no-index . ;;
*)
  echo "pip-install: locked, free or project, not '$kind'" >&2
  exit 2
  ;;
esac
