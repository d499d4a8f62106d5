# shellcheck shell=bash
# One phase of a run, from a batch script that has set PHASE, RECIPE, RUN_DIR and CLM_DETOUR; it ends the job.
#
# The job's exit code: 0 the phase is DONE, or a successor takes over; 75 stopped by RUN/STOP; anything else failed, which
# cancels the jobs that wait for it (afterok). A run that stopped early for any other reason queues itself again.
set -euo pipefail

# shellcheck source=launch/env.sh
. "$CLM_DETOUR/launch/env.sh"
mkdir -p "$RUN_DIR/logs"
RUN_DIR="$(cd "$RUN_DIR" && pwd)"
export RECIPE RUN_DIR
restart="${SLURM_RESTART_COUNT:-0}"
echo "phase $PHASE: job $SLURM_JOB_ID, start $((restart + 1)), $SLURM_JOB_NUM_NODES nodes, ${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES} tasks, $(date -u +%FT%TZ)"

attempts() { in_env -- "$PYTHON" -m pipeline.attempts "$@"; }

end_of_time() { # of this job, in seconds since 1970; SLURM before 23.02 does not tell the job
    local left
    left="$(squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null || true)"
    case "$left" in "" | N/A | UNLIMITED) ;; *) date -d "$left" +%s ;; esac
}

on_every_node() { # COMMAND...
    # TMPDIR is what it makes or removes. A step that SLURM cannot start must not hold up the job (after a node's failure it may).
    TMPDIR=/tmp timeout -k 10 "$HELPER_LIMIT" srun --overlap --nodes="$SLURM_JOB_NUM_NODES" \
        --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 "$@"
}
HELPER_LIMIT=60 # seconds

clean() { on_every_node bash "$CLM_DETOUR/launch/scratch.sh" remove || rm -rf -- "$JOB_SCRATCH"; }

successor() { # where requeueing is forbidden: submit the same again, and let what waits for this job wait for that one
    local options=() new waiting variable
    if [ -n "${CLM_DETOUR_OPTIONS:-}" ]; then
        mapfile -t options <<<"$CLM_DETOUR_OPTIONS" # one option a line, as launch/submit got them
    else
        options=(--nodes="$SLURM_JOB_NUM_NODES" --partition="$SLURM_JOB_PARTITION" --time="$(squeue -h -j "$SLURM_JOB_ID" -o %l)")
        if [ -n "${SLURM_NTASKS_PER_NODE:-}" ]; then options+=(--ntasks-per-node="$SLURM_NTASKS_PER_NODE"); fi
        if [ -n "${SLURM_NTASKS:-}" ]; then options+=(--ntasks="$SLURM_NTASKS"); fi
        if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK"); fi
        if [ -n "${SLURM_GPUS_PER_NODE:-}" ]; then options+=(--gpus-per-node="$SLURM_GPUS_PER_NODE"); fi
        if [ -n "${SLURM_JOB_ACCOUNT:-}" ]; then options+=(--account="$SLURM_JOB_ACCOUNT"); fi
    fi
    scontrol write batch_script "$SLURM_JOB_ID" "$RUN_DIR/logs/successor.sbatch" >/dev/null
    new="$(
        # What SLURM told this job must not reach the next one.
        export CLM_DETOUR_CHAIN="${CLM_DETOUR_CHAIN:-$SLURM_JOB_ID}"
        log="$(scontrol -o show job "$SLURM_JOB_ID" | sed -n 's/.* StdOut=\(\S*\).*/\1/p')"
        unset CLM_DETOUR_END_TIME MASTER_ADDR MASTER_PORT TMPDIR JOB_SCRATCH
        for variable in "${!SLURM_@}" "${!SRUN_@}"; do
            if [ "$variable" != SLURM_CONF ]; then unset "$variable"; fi
        done
        sbatch --parsable --job-name="$PHASE" --output="$log" "${options[@]}" "$RUN_DIR/logs/successor.sbatch"
    )"
    new="${new%%;*}"
    echo "$PHASE $new" >>"$RUN_DIR/logs/jobs"
    for waiting in $(squeue -h -o '%i %E' | awk -v job="$SLURM_JOB_ID" '$2 ~ "afterok:" job "([^0-9]|$)" { print $1 }'); do
        scontrol update JobId="$waiting" Dependency="afterok:$new"
    done
    echo "requeueing is forbidden here: job $new goes on"
}

verdict="$(attempts begin "$RUN_DIR" "$PHASE")" || exit 1
case "$verdict" in
done)
    echo "phase $PHASE is done already"
    exit 0
    ;;
stopped)
    echo "stopped by $RUN_DIR/STOP; launch/submit goes on"
    exit 75
    ;;
esac

if [ -z "${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-}${CUDA_VISIBLE_DEVICES:-}" ]; then
    echo "no GPUs were asked for (--gpus-per-node): training on CPUs"
fi
if [ -z "${CLM_DETOUR_END_TIME:-}" ]; then
    CLM_DETOUR_END_TIME="${SLURM_JOB_END_TIME:-$(end_of_time)}"
    export CLM_DETOUR_END_TIME
fi
live="$(squeue -h -u "$(id -u)" -o %A 2>/dev/null || true)"
code=0
# shellcheck disable=SC2086 # one word an id
on_every_node bash "$CLM_DETOUR/launch/scratch.sh" make $live || code=$?

overrides=()
if [ -n "${OVERRIDES:-}" ]; then mapfile -t overrides <<<"$OVERRIDES"; fi # key=value, one a line
if [ "$code" -eq 0 ]; then
    in_env srun --kill-on-bad-exit=1 -- "$PYTHON" "$CLM_DETOUR/pipeline/train.py" "$RECIPE" \
        --phase "$PHASE" --run-dir "$RUN_DIR" "${overrides[@]}" || code=$?
fi

clean
verdict="$(attempts end "$RUN_DIR" "$PHASE" "$code")"
case "$verdict" in
done) exit 0 ;;
stopped)
    echo "stopped by $RUN_DIR/STOP; launch/submit goes on"
    exit 75
    ;;
again)
    if scontrol requeue "$SLURM_JOB_ID"; then
        sleep 60 # SLURM ends this script meanwhile, and queues the job again
        exit 75
    fi
    successor && exit 0
    exit 75
    ;;
*)
    echo "error: phase $PHASE failed, srun's exit code $code; the lines above say why" >&2
    if [ "$code" -eq 0 ]; then code=1; fi
    exit "$code"
    ;;
esac
