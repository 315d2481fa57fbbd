#!/usr/bin/env bash
# Verifies handshake.pml in all its configurations and mutations, one at a time, and prints a table.
#
#   run.sh                all of them           run.sh --quick   the cheap ones: 2 and 3 ranks, and all mutations
#   run.sh NAME...        those                 run.sh --list [--quick]   their names only
#   run.sh --trail NAME   the steps to the error of one that is refused, by the shortest way
#
# Exit status: 0 everything as expected, 1 a surprise, 2 spin or a C compiler is missing or a name is unknown.
# Environment: SPIN, CC, MODEL_MEMORY_MB (limit of one verification, 4000).
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
spin=${SPIN:-spin}
cc=${CC:-cc}
memory_mb=${MODEL_MEMORY_MB:-4000}
incomplete='Search not completed|depth too small|out of memory|MEMLIM'

# name | quick or full | expected | definitions
#   pass     exhaustive, no error
#   blocked  the same; ranks stand in their waits in the end, as they should: no check for invalid end states
#   acyclic  exhaustive, no cycle
#   others   refused for that reason; one of several where the search order decides which comes first
configurations() {
  cat <<'TABLE'
2 ranks                                 |quick|pass    |P=2 N=4 K=3
2 ranks, two call sites                 |quick|pass    |P=2 N=4 K=3 ALT
2 ranks, own slice early                |quick|pass    |P=2 N=4 K=3 ALT OWN_EARLY
2 ranks, W is not S                     |quick|pass    |P=2 N=4 K=3 ALT SPLIT
2 ranks, W is not S, own slice early    |quick|pass    |P=2 N=4 K=3 ALT SPLIT OWN_EARLY
2 ranks, join of S stands in for C's    |quick|pass    |P=2 N=4 K=3 ALT SPLIT OWN_EARLY NO_JOIN_C
2 ranks, tags with W of their own       |quick|pass    |P=2 N=4 K=1 ALT SPLIT TAGS
2 ranks, the same, own slice early      |quick|pass    |P=2 N=4 K=1 ALT SPLIT TAGS OWN_EARLY
2 ranks, late resets                    |quick|pass    |P=2 N=4 K=3 ALT RESET_NEXT
2 ranks, late resets, W is not S        |quick|pass    |P=2 N=4 K=3 ALT SPLIT OWN_EARLY RESET_NEXT
2 ranks, late resets, tags              |quick|pass    |P=2 N=4 K=1 ALT SPLIT TAGS RESET_NEXT
2 ranks, late resets, READY differs     |quick|blocked |P=2 N=3 K=3 ALT MIS=1 RESET_NEXT
2 ranks, late resets, DONE differs      |quick|blocked |P=2 N=3 K=3 ALT MIS=2 RESET_NEXT
2 ranks, late resets, a group left out  |quick|blocked |P=2 N=3 K=3 ALT MIS=3 RESET_NEXT
2 ranks, late resets, monitored         |quick|pass    |P=2 N=3 K=2 ALT MONITOR RESET_NEXT
2 ranks, late resets, late              |quick|pass    |P=2 N=2 K=2 ALT LATE RESET_NEXT
2 ranks, late resets, one dies          |quick|pass    |P=2 N=3 K=2 ALT DIES RESET_NEXT
2 ranks, no cycle                       |quick|acyclic |P=2 N=4 K=3 ALT
2 ranks, READY differs                  |quick|blocked |P=2 N=3 K=3 ALT MIS=1
2 ranks, DONE differs                   |quick|blocked |P=2 N=3 K=3 ALT MIS=2
2 ranks, a group left out               |quick|blocked |P=2 N=3 K=3 ALT MIS=3
2 ranks, monitored                      |quick|pass    |P=2 N=3 K=2 ALT MONITOR
2 ranks, late                           |quick|pass    |P=2 N=2 K=2 ALT LATE
2 ranks, late, three groups             |full |pass    |P=2 N=3 K=1 ALT LATE COARSE
2 ranks, late, no cycle                 |quick|acyclic |P=2 N=2 K=1 ALT LATE COARSE
2 ranks, late, looks                    |quick|pass    |P=2 N=2 K=1 ALT LATE LOOK COARSE
2 ranks, late, monitored                |quick|blocked |P=2 N=3 K=1 ALT LATE IMPATIENT=0 MONITOR COARSE
2 ranks, READY differs, then time-outs  |quick|pass    |P=2 N=3 K=1 ALT LATE MIS=1 COARSE
2 ranks, DONE differs, then time-outs   |quick|pass    |P=2 N=3 K=1 ALT LATE MIS=2 COARSE
2 ranks, one dies                       |quick|pass    |P=2 N=3 K=2 ALT DIES
3 ranks                                 |quick|pass    |P=3 N=3 K=3 COARSE
3 ranks, two call sites                 |quick|pass    |P=3 N=3 K=3 ALT COARSE
3 ranks, late resets                    |quick|pass    |P=3 N=3 K=3 ALT COARSE RESET_NEXT
3 ranks, two call sites, not coarse     |full |pass    |P=3 N=2 K=2 ALT
3 ranks, no cycle                       |quick|acyclic |P=3 N=3 K=3 ALT COARSE
3 ranks, W is not S                     |full |pass    |P=3 N=2 K=1 ALT SPLIT COARSE
3 ranks, W is not S, own slice early    |quick|pass    |P=3 N=2 K=1 ALT SPLIT OWN_EARLY
3 ranks, READY differs                  |quick|blocked |P=3 N=3 K=3 ALT MIS=1 COARSE
3 ranks, DONE differs                   |quick|blocked |P=3 N=3 K=3 ALT MIS=2 COARSE
3 ranks, a group left out               |quick|blocked |P=3 N=3 K=3 ALT MIS=3 COARSE
3 ranks, monitored                      |quick|pass    |P=3 N=3 K=1 ALT MONITOR COARSE
3 ranks, one impatient, others late     |full |blocked |P=3 N=2 K=1 LATE IMPATIENT=0 COARSE
3 ranks, one dies, one group            |full |pass    |P=3 N=1 K=1 DIES COARSE
3 ranks, one dies, 0 gives up, 1 is late|full |blocked |P=3 N=2 K=1 DIES IMPATIENT=0 COARSE
3 ranks, one dies, 1 gives up, 0 is late|quick|blocked |P=3 N=2 K=1 DIES IMPATIENT=1 COARSE
4 ranks                                 |full |pass    |P=4 N=3 K=2 COARSE
4 ranks, two call sites                 |full |pass    |P=4 N=3 K=3 ALT COARSE
4 ranks, late resets                    |full |pass    |P=4 N=3 K=3 ALT COARSE RESET_NEXT
4 ranks, READY differs                  |full |blocked |P=4 N=3 K=1 ALT MIS=1 COARSE
4 ranks, DONE differs                   |full |blocked |P=4 N=3 K=1 ALT MIS=2 COARSE
4 ranks, a group left out               |full |blocked |P=4 N=3 K=1 ALT MIS=3 COARSE
mutation: no READY                      |quick|overwrite,wrong-data|P=2 N=3 K=2 NO_READY UNCHECKED_SLOTS
mutation: no DONE                       |quick|wrong-data|P=2 N=3 K=2 NO_DONE
mutation: one slot for both             |quick|lost-signal|P=2 N=3 K=2 SHARED_SLOT
mutation: one slot for both, unchecked  |quick|stuck   |P=2 N=3 K=2 SHARED_SLOT UNCHECKED_SLOTS
mutation: no reset                      |quick|lost-signal|P=2 N=3 K=2 NO_RESET
mutation: no reset, unchecked           |quick|overwrite,wrong-data|P=2 N=3 K=2 NO_RESET UNCHECKED_SLOTS
mutation: late reset of READY           |quick|lost-signal|P=2 N=3 K=2 RESET_READY_LATE
mutation: late reset, unchecked         |quick|stuck   |P=2 N=3 K=2 RESET_READY_LATE UNCHECKED_SLOTS
mutation: late resets, READY's later    |quick|lost-signal|P=2 N=3 K=2 RESET_NEXT RESET_READY_LATE
mutation: late resets, DONE's later     |quick|lost-signal,stuck|P=2 N=3 K=2 RESET_NEXT RESET_DONE_LATE
mutation: READY before last reader      |quick|overwrite,wrong-data|P=2 N=3 K=2 READY_UNORDERED
mutation: DONE before last copy         |quick|wrong-data|P=2 N=3 K=2 DONE_BEFORE_LAST_COPY
mutation: C does not wait for W         |quick|overwrite,wrong-data|P=2 N=3 K=2 SPLIT NO_JOIN_C
mutation: own slice does not wait for W |quick|overwrite,wrong-data|P=2 N=3 K=2 SPLIT NO_JOIN_OWN
mutation: the same, own slice early     |quick|overwrite,wrong-data|P=2 N=3 K=2 SPLIT OWN_EARLY NO_JOIN_OWN
mutation: C and S join the previous W   |quick|overwrite,wrong-data|P=2 N=4 K=1 ALT SPLIT TAGS JOIN_PREVIOUS
mutation: W does not wait for own slice |quick|wrong-data|P=2 N=3 K=2 SPLIT NO_WAIT_OWN
mutation: any non-zero READY passes     |quick|mismatch|P=2 N=3 K=2 MIS=1 WAIT_NONZERO
mutation: any non-zero DONE passes      |quick|mismatch|P=2 N=3 K=2 MIS=2 WAIT_NONZERO
mutation: no abort word, 2 ranks        |quick|overwrite,wrong-data|P=2 N=2 K=1 LATE COARSE NO_ABORT
mutation: abort after release, 2 ranks  |quick|overwrite,wrong-data|P=2 N=2 K=1 LATE COARSE ABORT_LATE
mutation: abort after release, late     |quick|overwrite,wrong-data|P=3 N=2 K=1 LATE IMPATIENT=0 COARSE ABORT_LATE
mutation: abort after release, death    |quick|overwrite,wrong-data|P=3 N=2 K=1 DIES IMPATIENT=0 COARSE ABORT_LATE
mutation: look before completion        |quick|missed-abort|P=2 N=2 K=1 LATE LOOK COARSE LOOK_EARLY
mutation: monitor does not look twice   |quick|false-alarm|P=2 N=3 K=2 ALT MONITOR MONITOR_ONCE
mutation: monitor ignores the abort word|quick|false-alarm|P=2 N=2 K=1 ALT LATE IMPATIENT=0 MONITOR MONITOR_NO_ABORT
TABLE
}

trim() {
  local text=$1
  text=${text#"${text%%[! ]*}"}
  printf '%s' "${text%"${text##*[! ]}"}"
}

# What pan complained about, by the expression of the assertion that it quotes.
reason() {
  local complaint
  complaint=$(grep -m 1 '^pan:[0-9]*: ' "$1")
  case $complaint in
    *"invalid end state"*) echo stuck ;;
    *"non-progress cycle"*) echo cycle ;;
    *"assertion violated"*"drained["* | *"assertion violated"*"awaits["*) echo stuck ;;
    *"assertion violated"*"(pad["*) echo lost-signal ;;
    *"assertion violated"*"!(wrong"* | *"assertion violated"*"!((wrong"*) echo missed-abort ;;
    *"assertion violated"*"(reading["*) echo overwrite ;;
    *"assertion violated"*"!(bad)"*) echo wrong-data ;;
    *"assertion violated"*"(g<"*) echo mismatch ;;
    *"assertion violated"*"(slot==0)"*) echo false-alarm ;;
    "") echo none ;;
    *) echo "unknown: $complaint" ;;
  esac
}

# Where the ranks disagree, or only one gives up, ranks stand in their waits in the end.
ends_blocked() { [[ $1 == blocked || " $2 " == *" IMPATIENT="* || (" $2 " == *" MIS="* && " $2 " != *" LATE "*) ]]; }

# build EXPECTED DEFINITIONS [compiler options]: pan in the working directory.
build() {
  local expected=$1 kind=-DSAFETY optimize=-O0 definition
  local -a defines=() words
  read -r -a words <<<"$2"
  shift 2
  for definition in "${words[@]}"; do defines+=("-D$definition"); done
  case $expected in
    acyclic) kind=-DNP optimize=-O1 ;;
    pass | blocked) optimize=-O1 ;; # these search long
  esac
  "$spin" -a "${defines[@]}" "$here/handshake.pml" >spin.log 2>&1 &&
    "$cc" "$optimize" -w "$kind" -DMEMLIM="$memory_mb" -DVECTORSZ=2048 "$@" -o pan pan.c >cc.log 2>&1
}

# verify EXPECTED DEFINITIONS: sets states, seconds, found.
verify() {
  local -a options=(-m100000 -n)
  states=- seconds=- found="does not build"
  if ! build "$1" "$2"; then
    tail -n 20 ./*.log >&2
    return
  fi
  [[ $1 == acyclic ]] && options+=(-l)
  ends_blocked "$1" "$2" && options+=(-E)
  ./pan "${options[@]}" >pan.log 2>&1
  states=$(awk '/states, stored/ { printf "%d", $1 }' pan.log)
  seconds=$(awk '/pan: elapsed time/ { print $4 }' pan.log)
  found=$(reason pan.log)
  if [[ $found == none ]]; then
    if grep -q 'errors: 0' pan.log && ! grep -qE "$incomplete" pan.log; then
      found=$1
      case $1 in pass | blocked | acyclic) ;; *) found="not refused" ;; esac
    else
      found="not exhaustive"
    fi
  fi
}

mode=run quick=no names=()
while (($#)); do
  case $1 in
    --quick) quick=yes ;;
    --list) mode=list ;;
    --trail) mode=trail ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "unknown option $1" >&2; exit 2 ;;
    *) names+=("$1") ;;
  esac
  shift
done

selected=()
while IFS='|' read -r name speed expected definitions; do
  name=$(trim "$name") speed=$(trim "$speed") expected=$(trim "$expected")
  if ((${#names[@]})); then
    wanted=no
    for given in "${names[@]}"; do [[ $given == "$name" ]] && wanted=yes; done
    [[ $wanted == no ]] && continue
  elif [[ $quick == yes && $speed != quick ]]; then
    continue
  fi
  selected+=("$name|$expected|$definitions")
done < <(configurations)
if ((${#selected[@]} == 0 || (${#names[@]} > 0 && ${#selected[@]} != ${#names[@]}))); then
  echo "unknown configuration; run.sh --list names them" >&2
  exit 2
fi
if [[ $mode == list ]]; then
  for line in "${selected[@]}"; do echo "${line%%|*}"; done
  exit 0
fi

for program in "$spin" "$cc"; do
  if ! command -v "$program" >/dev/null; then
    echo "$program is missing (spin 6.5 and a C compiler are needed; Debian and Ubuntu: apt-get install spin gcc)" >&2
    exit 2
  fi
done
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 2

if [[ $mode == trail ]]; then
  IFS='|' read -r name expected definitions <<<"${selected[0]}"
  build "$expected" "$definitions" -DBFS || { tail -n 20 ./*.log >&2; exit 1; }
  options=(-m100000 -n)
  ends_blocked "$expected" "$definitions" && options+=(-E)
  ./pan "${options[@]}" >pan.log 2>&1
  grep '^pan:' pan.log
  [[ -e handshake.pml.trail ]] && ./pan -r handshake.pml.trail 2>&1 | sed 's/[[:space:]]\+/ /g'
  exit 0
fi

format='%-40s %-22s %10s %8s  %-12s %s\n'
printf "$format" configuration expected states seconds found verdict
surprises=0 total_states=0 total_seconds=0
for line in "${selected[@]}"; do
  IFS='|' read -r name expected definitions <<<"$line"
  verify "$expected" "$definitions"
  if [[ ",$expected," == *",$found,"* ]]; then
    verdict=ok
  else
    verdict=SURPRISE
    surprises=$((surprises + 1))
  fi
  printf "$format" "$name" "$expected" "${states:--}" "${seconds:--}" "$found" "$verdict"
  [[ ${states:--} == - ]] || total_states=$((total_states + states))
  total_seconds=$(awk -v a="$total_seconds" -v b="${seconds:-0}" 'BEGIN { print a + b }')
  rm -rf "${work:?}"/*
done
echo
echo "${#selected[@]} configurations, $total_states states, $total_seconds s of verification, $surprises surprises"
((surprises == 0))
