#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:10:00
#
# Runs a program on two nodes of a Slurm cluster: ringcomm reads what srun tells each rank.
#
# Command:
#
#     sbatch examples/12_slurm.sh
#
# Expected output (in slurm-JOB.out):
#
#     rank 0 of 2
#     sum 3.0
#     mean 1.5
#     gathered [1.0, 2.0]
#     sum in the background 3.0
#
# If it fails:
#
# - "rank 0 of 1", twice: srun did not start the program, or two jobs of one task ran.
# - "No module named ringcomm": activate its environment here, which all nodes have to see.
# - PyTorch's "RANK expected, but not set": init_process_group("ringcomm",
#   init_method="ringcomm://") reads what srun tells.

set -eu
# The secret by which ranks know each other, in a home directory that all nodes share.
export RINGCOMM_SECRET_FILE="${RINGCOMM_SECRET_FILE:-$HOME/.ringcomm.key}"
[ -e "$RINGCOMM_SECRET_FILE" ] || python -m ringcomm keygen "$RINGCOMM_SECRET_FILE" >&2

# export RINGCOMM_INTERFACES=eth0,eth1    # the ports to use; all real ones that are up unless given
srun python examples/01_allreduce_numpy.py
