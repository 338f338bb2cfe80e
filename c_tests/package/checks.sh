# What the tests of packages share, to be sourced: the folder `work`, which goes with the script, and checks that are
# counted. The script ends with `finish`.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

# check NAME COMMAND...: counts one check, and prints the command's output if it failed.
check() {
    local name=$1
    shift
    if "$@" >"$work/log" 2>&1; then
        passed=$((passed + 1))
        echo "ok: $name"
    else
        failed=$((failed + 1))
        echo "FAILED: $name"
        sed 's/^/    /' "$work/log"
    fi
}

# Ends with the line that test runners read.
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" = 0 ]
}
