# shellcheck shell=bash
# How a job finds its software and where it puts its files. Edit this file to your cluster; every script sources it.

# 1. Software: ONE of the three.
#
# a) A virtual environment (`make setup`), found here when it is in the project's folder; PYTHON, where it is set, wins:
if [ -z "${PYTHON:-}" ]; then
    PYTHON="$CLM_DETOUR/.venv/bin/python"
    [ -x "$PYTHON" ] || PYTHON=python
fi
set +u # modules and conda use variables that are not set
#
# b) Modules or conda: they change this shell's environment, and srun hands that on to its tasks.
# module load cuda/12.8 python/3.12
# source "$HOME/miniforge3/etc/profile.d/conda.sh" && conda activate clm-detour && PYTHON=python
#
set -u
# c) A container (launch/container.def): set CONTAINER to the image; its options are in section 3.

# The project is used from its folder, installed or not.
export PYTHONPATH="$CLM_DETOUR${PYTHONPATH:+:$PYTHONPATH}"

# 2. Files. SCRATCH is the big, fast file system; home quotas are small. Node-local disk (SLURM_TMPDIR) suits the
# cache best. CLM_DETOUR_SCRATCH overrides both.
CLM_DETOUR_SCRATCH="${CLM_DETOUR_SCRATCH:-${SLURM_TMPDIR:-${SCRATCH:-/tmp}}}"
if [ -n "${SLURM_JOB_ID:-}" ]; then
    # A folder of the job's own on each node, made and removed by launch/scratch.sh.
    JOB_SCRATCH="$CLM_DETOUR_SCRATCH/clm-detour-$(id -u)/${SLURM_CLUSTER_NAME:-cluster}-$SLURM_JOB_ID"
    export JOB_SCRATCH TMPDIR="$JOB_SCRATCH"
    export TRITON_CACHE_DIR="$JOB_SCRATCH/triton"
    export TORCHINDUCTOR_CACHE_DIR="$JOB_SCRATCH/inductor"
    export TORCH_EXTENSIONS_DIR="$JOB_SCRATCH/torch_extensions"
    # Compute nodes have no internet: launch/submit has put hub models into HF_HOME before.
    export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
fi
# Shared by login and compute nodes, kept between jobs. On a small home quota, not ~/.cache.
export HF_HOME="${HF_HOME:-${SCRATCH:-$HOME/.cache}/huggingface}"
export HF_HUB_DISABLE_TELEMETRY=1

# 3. The container: words put before each command.
IN_ENV=()
if [ -n "${CONTAINER:-}" ]; then
    # --nv gives access to the GPUs. With exec (not run), signals reach Python itself. Bind only existing folders.
    # Add the other folders that the recipe names (rows, a model).
    bound=("$CLM_DETOUR" "${RUN_DIR:-$CLM_DETOUR}" "$CLM_DETOUR_SCRATCH" "${SCRATCH:-/tmp}" "$HF_HOME")
    mkdir -p "${RUN_DIR:-$CLM_DETOUR}" "$HF_HOME"
    IN_ENV=(apptainer exec --nv "${bound[@]/#/--bind=}" "$CONTAINER")
    PYTHON=python
elif ! command -v "$PYTHON" >/dev/null; then
    echo "error: PYTHON=$PYTHON is no program: see 'Software' in launch/env.sh" >&2
    exit 1
fi

# in_env [LAUNCHER...] -- COMMAND...: run COMMAND in that environment, through LAUNCHER if given (srun and its options).
in_env() {
    local launcher=()
    while [ "$1" != -- ]; do
        launcher+=("$1")
        shift
    done
    shift
    "${launcher[@]}" "${IN_ENV[@]}" "$@"
}

# 4. Threads, only in a job: the data loader and gloo need some; 1 where SLURM sets no number. Not on the login node,
# where SLURM sets none either: jobs would inherit that 1.
if [ -n "${SLURM_JOB_ID:-}" ]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"; fi
# Since SLURM 22.05, srun no longer inherits --cpus-per-task from sbatch.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# 5. NCCL and DeepSpeed.
# A collective that fails ends the rank instead of hanging until the watchdog (faults.hang_seconds).
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
# NCCL and gloo choose the interface themselves. Where they choose wrongly (hangs at the first collective, "no route"):
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0        # the interface between the nodes: `ip -br addr`
# export NCCL_IB_HCA=mlx5                                     # InfiniBand; NCCL_IB_DISABLE=1 falls back to TCP
# export NCCL_DEBUG=WARN                                      # what NCCL thinks; INFO tells which transport it took
# DeepSpeed compiles nothing here, needs no hostfile and no ssh: srun starts the ranks, which read SLURM's variables.
export DS_BUILD_OPS=0
