#!/usr/bin/env bash
# tools/dist_test.sh CONFIG CHECKPOINT PROCESSES [options of tools/test.py]
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and PORT on each.
set -euo pipefail
if [ $# -lt 3 ]; then echo "usage: $0 CONFIG CHECKPOINT PROCESSES [test.py options]" >&2; exit 2; fi
CONFIG=$1
CHECKPOINT=$2
PROCESSES=$3
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    --nproc_per_node="$PROCESSES" \
    "$here/test.py" "$CONFIG" "$CHECKPOINT" --launcher pytorch "${@:4}"
