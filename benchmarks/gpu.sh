#!/bin/bash
# On a machine with a GPU: the kernels' tests, their shapes, a training step, the overhead. All lands in $OUT (default: out/gpu).
#   benchmarks/gpu.sh [tests] [tune] [step] [overhead]      all four without an argument
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-out/gpu}
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
PYTHON=${PYTHON:-python3}
steps=${*:-tests tune step overhead}
status=0
for step in $steps; do
  start=$SECONDS
  case $step in
    tests) "$PYTHON" benchmarks/gpu_tests.py --out "$OUT/kernels" ;;
    tune) "$PYTHON" benchmarks/tune.py --out "$OUT/tune.json" ;;
    step) "$PYTHON" benchmarks/train_step.py --out "$OUT/train_step" --repeats 5 --warm 2 ;;
    overhead) "$PYTHON" benchmarks/overhead.py --out "$OUT/h200.json" ${OVERHEAD_ARGS:-} ;;
    *) echo "unknown step $step"; exit 2 ;;
  esac 2>&1 | tee "$OUT/$step.log" | tail -70
  [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
  echo "-- $step: $((SECONDS - start)) s"
done
exit $status
