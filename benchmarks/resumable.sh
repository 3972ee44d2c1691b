# Sourced by the unattended scripts, which set $folder and $limit (seconds).

run() { # NAME COMMAND...: its output in NAME.log; nothing where NAME.done is there. A failure, or more than $limit s, stops nothing else.
    local name=$1
    shift
    [ -e "$folder/$name.done" ] && { echo "$name: there already"; return; }
    echo "$name: $(date +%H:%M:%S) $*"
    rm -f "$folder/$name.failed"
    timeout --kill-after=60 "$limit" "$@" > "$folder/$name.log" 2>&1
    local code=$?
    [ $code = 0 ] && { echo "$name: done at $(date +%H:%M:%S)"; touch "$folder/$name.done"; return; }
    [ $code = 124 ] || [ $code = 137 ] && echo "error: it took longer than $limit s" >> "$folder/$name.log"
    rm -f "$folder/$name.json"
    touch "$folder/$name.failed" # a file: what runs in the background can tell nothing else
    echo "$name: failed: $(grep -m 1 '^error:' "$folder/$name.log" || tail -n 1 "$folder/$name.log")"
}

end() { # the exit code, and which runs failed
    local failed
    failed=$(cd "$folder" && ls -- *.failed 2>/dev/null | sed 's/\.failed$//' | tr '\n' ' ')
    [ -z "$failed" ] && exit 0
    echo "error: $(wc -w <<< "$failed") runs failed: ${failed% }; their logs are in $folder" >&2
    exit 1
}
