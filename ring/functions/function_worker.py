"""One rank of ``ringlet.run``: ``python -m ringlet.ring.functions.function_worker``.

The call comes from the job's store, and the result goes there.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import sys
import traceback
from typing import Any

from ringlet.ring.descriptors import flush_standard_streams
from ringlet.ring.errors import LOST_PEER, PeerLost
from ringlet.ring.launch.signed_pickle import error_name, parcel_key, pickler, result_name
from ringlet.ring.rendezvous.loss_report import report_loss
from ringlet.ring.wire.framing import seal, unseal
from ringlet.ring.wire.keys import MEMBER, STORE_KEY
from ringlet.ring.wire.kv_client import Client, client

_FORKED = (
    "ringlet.run: a process that the function has forked came back from it, and what it returned"
    " is dropped: end it in the function, with os._exit(0)"
)


def main(store: Client, key: bytes, who: int) -> int:
    """Call the function, leave its result or its traceback as ``who``; return the exit code."""
    own = os.getpid()
    try:
        call = io.BytesIO(unseal(key, "call", store.fetch("call")))
        sys.path[:] = pickle.load(call)  # before the function's modules are needed
        fn, args, kwargs = pickle.load(call)
        returned = fn(*args, **kwargs)
        if os.getpid() != own:
            print(_FORKED, file=sys.stderr)
            return 0
        data = _packed(returned)
    except BaseException as error:
        if os.getpid() != own:
            raise  # a child has no part in the job, and its connections are its parent's
        if isinstance(error, SystemExit) and MEMBER in os.environ and not error.code:
            return 0  # it belongs to the job no more
        text = "".join(traceback.format_exception(error))
        store.leave(error_name(who), text.encode(errors="backslashreplace"))
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, PeerLost):
            report_loss(error, os.environ)
            return LOST_PEER
        return 1
    store.leave(result_name(who), seal(key, result_name(who), data))
    return 0


def _packed(returned: Any) -> bytes:
    try:
        data: bytes = pickler().dumps(returned)
    except Exception as error:
        kind = type(returned).__name__
        error.add_note(f"That is what the function returned, a {kind}, on its way to the launcher.")
        raise
    return data


if __name__ == "__main__":
    key = parcel_key(bytes.fromhex(os.environ[STORE_KEY]))
    who = os.environ.get(MEMBER, os.environ["RINGLET_RANK"])  # ranks of members change
    store = client()
    atexit.register(store.close)  # after all that the function may have registered
    code = main(store, key, int(who))
    if code:
        flush_standard_streams()
        os._exit(code)  # MPI_Finalize would wait for ranks that wait for this one
