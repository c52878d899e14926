#!/bin/sh
# All that a machine with a CUDA card can tell about this repository, in at most 8 minutes. Needs torch, triton and pytest; what else is
# missing is named and skipped (the op tests and the whole step want transformers, pydantic and safetensors; PYTHONPATH may bring them).
# Results go to $OUT, or to build/bench. PYTHON names the interpreter.
#     sh bench/gpu.sh
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/bench}
OPTIONS="--device cuda --rounds 3 --preset llama8b,glm5,smollm2 -k not(s32768)"
mkdir -p "$OUT" build/bench
: > "$OUT/log.txt"
export PYTHONUNBUFFERED=1 EAGLE3_FAST_TEST_DEVICE=cuda PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
started=$(date +%s)
summary=
whole=455 # seconds for all parts but the report

# part NAME SECONDS "MODULES IT NEEDS" COMMAND...: runs it under its own limit and within the whole one, whatever the parts before it did.
part() {
  name=$1 limit=$2 needs=$3
  shift 3
  left=$((whole - $(date +%s) + started))
  [ "$left" -lt "$limit" ] && limit=$left
  missing=
  for module in $needs; do "$PYTHON" -c "import $module" 2>/dev/null || missing="$missing $module"; done
  if [ -n "$missing" ]; then
    verdict="skipped, lacks$missing"
  elif [ "$limit" -le 5 ]; then
    verdict="skipped, no time left"
  else
    since=$(date +%s)
    timeout "$limit" "$@" > "$OUT/part" 2>&1
    code=$?
    tail -n 25 "$OUT/part"
    { echo "== $name"; cat "$OUT/part"; } >> "$OUT/log.txt"
    rm "$OUT/part"
    case $code in 0) verdict=ok ;; 124) verdict="stopped after $limit s" ;; *) verdict="failed ($code), see log.txt" ;; esac
    verdict="$verdict, $(($(date +%s) - since)) s"
  fi
  summary="$summary
$name: $verdict"
  echo "== $name: $verdict"
}

for module in liger_kernel pytest_benchmark; do
  "$PYTHON" -c "import $module" 2>/dev/null || echo "not installed, goes without: $module"
done
part machine 60 "torch triton" sh -c "nvidia-smi; '$PYTHON' -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.version.cuda)'"
part attention-tests 80 "torch triton pytest transformers pydantic" "$PYTHON" -m pytest tests/ops/test_ttt_attention.py --tb short
part divergence-tests 80 "torch triton pytest transformers pydantic" "$PYTHON" -m pytest tests/ops/test_linear_divergence.py --tb short
part smoke 60 "torch triton pytest" "$PYTHON" -m pytest bench/bench_linear_divergence.py bench/bench_ttt_attention.py --device cuda
part linear-divergence 75 "torch triton pytest" "$PYTHON" -m pytest bench/bench_linear_divergence.py $OPTIONS
part ttt-attention 60 "torch triton pytest" "$PYTHON" -m pytest bench/bench_ttt_attention.py $OPTIONS
part train-step 90 "torch triton pytest transformers pydantic safetensors" "$PYTHON" -m pytest bench/bench_train_step.py $OPTIONS
whole=480
part report 25 "torch" sh -c "'$PYTHON' bench/report.py --no-plots > '$OUT/report.md'; cat '$OUT/report.md'"
[ "$OUT" -ef build/bench ] || cp build/bench/*.json "$OUT"
echo "== summary$summary" | tee "$OUT/summary.txt"
