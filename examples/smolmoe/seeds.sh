#!/usr/bin/env bash
# Seeds of a registered study, one after the other, each on a base model of its own: seeds.sh DENSE OUT SEEDS [options of run.py]
#
# DENSE and the questions are those of ../upcycle/build.sh; SEEDS is a list such as "0 1". OUT gets base0/ ..., and equal/ with what
# was computed. Stopped at any moment, the same command goes on where it was. STUDY=larger is the study of LARGER.md. TRAIN_SECONDS is
# long by default, so that every step of a base model is taken on a slow machine too; the larger base is trained for four minutes.
set -euo pipefail
if [ $# -lt 3 ]; then
  echo "usage: $0 DENSE OUT SEEDS [options of run.py]" >&2
  exit 2
fi
dense=$1 out=$2 seeds=$3
shift 3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
"$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vmoer") is None)' || export PYTHONPATH="$here/../../src${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

study=${STUDY:-smolmoe}
case $study in
  smolmoe) bases=5 seconds=900 train=() settings=() ;;
  larger)
    bases=4 seconds=240 train=(--batch-size 32 --lr 1e-4)
    # training the base nearly fills the GPU
    settings=(UPCYCLE_OPTIONS="--experts 4 --router-sd 0.03 --dtype bfloat16" PYTORCH_ALLOC_CONF=expandable_segments:True)
    ;;
  *)
    echo "STUDY=$study: choose smolmoe or larger" >&2
    exit 2
    ;;
esac

models=()
for ((number = 0; number < bases; number++)); do models+=("$out/base$number/specialised"); done
missed=0
for seed in $seeds; do
  number=$((seed % ${#models[@]}))
  [ -e "${models[$number]}/check.json" ] ||
    env TRAIN_SECONDS="${TRAIN_SECONDS:-$seconds}" ${settings[@]+"${settings[@]}"} \
      "$here/../upcycle/build.sh" "$dense" "$out/base$number" --seed "$number" ${train[@]+"${train[@]}"}
  "$python" "$here/run.py" --registered "$study" --model "${models[@]}" --seeds "$seed" --out "$out/equal" --mps "$@" || missed=$?
  [ "$missed" -le 1 ] || exit "$missed"
done
exit "$missed"
