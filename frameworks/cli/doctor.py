"""``ringlet doctor``: what is installed, what the network can do, what compression would save."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ringlet.cli.assumed_link import assumed_hosts, assumed_link
from ringlet.cli.progress import Progress
from ringlet.compressors import Compressor, Context, Workspace, parse
from ringlet.compressors.base.contract import storage
from ringlet.job.capabilities import gpu_path
from ringlet.ring.command.cli import UsageError, add_hosts, reach_of, size_of
from ringlet.ring.communicator import FAR, Communicator
from ringlet.ring.cost.cost_model import Workload
from ringlet.ring.cost.link_probe import MeasuredLink, measure_links
from ringlet.ring.errors import RingError
from ringlet.ring.hosts.hosts import chosen_hosts
from ringlet.ring.launch.job import launch
from ringlet.ring.launch.machine import Finding, examine, versions
from ringlet.ring.rendezvous.connect import connect
from ringlet.ring.rendezvous.environment import check_transport, detect

SPECS = ("fp16", "int8", "int4 | ef", "topk(ratio=0.01) | ef", "powersgd(rank=4) | ef")
SIDE = 2048  # the tensor on which codecs are timed is SIDE x SIDE float32
PAYS = 1.1  # times faster than uncompressed from which on a compressor is recommended
EXAMPLES = """\
ringlet doctor                            # this machine: versions, transports
ringlet doctor -np 8 -H host1:4,host2:4   # the links, and what pays on them
ringlet doctor -np 8 --link 1gbit         # what would pay on a link not here"""
DESCRIPTION = """\
Say what is installed and which transports work. With -np or hosts, or as the
command of `ringlet run`, also connect the ranks, measure the links between
their hosts, and say which compressors would pay on them. With --link nothing
is measured between hosts: the prediction is for that link, with each rank on a
host of its own if there is one host here. The exit code is 1 when something has
to be put right."""


@dataclass(frozen=True)
class CodecCost:
    """What compressing a tensor costs: seconds to encode and to decode, payload per input byte.

    ``sums`` is the number of exchanges that it takes, one after the other.
    """

    spec: str
    combine: str
    encode: float
    decode: float
    ratio: float
    sums: int = 1


UNCOMPRESSED = CodecCost("none", "sum", 0.0, 0.0, 1.0)


@dataclass(frozen=True)
class SpecPrediction:
    """What a codec would do: times faster than uncompressed, and the seconds on wire and codec."""

    spec: str
    gain: float
    verdict: str
    wire_seconds: float
    codec_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``ringlet doctor``."""
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-np", "--np", "--num-proc", dest="np", metavar="N", help="connect N ranks")
    parser.add_argument("--transport", metavar="NAME", help="mpi, gloo or nccl")
    add_hosts(parser)
    parser.add_argument(
        "--link",
        metavar="LINK",
        help="predict for this link instead of the measured ones: 1gbit, or 100us,1Gbit/s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--ranks-only", action="store_true", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Examine this machine, or the job that it is a rank of; return the exit code."""
    try:
        rank = detect(os.environ)
    except RingError:
        rank = None  # the report says so
    try:
        link = None if options.link is None else assumed_link(options.link)
        if rank is not None and rank.size > 1:
            return _as_rank(options.ranks_only, options.json, link)
        hosts = chosen_hosts(options.hosts, options.hostfile)
        ranks = options.np is not None or bool(hosts)
        if link is not None and not ranks:
            raise UsageError("--link predicts for ranks: give -np too, as in -np 8 --link 1gbit")
        if options.json and not ranks:
            findings = _examined()
            print(json.dumps({"machine": _as_objects(findings)}, indent=1))
            return 0 if all(finding.good for finding in findings) else 1
        size = size_of(options, hosts) if ranks else 0  # refused before anything is printed
        # Of several ranks the first prints the object, with what it finds on its own machine.
        good = options.json or _report(_examined())
        if not ranks:
            print("\nMore with ranks: ringlet doctor -np 4, or -H host1:4,host2:4")
            return 0 if good else 1
        if options.transport is not None:
            check_transport(options.transport, "--transport")
        told = "--json" if options.json else "--ranks-only"
        command = [sys.executable, "-P", "-m", "ringlet", "doctor", told]
        command += [] if link is None else ["--link", options.link]
        sys.stdout.flush()
        code = launch(
            command,
            size,
            options.transport,
            hosts=hosts,
            reach=reach_of(options),
            prefix=False,
        )
    except (UsageError, RingError) as error:
        print(f"ringlet doctor: {error}", file=sys.stderr)
        return 2
    return code or (0 if good else 1)


def _examined() -> list[Finding]:
    return [*examine(os.environ), Finding("tensors on GPUs", gpu_path())]


def _report(findings: Sequence[Finding]) -> bool:
    for finding in findings:
        mark = " " if finding.good else "!"
        print(f"{mark} {finding.name:<16} {finding.text}")
    return all(finding.good for finding in findings)


def _as_objects(findings: Sequence[Finding]) -> list[dict[str, object]]:
    return [{"name": f.name, "text": f.text, "good": f.good} for f in findings]


def _as_rank(ranks_only: bool, as_json: bool = False, assumed: MeasuredLink | None = None) -> int:
    try:
        comm = connect()
    except RingError as error:
        print(f"ringlet doctor: the ranks cannot be connected: {error}", file=sys.stderr)
        return 1
    good = True
    if comm.rank == 0 and not ranks_only and not as_json:
        good = _report(_examined())
    network = _measured(comm, assumed)
    if comm.rank == 0 and as_json:
        good = _tell_as_json(comm, network, assumed)
    elif comm.rank == 0:
        good = _tell(comm, network, assumed) and good
    good = comm.broadcast_bytes(b"1" if good else b"0") == b"1"
    comm.close()
    return 0 if good else 1


@dataclass(frozen=True)
class _Network:
    """What ranks have found out together.

    ``hosts`` are theirs, ``places`` those that predictions are for: others where a link is assumed.
    ``found`` are each rank's versions. ``codecs`` is empty where there is no verdict, ``reduced``
    the bytes of tensor a second that an uncompressed allreduce takes.
    """

    hosts: list[str]
    places: Sequence[str]
    found: list[dict[str, str]]
    links: Sequence[MeasuredLink]
    codecs: list[CodecCost]
    reduced: float

    @property
    def compared(self) -> bool:
        """Whether all links are known, and so what compressors would take on them."""
        return _known(self.links)


def _measured(comm: Communicator, assumed: MeasuredLink | None) -> _Network:
    """Measure the links, unless one is ``assumed``, and codecs. Collective."""
    own = json.dumps([socket.gethostname(), versions()]).encode()
    told = [json.loads(said) for said in comm.allgather_bytes(own)]
    hosts = [host for host, _ in told]
    places = hosts if assumed is None else assumed_hosts(hosts)
    pieces = (assumed is None) + 1 + (len(set(places)) > 1) * len(SPECS)
    shown = Progress(pieces) if comm.rank == 0 else None
    if assumed is None:
        with _piece(shown, "measuring the links between hosts"):
            links = measure_links(comm, hosts)
    else:
        links = [assumed]
    codecs = []
    for spec in SPECS if _known(links) else ():
        with _piece(shown, f"timing {spec}"):
            codecs.append(_slowest(comm, _codec(parse(spec))))
    with _piece(shown, "timing an uncompressed allreduce"):
        reduced = _allreduce_rate(comm)
    if shown is not None:
        shown.wipe()
    return _Network(hosts, places, [found for _, found in told], links, codecs, reduced)


def _known(links: Sequence[MeasuredLink]) -> bool:
    """Whether there are links, and all of them could be measured."""
    return bool(links) and not any(link.error for link in links)


def _tell_as_json(comm: Communicator, network: _Network, assumed: MeasuredLink | None) -> bool:
    """Print all that was found as one object; return whether nothing has to be put right."""
    findings, codecs, places, links = _examined(), network.codecs, network.places, network.links
    good = all(f.good for f in findings) and not any(link.error for link in links)
    good = good and not _differing(network.found)
    rows = [asdict(each) for each in _predicted(codecs, places, links)] if network.compared else []
    best = _best(rows) if network.compared else None if links else "none"
    facts = {
        "machine": _as_objects(findings),
        "transport": comm.name,
        "hosts": network.hosts,
        "links": [] if assumed else [asdict(link) for link in links],
        "assumed_link": asdict(assumed) if assumed else None,
        "allreduce_bytes_per_s": network.reduced,
        "predicted": rows,
        "compression": best,
        "hierarchical_bytes": _share_of_levels([UNCOMPRESSED, *codecs], best or "none", places),
        "good": good,
    }
    print(json.dumps(facts, indent=1), flush=True)
    return good


def _tell(comm: Communicator, network: _Network, assumed: MeasuredLink | None) -> bool:
    """Print what was found, for people; return whether nothing has to be put right."""
    hosts = network.hosts
    print(f"\n{comm.size} ranks over {comm.name}:")
    for host in dict.fromkeys(hosts):
        ranks = ", ".join(str(r) for r, name in enumerate(hosts) if name == host)
        print(f"  {host}: {ranks}")
    good = _compare(network.found, hosts)
    print(f"  allreduce of 16 MiB: {network.reduced / 1e6:.0f} MB/s of tensor, uncompressed")
    if assumed is None:
        good = _links(network.links) and good
    else:
        where = "" if network.places is hosts else ", with every rank on a host of its own"
        mbit = 8 * assumed.rate / 1e6
        print(f"  not measured but assumed: {mbit:g} Mbit/s between hosts{where}")
    _verdict(network.codecs, network.places, network.links)
    sys.stdout.flush()
    return good


@contextmanager
def _piece(shown: Progress | None, what: str) -> Iterator[None]:
    """Show on rank 0 that ``what`` is being done."""
    if shown is not None:
        shown.begin(what)
    yield
    if shown is not None:
        shown.end()


def _compare(found: Sequence[dict[str, str]], hosts: Sequence[str]) -> bool:
    """Say which versions differ between ranks; differing ones compute different things."""
    differing = _differing(found)
    for name in differing:
        seen = {host: one[name] or "none" for host, one in zip(hosts, found, strict=True)}
        print(f"! {name} differs: {', '.join(f'{v} on {h}' for h, v in seen.items())}")
    return not differing


def _differing(found: Sequence[dict[str, str]]) -> list[str]:
    return [name for name in found[0] if len({one[name] for one in found}) > 1]


def _links(links: Sequence[MeasuredLink]) -> bool:
    if not links:
        print("  all ranks are on one host: there is no network between them")
    for link in links:
        way = f"{link.source} -> {link.target}"
        if link.error:
            print(f"! {way}: {link.error}")
        else:
            mbit = 8 * link.rate / 1e6
            print(f"  {way}: {1e6 * link.latency:.0f} us, {mbit:.0f} Mbit/s (one TCP connection)")
    return not any(link.error for link in links)


def _verdict(
    codecs: Sequence[CodecCost], hosts: Sequence[str], links: Sequence[MeasuredLink]
) -> None:
    if not links:
        print("\nInside one host compression saves no time: compression='none'.")
        return
    if any(link.error for link in links):
        print("\nNo verdict: a link could not be measured.")
        return
    print(
        "\nPredicted for float32 gradients (bytes over the slowest link / its rate, its delays, and"
        f" codec time\nmeasured on a {SIDE} x {SIDE} tensor; no overlap with computing; accuracy is"
        " another matter, see\ndocs/convergence.md):"
    )
    predicted = _predicted(codecs, hosts, links)
    for one in predicted:
        print(
            f"  {one.spec:<18} {one.gain:5.1f} x  {one.verdict:<20}"
            f" wire {1e3 * one.wire_seconds:7.1f} ms, codec {1e3 * one.codec_seconds:6.1f} ms"
        )
    plain = _wire(UNCOMPRESSED, hosts, links)
    chosen = _best([asdict(one) for one in predicted])
    print(f"Uncompressed: {1e3 * plain:.1f} ms. Fastest by this model: compression={chosen!r}.")
    share = _share_of_levels([UNCOMPRESSED, *codecs], chosen, hosts)
    if share < 1:
        print(
            f"Ranks share hosts: with --hierarchical-allreduce {share:.2g} times as many bytes of"
            f" {chosen!r} leave one,\nwhich pays where links are slow, and costs time inside hosts"
            " (docs/when-it-pays.md). That is not counted above."
        )


def _predicted(
    codecs: Sequence[CodecCost], hosts: Sequence[str], links: Sequence[MeasuredLink]
) -> list[SpecPrediction]:
    """Return what each codec would gain on the slowest of ``links``."""
    plain = _wire(UNCOMPRESSED, hosts, links)
    found = []
    for codec in codecs:
        wire = _wire(codec, hosts, links)
        spent = _work(codec, len(hosts))
        gain = plain / (wire + spent)
        verdict = "pays" if gain >= PAYS else "costs" if gain < 1 / PAYS else "makes no difference"
        found.append(SpecPrediction(codec.spec, gain, verdict, wire, spent))
    return found


def _best(predicted: Sequence[dict[str, Any]]) -> str:
    """Return the spec that gains most, "none" where none pays."""
    best = max(predicted, key=lambda one: float(one["gain"]), default=None)
    return str(best["spec"]) if best and best["gain"] >= PAYS else "none"


def _wire(codec: CodecCost, hosts: Sequence[str], links: Sequence[MeasuredLink]) -> float:
    """Return the seconds that the payload of a tensor takes over the slowest of ``links``."""
    rate, latency = min(link.rate for link in links), max(link.latency for link in links)
    nbytes = 4.0 * SIDE * SIDE * _crossing(codec.combine, codec.ratio, hosts)
    return nbytes / rate + latency * _delays(codec, hosts, links)


def _delays(codec: CodecCost, hosts: Sequence[str], links: Sequence[MeasuredLink]) -> float:
    """Return how many messages between hosts wait for each other, as the cost model counts them."""
    places = len(set(hosts))
    far = places == len(hosts) and min(link.latency for link in links) >= FAR
    combine = "allreduce" if codec.combine in ("sum", "rounds") else codec.combine
    return codec.sums * Workload(combine, 0, places, far=far).terms().alpha


def _share_of_levels(codecs: Sequence[CodecCost], spec: str, hosts: Sequence[str]) -> float:
    """Return what two levels send of the bytes that leave a host without them; 1 for no use."""
    places = len(set(hosts))
    counts = {list(hosts).count(host) for host in hosts}
    if places == 1 or len(counts) > 1 or counts == {1}:
        return 1.0
    codec = next(codec for codec in codecs if codec.spec == spec)
    payloads = places - 1 if codec.combine == "allgather" else 2 * (places - 1) / places
    return payloads * codec.ratio / _crossing(codec.combine, codec.ratio, hosts)


def _crossing(combine: str, ratio: float, hosts: Sequence[str]) -> float:
    """Return the bytes that leave the busiest host, per byte of tensor."""
    size = len(hosts)
    local = max(list(hosts).count(host) for host in hosts)
    if combine in ("sum", "rounds"):  # a ring leaves each host once
        return 2 * (size - 1) / size * ratio
    if combine == "scatter_reduce":
        return 2 * local * (size - local) / size * ratio
    return local * (size - local) * ratio


def _work(codec: CodecCost, size: int) -> float:
    """Return the seconds that one rank spends in the codec."""
    if codec.combine == "scatter_reduce":
        return codec.encode * (1 + 1 / size) + 2 * codec.decode
    if codec.combine == "allgather":
        return codec.encode + size * codec.decode
    return codec.encode + codec.decode


def _codec(compressor: Compressor) -> CodecCost:
    """Time ``compressor`` on this rank; a stand-in for the exchange is free."""
    traits = compressor.traits()
    x = np.random.default_rng(0).standard_normal(SIDE * SIDE, dtype=np.float32)
    out, context = (
        np.empty_like(x),
        Context(shape=(SIDE, SIDE), numel=x.size, workspace=Workspace()),
    )
    if traits.combine == "rounds":
        sent = sums = 0

        def run() -> None:
            nonlocal sent, sums
            sent = sums = 0
            exchange = compressor.exchange(x, out, context)
            try:
                item = next(exchange)
                while True:
                    sent += item.values.nbytes
                    sums += 1
                    item = exchange.send(item.values.copy())
            except StopIteration:
                return

        seconds = _median(run)
        return CodecCost(str(compressor), "rounds", seconds, 0.0, sent / x.nbytes, sums)
    payload = {}
    if traits.fixed_size:
        payload = {
            p.name: np.empty(p.elements, storage(p.dtype)) for p in compressor.layout(x.size)
        }

    def encode() -> None:
        nonlocal payload
        if traits.fixed_size:
            compressor.encode_into(x, payload, context)
        else:
            payload = dict(compressor.compress(x, context))

    encoding = _median(encode)
    decoding = _median(lambda: compressor.decompress(payload, out, context))
    nbytes = sum(array.nbytes for array in payload.values())
    combine: str = traits.combine
    if combine == "gather":
        shardable = traits.fixed_size and traits.granularity is not None
        combine = "scatter_reduce" if shardable else "allgather"
    return CodecCost(str(compressor), combine, encoding, decoding, nbytes / x.nbytes)


def _median(run: object) -> float:
    assert callable(run)
    run()  # compiles kernels
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _slowest(comm: Communicator, codec: CodecCost) -> CodecCost:
    told = comm.allgather_bytes(json.dumps([codec.encode, codec.decode]).encode())
    encode, decode = (max(column) for column in zip(*map(json.loads, told), strict=True))
    return replace(codec, encode=encode, decode=decode)


def _allreduce_rate(comm: Communicator) -> float:
    values = np.ones(4 << 20, np.float32)
    times = []
    for _ in range(3):
        comm.barrier()
        begin = time.perf_counter()
        comm.allreduce(values)
        times.append(time.perf_counter() - begin)
        values[:] = 1
    return values.nbytes / statistics.median(times)
