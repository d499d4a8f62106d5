#!/usr/bin/env bash
# One node's scratch folder of a job: `scratch.sh make LIVE_JOBS...` or `scratch.sh remove`. phase.sh runs it on every node.
#
# LIVE_JOBS are the ids of this user's jobs in the queue. Folders of earlier jobs that are not among them are leftovers
# (of a node that failed, of a SIGKILL) and hold text that must not stay: they are removed. A later job's folder stays,
# because the job may have started after that list was made; so does another cluster's, whose name differs.
set -euo pipefail
: "${JOB_SCRATCH:?}"
case "${1:-}" in
make)
    shift
    live=" $* "
    root="$(dirname "$JOB_SCRATCH")"
    umask 077
    mkdir -p "$root" "$JOB_SCRATCH"
    if [ ! -O "$root" ]; then
        echo "error: $root belongs to another user; set CLM_DETOUR_SCRATCH to a folder of your own" >&2
        exit 1
    fi
    chmod 700 "$root" "$JOB_SCRATCH"
    name="$(basename "$JOB_SCRATCH")"
    prefix="${name%-*}-"
    own="${name##*-}"
    if [ $# -gt 0 ]; then # an empty list means that squeue failed, not that no job lives
        for other in "$root/$prefix"*; do
            job="${other##*-}"
            case "$job" in *[!0-9]* | "") continue ;; esac
            if [ -d "$other" ] && [ "$job" -lt "$own" ] && [[ "$live" != *" $job "* ]]; then
                rm -rf -- "$other" || true # what is left there may not stop this job
            fi
        done
    fi
    ;;
remove) rm -rf -- "$JOB_SCRATCH" ;;
*)
    echo "error: scratch.sh make|remove" >&2
    exit 2
    ;;
esac
exit 0
