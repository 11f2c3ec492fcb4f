"""One rank of ``ringlet.run``: ``python -m ringlet.ring.functions.function_worker``.

The call comes from the job's store, and the result goes there.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import traceback

from ringlet.ring.errors import LOST_PEER, PeerLost
from ringlet.ring.launch.signed_pickle import error_name, parcel_key, pickler, result_name
from ringlet.ring.rendezvous.exit_hooks import report_loss
from ringlet.ring.wire.framing import seal, unseal
from ringlet.ring.wire.keys import MEMBER, STORE_KEY
from ringlet.ring.wire.kv_client import Client, client


def main(store: Client, key: bytes, who: int) -> int:
    """Call the function, leave its result or its traceback as ``who``; return the exit code."""
    try:
        call = io.BytesIO(unseal(key, "call", store.fetch("call")))
        sys.path[:] = pickle.load(call)  # before the function's modules are needed
        fn, args, kwargs = pickle.load(call)
        data = pickler().dumps(fn(*args, **kwargs))
    except BaseException as error:
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


if __name__ == "__main__":
    key = parcel_key(bytes.fromhex(os.environ[STORE_KEY]))
    who = os.environ.get(MEMBER, os.environ["RINGLET_RANK"])  # ranks of members change
    code = main(client(), key, int(who))
    if code:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # MPI_Finalize would wait for ranks that wait for this one
