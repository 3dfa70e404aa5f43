#!/usr/bin/env bash
# tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [options of tools/train.py]
# GPUS, GPUS_PER_NODE (0: CPU processes), CPUS_PER_TASK and SRUN_ARGS from the environment.
set -euo pipefail
if [ $# -lt 4 ]; then echo "usage: $0 PARTITION JOB_NAME CONFIG WORK_DIR [train.py options]" >&2; exit 2; fi
PARTITION=$1
JOB_NAME=$2
CONFIG=$3
WORK_DIR=$4
GPUS=${GPUS:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
here=$(cd "$(dirname "$0")" && pwd)
gres=()
tasks=("--ntasks=$GPUS")
if [ "$GPUS_PER_NODE" -gt 0 ]; then
    gres=("--gres=gpu:$GPUS_PER_NODE")
    tasks+=("--ntasks-per-node=$GPUS_PER_NODE")
fi
# SRUN_ARGS is split into words on purpose.
# shellcheck disable=SC2086
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec srun -p "$PARTITION" --job-name="$JOB_NAME" \
    "${gres[@]}" "${tasks[@]}" --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$here/train.py" "$CONFIG" --work-dir="$WORK_DIR" --launcher=slurm "${@:5}"
