#!/bin/sh
# Runs test programs, as many at a time as there are cores, and adds up their results. Each ends
# with a line "N passed, M failed"; one that does not, or that exits non-zero without a failed test
# (a sanitizer's finding, a crash, a hang), counts as one failure more.
#
# usage: run.sh PROGRAM...
# environment: TEST_TIMEOUT, seconds per program (default 240); RUNNER, a command that starts it;
#              JOBS, programs at a time

if [ "$1" = --one ]; then # run.sh --one FOLDER PROGRAM: leaves its output and its status there
    # shellcheck disable=SC2086 # RUNNER is a command with its arguments
    timeout -k 5 "$TEST_TIMEOUT" $RUNNER "$3" >"$2/$(basename "$3").log" 2>&1
    echo $? >"$2/$(basename "$3").status"
    exit 0
fi

: "${TEST_TIMEOUT:=240}"
: "${JOBS:=$(nproc 2>/dev/null || echo 1)}"
: "${ASAN_OPTIONS:=detect_leaks=1:detect_stack_use_after_return=1}"
: "${UBSAN_OPTIONS:=print_stacktrace=1}"
: "${TSAN_OPTIONS:=second_deadlock_stack=1}"
export TEST_TIMEOUT RUNNER ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS

folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
printf '%s\n' "$@" | xargs -P "$JOBS" -n 1 "$0" --one "$folder"

passed=0
failed=0
for program; do
    name=$(basename "$program")
    log=$folder/$name.log
    status=$(cat "$folder/$name.status" 2>/dev/null || echo 255)
    printf '== %s\n' "$name"
    cat "$log"
    sum=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    sum=${sum:-0 0}
    passed=$((passed + ${sum% *}))
    failed=$((failed + ${sum#* }))
    if [ "$sum" = "0 0" ] || { [ "$status" -ne 0 ] && [ "${sum#* }" -eq 0 ]; }; then
        printf '%s ended with status %d\n' "$name" "$status"
        failed=$((failed + 1))
    fi
done

printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
