#!/bin/bash
# On a machine with a GPU: the kernels' tests, their shapes, the overhead. Everything lands in $OUT (default: out/gpu).
#   benchmarks/gpu.sh [tests] [tune] [overhead]      all three without an argument
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-out/gpu}
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
PYTHON=${PYTHON:-python3}
steps=${*:-tests tune overhead}
status=0
for step in $steps; do
  start=$SECONDS
  case $step in
    tests) "$PYTHON" -m pytest tests/kernels -m gpu -q -p no:cacheprovider --durations=10 2>&1 | tee "$OUT/tests.log" | tail -40
           [ "${PIPESTATUS[0]}" -eq 0 ] || status=1 ;;
    tune) "$PYTHON" benchmarks/tune.py --out "$OUT/tune.json" 2>&1 | tee "$OUT/tune.log" | tail -60 ;;
    overhead) "$PYTHON" benchmarks/overhead.py --out "$OUT/h200.json" ${OVERHEAD_ARGS:-} 2>&1 | tee "$OUT/overhead.log" | tail -70 ;;
    *) echo "unknown step $step"; exit 2 ;;
  esac
  echo "-- $step: $((SECONDS - start)) s"
done
exit $status
