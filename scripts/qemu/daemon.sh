# Starting and ending the daemon, for `run`, `test` and the demo. Sourced after lib.sh; wants the directory $work.
# shellcheck shell=bash

# The daemon that is tried. VZRAM_DAEMON=PATH selects another build; vzramctl lies beside it.
DAEMON=${VZRAM_DAEMON:-$ROOT/target/release/vhost-user-zram}
declare -A daemon_pids=()

# wait_until SECONDS COMMAND...: fails if COMMAND does not succeed in time.
wait_until() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -le $deadline ] || return 1
        sleep 0.05
    done
}

# daemon_start NAME ARGUMENT...: a disk NAME on $work/NAME.sock, its log in $work/NAME.log. The signal for the
# parent's death ends it even if the script is killed outright.
daemon_start() {
    local name=$1
    shift
    [ -x "$DAEMON" ] || die "there is no $DAEMON: run cargo build --release"
    setpriv --pdeathsig KILL "$DAEMON" --socket-path "$work/$name.sock" --control-path "$work/$name.ctl" "$@" \
        >"$work/$name.out" 2>"$work/$name.log" </dev/null &
    daemon_pids[$name]=$!
    if ! wait_until 10 daemon_settled "$name" || ! daemon_alive "$name"; then
        say "the daemon of disk $name did not start:"
        tail -n 10 "$work/$name.log" >&2
        return 1
    fi
}

daemon_alive() { kill -0 "${daemon_pids[$1]}" 2>/dev/null; }
daemon_settled() { [ -S "$work/$1.sock" ] || ! daemon_alive "$1"; }

# daemon_stop NAME: it must end with 0 within a second of SIGTERM and take its sockets with it.
daemon_stop() {
    local name=$1 pid=${daemon_pids[$1]} code=0 start=${EPOCHREALTIME/./}
    kill -TERM "$pid" 2>/dev/null || {
        say "the daemon of disk $name had died"
        return 1
    }
    wait "$pid" || code=$?
    unset "daemon_pids[$name]"
    local milliseconds=$(((${EPOCHREALTIME/./} - start) / 1000))
    [ $code = 0 ] || say "the daemon of disk $name ended with exit code $code"
    [ $milliseconds -le 1000 ] || say "the daemon of disk $name took $milliseconds ms to end"
    [ ! -e "$work/$name.sock" ] && [ ! -e "$work/$name.ctl" ] || say "the daemon of disk $name left a socket"
    [ $code = 0 ] && [ $milliseconds -le 1000 ] && [ ! -e "$work/$name.sock" ] && [ ! -e "$work/$name.ctl" ]
}

# Whatever state they are in. For traps.
daemons_kill() {
    # Without the shell's own line about a killed child.
    {
        [ ${#daemon_pids[@]} = 0 ] || kill -KILL "${daemon_pids[@]}" || true
        wait
    } 2>/dev/null
    daemon_pids=()
}

vzramctl() {
    local name=$1
    shift
    "$(dirname "$DAEMON")/vzramctl" --control "$work/$name.ctl" "$@"
}

# table NAME...: the host's view, one line per disk under one head.
table() {
    local name
    for name; do vzramctl "$name"; done | awk '
        NR == 1 || $1 != "NAME" {
            rows++
            for (i = 1; i <= NF; i++) {
                cell[rows, i] = $i
                if (length($i) > width[i]) width[i] = length($i)
            }
            if (NF > columns) columns = NF
        }
        END {
            for (row = 1; row <= rows; row++) {
                line = ""
                # Names and words to the left, numbers to the right.
                for (i = 1; i <= columns; i++)
                    line = line sprintf("%" (i == 1 || i == 8 ? "-" : "") width[i] "s ", cell[row, i])
                sub(/ +$/, "", line)
                print line
            }
        }'
}
