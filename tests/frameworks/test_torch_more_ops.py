"""ringlet.torch: groups, process sets, joins, sparse tensors, objects, SyncBatchNorm."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

import ringlet
import ringlet.torch as hvd
from ringlet.ring.transports.nccl_library import lacking

pytestmark = pytest.mark.preloaded("torch")

OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


def filled(value, *shape, dtype=torch.float32):
    return torch.full(shape, float(value), dtype=dtype)


def case_grouped_allreduce():
    size, rank = hvd.size(), hvd.rank()
    shapes = [(3,), (2, 2), (), (5, 1)]
    for op in OPS:
        tensors = [filled(rank + 1, *shape) for shape in shapes]
        results = hvd.grouped_allreduce(tensors, op=op, name=f"grouped.{op.name}")
        single = [hvd.allreduce(t, op=op) for t in tensors]
        assert [r.tolist() for r in results] == [s.tolist() for s in single]
        assert all(t.unique().item() == rank + 1 for t in tensors)  # inputs are left alone
        handle = hvd.grouped_allreduce_async_(tensors, op=op)
        assert hvd.synchronize(handle)[0] is tensors[0]
        assert [t.tolist() for t in tensors] == [s.tolist() for s in single]
    mixed = [filled(rank, 4, dtype=d) for d in (torch.float16, torch.float64, torch.int64)]
    total = size * (size - 1) // 2
    assert [r.sum().item() for r in hvd.grouped_allreduce(mixed, average=False)] == [4 * total] * 3
    x, y = (filled(2, 2).requires_grad_() for _ in range(2))
    a, b = hvd.grouped_allreduce([x, y], op=hvd.Sum, name="g.grad")
    (a.sum() * (rank + 1) + 2 * b.sum()).backward()
    assert x.grad.tolist() == [sum(range(1, size + 1))] * 2
    assert y.grad.tolist() == [2 * size] * 2
    with pytest.raises(hvd.HorovodInternalError, match="at least one tensor"):
        hvd.grouped_allreduce([])
    for given, found in (({"a": filled(2, 2)}, "a mapping"), (filled(2, 2), "one of the tensors")):
        for what in ("allreduce", "allgather", "reducescatter"):
            words = rf"a grouped {what} takes a list of tensors, not {found}: pass "
            words += r"list\(tensors\.values\(\)\)"
            with pytest.raises(TypeError, match=words):
                getattr(hvd, f"grouped_{what}")(given)


def case_a_group_in_place_that_overlaps():
    n, total = 1000, sum(range(1, hvd.size() + 1))
    for size in (n, 2_000_000):
        for name in (None, "overlapping"):
            for _ in range(2):
                x = filled(hvd.rank() + 1, size)
                y = hvd.grouped_allreduce_([x, x.view(1, -1), x[5:]], op=hvd.Sum, name=name)
                assert (x == total).all()
                assert [each.shape for each in y] == [(size,), (1, size), (size - 5,)]


def case_grouped_movements():
    size, rank = hvd.size(), hvd.rank()
    given = [filled(rank, rank + 1, 2), filled(rank, 3)]
    for _ in range(3):  # the second time ranks ask for what they know
        rows, flat = hvd.grouped_allgather(given, name="two")
        assert rows[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
        assert flat.tolist() == [r for r in range(size) for _ in range(3)]
    x = torch.ones(2, requires_grad=True)  # beside what has no gradient
    y, _, _ = hvd.grouped_allgather([x, x > 0, torch.arange(3)])
    (y * torch.arange(2.0 * size)).sum().backward()
    assert x.grad.tolist() == [2.0 * rank, 2.0 * rank + 1]
    a, b = hvd.grouped_reducescatter([filled(rank, size * 2), filled(1, size, 3)], op=hvd.Sum)
    assert a.tolist() == [size * (size - 1) / 2] * 2
    assert b.tolist() == [[size] * 3]


def case_alltoall():
    size, rank = hvd.size(), hvd.rank()
    x = torch.arange(size * 2, dtype=torch.int32).reshape(-1, 1).repeat(1, 3) + 100 * rank
    moved = hvd.alltoall(x)
    assert moved[:, 0].tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    splits = torch.tensor([(rank + r) % 3 for r in range(size)])
    y = torch.arange(int(splits.sum()), dtype=torch.float32) + 100 * rank
    moved, received = hvd.alltoall(y, splits=splits)
    assert received.tolist() == [(rank + r) % 3 for r in range(size)]
    assert received.dtype is torch.int32
    assert len(moved) == sum(received)
    y.requires_grad_()
    moved, _ = hvd.alltoall(y, splits=splits.tolist())
    (moved * (rank + 1)).sum().backward()
    expected = [r + 1 for r in range(size) for _ in range((rank + r) % 3)]
    assert y.grad.tolist() == expected
    with pytest.raises(RuntimeError, match="share of 3 rows"):
        hvd.alltoall(torch.ones(3), splits=[1] * (size + 1))
    with pytest.raises(ValueError, match="whole numbers"):
        hvd.alltoall(torch.ones(size), splits=torch.ones(size))
    with pytest.raises(RuntimeError, match="divide"):
        hvd.alltoall(torch.ones(size + 1, 2))


def case_reducescatter():
    size, rank = hvd.size(), hvd.rank()
    x = torch.arange(size * 3 + 1, dtype=torch.float32).reshape(-1, 1)
    mine = hvd.reducescatter(x * (rank + 1), op=hvd.Sum)
    start = 3 * rank + min(rank, 1)
    total = sum(range(1, size + 1))
    assert mine[:, 0].tolist() == [total * (start + i) for i in range(4 if rank == 0 else 3)]
    numbers = (int(hvd.Sum), size), (int(hvd.Average), 1)  # Horovod's
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1), *numbers):
        y = torch.ones(size * 4, 2, requires_grad=True)
        hvd.reducescatter(y, op=op).sum().backward()
        assert y.grad.unique().tolist() == [factor]
    half = hvd.reducescatter(torch.ones(size, 2), compression=hvd.Compression.fp16)
    assert half.dtype is torch.float32
    scaled = hvd.reducescatter(
        torch.ones(size, 2), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
    )
    assert scaled.tolist() == [[size] * 2]
    with pytest.raises(RuntimeError, match="'none', 'fp16' or 'bf16'"):
        hvd.reducescatter(torch.ones(size), compression="int8")


def case_process_sets():
    size, rank = hvd.size(), hvd.rank()
    if size < 3:
        return
    evens = hvd.add_process_set([r for r in range(size) if r % 2 == 0])
    odds = hvd.add_process_set(hvd.ProcessSet(ranks_or_comm=range(1, size, 2)))
    own = evens if rank % 2 == 0 else odds
    assert own.included()
    assert not (odds if own is evens else evens).included()
    assert own.size() == len(own.ranks)
    assert own.rank() == own.ranks.index(rank)
    mean = sum(own.ranks) / own.size()
    for compression in (None, "fp16", "int8(bucket=32)"):
        x = hvd.allreduce(filled(rank, 2048), compression=compression, process_set=own, name="x")
        assert x.tolist() == pytest.approx([mean] * 2048, abs=0.02)
    assert hvd.allgather(filled(rank, 1), process_set=own).tolist() == own.ranks
    root = own.ranks[-1]
    assert hvd.broadcast(filled(rank, 2), root, process_set=own).tolist() == [root] * 2
    moved = hvd.alltoall(filled(rank, own.size()), process_set=own)
    assert moved.tolist() == own.ranks
    share = hvd.reducescatter(filled(1, own.size()), op=hvd.Sum, process_set=own)
    assert share.tolist() == [own.size()]
    assert hvd.broadcast_object({"root": rank}, root, process_set=own) == {"root": root}
    assert hvd.allgather_object(rank, process_set=own) == own.ranks
    hvd.barrier(process_set=own)
    with pytest.raises(ValueError, match="is not part of"):
        hvd.allreduce(filled(1, 1), process_set=odds if own is evens else evens)
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set(evens.ranks)
    with pytest.raises(ValueError, match="distinct ranks"):
        hvd.add_process_set([0, size])
    assert hvd.remove_process_set(evens)
    assert hvd.remove_process_set(odds)
    assert not hvd.remove_process_set(odds)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(filled(1, 1), process_set=own)
    assert own.included()
    assert own.ranks is not None
    assert hvd.ProcessSet([rank]).included()
    assert not hvd.ProcessSet([(rank + 1) % size]).included()
    with pytest.raises(ValueError, match="not registered"):
        hvd.ProcessSet([rank]).size()


def case_process_sets_at_init():
    size, rank = hvd.size(), hvd.rank()
    with pytest.raises(ValueError, match="a second time"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    with pytest.raises(TypeError, match=r"holds \[0\], which is no ProcessSet"):
        hvd.init(process_sets=[[0]])
    first, own = hvd.ProcessSet([0]), hvd.ProcessSet([rank])
    hvd.init(process_sets=[first, own] if rank else [first])  # what is there already is shared
    assert first.process_set_id is not None
    if rank:
        assert hvd.allreduce(filled(rank, 1), op=hvd.Sum, process_set=own).tolist() == [rank]
    others = [hvd.broadcast_object(own.process_set_id, r) for r in range(1, size)]
    assert len(set(others)) == size - 1
    assert hvd.global_process_set.ranks == list(range(size))
    shown = f"ProcessSet(process_set_id={first.process_set_id}, ranks=[0], mpi_comm=None)"
    assert str(first) == shown  # as Horovod's tests have it
    for number in (*others, first.process_set_id):
        known = hvd.ProcessSet([])
        known.adopt(number)
        assert hvd.remove_process_set(known)


def case_nothing_is_left_of_removed_process_sets():
    runtime, kept = hvd.init(), hvd.ProcessSet([0])
    for _ in range(3):
        hvd.add_process_set(kept)
        hvd.remove_process_set(kept)
    held = len(runtime.at_close)
    seen = [weakref.ref(hvd.add_process_set([0]))]
    for _ in range(20):
        hvd.remove_process_set(seen[-1]())
        seen.append(weakref.ref(hvd.add_process_set([0])))
    assert len(runtime.at_close) == held
    gc.collect()
    assert [each() is None for each in seen] == [True] * 20 + [False]
    hvd.remove_process_set(seen[-1]())


def case_names_of_parameters():
    model = torch.nn.Linear(2, 1)
    for op in (hvd.Average, hvd.Adasum):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)
        assert sorted(optimizer._parameter_names.values()) == ["bias", "weight"]
    hvd.broadcast_parameters(model.parameters())
    assert hvd.replicas_equal(model.state_dict())
    assert model.bias.grad is None
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert model.bias.grad.tolist() == [0.0]


def case_booleans_have_no_average():
    x = torch.ones(hvd.size(), dtype=torch.bool)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter):
        with pytest.raises(ValueError, match="no average"):
            call(x)
    assert hvd.grouped_allreduce([x], op=hvd.Sum)[0].all()


def case_optimizer_of_a_process_set():
    size, rank = hvd.size(), hvd.rank()
    if size < 3:
        return
    pair = hvd.add_process_set([0, size - 1])
    p = torch.nn.Parameter(torch.zeros(3000))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0), [("p", p)], "int8 | ef", process_set=pair
    )
    (p * (rank + 1)).sum().backward()
    optimizer.step()
    expected = (1 + size) / 2 if pair.included() else rank + 1
    assert p.tolist() == pytest.approx([-expected] * 3000, rel=1e-2)
    hvd.remove_process_set(pair)


def case_join():
    size, rank = hvd.size(), hvd.rank()
    for _ in range(1 + rank):
        hvd.allreduce(filled(1, 3), name="uneven", op=hvd.Sum)
    assert hvd.join() == size - 1
    for first in range(size):  # ranks have made unequal numbers of calls that have no name
        if rank != first:
            with pytest.raises(RuntimeError):
                hvd.allgather(filled(1, 3))
        assert hvd.join(hvd.local_rank()) != first
    assert hvd.allreduce(filled(1, 1), op=hvd.Sum).tolist() == [size]
    model = torch.nn.Linear(40, 40)
    hvd.broadcast_parameters(model.state_dict(), 0)
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named, "int8|ef")
    for _ in range(3 - min(rank, 2)):
        optimizer.zero_grad()
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer.zero_grad()
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    assert hvd.replicas_equal(model.state_dict())


def case_elastic_state():
    size, rank = hvd.size(), hvd.rank()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + rank, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(size * 4 + 1), seed=1)
    assert len(sampler) == 5
    assert set(hvd.allgather(torch.tensor(list(sampler))).tolist()) == set(range(size * 4 + 1))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, seen=[rank])
    told = []
    state.register_reset_callbacks([lambda: told.append("reset")])

    @hvd.elastic.run
    def train(state, fail=False):
        assert state.seen[0] == 0
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state.sampler.record_batch(0, 2)
        state.seen.append(len(sampler))
        if fail:
            hvd.allreduce(torch.ones(1 + rank), name="differs")
        state.commit()
        return state.seen

    assert train(state) == [0, 5]
    assert optimizer.param_groups[0]["lr"] == 1.0
    weight = model.weight.detach().clone()
    with pytest.raises(hvd.HorovodInternalError):
        train(state, fail=True)
    assert torch.equal(model.weight, weight)  # what was committed
    assert (state.seen, len(sampler), sampler.processed_num) == ([0, 5], 3, size * 2)
    sampler.set_epoch(1)
    state.on_reset()
    assert (len(sampler), told) == (5, ["reset"])


def case_sparse_tensors():
    size, rank = hvd.size(), hvd.rank()
    indices = torch.tensor([[rank, size]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2, 3), (size + 1, 3))
    numbers = (int(hvd.Sum), 1.0), (int(hvd.Average), 1 / size)  # Horovod's
    for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1 / size), *numbers):
        handle = hvd.sparse_allreduce_async(sparse, name="rows", op=op)
        dense = handle().to_dense()
        assert dense[:size].tolist() == [pytest.approx([scale] * 3)] * size
        assert dense[size].tolist() == pytest.approx([scale * size] * 3)


def _embedding(sparse_as_dense, rows):
    torch.manual_seed(0)
    sparse = torch.nn.Embedding(rows, 8, sparse=True)
    dense = torch.nn.Embedding(rows, 8)
    dense.load_state_dict(sparse.state_dict())
    models = []
    for table in (sparse, dense):
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        named = table.named_parameters(prefix="table")
        kwargs = {"sparse_as_dense": sparse_as_dense} if table is sparse else {}
        models.append((table, hvd.DistributedOptimizer(optimizer, named, **kwargs)))
        for step in range(3):
            models[-1][1].zero_grad()
            tokens = torch.tensor([hvd.rank(), step, rows - 1, step])
            (table(tokens) * (1 + hvd.rank())).sum().backward()
            models[-1][1].step()
            if table is sparse:
                assert table.weight.grad.is_sparse
    assert torch.allclose(models[0][0].weight, models[1][0].weight, atol=1e-5)
    assert hvd.replicas_equal(models[0][0].state_dict())


def case_sparse_gradients_large_and_small():
    for rows in (50, 20_000):
        for sparse_as_dense in (False, True):
            _embedding(sparse_as_dense, rows)


def case_what_the_first_step_holds_back_of_sparse_gradients_goes_along_with_the_second():
    """From then on they travel as rows, and nothing would ever be added to a residual."""
    for spec in ("topk(ratio=0.001) | ef", "int8 | ef", "int4 | ef(dtype='bf16')"):
        for options in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}):
            table = torch.nn.Embedding(20_000, 8, sparse=True)
            named = [*table.named_parameters(prefix="table")]
            inner = torch.optim.SGD(table.parameters(), lr=1.0)
            optimizer = hvd.DistributedOptimizer(inner, named, spec, **options)
            got = torch.zeros(20_000, 8)
            numbers = torch.rand(3, 40, 8, generator=torch.Generator().manual_seed(hvd.rank()))
            for step in range(3):
                optimizer.zero_grad()
                tokens = torch.arange(40) * (hvd.rank() + 1)
                (table(tokens) * numbers[step]).sum().backward()
                optimizer.step()
                got += table.weight.grad.to_dense()
                assert (optimizer.residual_norm() > 0) == (step == 0)
            sent = torch.zeros(20_000, 8).index_add_(0, tokens, numbers.sum(0))
            wanted = hvd.allreduce(sent, op=options.get("op", hvd.Average))
            few = 1e-2 if "bf16" in spec else 1e-5
            torch.testing.assert_close(got, wanted, rtol=few, atol=few, msg=spec)


def case_what_is_held_back_of_sparse_halves_goes_along_too():
    """torch adds no sparse tensors of 16-bit floats."""
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        table = torch.nn.Embedding(20_000, 8, sparse=True).to(dtype)
        named = [*table.named_parameters(prefix="table")]
        inner = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, named, "topk(ratio=0.001) | ef")
        got = torch.zeros(20_000, 8)
        for _ in range(3):
            optimizer.zero_grad()
            tokens = torch.arange(40) * (hvd.rank() + 1)
            table(tokens).sum().backward()
            optimizer.step()
            assert table.weight.grad.dtype is dtype
            got += table.weight.grad.to_dense().float()
        sent = torch.zeros(20_000, 8).index_fill_(0, tokens, 3.0)
        torch.testing.assert_close(got, hvd.allreduce(sent), rtol=1e-2, atol=1e-2)


def case_sparse_gradients_unused_on_some_ranks():
    table, head = torch.nn.Embedding(20_000, 8, sparse=True), torch.nn.Linear(8, 1)
    model = torch.nn.ModuleList([table, head])
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "int8 | ef"
    )
    for step in range(4):
        optimizer.zero_grad()
        used = (step + hvd.rank()) % 2 == 0
        rows = table(torch.tensor([3, hvd.rank()])) if used else torch.ones(2, 8)
        head(rows).sum().backward()
        optimizer.step()
    assert hvd.replicas_equal(model.state_dict())


def case_sparse_gradients_are_sparse_on_ranks_that_use_none():
    """SparseAdam takes no others, and of 16 bits the others would be rounded in another way."""
    for kind, dtype in ((torch.optim.SparseAdam, torch.float32), (torch.optim.SGD, torch.float16)):
        for rows in (50, 20_000):
            torch.manual_seed(0)
            table = torch.nn.Embedding(rows, 8, sparse=True).to(dtype)
            named = [*table.named_parameters(prefix="table")]
            optimizer = hvd.DistributedOptimizer(kind(table.parameters(), lr=0.013), named)
            for step in range(4):
                optimizer.zero_grad()
                if hvd.rank() == 0 or step == 2:
                    (table(torch.tensor([3, step])).float() * 1.3).square().sum().backward()
                optimizer.step()
                assert table.weight.grad.is_sparse, (kind, rows, step)
            assert hvd.replicas_equal(table.state_dict()), (kind, rows)


def case_objects():
    rank, size = hvd.rank(), hvd.size()
    told = hvd.broadcast_object({"epoch": 3, "rank": rank} if rank == size - 1 else None, size - 1)
    assert told == {"epoch": 3, "rank": size - 1}
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(size)]
    assert hvd.broadcast_object(None, 0) is None
    # One rank cannot pickle its object: the others do not wait for it.
    last = size - 1
    given = (each for each in ()) if rank == last else rank
    for told in (lambda: hvd.broadcast_object(given, last), lambda: hvd.allgather_object(given)):
        with pytest.raises(ValueError, match=rf"rank {last}'s object cannot be pickled.*generator"):
            told()
    assert hvd.broadcast_object(rank, 0) == 0


def case_adasum():
    rank, size = hvd.rank(), hvd.size()
    same = hvd.allreduce(filled(3, 5), op=hvd.Adasum)
    assert same.tolist() == pytest.approx([3.0] * 5)  # parallel: the average
    unit = torch.zeros(size)
    unit[rank] = 2.0
    assert hvd.allreduce(unit, op=hvd.Adasum).tolist() == pytest.approx([2.0] * size)  # the sum
    half = hvd.allreduce(filled(3, 5), op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert half.tolist() == pytest.approx([3.0] * 5)
    model = torch.nn.Linear(6, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Adasum
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    assert hvd.replicas_equal(model.state_dict())


def case_sync_batch_norm():
    size, rank = hvd.size(), hvd.rank()
    torch.manual_seed(3)
    whole = torch.randn(sum(r + 2 for r in range(size)), 4, 3, dtype=torch.float64)
    start = sum(r + 2 for r in range(rank))
    plain, synced = torch.nn.BatchNorm1d(4).double(), hvd.SyncBatchNorm(4).double()
    weights = torch.randn_like(whole)
    one, mine = whole.clone().requires_grad_(), whole[start : start + rank + 2].clone()
    mine.requires_grad_()
    (plain(one) * weights).sum().backward()
    out = synced(mine)
    (out * weights[start : start + rank + 2]).sum().backward()
    assert torch.allclose(out, plain(one)[start : start + rank + 2], atol=1e-9)
    assert torch.allclose(mine.grad, one.grad[start : start + rank + 2], atol=1e-9)
    total = hvd.allreduce(synced.weight.grad, op=hvd.Sum)
    assert torch.allclose(total, plain.weight.grad, atol=1e-9)
    plain(one)  # the comparison above ran it twice
    synced(mine)
    synced(mine)
    assert torch.allclose(synced.running_mean, plain.running_mean, atol=1e-9)
    assert torch.allclose(synced.running_var, plain.running_var, atol=1e-9)
    assert torch.allclose(synced.eval()(mine), plain.eval()(mine), atol=1e-9)


def case_sync_batch_norm_has_second_derivatives():
    size, rank = hvd.size(), hvd.rank()
    draw = torch.Generator().manual_seed(3)
    whole, weights = torch.randn(2, sum(range(2, size + 2)), 4, 3, generator=draw).double()
    own = slice(sum(range(2, rank + 2)), sum(range(2, rank + 3)))
    for affine in (True, False):
        found = []
        for make, rows in ((torch.nn.BatchNorm1d, slice(None)), (hvd.SyncBatchNorm, own)):
            norm, x = make(4, affine=affine).double(), whole[rows].clone().requires_grad_()
            objective = (norm(x) ** 3 * weights[rows]).sum()
            (first,) = torch.autograd.grad(objective, x, create_graph=True)
            (first**2).sum().backward()
            found.append((first.detach(), x.grad, norm.weight))
        (first, second, plain), (ours, again, synced) = found
        torch.testing.assert_close(ours, first[own])
        torch.testing.assert_close(again, second[own])
        if affine:
            total = hvd.allreduce(synced.grad, op=hvd.Sum)
            torch.testing.assert_close(total, plain.grad)


def case_horovod_compressors():
    for compression, dtype in ((hvd.Compression.none, 32), (hvd.Compression.fp16, 16)):
        small, context = compression.compress(torch.ones(3))
        assert small.dtype.itemsize * 8 == dtype
        assert compression.decompress(small, context).dtype is torch.float32
        assert hvd.allreduce(torch.ones(3), compression=compression).tolist() == [1.0] * 3

    class Twice:
        @staticmethod
        def compress(tensor):
            return tensor * 2, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor / 2

    assert hvd.allreduce(torch.ones(3), compression=Twice).tolist() == [1.0] * 3

    class Scaled(hvd.Compression.fp16):
        """Casts in its own way: what it is derived from stands for a spec, it does not."""

        @staticmethod
        def compress(tensor):
            return (tensor * 2**20).half(), tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tensor.to(ctx) / 2**20

    class Renamed(hvd.Compression.fp16):
        pass

    tiny = torch.full((3,), 2.0**-33)  # half of what float16 can tell from zero, and less
    mean = hvd.allreduce(tiny, compression=Scaled)
    torch.testing.assert_close(mean, tiny, rtol=1e-3, atol=0.0)
    assert hvd.allreduce(tiny, compression=Renamed).tolist() == [0.0] * 3
    p = torch.nn.Parameter(torch.ones(1))
    for own in (Twice, Scaled):
        with pytest.raises(TypeError, match="one of Horovod's compressors"):
            hvd.DistributedOptimizer(torch.optim.SGD([p], 0.1), [("p", p)], compression=own)


def case_build_queries():
    assert hvd.mpi_built()
    assert hvd.gloo_built()
    assert hvd.mpi_enabled() != hvd.gloo_enabled()
    for absent in (hvd.ddl_built, hvd.rocm_built):
        assert not absent()
    assert hvd.cuda_built() == (hvd.nccl_built() > 0) == (lacking(gpu=False) is None)


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize(("transport", "size"), [("mpi", 2), ("gloo", 3)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_op(run_case, case, transport, size):
    run_case(case, transport, size)


def part_of_a_job():
    hvd.init(comm=[int(os.environ["RINGLET_RANK"])])
    told = hvd.rank(), hvd.size()
    hvd.shutdown()
    return told


def test_a_job_of_some_ranks():
    with pytest.raises(ValueError, match="use process_sets"):
        hvd.init(comm=[0, 1])
    with pytest.raises(TypeError, match="a list of ranks"):
        hvd.init(comm="all")
    assert ringlet.run(part_of_a_job, np=2, transport="mpi") == [(0, 1)] * 2


def two_children():
    told = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                hvd.init()
                code = int(hvd.allreduce(torch.ones(1), op=hvd.Sum).item() != 2)
                hvd.barrier()
                hvd.shutdown()
            finally:
                os._exit(code)
        told.append(os.waitpid(child, 0)[1])
    return told


def test_a_rank_whose_children_connect_one_after_the_other():
    assert ringlet.run(two_children, np=2, transport="gloo") == [[0, 0]] * 2
