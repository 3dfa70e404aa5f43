#!/usr/bin/env bash
# tools/dist_train.sh CONFIG PROCESSES [options of tools/train.py]
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and PORT on each.
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: $0 CONFIG PROCESSES [train.py options]" >&2; exit 2; fi
CONFIG=$1
PROCESSES=$2
here=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    --nproc_per_node="$PROCESSES" \
    "$here/train.py" "$CONFIG" --launcher pytorch "${@:3}"
