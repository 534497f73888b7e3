#!/usr/bin/env bash
# The study in one command, from the dense file to the verdicts: all.sh DENSE OUT [options of run.py]
#
# DENSE and the questions are those of ../upcycle/build.sh. OUT gets model/, study/ and study/results/, whose verdicts are printed last.
# Stopped at any moment, the same command goes on where it was.
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: $0 DENSE OUT [options of run.py]" >&2
  exit 2
fi
dense=$1 out=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vmoer") is None)' || export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}"

[ -e "$out/model/specialised/check.json" ] || "$here/../upcycle/build.sh" "$dense" "$out/model"
missed=0
"$python" "$here/run.py" --model "$out/model/specialised" --out "$out/study" --mps "$@" || missed=$?
[ "$missed" -le 1 ] || exit "$missed"
"$python" "$here/run.py" --out "$out/study" --report
"$python" "$here/verdicts.py" "$out/study/results"
exit "$missed"
