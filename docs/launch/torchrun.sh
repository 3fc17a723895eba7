#!/bin/bash
# The same without a scheduler: run it on every node, with NODE_RANK from 0 to NUM_NODES - 1.
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 docs/launch/torchrun.sh -c RECIPE --run_dir runs/two-nodes
set -euo pipefail

GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}

torchrun --nnodes "$NUM_NODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS" \
  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
  train.py fit "$@" --ckpt_path last --trainer.num_nodes "$NUM_NODES" --trainer.devices "$GPUS"
