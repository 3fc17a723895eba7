#!/bin/bash
# Data-parallel training on several nodes, one process a GPU. From the repository, on a file system that all nodes share:
#   sbatch --nodes 2 docs/launch/slurm.sh RECIPE --run_dir runs/two-nodes
#SBATCH --job-name=qerl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# GPUs are asked for by node: with --gpus-per-task each process would see one GPU and not know the others of its node.
set -euo pipefail

source .venv/bin/activate
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# 600 seconds before the time limit this script gets SIGUSR1, and srun sends it to the run, which finishes its iteration,
# writes a checkpoint and ends. Then the job is queued again. Change the 600 if an iteration takes longer.
continue_in_another_job() {
  kill -USR1 "$run"
  wait "$run" || scontrol requeue "$SLURM_JOB_ID"
  exit
}
trap continue_in_another_job USR1

# One process that fails ends the job; a job that is started again goes on from its last whole iteration.
srun --kill-on-bad-exit=1 python train.py fit "$@" --ckpt_path last \
  --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" &
run=$!
wait "$run"
