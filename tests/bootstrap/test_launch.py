"""Every launcher's environment, and every way to get it wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ringcomm.bootstrap.join import join
from ringcomm.bootstrap.launch import CANDIDATES, derived_ports, first_host, identify
from ringcomm.config import Config
from ringcomm.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-5988@1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "3406823425",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, {"rank": 0, "world_size": 1, "launcher": "none", "master_ports": ()}),
        (
            TORCHRUN,
            {
                "rank": 3,
                "world_size": 4,
                "local_rank": 1,
                "local_world_size": 2,
                "master_addr": "node0",
                "master_port": 29501,
                "launcher": "torchrun",
                "job": "torchrun:abc:1:29500",
            },
        ),
        (  # one host: the agent's name for itself may be a public address
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"},
            {"master_addr": "127.0.0.1", "master_port": 29501},
        ),
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            {"master_addr": "node0", "master_port": 29500},
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "4000"},
            {"launcher": "env", "master_addr": "::1", "master_port": 4000, "local_rank": None},
        ),
        (
            OPEN_MPI_5,
            {
                "rank": 1,
                "world_size": 2,
                "local_rank": 1,
                "launcher": "mpirun",
                "master_addr": "127.0.0.1",
                "job": "mpirun:prterun-host-5988@1",
            },
        ),
        (OPEN_MPI_4, {"rank": 0, "job": "mpirun:3406823425", "master_addr": "127.0.0.1"}),
        (
            {**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "node0"},
            {"master_addr": "node0", "local_world_size": 1},
        ),
        ({**OPEN_MPI_5, "MASTER_ADDR": "node0", "MASTER_PORT": "5000"}, {"master_port": 5000}),
        (HYDRA, {"rank": 1, "world_size": 2, "launcher": "mpiexec", "master_addr": "127.0.0.1"}),
        (
            SLURM,
            {
                "rank": 5,
                "world_size": 8,
                "local_rank": 1,
                "launcher": "srun",
                "master_addr": "gpu03",
                "job": "srun:77.0",
            },
        ),
        (
            {**SLURM, "SLURM_STEP_NODELIST": " ", "SLURM_NODELIST": "gpu[05-06]"},
            {"master_addr": "gpu05"},
        ),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, {"master_addr": "127.0.0.1"}),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, {"world_size": 6}),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": " ", "SLURM_NTASKS": "7"}, {"world_size": 7}),
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": ""}, {"launcher": "srun"}),
        ({**SLURM, **OPEN_MPI_5}, {"launcher": "mpirun"}),
        ({**SLURM, **OPEN_MPI_5, **TORCHRUN}, {"launcher": "torchrun"}),
        # a batch script itself has no step: it is one process
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {"world_size": 1, "launcher": "none"}),
        # srun with PMI sets both; its own account is the fuller one
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, {"launcher": "srun"}),
        ({**TORCHRUN, "MASTER_PORT": "65535"}, {"master_addr": "node0"}),
    ],
)
def test_launchers(env: dict[str, str], expected: dict[str, Any]) -> None:
    found = identify(env=env)
    assert {name: getattr(found, name) for name in expected} == expected
    assert all(0 < port < 65536 for port in found.master_ports)


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": " ", "WORLD_SIZE": "2"}, "RANK is not"),
        ({**TORCHRUN, "RANK": "one"}, "RANK='one' is not a whole number"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' is not"),
        ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, "not a whole number"),
        ({**TORCHRUN, "RANK": "4"}, "rank=4 does not fit world_size=4"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "world_size=0"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not both set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not both set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({**OPEN_MPI_5, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set MASTER_ADDR"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "set MASTER_ADDR"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[03"}, "cannot be read"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "set MASTER_ADDR"),
        ({**SLURM, "SLURM_NTASKS": ""}, "SLURM_NTASKS is not"),
    ],
)
def test_bad_environment(env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        identify(env=env)


def test_explicit_values_win() -> None:
    found = identify(1, 3, "tcp://[fe00::1]:29500", env=TORCHRUN)
    assert (found.rank, found.world_size) == (1, 3)
    assert (found.master_addr, found.master_ports) == ("fe00::1", (29500,))
    assert found.launcher == "explicit"


def test_address_beside_a_launcher() -> None:
    found = identify(init_method="tcp://node7:1234", env=OPEN_MPI_5)
    assert (found.rank, found.master_addr, found.master_ports) == (1, "node7", (1234,))


def test_explicit_ranks_take_the_environments_address() -> None:
    env = {"MASTER_ADDR": "node0", "MASTER_PORT": "4000"}
    one, other = identify(0, 2, env=env), identify(env={"RANK": "1", "WORLD_SIZE": "2", **env})
    assert one.master_addr == "node0"
    assert (one.job, one.master_ports) == (other.job, other.master_ports)


def test_world_of_one_needs_no_address() -> None:
    assert identify(0, 1, env={}).master_ports == ()
    assert identify(0, 1, "tcp://node0:4000", env={}).world_size == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, None, None), "world_size is missing"),
        ((None, 2, None), "rank is missing"),
        ((2, 2, "tcp://a:1"), "rank=2 does not fit"),
        ((True, 2, "tcp://a:1"), "rank=True"),
        ((0.0, 2, "tcp://a:1"), "rank=0.0"),
        ((0, 2, None), "MASTER_ADDR and MASTER_PORT"),
        ((0, 2, "tcp://a"), "tcp://host:port"),
        ((0, 2, "tcp://a:0"), "tcp://host:port"),
        ((0, 2, "tcp://a:99999"), "tcp://host:port"),
        ((0, 2, "tcp://:29500"), "tcp://host:port"),
        ((0, 2, "tcp://a:1?rank=0"), "tcp://host:port"),
        ((0, 2, "tcp://[::1:29500"), "tcp://host:port"),
        ((0, 2, "file:///tmp/x"), "tcp://host:port"),
        ((None, None, "env://"), "no launcher's environment"),
        ((None, None, "tcp://a:1"), "no launcher's environment"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, Any, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        identify(*arguments, env={})


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-07,11],big1", "gpu03"),
        ("gpu[7,11]", "gpu7"),
        ("rack[1-2]node[05-06]", "rack1node05"),
        ("n[1-2].cluster.example,m", "n1.cluster.example"),
        ("", ""),
    ],
)
def test_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


def test_derived_ports_are_the_jobs_own() -> None:
    ports = derived_ports("mpirun:1")
    assert ports == derived_ports("mpirun:1") != derived_ports("mpirun:2")
    assert len(set(ports)) == CANDIDATES
    # Ports that the kernel gives to clients could be taken, or meet themselves.
    assert all(20000 <= port < 32768 for port in ports)


@pytest.mark.parametrize("given", ["rank", "world_size", "init_method", "store"])
def test_an_mpi_communicator_says_it_all(given: str) -> None:
    others: dict[str, Any] = {"rank": None, "world_size": None, "init_method": None, "store": None}
    with pytest.raises(ConfigError, match="mpi= already says who is who; leave out rank, world"):
        join(Config(), **{**others, given: 1}, timeout=None, mpi=object())
