"""One rank of test_gpu_nccl.py: payloads over two levels, all ranks on one GPU of two hosts."""

import cupy
import numpy as np

from ringlet.compressors import parse
from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.devices.cuda import CudaPlace
from ringlet.ring import Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.rendezvous.connect import connect
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator

SPECS = (
    "none", "fp16", "int8 | ef", "int4", "onebit | ef", "topk(ratio=0.1) | ef", "block_topk | ef",
    "mxfp4", "lossless",
)  # fmt: skip
SHAPE = (300, 401)  # which two ranks of a host do not share evenly

comm = connect("nccl")
rank = comm.rank
two = HierarchicalCommunicator(comm, Topology.from_hosts(rank, "aabb"))
place = CudaPlace(cupy, comm.device)
engine = Engine(two, open_control, Limits(), [place])

found = {}
for where in "host", "cuda":
    requests = [Request(f"{where} {s}", shape=SHAPE, spec=s, place=where) for s in SPECS]
    group = engine.declare(where, requests, [parse(s) for s in SPECS], [{} for _ in SPECS])
    results = []
    for step in range(3):
        arrays = []
        for i, request in enumerate(requests):
            rng = np.random.default_rng([rank, step, i])
            x = rng.standard_normal(request.numel).astype(np.float32)
            arrays.append(cupy.asarray(x) if where == "cuda" else x)
            group.submit(request.name, arrays[-1])
        group.wait(120)
        place.finish()  # nobody has told a stream of CuPy's to wait
        results.append([x.get() if where == "cuda" else x for x in arrays])
    found[where] = results
for step, (here, there) in enumerate(zip(found["host"], found["cuda"], strict=True)):
    for spec, e, f in zip(SPECS, here, there, strict=True):
        if spec == "lossless":  # of no fixed size: on one level there, and rounded before that
            assert np.allclose(e, f, rtol=0, atol=0.03), (step, spec)
        else:
            assert np.array_equal(e.view(np.uint32), f.view(np.uint32)), (step, spec)
engine.shutdown()
two.close()
print(f"rank {rank} is done")
