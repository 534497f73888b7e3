#!/usr/bin/env bash
# From the dense file to a Mixture-of-Experts whose routing matters, and the proof: build.sh DENSE OUT [options of specialise.py]
#
# DENSE is a .gguf file, a wheel that holds one, a folder or a hub id; OUT gets upcycled/, specialised/ and their reports. The
# questions come from VMOER_DATA (DIR/<task>/<split>.jsonl), or from the hub. A stage whose folder is there already is not repeated.
# TRAIN_SECONDS (150) bounds the training; UPCYCLE_OPTIONS are options of upcycle.py, CHECK_OPTIONS of check.py, such as "--split test".
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: $0 DENSE OUT [options of specialise.py]" >&2
  exit 2
fi
dense=$1 out=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vmoer") is None)' || export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

SECONDS=0
# shellcheck disable=SC2086  # several options in one variable
[ -e "$out/upcycled" ] || "$python" "$here/upcycle.py" --dense "$dense" --out "$out/upcycled" ${UPCYCLE_OPTIONS:-}
upcycled=$SECONDS
[ -e "$out/specialised" ] ||
  "$python" "$here/specialise.py" --model "$out/upcycled" --out "$out/specialised" --seconds "${TRAIN_SECONDS:-150}" "$@"
specialised=$SECONDS
# shellcheck disable=SC2086  # several options in one variable
"$python" "$here/check.py" --model "$out/specialised" ${CHECK_OPTIONS:-}
echo
printf '%-12s%8s\n' stage seconds upcycle "$upcycled" specialise $((specialised - upcycled)) check $((SECONDS - specialised)) \
  total "$SECONDS"
