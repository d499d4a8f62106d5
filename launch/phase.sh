# shellcheck shell=bash
# Trains one phase of a run. A batch script sets PHASE, RECIPE, RUN_DIR and CLM_DETOUR and sources it; it ends the job.
#
# The job's exit code: 0, the phase is DONE, or a successor takes over; 75, stopped by RUN/STOP; any other, failed,
# which cancels the jobs that wait for it (afterok). A run that stopped early for any other reason queues itself again.
set -euo pipefail

mkdir -p "$RUN_DIR/logs"
RUN_DIR="$(cd "$RUN_DIR" && pwd)"
export RECIPE RUN_DIR
# shellcheck source=launch/env.sh
. "$CLM_DETOUR/launch/env.sh"
restart="${SLURM_RESTART_COUNT:-0}"
echo "phase $PHASE: job $SLURM_JOB_ID, start $((restart + 1)), $SLURM_JOB_NUM_NODES nodes, $(date -u +%FT%TZ)"

ask() { in_env -- "$PYTHON" -m pipeline.slurm "$@"; }

end_of_time() { # of this job, in seconds since 1970; SLURM before 23.02 does not tell it to the job
    local left
    left="$(SLURM_TIME_FORMAT=standard squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null || true)"
    case "$left" in "" | N/A | UNLIMITED) ;; *) date -d "$left" +%s ;; esac
}

on_every_node() { # COMMAND...
    # COMMAND makes or removes TMPDIR. A step that SLURM cannot start (a node failed) must not hold up the job.
    TMPDIR=/tmp timeout -k 10 "$HELPER_LIMIT" srun --overlap --nodes="$SLURM_JOB_NUM_NODES" \
        --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 "$@"
}
HELPER_LIMIT=60 # seconds

clean() { on_every_node bash "$CLM_DETOUR/launch/scratch.sh" remove || rm -rf -- "$JOB_SCRATCH" || true; }

shown() { # FIELD of `scontrol show job`, empty where it is not set
    sed -n "s/^\(.* \)\?$1=\(\S*\).*/\2/p" <<<"$job" | sed '/^(null)$/d'
}

options_of_this_job() { # one per line: what sbatch's command line and the script's own lines have asked for
    local option variable value
    echo --no-requeue
    if [ "$(shown OverSubscribe)" = NO ]; then echo --exclusive; fi
    if [ -n "${SLURM_NTASKS_PER_GPU:-}" ]; then unset SLURM_NTASKS; fi # sbatch takes one of them
    while read -r option variable; do
        if [ -n "${!variable:-}" ]; then echo "--$option=${!variable}"; fi
    done <<END
nodes SLURM_JOB_NUM_NODES
partition SLURM_JOB_PARTITION
account SLURM_JOB_ACCOUNT
qos SLURM_JOB_QOS
reservation SLURM_JOB_RESERVATION
ntasks SLURM_NTASKS
ntasks-per-node SLURM_NTASKS_PER_NODE
ntasks-per-gpu SLURM_NTASKS_PER_GPU
cpus-per-task SLURM_CPUS_PER_TASK
cpus-per-gpu SLURM_CPUS_PER_GPU
gpus SLURM_GPUS
gpus-per-task SLURM_GPUS_PER_TASK
mem-per-gpu SLURM_MEM_PER_GPU
END
    value="$(shown TresPerNode)" # --gpus-per-node and --gres, as gres:gpu:4 or gres/gpu:4
    if [ -n "$value" ]; then
        echo "--gres=$(sed 's#gres[:/]##g; s#=#:#g' <<<"$value")"
    elif [ -n "${SLURM_GPUS_PER_NODE:-}" ]; then
        echo "--gpus-per-node=$SLURM_GPUS_PER_NODE"
    fi
    if [ -z "${SLURM_MEM_PER_GPU:-}" ]; then # 0: the node's whole memory
        for option in mem:MinMemoryNode mem-per-cpu:MinMemoryCPU; do
            value="$(shown "${option#*:}")"
            if [ -n "$value" ]; then echo "--${option%:*}=$value"; fi
        done
    fi
    for option in constraint:Features exclude:ExcNodeList time:TimeLimit; do
        value="$(shown "${option#*:}")"
        if [ -n "$value" ]; then echo "--${option%:*}=$value"; fi
    done
}

# Where requeueing is forbidden: submit the same job again, and make the jobs that wait for this one wait for that.
# If a step fails, the function fails: otherwise this job would end with 0 and release the jobs that wait for the phase.
# `set -e` is off in here, because the caller tests the function's result.
successor() {
    local job options=() new log waiting other variable
    job="$(scontrol -o show job "$SLURM_JOB_ID")" || return 1
    log="$(shown StdOut)" && [ -n "$log" ] || return 1
    # One option per line, as launch/submit got them, or as SLURM tells them.
    mapfile -t options <<<"${CLM_DETOUR_OPTIONS:-$(options_of_this_job)}"
    scontrol write batch_script "$SLURM_JOB_ID" "$RUN_DIR/logs/successor.sbatch" >/dev/null || return 1
    new="$(
        # What SLURM told this job must not reach the next one.
        export CLM_DETOUR_CHAIN="${CLM_DETOUR_CHAIN:-$SLURM_JOB_ID}"
        unset CLM_DETOUR_END_TIME MASTER_ADDR MASTER_PORT TMPDIR JOB_SCRATCH
        for variable in "${!SLURM_@}" "${!SRUN_@}"; do
            if [ "$variable" != SLURM_CONF ]; then unset "$variable"; fi
        done
        sbatch --parsable --export=ALL --job-name="$PHASE" --output="$log" "${options[@]}" "$RUN_DIR/logs/successor.sbatch"
    )" || return 1
    new="${new%%;*}"
    case "$new" in "" | *[!0-9]*)
        echo "sbatch printed no job's id but '$new'" >&2
        return 1
        ;;
    esac
    echo "$PHASE $new" >>"$RUN_DIR/logs/jobs"
    waiting="$(squeue -h -o '%i %E' | awk -v job="$SLURM_JOB_ID" '$2 ~ "afterok:" job "([^0-9]|$)" { print $1 }')" || return 1
    for other in $waiting; do
        scontrol update JobId="$other" Dependency="afterok:$new" || return 1
    done
    echo "requeueing is forbidden here: job $new goes on"
}

again() { # ends this job: it is queued again, or another takes over, or it fails
    local try
    for try in 1 2 3 4; do
        if scontrol requeue "$SLURM_JOB_ID"; then
            sleep 60 # SLURM ends this script meanwhile, and queues the job again
            exit 75
        fi
        # Only where SLURM says that this job may not be requeued: a busy controller may have heard us after all.
        if scontrol -o show job "$SLURM_JOB_ID" | grep '\bRequeue=0\b' >/dev/null; then
            if successor; then exit 0; fi
            break
        fi
        if [ "$try" -lt 4 ]; then sleep 10; fi
    done
    echo "error: phase $PHASE has stopped early and saved, but could not be queued again (see above); submit it again" >&2
    exit 75
}

# launch/status shows the jobs of this file; launch/submit has written its own there.
grep -qsxF "$PHASE $SLURM_JOB_ID" "$RUN_DIR/logs/jobs" || echo "$PHASE $SLURM_JOB_ID" >>"$RUN_DIR/logs/jobs"

verdict="$(ask begin "$RUN_DIR" "$PHASE")" || exit 1
export CLM_DETOUR_STOP_CLEARED=1 # a STOP that `begin` left, or that comes now, is for this run: no rank may remove it
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
step="$(ask srun)" || exit 1
step_options=()
if [ -n "$step" ]; then
    mapfile -t step_options <<<"$step"
    echo "one task a GPU: srun ${step_options[*]}"
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
    in_env srun --kill-on-bad-exit=1 "${step_options[@]}" -- "$PYTHON" "$CLM_DETOUR/pipeline/train.py" "$RECIPE" \
        --phase "$PHASE" --run-dir "$RUN_DIR" "${overrides[@]}" || code=$?
fi

clean
verdict="$(ask end "$RUN_DIR" "$PHASE" "$code")"
case "$verdict" in
done) exit 0 ;;
stopped)
    echo "stopped by $RUN_DIR/STOP; launch/submit goes on"
    exit 75
    ;;
again) again ;;
*)
    echo "error: phase $PHASE failed, srun's exit code $code; the lines above say why" >&2
    if [ "$code" -eq 0 ]; then code=1; fi
    exit "$code"
    ;;
esac
