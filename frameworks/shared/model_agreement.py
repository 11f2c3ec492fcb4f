"""What ranks must have in common before they exchange tensors, and who does not."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringlet.job import json_exchange
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import Mismatch
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.rank_comparison import same_digest
from ringlet.shared.variable_names import alike

Items = Sequence[tuple[str, str]]
# What ranks may call otherwise; what they decide for themselves; and what a broadcast makes alike.
_OWN = frozenset({"name", "module", "registered_name", "build_config", "jit_compile"})
_RATES = frozenset({"learning_rate", "lr"})

SAME_MODEL = (
    "every rank needs the same model: build it in the same way on every rank, with layers in one "
    "order and under the same names, or load one file on every rank"
)

UNUSED = "no gradient"
_USE = (
    "on rank(s) {ranks} the loss does not depend on it: compute the same loss on every rank, or add"
    " a term that is zero there, such as 0.0 * keras.ops.sum(variable)"
)

# What a rank has in the place of gradients.
EPOCH_ENDS, TRAINING_ENDS = "the end of an epoch", "the end of training"
_MORE_BATCHES = (
    "rank(s) {ended} ended an epoch, and rank(s) {others} went on to another batch in it: give all "
    "ranks equally many batches, for example with steps_per_epoch, and let a callback that ends "
    "training within an epoch, such as TerminateOnNaN, do so on all ranks"
)
_MORE_EPOCHS = (
    "rank(s) {ended} ended training, and rank(s) {others} went on: pass the same epochs on all "
    "ranks, and put callbacks that end training, such as EarlyStopping, behind "
    "MetricAverageCallback, on all ranks"
)
_OTHER_EPOCHS = (
    "ranks ended different epochs at once ({shown}): pass the same initial_epoch to fit on all "
    "ranks, such as one that a rank broadcasts, and BackupAndRestore on all ranks, with a folder "
    "for each, or on none"
)


def agree(
    what: str, label: str, items: Items, process_set: ProcessSet, remedy: str = SAME_MODEL
) -> None:
    """Raise Mismatch, the same on every rank, unless all ranks list the same ``items``.

    Each is a name and what else must be equal, in words. Collective; ``label`` names the exchange.
    ``remedy`` says what to do about a difference.
    """
    lists = _lists(label, items, process_set)
    if lists is not None:
        raise _difference(what, lists, process_set, remedy)


def agree_on_settings(
    what: str,
    settings: Mapping[str, object],
    process_set: ProcessSet = global_process_set,
    remedy: str = "pass the same on all ranks",
) -> None:
    """Raise Mismatch, on every rank, unless all make ``what`` with equal ``settings``. Collective.

    Not in elastic jobs, where newcomers make theirs while the others train.
    """
    if is_elastic() or not process_set.included() or process_set.size() == 1:
        return
    label = current().unnamed(f"{what} settings", process_set.process_set_id or 0)
    agree(what, label, [(name, str(v)) for name, v in settings.items()], process_set, remedy)


def common_names(what: str, label: str, items: Items, process_set: ProcessSet) -> list[str]:
    """Return names for variables that all ranks list in one order: those of the first rank.

    Those of others may lack models that the first rank's variables are in, or the other way round,
    as Keras leaves a Sequential model out of the paths of what it has loaded. Otherwise as
    ``agree``.
    """
    lists = _lists(label, items, process_set)
    if lists is None:
        return [name for name, _ in items]
    first = lists[0]
    if not all(_same_variables(first, other) for other in lists[1:]):
        raise _difference(what, lists, process_set, SAME_MODEL)
    return [name for name, _ in first]


def _same_variables(items: Items, others: Items) -> bool:
    return len(items) == len(others) and all(
        words == other_words and alike(name, other)
        for (name, words), (other, other_words) in zip(items, others, strict=True)
    )


def told_alike(told: object, label: str, process_set: ProcessSet) -> bool:
    """Whether all ranks tell the same, by its ``repr``. Collective, one answer for all."""
    digest = hashlib.blake2b(repr(told).encode(), digest_size=16).digest()
    return same_digest(digest, label, process_set)


def _lists(label: str, items: Items, process_set: ProcessSet) -> list[Items] | None:
    """Return the items of all ranks in order; None if they are the same on all of them."""
    if told_alike(list(items), f"{label}.agreed", process_set):
        return None
    expected = "a list of names and what else must be equal"
    lists = json_exchange.gather(list(items), f"{label}.lists", process_set, expected, _are_items)
    return [[(name, words) for name, words in one] for one in lists]


def _are_items(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, list) and len(item) == 2 and all(isinstance(text, str) for text in item)
        for item in value
    )


def _difference(
    what: str, lists: Sequence[Items], process_set: ProcessSet, remedy: str
) -> Mismatch:
    ranks = list(process_set.ranks or range(len(lists)))
    tables = [dict(one) for one in lists]
    for end, text in ((TRAINING_ENDS, _MORE_EPOCHS), (EPOCH_ENDS, _MORE_BATCHES)):
        ended = [rank for rank, table in zip(ranks, tables, strict=True) if end in table]
        if not ended:
            continue
        others = [rank for rank in ranks if rank not in ended]
        if not others:
            epochs = [table[EPOCH_ENDS] for table in tables]
            told_by = [f"rank {rank}: {epoch}" for rank, epoch in zip(ranks, epochs, strict=True)]
            return Mismatch(_OTHER_EPOCHS.format(shown="; ".join(told_by)))
        return Mismatch(text.format(ended=_listed(ended), others=_listed(others)))
    for name in dict.fromkeys(name for one in tables for name in one):
        having = [rank for rank, table in zip(ranks, tables, strict=True) if name in table]
        if len(having) < len(ranks):
            return Mismatch(
                f"{what}: {name!r} is there on rank(s) {_listed(having)} but not on rank(s) "
                f"{_listed([rank for rank in ranks if rank not in having])}; {remedy}"
            )
        told = {rank: table[name] for rank, table in zip(ranks, tables, strict=True)}
        if len(set(told.values())) > 1:
            shown = "; ".join(f"rank {rank}: {words}" for rank, words in told.items())
            without = [rank for rank, words in told.items() if words == UNUSED]
            cure = remedy if not without else _USE.format(ranks=_listed(without))
            return Mismatch(f"{what}: {name!r} differs between ranks ({shown}); {cure}")
    odd = next((row for row in zip(*lists, strict=False) if len(set(row)) > 1), ())
    first = "; ".join(f"rank {rank}: {name!r}" for rank, (name, _) in zip(ranks, odd, strict=False))
    where = f" (where they first differ, {first})" if first else ""
    return Mismatch(f"{what}: ranks list the same tensors in different orders{where}; {remedy}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def unique(names: Sequence[str]) -> list[str]:
    """Return ``names`` with a number behind those that were there before."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen[name] = seen.get(name, 0) + 1
        result.append(name if count == 1 else f"{name}#{count}")
    return result


def equal_on_all_ranks(arrays: Iterable[tuple[str, Array]]) -> bool:
    """Whether all ranks hold the same ``arrays``, bit for bit. Collective, one answer for all.

    Each comes with what else must be equal, in words: a name, a dtype, a shape.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for words, array in arrays:
        hashed.update(words.encode())
        hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return same_digest(hashed.digest(), "replicas_equal", global_process_set)


def of_config(optimizer: Any) -> dict[str, object]:
    """Return what ``optimizer.get_config()`` tells, by name: numbers and words.

    Those of an optimizer inside, and of a schedule, too. A learning rate that is a number is not
    among them: callbacks change it, and a broadcast makes it alike.
    """
    try:
        config = optimizer.get_config()
    except Exception:  # one of the user's own need not have any
        return {}
    return dict(_plain(config, ""))


def of_attributes(optimizer: Any, spared: Container[str] = ()) -> dict[str, object]:
    """Return the numbers among the attributes of ``optimizer`` that are not ``spared``."""
    return {
        name.strip("_"): _number(value)
        for name, value in sorted(vars(optimizer).items())
        if isinstance(value, int | float | np.number) and name not in spared
    }


def _plain(config: Mapping[str, Any], before: str) -> Iterator[tuple[str, object]]:
    if config.get("class_name") == "__lambda__":
        return  # Keras tells its code, and so in which folder of a host its file is
    for key, value in sorted(config.items()):
        if isinstance(value, Mapping):
            yield from _plain(value, before if key == "config" else f"{before}{key} ")
        elif key in _OWN or key in _RATES:
            continue
        elif isinstance(value, bool | str | None):
            yield f"{before}{key}", value
        elif isinstance(value, int | float | np.number):
            yield f"{before}{key}", _number(value)
        elif isinstance(value, list | tuple):
            yield from _plain({str(i): each for i, each in enumerate(value)}, f"{before}{key} ")


def _number(value: Any) -> object:
    # As a variable has it: on one rank it may have been loaded.
    return value if isinstance(value, bool) else float(str(np.float32(value)))
