#!/usr/bin/env bash
# What is to be run where a host has more than two GPUs: whether all is exact, and how it compares.
#
#   benchmarks/many_gpus.sh OUT [RANKS]     RANKS: 3 or more, default as many as there are GPUs
#
# Writes what each part printed to OUT/PART.txt, then a line a part: its exit status and its last line. The package and
# what its tests need are installed; fast-ulysses is a contender where it is. No part takes longer than its time-out.
# Exit status: 0 all parts ended with 0, else 1; 2 it cannot run here.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

out=${1:?a folder for what the parts print}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
ranks=${2:-$gpus}
if ((gpus < ranks || ranks < 3)); then
  echo "many_gpus: $ranks ranks were asked for, 3 or more are meant; this host has $gpus GPUs" >&2
  exit 2
fi
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD:$PWD/tests:$PWD/examples${PYTHONPATH:+:$PYTHONPATH}
failed=0 table=()

# part NAME SECONDS COMMAND...
part() {
  local name=$1 seconds=$2 status
  shift 2
  echo "[$(date +%T)] $name: $*"
  timeout "$seconds" "$@" >"$out/$name.txt" 2>&1
  status=$?
  ((status == 0)) || failed=1
  table+=("$(printf '%-14s %3d  %s' "$name" "$status" "$(grep -v '^$' "$out/$name.txt" | tail -n 1 | cut -c1-100)")")
}
bench() { part "$1" "$2" python -m ulysses_op bench --device cuda --ranks "$ranks" --timeout $(($2 - 10)) --json "$out/$1.json" "${@:3}"; }
service() { part "$1" 120 python examples/denoise.py --device cuda --ranks "$ranks" --timeout 110 "${@:2}"; }

python -m ulysses_op doctor --device cuda --ranks "$ranks" >"$out/doctor.txt" 2>&1
part tests 400 python -m pytest -q tests/test_gpu.py -k "not in_a_row and not leaving and not exception"
part compiled 300 python -m pytest -q tests/test_gpu_compile.py
part killed 120 python -m pytest -q tests/test_gpu_faults.py -k "killed and not build"
part skew 200 env ULYSSES_OP_TEST_GROUPS=25000 python -m pytest -q -s tests/test_gpu.py -k "groups_in_a_row and symm_mem"
service h3
service h3-compiled --compile
((ranks % 2)) || service h3-parallel --tensor-parallel 2
service lingbot --model lingbot
bench exchange 180 --level exchange --profile h3-u2 h3-tp2u2 lingbot-u2 wan-480p wan-720p --iterations 30
bench block 240 --level block --profile h3-u2 h3-tp2u2 lingbot-u2 wan-480p --iterations 30
# One shape a process: see fast-ulysses in README.md of this folder.
for profile in h3-u2 h3-tp2u2 lingbot-u2 wan-480p; do bench "block-$profile" 90 --level compiled --profile "$profile" --iterations 30; done
bench ablation 120 --level ablation --profile h3-u2 --iterations 30
bench contention 90 --level contention --profile h3-u2 --iterations 30
bench rows 90 --level rows --profile wan-480p --iterations 30
for loop in h3 lingbot; do bench "model-$loop" 300 --level model --loop "$loop" --warmups 3 --iterations 20; done

echo
printf '%s\n' "${table[@]}"
exit "$failed"
