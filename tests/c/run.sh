#!/bin/sh
# Runs test programs one after the other and adds up their results. Each ends with a line
# "N passed, M failed"; one that does not, or that exits non-zero without a failed test (a
# sanitizer's finding, a crash, a hang), counts as one failure more.
#
# usage: run.sh PROGRAM...
# environment: TEST_TIMEOUT, seconds per program (default 120); RUNNER, a command that starts it

: "${TEST_TIMEOUT:=120}"
: "${ASAN_OPTIONS:=detect_leaks=1:detect_stack_use_after_return=1}"
: "${UBSAN_OPTIONS:=print_stacktrace=1}"
: "${TSAN_OPTIONS:=second_deadlock_stack=1}"
export ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS

passed=0
failed=0
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

for program; do
    printf '== %s\n' "$(basename "$program")"
    # shellcheck disable=SC2086 # RUNNER is a command with its arguments
    timeout -k 5 "$TEST_TIMEOUT" $RUNNER "$program" >"$log" 2>&1
    status=$?
    cat "$log"
    sum=$(sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1)
    sum=${sum:-0 0}
    passed=$((passed + ${sum% *}))
    failed=$((failed + ${sum#* }))
    if [ "$sum" = "0 0" ] || { [ "$status" -ne 0 ] && [ "${sum#* }" -eq 0 ]; }; then
        printf '%s ended with status %d\n' "$(basename "$program")" "$status"
        failed=$((failed + 1))
    fi
done

printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
