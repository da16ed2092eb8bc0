"""How a worker learns from its environment who started it, and as which of how many."""

from __future__ import annotations

import pytest

from edl_hvd.settings import Launch

MPIRUN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_RANK": "3"}
SRUN = {"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "3"}
# The shell of a batch job, and what it starts without srun.
SBATCH = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
ONE_TASK = {**SRUN, "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "mpi", "rank", "size", "local_rank"),
    [
        ({}, False, 0, 1, 0),
        (MPIRUN, True, 3, 4, 1),
        (SRUN, True, 3, 4, 1),
        ({**SRUN, **MPIRUN, "SLURM_STEP_NUM_TASKS": "1"}, True, 3, 4, 1),
        (PMI, True, 3, 4, 0),
        (SBATCH, False, 0, 1, 0),
        (ONE_TASK, False, 0, 1, 0),
    ],
    ids=["alone", "mpirun", "srun", "mpirun in srun", "pmi", "sbatch", "srun of one"],
)
def test_a_worker_knows_its_place(environ, mpi, rank, size, local_rank):
    launch = Launch.from_environment(environ)
    assert (launch.mpi, launch.rank, launch.size, launch.local_rank) == (mpi, rank, size, local_rank)
