"""ringlet.torch: mistakes get one text on every rank, nobody hangs, and the job can go on."""

from __future__ import annotations

import hashlib
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import ringlet
import ringlet.torch as hvd
from ringlet.compressors import Compressor, register
from ringlet.fusion import CompressionFailed, StepAbandoned
from ringlet.ring.errors import Mismatch
from ringlet.ring.functions import WorkerFailed

pytestmark = pytest.mark.preloaded("torch")


def same_everywhere(text):
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    rows = hvd.allgather(torch.tensor([list(digest)], dtype=torch.uint8))
    return bool((rows == rows[0]).all())


def refused(call, *words, error=Mismatch):
    """Check that ``call`` raises ``error`` with all ``words``, the same text on every rank."""
    with pytest.raises(error) as told:
        call()
    text = str(told.value)
    assert all(word in text for word in words), text
    assert same_everywhere(text), text
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3  # life goes on


def odd():
    return hvd.rank() == hvd.size() - 1


def model(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 40), nn.Linear(40, outputs))


def wrap(m, names=None, **options):
    names = m.named_parameters() if names is None else names
    return hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), names, **options)


def step(m, optimizer):
    optimizer.zero_grad()
    m(torch.ones(2, 4) * hvd.rank()).square().sum().backward()
    optimizer.step()


def case_a_failed_adasum_step_leaves_parameters_alike():
    m = model()
    cast = hvd.Compression.fp16 if odd() else hvd.Compression.none
    bad = wrap(m, op=hvd.Adasum, compression=cast)
    good = wrap(m, op=hvd.Adasum)
    before = [p.detach().clone() for p in m.parameters()]
    refused(lambda: step(m, bad), "dtypes differ")
    assert all(map(torch.equal, before, m.parameters()))
    step(m, good)
    assert not any(map(torch.equal, before, m.parameters()))
    assert hvd.replicas_equal(m.state_dict())


def case_an_adasum_step_that_raises_on_one_rank_can_be_repeated_there():
    class Moody(torch.optim.SGD):
        moody = odd()

        def step(self, closure=None):
            super().step(closure)
            if self.moody:
                Moody.moody = False
                raise KeyError("moody")

    m = model()
    optimizer = hvd.DistributedOptimizer(
        Moody(m.parameters(), lr=0.1), m.named_parameters(), op=hvd.Adasum
    )
    if odd():
        with pytest.raises(KeyError, match="moody"):
            step(m, optimizer)
    step(m, optimizer)
    assert hvd.replicas_equal(m.state_dict())


def case_names():
    m = model()
    named = list(m.named_parameters())
    stranger = nn.Parameter(torch.ones(1))
    for names, words in (
        ([*named[:-1], (named[0][0], named[-1][1])], "repeats names: 0.weight"),
        (named[:-1], "position 3, shape [3]"),
        ([*named, ("alias", named[0][1])], "one parameter several times: 0.weight, alias"),
        ([p for _, p in named], "tuples"),
        ((pair for pair in ()), "empty: a generator serves once; call model.named_parameters()"),
        (list(model().named_parameters()), "of another model than the optimizer's parameters"),
        (m.state_dict(), "a state_dict's; pass model.named_parameters()"),
        ("int8 | ef", "a spec goes behind it: compression='int8 | ef'"),
    ):
        with pytest.raises(ValueError, match="named_parameters") as told:
            wrap(m, names)
        assert words in str(told.value)
    with pytest.warns(UserWarning, match="does not hold, the first 'more'"):
        wrap(m, [*named, ("more", stranger)])
    wrap(m, [*named, ("frozen", nn.Parameter(torch.ones(1), requires_grad=False))])


def case_arguments_of_the_wrong_kind():
    """What was given instead is named, before anything is exchanged."""
    own = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    for wrong, called in (
        (own.named_parameters(), "a generator"),
        (own, "the model"),
        (torch.optim.SGD, "the class SGD"),
    ):
        with pytest.raises(TypeError, match=f"first argument is a torch optimizer.*not {called}"):
            hvd.DistributedOptimizer(wrong, sgd)
    with pytest.raises(TypeError, match="backward_passes_per_step is a whole number, not '2'"):
        hvd.DistributedOptimizer(sgd, own.named_parameters(), backward_passes_per_step="2")
    for options, kind, said in (
        ({"process_set": [0, 1]}, TypeError, r"process_set is what add_process_set.*\[0, 1\]"),
        ({"groups": "all"}, ValueError, "groups is a number, or a list of lists .* not 'all'"),
        ({"groups": [["weight"]]}, ValueError, "groups is .* not of names, such as 'weight'"),
        ({"num_groups": "2"}, TypeError, "num_groups is a whole number, not '2'"),
        ({"gradient_predivide_factor": "2"}, TypeError, "predivide_factor is a number, not '2'"),
        ({"sparse_as_dense": "no"}, TypeError, "sparse_as_dense is True or False, not 'no'"),
        ({"op": True}, ValueError, r"op is one of hvd\.Average, .*, not True"),
    ):
        with pytest.raises(kind, match=said):
            hvd.DistributedOptimizer(sgd, own.named_parameters(), **options)
    taken = hvd.DistributedOptimizer(
        sgd,
        own.named_parameters(),
        backward_passes_per_step=np.int64(2),
        gradient_predivide_factor=np.float32(2),
        sparse_as_dense=np.True_,
        groups=np.int64(1),
    )
    taken.set_backward_passes_per_step(np.int64(3))
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(ValueError, match=r"op='sum' is a text: write op=hvd\.Sum"):
            call(torch.ones(4), op="sum")
        with pytest.raises(ValueError, match=r"op is one of hvd\.Average, .*, not 'total'"):
            call(torch.ones(4), op="total")
        with pytest.raises(ValueError, match=r"op is one of hvd\.Average, .*, not True"):
            call(torch.ones(4), op=True)
    with pytest.raises(ValueError, match=r"op='average' is a text: write op=hvd\.Average"):
        hvd.DistributedOptimizer(sgd, own.named_parameters(), op="average")
    for wrong, words in (
        (own, r"pass model\.state_dict\(\), not the model"),
        (own.parameters(), r"state_dict\(\) or model\.named_parameters\(\)"),
        (own.weight, r"state_dict\(\) or model\.named_parameters\(\)"),
        (None, r"state_dict\(\) or model\.named_parameters\(\)"),
    ):
        with pytest.raises(TypeError, match=words):
            hvd.replicas_equal(wrong)
    with pytest.warns(
        UserWarning, match="'bais', 'wieght' match no parameter, and compress nothing"
    ):
        hvd.DistributedOptimizer(sgd, own.named_parameters(), {"bais": "none", "wieght": "int8"})


def case_states_that_are_none():
    m = model()
    optimizer = wrap(m)
    for state in ({}, m.state_dict()):
        with pytest.raises(ValueError, match=r"not what an optimizer.s state_dict\(\) gave"):
            optimizer.load_state_dict(state)
    with pytest.raises(TypeError, match=r"pass the optimizer, not its state_dict\(\)"):
        hvd.broadcast_optimizer_state(optimizer.state_dict(), 0)
    with pytest.raises(TypeError, match="pass the optimizer, not Sequential"):
        hvd.broadcast_optimizer_state(m, 0)


def case_a_model_in_place_of_what_holds_it():
    m = model()
    with pytest.raises(TypeError, match=r"first argument is a torch optimizer, .*, not the model"):
        hvd.DiLoCo(m, m.named_parameters())
    with pytest.raises(TypeError, match=r"argument of compress_fsdp is the model, not a str"):
        hvd.compress_fsdp("int8", m)
    with pytest.raises(TypeError, match=r"is a list of ranks such as \[0, 1\], not 0"):
        hvd.add_process_set(0)
    with pytest.raises(TypeError, match=r"elastic\.run decorates a function"):
        hvd.elastic.run(m.state_dict())
    train = hvd.elastic.run(lambda state: None)
    with pytest.raises(TypeError, match=r"is a state, such as TorchState.*, not a Sequential"):
        train(m)


def case_a_lazy_module_that_has_no_shape_yet():
    lazy = nn.LazyLinear(3)
    with pytest.raises(TypeError, match=r"parameter 'weight' is of a lazy module, .* on all"):
        wrap(lazy)
    with pytest.raises(TypeError, match="run the model once on a batch"):
        hvd.broadcast_parameters(lazy.state_dict(), 0)


def case_a_model_that_is_converted_too_late():
    m = model()
    optimizer = wrap(m)
    for dtype in (torch.float64, torch.bfloat16):
        m.to(dtype)
        name = str(dtype).partition(".")[2]
        words = f"'1.bias' is {name} now, and was float32 .* before DistributedOptimizer is made"
        with pytest.raises(TypeError, match=words):
            m(torch.ones(2, 4, dtype=dtype)).sum().backward()
        hvd.barrier()  # a step that is given up elsewhere is another error
        optimizer.abandon_step()
        m.zero_grad()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3


def case_a_layer_that_one_rank_freezes():
    """In the first step or later, and then it is thawed: all ranks are told, and can go on."""
    m = model()
    optimizer = wrap(m, compression="int8 | ef")
    first = m[0].weight
    for _ in range(2):
        if odd():
            first.requires_grad_(False)
        remedy = "set requires_grad alike on all ranks"
        refused(lambda: step(m, optimizer), "'0.weight'", f"on rank(s) {hvd.size() - 1}", remedy)
        first.requires_grad_(True)
        optimizer.zero_grad()
        hvd.broadcast_parameters(m.state_dict(), 0)
        step(m, optimizer)
    first.requires_grad_(False)
    for _ in range(2):
        step(m, optimizer)
    assert hvd.replicas_equal(m.state_dict())


def case_a_large_sparse_embedding_that_one_rank_freezes_or_thaws():
    """Its gradient travels as rows after the first step, and not among the others."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Embedding(9000, 8, sparse=True), nn.Linear(8, 3))
    optimizer = wrap(m)
    rows = m[0].weight

    def train():
        optimizer.zero_grad()
        m(torch.arange(4) + hvd.rank()).square().sum().backward()
        optimizer.step()

    def alike():
        optimizer.zero_grad()
        hvd.broadcast_parameters(m.state_dict(), 0)
        train()
        assert hvd.replicas_equal(m.state_dict())

    train()
    words = "'0.weight'", f"on rank(s) {hvd.size() - 1}", "set requires_grad alike on all ranks"
    rows.requires_grad_(not odd())
    refused(train, *words)
    rows.requires_grad_(True)
    alike()
    rows.requires_grad_(False)
    alike()
    rows.requires_grad_(odd())
    refused(train, "'0.weight'", "set requires_grad alike on all ranks")
    rows.requires_grad_(True)
    alike()


def case_a_parameter_that_is_added_gives_the_step_up_on_all_ranks():
    """On one rank, and on all of them: nobody waits, and zero_grad() begins the next step."""
    for everywhere in (False, True):
        m, extra = model(), nn.Linear(4, 40)
        optimizer = wrap(m)
        step(m, optimizer)
        if everywhere or odd():
            optimizer.add_param_group({"params": list(extra.parameters())})
        optimizer.zero_grad()
        part = m[1](extra(torch.ones(2, 4)))  # what is left nobody reduces before step()
        part.sum().backward()
        wanted = RuntimeError if everywhere or odd() else StepAbandoned
        with pytest.raises(wanted, match=r"was added or unfrozen.*given up, on all ranks"):
            optimizer.step()
        optimizer.zero_grad()
        for p in extra.parameters():
            p.grad = None
        step(m, optimizer)
        assert hvd.replicas_equal(m.state_dict())


def case_a_parameter_that_one_rank_adds_to_onebit_adam_leaves_nobody_waiting():
    m, extra = model(), nn.Linear(4, 40)
    optimizer = hvd.OneBitAdam(m.named_parameters(), warmup=1)
    if odd():
        optimizer.add_param_group({"params": list(extra.parameters())})
    for _ in range(2):
        optimizer.zero_grad()
        (m(torch.ones(2, 4)).sum() + extra(torch.ones(2, 4)).sum()).backward()
        with pytest.raises(RuntimeError if odd() else StepAbandoned, match="was added or unfrozen"):
            optimizer.step()
    for p in extra.parameters():
        p.grad = None
    m(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert hvd.replicas_equal(m.state_dict())


def case_onebit_adam_is_refused_on_one_rank_after_another():
    """The one that has heard of the first refusal gives up a step of its own."""
    m, extra = model(), nn.Linear(4, 40)
    optimizer = hvd.OneBitAdam(m.named_parameters(), warmup=1)
    optimizer.add_param_group({"params": list(extra.parameters())})
    for n in range(2):
        optimizer.zero_grad()
        loss = m(torch.ones(2, 4)).sum()
        (loss + extra(torch.ones(2, 4)).sum() if hvd.rank() == n else loss).backward()
        error = RuntimeError if hvd.rank() == n else StepAbandoned
        with pytest.raises(error, match="was added or unfrozen"):
            optimizer.step()
    optimizer.zero_grad()
    m(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert hvd.replicas_equal(m.state_dict())


def case_a_step_that_is_interrupted_on_one_rank_is_taken_when_it_is_repeated():
    """Others take it; zero_grad() would leave this rank a step behind, which nobody would see."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # whose gradient is copied
    m = nn.Sequential(conv, nn.Flatten(), nn.Linear(32, 3))
    optimizer = wrap(m, compression="int8 | ef")
    for n in range(3):
        optimizer.zero_grad()
        images = torch.full((2, 4, 4, 4), hvd.rank() + n + 1.0)
        m(images.to(memory_format=torch.channels_last)).square().sum().backward()
        if n == 1 and odd():
            group = optimizer._ringlet.declared.group
            with (
                mock.patch.object(type(group), "wait", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                optimizer.step()
            with pytest.raises(RuntimeError, match=r"Call it after step\(\).*abandon_step"):
                optimizer.zero_grad()
        optimizer.step()
    assert hvd.replicas_equal(m.state_dict())


def case_an_adasum_step_that_is_interrupted_on_one_rank_is_taken_when_it_is_repeated():
    m = model()
    optimizer = wrap(m, op=hvd.Adasum, compression="fp16")
    waits = "ringlet.torch.ops.handles.wait_all"
    for n in range(4):
        optimizer.zero_grad()
        m(torch.ones(2, 4) * (hvd.rank() + n + 1)).square().sum().backward()
        before = [p.detach().clone() for p in m.parameters()]
        if n == 2 and odd():
            interrupt = mock.patch(waits, side_effect=KeyboardInterrupt)
            with interrupt, pytest.raises(KeyboardInterrupt):
                optimizer.step()
            assert all(map(torch.equal, m.parameters(), before))
            with pytest.raises(RuntimeError, match=r"Call step\(\) again first"):
                optimizer.zero_grad()
        optimizer.step()
        assert not any(map(torch.equal, m.parameters(), before))
        assert hvd.replicas_equal(m.state_dict())


def case_a_recipes_step_that_is_interrupted_on_one_rank_is_taken_when_it_is_repeated():
    for kind in ("OneBitAdam", "DiLoCo"):
        m = model()
        if kind == "DiLoCo":
            inner = torch.optim.SGD(m.parameters(), lr=0.1)
            optimizer = hvd.DiLoCo(inner, m.named_parameters(), every=1)
        else:
            optimizer = hvd.OneBitAdam(m.named_parameters(), warmup=1)
        for n in range(4):
            optimizer.zero_grad()
            m(torch.ones(2, 4) * (hvd.rank() + n + 1)).square().sum().backward()
            if n == 2 and odd():
                group = type(optimizer._ringlet.declared.group)
                with (
                    mock.patch.object(group, "wait", side_effect=KeyboardInterrupt),
                    pytest.raises(KeyboardInterrupt),
                ):
                    optimizer.step()
                with pytest.raises(RuntimeError, match=r"Call step\(\) again first"):
                    optimizer.zero_grad()
            optimizer.step()
        assert hvd.replicas_equal(m.state_dict()), kind
        assert optimizer.steps == 4


def case_a_layer_that_one_rank_thaws():
    """Others, who have all of the step when it is handed in, hear of it before they go on."""
    m = model()
    optimizer = wrap(m)
    first = m[0].weight
    first.requires_grad_(False)
    step(m, optimizer)
    for _ in range(2):
        first.requires_grad_(odd())
        optimizer.zero_grad()
        m(torch.ones(2, 4)).square().sum().backward()
        changes = optimizer._ringlet.declared.agreement._changes
        assert not odd() or changes.call + 1 in changes._changes  # told already
        refused(optimizer.step, "'0.weight'", f"but not on rank(s) {hvd.size() - 1}")
    first.requires_grad_(True)
    step(m, optimizer)


def ends_here(call, *errors):
    """Check that a mistake's traceback ends at the line that called, without frames of ours."""
    with pytest.raises(errors) as told:
        call()
    assert told.traceback[-1].name == "<lambda>", told.traceback


def case_short_tracebacks():
    m = model()
    optimizer = wrap(m, compression="int4 | ef")
    step(m, optimizer)
    ends_here(lambda: optimizer.set_compression("int5"), ValueError)
    ends_here(lambda: optimizer.load_state_dict({}), ValueError)
    ends_here(lambda: hvd.broadcast(torch.ones(3), root_rank=99), hvd.HorovodInternalError)
    ends_here(lambda: hvd.allgather([1.0]), TypeError)
    ends_here(lambda: hvd.synchronize(12345), TypeError)
    handle = hvd.allreduce_async(torch.ones(3))
    for function in hvd.synchronize, hvd.poll:
        with pytest.raises(TypeError, match=r"an asynchronous operation returned.*wait for each"):
            function([handle])
    assert hvd.synchronize(handle).tolist() == [1.0] * 3
    m(torch.ones(2, 4)).sum().backward()
    ends_here(lambda: optimizer.zero_grad(), RuntimeError)
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
    ends_here(lambda: optimizer.step(), RuntimeError)
    optimizer.abandon_step()
    step(m, optimizer)


def case_ops_of_torch():
    """They are numbers in another order: SUM is what Average is here."""
    dist = torch.distributed
    for op, name in ((dist.ReduceOp.SUM, "Sum"), (dist.ReduceOp.AVG, "Average")):
        with pytest.raises(ValueError, match=f"write op=hvd.{name}"):
            hvd.allreduce(torch.ones(3), op=op)
    assert hvd.allreduce(torch.ones(3), op=1).tolist() == [hvd.size()] * 3  # Horovod's number
    with pytest.raises(TypeError, match="not list; several go to a grouped"):
        hvd.allreduce([torch.ones(3)])


def case_bad_compression():
    for spec, words in (("int9", "did you mean"), ("topk(ratio=2)", "ratio"), ("ef", "to its left"),
                        ({"*": "nothing"}, "nothing"), (" ", "empty")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            wrap(model(), compression=spec)
    with pytest.raises(TypeError, match="'fp16'"):
        wrap(model(), compression=type("HorovodStyle", (), {}))
    for call in (
        lambda: hvd.DistributedOptimizer(
            torch.optim.SGD(model().parameters(), lr=0.1), compression="topkk"
        ),
        lambda: hvd.allreduce(torch.ones(3), compression="topkk"),
        lambda: hvd.ddp_hook("topkk"),
    ):
        with pytest.raises(ValueError, match="did you mean 'topk'") as caught:
            call()
        assert caught.traceback[-1].name == "<lambda>"  # no frame of Ringlet's
    with pytest.raises(ValueError, match="op=Max needs compression"):
        hvd.allreduce(torch.ones(5000), op=hvd.Max, compression="int8")


def case_collectives_that_differ():
    size, last = hvd.size(), hvd.size() - 1
    x = torch.ones(2, 3)
    one = f"rank {last}: "
    refused(lambda: hvd.allreduce(torch.ones(3, 2) if odd() else x, name="s"),
            "'s'", "shapes differ", one + "[3, 2]")  # fmt: skip
    refused(lambda: hvd.allreduce(x.double() if odd() else x, name="d"),
            "'d'", "dtypes differ", one + "float64")  # fmt: skip
    refused(lambda: hvd.allreduce(x, op=hvd.Sum if odd() else hvd.Average, name="o"),
            "'o'", "reduce ops differ", one + "Sum")  # fmt: skip
    refused(lambda: hvd.allreduce(x, compression="int8" if odd() else "fp16", name="c"),
            "'c'", "compressors differ", one + "int8")  # fmt: skip
    refused(lambda: hvd.allreduce(x, prescale_factor=2.0 if odd() else 1.0, name="p"),
            "prescale factors differ")  # fmt: skip
    refused(lambda: hvd.broadcast(x, last if odd() else 0, name="b"), "root ranks differ")
    refused(lambda: hvd.broadcast(x[:1] if odd() else x, 0, name="b"), "shapes differ")
    refused(lambda: hvd.allgather(torch.ones(2, 4) if odd() else x, name="g"), "shapes behind")
    refused(lambda: hvd.allgather(torch.tensor(1.0), name="g"), "without dimensions")
    refused(lambda: (hvd.allgather if odd() else hvd.allreduce)(x, name="k"), "operations differ")
    assert hvd.allreduce(x, name="s", op=hvd.Sum).tolist() == (x * size).tolist()
    for _ in range(2):
        refused(lambda: hvd.broadcast_parameters(model(4 if odd() else 3).state_dict()),
                "broadcast_parameters.1.weight", "shapes differ")  # fmt: skip
    hvd.broadcast_parameters(model().state_dict())


def case_optimizers_that_differ():
    def frozen():
        m = model()
        if odd():
            m[0].weight.requires_grad_(False)
        return m

    def nothing():
        m = model()
        for p in m.parameters() if odd() else ():
            p.requires_grad_(False)
        return m

    for build, words in (
        (lambda: wrap(model(5 if odd() else 3)), ("'1.weight'", "shapes differ")),
        (lambda: wrap(model().double() if odd() else model()), ("'0.weight'", "dtypes differ")),
        (lambda: wrap(model(), compression="fp16" if odd() else None), ("compressors differ",)),
        (lambda: wrap(model(), op=hvd.Sum if odd() else hvd.Average), ("reduce ops differ",)),
        (lambda: wrap(frozen()), ("'0.weight'", f"not on rank {hvd.size() - 1}")),
        (lambda: wrap(nothing()), ("'0.weight'", "'1.bias'", f"not on rank {hvd.size() - 1}")),
        (
            lambda: wrap(model(), precision="amp_fp16" if odd() else None, compression="none"),
            ("'precision' differs", "rank 0: fp32", "amp_fp16", "same arguments, on all ranks"),
        ),
        (
            lambda: wrap(model(), precision=f"amp_fp16(init={1024 if odd() else 2048})"),
            ("'precision' differs", "2048", "1024"),
        ),
        (
            lambda: wrap(model().bfloat16(), precision="bf16" if odd() else None),
            ("'precision' differs", "bf16"),
        ),
        (
            lambda: wrap(model(), op=hvd.Adasum if odd() else hvd.Average),
            ("'op=Adasum' differs", "rank 0: False"),
        ),
        (
            lambda: wrap(model(), sparse_as_dense=odd()),
            ("'sparse_as_dense' differs", "rank 0: False"),
        ),
    ):
        refused(build, *words)
    m = model()
    optimizer = wrap(m)
    step(m, optimizer)
    assert hvd.replicas_equal(m.state_dict())


def case_a_process_set_that_is_not_registered():
    """Ranks outside of it must not count an optimizer more: the next one would wait for ever."""
    for op in (hvd.Average, hvd.Adasum):
        unknown = hvd.ProcessSet([0])
        words = ("is not registered", "add_process_set")
        refused(lambda: wrap(model(), op=op, process_set=unknown), *words, error=ValueError)  # noqa: B023
    m = model()
    step(m, wrap(m))
    assert hvd.replicas_equal(m.state_dict())


def case_parameters_in_another_order_on_one_rank():
    """State goes by their places: layers of one shape would get each other's, without a word."""
    square = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for m in (square, model()):
        for ours in (True, False):
            named = list(m.named_parameters())
            named = named[::-1] if odd() else named
            made = torch.optim.Adam(named if not ours else [p for _, p in named], lr=0.1)
            if ours:
                made = hvd.DistributedOptimizer(made, named)
            words = ("different orders", "rank 0: '0.weight'", "same order on all ranks")
            refused(lambda: hvd.broadcast_optimizer_state(made), *words)  # noqa: B023
    listed = list(square.named_parameters())
    recipe = hvd.OneBitAdam(listed[::-1] if odd() else listed)
    refused(lambda: hvd.broadcast_optimizer_state(recipe), "different orders", "rank 0: '0.weight'")
    unnamed = model(2 if odd() else 3)
    plain = torch.optim.Adam(unnamed.parameters(), lr=0.1)
    words = ("'param.0.2' differs", "[3, 40] in group 0", "[2, 40] in group 0")
    refused(lambda: hvd.broadcast_optimizer_state(plain), *words)


def case_torchs_names_of_what_one_rank_has_loaded_may_be_others():
    m = model()
    plain = torch.optim.Adam(m.named_parameters(), lr=0.1)
    if odd():
        plain.param_groups[0]["param_names"] = [f"z.{i}" for i in (3, 2, 1, 0)]
    hvd.broadcast_optimizer_state(plain)


def case_adasum_takes_parameters_in_any_order_and_no_others():
    square = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    torch.manual_seed(0)
    for p in square.parameters():
        nn.init.normal_(p)
    named = list(square.named_parameters())
    optimizer = wrap(square, named[::-1] if odd() else named, op=hvd.Adasum)
    for _ in range(2):
        step(square, optimizer)
        assert hvd.replicas_equal(square.state_dict())
    for m, words in (
        (model(5 if odd() else 3), ("'1.bias' differs", "rank 0: [3]")),
        (model()[:1] if odd() else model(), ("'1.bias' is there on rank(s) 0",)),
    ):
        optimizer = wrap(m, op=hvd.Adasum)
        before = [p.detach().clone() for p in m.parameters()]
        for _ in range(2):
            refused(lambda: step(m, optimizer), *words)  # noqa: B023
            assert all(map(torch.equal, before, m.parameters()))


def case_recipes_that_differ():
    def adam(**options):
        return hvd.OneBitAdam(model().named_parameters(), **options)

    def diloco(**options):
        m = model()
        return hvd.DiLoCo(torch.optim.SGD(m.parameters(), lr=0.1), m.named_parameters(), **options)

    for build, words in (
        (lambda: adam(warmup=5 if odd() else 6), ("OneBitAdam", "'warmup' differs", "rank 0: 6")),
        (
            lambda: adam(compression="int8 | ef" if odd() else "int4 | ef"),
            ("OneBitAdam", "'compression' differs", "rank 0: int4 | ef"),
        ),
        (lambda: diloco(every=3 if odd() else 2), ("DiLoCo", "'every' differs", "rank 0: 2")),
    ):
        refused(build, *words, "pass the same on all ranks")
    refused(lambda: adam(compression="onebitt | ef"), "did you mean 'onebit'", error=ValueError)
    m = model()
    refused(lambda: hvd.OneBitAdam(m.parameters()), "(name, parameter) tuples", error=ValueError)
    refused(
        lambda: hvd.DiLoCo(wrap(m), m.named_parameters()), "pass the original", error=ValueError
    )
    twice = adam()
    refused(lambda: hvd.DistributedOptimizer(twice), "OneBitAdam communicates", error=ValueError)


def case_a_step_that_nobody_has_synchronized():
    for passes in (1, 2):
        m = model()
        optimizer = wrap(m, backward_passes_per_step=passes)

        def skipping(m=m, optimizer=optimizer):
            m(torch.ones(2, 4) * hvd.rank()).square().sum().backward()
            with optimizer.skip_synchronize():
                optimizer.step()

        before = [p.detach().clone() for p in m.parameters()]
        for _ in range(2):
            refused(skipping, "call optimizer.synchronize() after backward()", error=RuntimeError)
            assert all(map(torch.equal, m.parameters(), before))
            optimizer.zero_grad()
        m(torch.ones(2, 4) * hvd.rank()).square().sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        step(m, optimizer)
        assert hvd.replicas_equal(m.state_dict())


def case_a_compressor_that_fails_on_one_rank():
    @register("fragile")
    class Fragile(Compressor):
        """Fail where a NaN says so."""

        def compress(self, x, ctx):
            if ctx.xp.isnan(x).any():
                raise ArithmeticError(f"a NaN on rank {ctx.rank}")
            return {"all": x.copy()}

        def decompress(self, payload, out, ctx):
            out[:] = payload["all"]

    last = hvd.size() - 1
    words = (f"rank {last}: ", "'fragile'", "ArithmeticError: a NaN")
    x = torch.zeros(2000)
    x[7] = float("nan") if odd() else 0.0
    for _ in range(2):
        refused(lambda: hvd.allreduce(x, compression="fragile", name="f"), *words, "'f'",
                error=CompressionFailed)  # fmt: skip
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 600), nn.Linear(600, 3))
    optimizer = wrap(m, compression="fragile")
    step(m, optimizer)
    for _ in range(2):
        before = [p.clone() for p in m.parameters()]
        optimizer.zero_grad()
        bad = float("nan") if odd() else 1.0
        (m(torch.ones(2, 4)).sum() * bad).backward()
        refused(optimizer.step, *words, error=CompressionFailed)
        assert all(torch.equal(p, q) for p, q in zip(m.parameters(), before, strict=True))
        step(m, optimizer)
        assert hvd.replicas_equal(m.state_dict())


CASES = [value for name, value in sorted(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize(("transport", "size"), [("mpi", 4), ("gloo", 2)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[5:])
def test_error(case, transport, size, run_case):
    run_case(case, transport, size)


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_rank_that_raises_in_the_middle_of_training(transport):
    def work():
        torch.set_num_threads(1)
        hvd.init()
        m = model()
        optimizer = wrap(m, compression="fp16")
        for number in range(1000):
            if number == 5 and hvd.rank() == 1:
                raise KeyError("the data of step 5 is missing")
            step(m, optimizer)

    with pytest.raises(WorkerFailed) as told:
        ringlet.run(work, np=2, transport=transport)
    assert told.value.rank == 1
    assert "the data of step 5 is missing" in told.value.traceback


def test_a_rank_that_leaves_while_others_train():
    def work():
        torch.set_num_threads(1)
        hvd.init()
        m = model()
        optimizer = wrap(m)
        step(m, optimizer)
        rank = hvd.rank()
        if rank == 1:
            hvd.shutdown()
            return "left"
        try:
            step(m, optimizer)
        except hvd.HorovodInternalError as error:
            return str(error)
        return "nothing was said"

    said = ringlet.run(work, np=2, transport="gloo")
    assert said[1] == "left"
    assert "rank 1 has shut down while a step of 'SGD' was waiting on rank 0; if a rank" in said[0]
    assert "give all ranks as many, or call hvd.join() after the loop" in said[0]


PLUGIN = """
from ringlet.compressors import Int8

class Louder(Int8):
    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= {}

    def sum_into(self, payloads, out, ctx):
        super().sum_into(payloads, out, ctx)
        out *= {}
"""


@pytest.mark.parametrize("spec", ["two_versions:Louder", "two_versions:Louder | ef"])
def test_versions_of_a_plugin_that_differ_are_told_before_replicas_do(tmp_path, spec):
    """Ranks decode alike only by the same source: its spec is the same on all of them."""
    for rank, factor in enumerate(("1.0", "1.5")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "two_versions.py").write_text(PLUGIN.format(factor, factor))

    def work():
        import sys

        torch.set_num_threads(1)
        hvd.init()
        sys.path.insert(0, str(tmp_path / str(hvd.rank())))
        m = model()
        texts = []
        for call in (
            lambda: step(m, wrap(m, compression=spec)),
            lambda: hvd.allreduce(torch.ones(2000), name="w", compression=spec),
        ):
            try:
                call()
            except Mismatch as error:
                texts.append(str(error))
        return texts

    first, second = ringlet.run(work, np=2, transport="gloo")
    assert first == second
    assert len(first) == 2
    for text in first:
        assert "versions of the plugin differ between ranks (rank 0: two_versions of sour" in text
        assert "install the same one on all hosts" in text
