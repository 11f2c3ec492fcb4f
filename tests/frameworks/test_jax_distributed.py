"""Ranks that jax.distributed has started, of several devices each: this is their script, too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta

import pytest

from ringlet.ring.processes.torchrun import free_port

pytestmark = pytest.mark.preloaded("jax")

RANKS, DEVICES = 2, 2
CHECKS = ("ranks", "gradients", "a mesh over processes", "once more")


def main(port, process):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import ringlet.jax as hvd
    from ringlet.compressors import parse
    from ringlet.compressors.testing.tools.simulate import simulate

    jax.distributed.initialize(f"localhost:{port}", RANKS, process)
    with pytest.raises(hvd.HorovodInternalError, match="meet over gloo, not 'mpi'"):
        hvd.init(transport="mpi")
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (jax.process_index(), RANKS) == (process, 2)
    assert (hvd.local_rank(), hvd.local_size()) == (process, 2)
    assert jax.local_device_count() == DEVICES
    assert float(hvd.allreduce(float(process), op=hvd.Sum)) == 1.0
    assert jax.jit(hvd.allgather)(jnp.full(1, process)).tolist() == [0, 1]
    print("ranks", flush=True)

    # One device a rank computes; what its program calls back is the engine's.
    transformation = hvd.reduce_gradients("int8 | ef")
    states = [{} for _ in range(RANKS)]
    state = transformation.init({"w": jnp.zeros(5000)})
    for step in range(3):
        given = [np.random.default_rng([r, step]).normal(size=5000) for r in range(RANKS)]
        given = [each.astype("float32") for each in given]
        reduced, state = jax.jit(transformation.update)({"w": given[process]}, state)
        expected = simulate(parse("int8 | ef"), given, states, step, "w")[0]
        assert np.array_equal(reduced["w"], expected)
    print("gradients", flush=True)
    local = jax.make_mesh((DEVICES,), ("own",), devices=jax.local_devices())
    everywhere = jax.device_put(jnp.ones(3), NamedSharding(local, PartitionSpec()))
    with pytest.raises(ValueError, match=r"use hvd\.sharded_mean in jax\.shard_map"):
        jax.jit(hvd.allreduce)(everywhere)

    # All devices of all ranks compute; payloads go by XLA's own collectives.
    total = RANKS * DEVICES
    mesh = jax.make_mesh((total,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axis = PartitionSpec("data")

    def mean(x, residual):
        made, after = hvd.sharded_mean(x[0], "data", "int4 | ef", residual[0])
        return made[None], after[None]

    run = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=axis, out_specs=axis))

    def spread(rows):
        own = rows[process * DEVICES : (process + 1) * DEVICES]
        return jax.make_array_from_process_local_data(NamedSharding(mesh, axis), own, rows.shape)

    residual, states = spread(np.zeros((total, 5000), "float32")), [{} for _ in range(total)]
    for step in range(3):
        given = np.random.default_rng(step).normal(size=(total, 5000)).astype("float32")
        made, residual = run(spread(given), residual)
        expected = simulate(parse("int4 | ef"), list(given), states, step)[0]
        for shard in made.addressable_shards:
            assert np.array_equal(np.asarray(shard.data)[0], expected)
    print("a mesh over processes", flush=True)

    hvd.shutdown()
    hvd.init()
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == 2.0
    print("once more", flush=True)
    hvd.shutdown()
    jax.distributed.shutdown()


def refused(port):
    import jax

    import ringlet.jax as hvd

    process = 1 - int(os.environ["RINGLET_RANK"])
    jax.distributed.initialize(f"localhost:{port}", RANKS, process)
    text = rf"says rank {1 - process} of 2, jax.distributed says process {process} of 2: pass"
    with pytest.raises(hvd.HorovodInternalError, match=text):
        hvd.init()
    print("refused", flush=True)
    jax.distributed.shutdown()


@pytest.fixture(scope="module")
def told():
    """Run the checks in two processes of two devices each, which no launcher knows."""
    devices = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}"
    env = os.environ | {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    port = str(free_port())
    with ExitStack() as stack:
        programs = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, port, str(process)],
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for process in range(RANKS)
        ]
        try:
            return [program.communicate(timeout=200) for program in programs]
        finally:
            for program in programs:
                program.kill()


@pytest.mark.parametrize("check", CHECKS)
def test_ranks_of_jax_distributed(told, check):
    for out, errors in told:
        assert f"{check}\n" in out, out + errors


def test_another_numbering_than_the_launchers_is_refused():
    run = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    done = subprocess.run(
        [*run, sys.executable, __file__, str(free_port())],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.count(">: refused\n") == RANKS, done.stdout + done.stderr


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_store_listens_only_where_others_look_for_it(host):
    dist = pytest.importorskip("torch.distributed")
    from ringlet.jax.distributed import _serve

    patience = timedelta(seconds=60)
    store = _serve(dist, host, 1, patience)
    dist.TCPStore(host, store.port, 1, False, patience).set("name", "value")
    assert store.get("name") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        refused(sys.argv[1])
