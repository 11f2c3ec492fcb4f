"""``ringlet.dask.run``: each worker of a Dask cluster runs one task, which is a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from distributed import Client, wait

from ringlet.job.placed_call import GRACE, Account, account_of, called, gathered, packed, results
from ringlet.ring.callers import public
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.interfaces import find_interface
from ringlet.ring.placed.store_server import StoreServer
from ringlet.ring.placed.ticket import Ticket, tickets
from ringlet.ring.wire.addresses import address_towards

_LOOK = 5.0  # seconds between two looks at which workers there are


@public
def run(
    client: Client,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: Sequence[str] | None = None,
    *,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    interfaces: Sequence[str] = (),
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on each worker of ``client``'s cluster; return results by rank.

    ``workers`` are addresses of those to take (None: all). They have to be processes: one can be
    one rank. ``env`` is set for every rank, ``transport`` is gloo (None) or nccl, ``interfaces``
    are network interfaces in order of preference. This process has to be reachable from the
    workers. Raises WorkerFailed, with the text of the traceback, when a rank raises or its worker
    goes, LaunchError when there are no such workers or the call cannot be sent.
    """
    call = packed(fn, args, kwargs)
    known = list(client.scheduler_info(n_workers=-1)["workers"])
    chosen = known if workers is None else list(workers)
    if unknown := [address for address in chosen if address not in known]:
        raise LaunchError(f"the cluster has no worker {unknown[0]}; it has {', '.join(known)}")
    if twice := [address for address in chosen if chosen.count(address) > 1]:
        raise LaunchError(
            f"workers names {twice[0]} {chosen.count(twice[0])} times: it is one rank"
        )
    if not chosen:
        raise LaunchError("the cluster has no workers")
    if any(address.startswith("inproc://") for address in chosen):
        raise LaunchError("a worker can be one rank: Client(processes=True) has them apart")
    chosen.sort(key=_host)
    with StoreServer(len(chosen), _own_host(client, interfaces)) as server:
        given = tickets(server, list(map(_host, chosen)), transport, interfaces, env)
        futures = [
            client.submit(
                _task, ticket, call, workers=[address], allow_other_workers=False, pure=False,
                retries=0,
            )
            for ticket, address in zip(given, chosen, strict=True)
        ]  # fmt: skip
        accounts = gathered(
            dict(enumerate(futures)),
            partial(_ended, client, chosen),
            lambda rank, future: _account(rank, future, chosen[rank], server),
        )
        explained = any(each.value is None and not each.effect for each in accounts.values())
        for rank in [rank for rank in range(len(chosen)) if rank not in accounts]:
            futures[rank].cancel()
            # A worker that Dask has started anew does not know of its task.
            text = f"has not ended {GRACE:g} s after others had failed: {chosen[rank]} may be gone"
            accounts[rank] = Account(rank, ended=text, effect=explained)
        return results(list(accounts.values()))


def _task(ticket: Ticket, call: bytes) -> Account:
    return account_of(ticket, called, (call,), {})


def _ended(
    client: Client, addresses: Sequence[str], futures: Mapping[int, Any], seconds: float | None
) -> list[int]:
    """Return the ranks that have ended, or whose workers are gone: Dask waits for those."""
    patience = _LOOK if seconds is None else min(seconds, _LOOK)
    with contextlib.suppress(TimeoutError):
        wait(list(futures.values()), timeout=patience, return_when="FIRST_COMPLETED")
    if done := [rank for rank, future in futures.items() if future.done()]:
        return done
    known = client.scheduler_info(n_workers=-1)["workers"]
    return [rank for rank in futures if addresses[rank] not in known]


def _account(rank: int, future: Any, address: str, server: StoreServer) -> Account:
    if not future.done():
        future.cancel()
        text = f"has gone: the worker {address} is not in the cluster any more"
    elif (error := future.exception()) is None:
        account: Account = future.result()
        return account
    else:
        text = f"has gone: the worker {address} did not finish it ({' '.join(str(error).split())})"
    server.fail(f"rank {rank} {text}")
    return Account(rank, ended=text)


def _host(address: str) -> str:
    return urlsplit(address).hostname or address


def _own_host(client: Client, interfaces: Sequence[str]) -> str:
    """Return the address of this process as the scheduler's host sees it."""
    if interfaces:
        return find_interface(interfaces)[1]
    name = _host(client.scheduler.address)
    own = address_towards(name)
    if own is None:
        raise LaunchError(f"the host of the scheduler, {name}, is not known here")
    return own
