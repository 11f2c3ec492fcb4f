"""`ringlet node --min-np`: nodes that come, go, and come again."""

import json
import re
import signal
import sys
import threading

import pytest
from node_commands import ended, node

from ringlet.ring.processes.torchrun import free_port

pytestmark = pytest.mark.preloaded("torch")

TRAIN = """
import json, os, sys, time
import torch
import ringlet.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), "int8 | ef"
)
state = hvd.elastic.TorchState(model, optimizer, step=0, over=False)

@hvd.elastic.run
def train(state):
    print(json.dumps({"begun": hvd.rank(), "size": hvd.size(), "at": state.step}), flush=True)
    while not state.over:
        optimizer.zero_grad()
        model(torch.ones(3, 4) * (1 + hvd.rank())).sum().backward()
        optimizer.step()
        state.step += 1
        state.over = hvd.broadcast_object(os.path.exists(sys.argv[1]))
        time.sleep(0.02)
        state.commit()

train(state)
flat = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
told = {"over": hvd.rank(), "own": os.environ["OWN"], "sum": sum(flat), "steps": state.step}
print(json.dumps(told), flush=True)
"""


class Nodes:
    """Nodes of one job, and what the first one prints."""

    def __init__(self, folder, count, *options):
        self.end, self.count, self.options = folder / "end", count, options
        self.port = free_port()
        (folder / "train.py").write_text(TRAIN)
        self.command = [sys.executable, str(folder / "train.py"), str(self.end)]
        self.told, self.notes, self._changed = [], [], threading.Condition()
        self.first = self.start(0)
        self._threads = [
            threading.Thread(target=self._read, args=(self.first.stdout, self.told)),
            threading.Thread(target=self._read, args=(self.first.stderr, self.notes)),
        ]
        for thread in self._threads:
            thread.start()

    def start(self, number, **given):
        env = {"OWN": f"own{number}"}
        words = [*self.options, "--heartbeat-seconds", "1", *self.command]
        return node(number, self.count, self.port, *words, env=env, slots=1, **given)

    def _read(self, stream, into):
        for line in stream:
            if found := re.search(r"(\{.*\})", line):
                with self._changed:
                    into.append(json.loads(found[1]))
                    self._changed.notify_all()
            elif into is self.notes:
                with self._changed:
                    into.append(line)
                    self._changed.notify_all()

    def until(self, known):
        with self._changed:
            assert self._changed.wait_for(lambda: known(self.told), 120), (self.told, self.notes)

    def sizes(self):
        """Return the sizes of epochs, as their first ranks told them."""
        return [line["size"] for line in self.told if line.get("begun") == 0]

    def finish(self, *others):
        self.end.touch()
        codes = [self.first.wait(120), *(ended(other)[0] for other in others)]
        for thread in self._threads:
            thread.join(60)
        self.first.stdout.close()
        self.first.stderr.close()
        return codes


def test_nodes_come_late_and_are_lost_and_come_again(tmp_path):
    nodes = Nodes(tmp_path, 3, "--min-np", "1")
    nodes.until(lambda _: nodes.sizes() == [1])
    second = nodes.start(1)
    nodes.until(lambda _: nodes.sizes() == [1, 2])
    second.send_signal(signal.SIGKILL)  # its ranks end with it
    nodes.until(lambda _: nodes.sizes() == [1, 2, 1])
    assert ended(second)[0] == -signal.SIGKILL
    again, third = nodes.start(1), nodes.start(2)
    nodes.until(lambda _: nodes.sizes()[-1] == 3)
    assert nodes.finish(again, third) == [0, 0, 0], nodes.notes
    over = [line for line in nodes.told if "over" in line]
    assert sorted(line["own"] for line in over) == ["own0", "own1", "own2"]
    assert len({(line["sum"], line["steps"]) for line in over}) == 1
    assert over[0]["steps"] > 0


def test_a_node_that_is_sent_away_leaves_the_others_at_work(tmp_path):
    nodes = Nodes(tmp_path, 2, "--min-np", "1")
    second = nodes.start(1)
    nodes.until(lambda _: nodes.sizes()[-1:] == [2])
    second.send_signal(signal.SIGTERM)  # as a batch system does; its rank ends by it
    nodes.until(lambda _: nodes.sizes()[-1:] == [1])
    assert ended(second)[0] == 128 + signal.SIGTERM  # which does not wait for the others
    assert nodes.finish() == [0]


def test_a_first_node_that_is_lost_ends_the_job(tmp_path):
    nodes = Nodes(tmp_path, 2, "--min-np", "2")
    second = nodes.start(1)
    nodes.until(lambda _: nodes.sizes() == [2])
    nodes.first.kill()
    code, _, err = ended(second)
    assert code == 2
    assert "the first node has gone, and with it the job" in err
    nodes.finish()


def test_another_node_of_the_same_number_takes_its_place_and_that_is_said(tmp_path):
    nodes = Nodes(tmp_path, 2, "--min-np", "1")
    earlier = nodes.start(1)
    nodes.until(lambda _: nodes.sizes()[-1:] == [2])
    later = nodes.start(1)
    code, _, err = ended(earlier)
    assert code == 2
    assert "another node has come as node 1, and takes this one's place" in err
    nodes.until(lambda _: nodes.sizes()[-1] == 2 and len(nodes.sizes()) > 2)
    assert nodes.finish(later) == [0, 0]
    assert any("node 1 has come once more" in str(note) for note in nodes.notes), nodes.notes


def test_too_few_nodes_are_said_to_all(tmp_path):
    nodes = Nodes(tmp_path, 3, "--min-np", "3", "--elastic-timeout", "10")
    second = nodes.start(1)
    assert nodes.first.wait(120) == 1
    assert ended(second)[0] == 1
    nodes.finish()
    few = "ringlet node: --min-np 3 ranks are needed; 2 are there"
    assert any(few in str(note) for note in nodes.notes), nodes.notes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--min-np", "0"], "--min-np takes a number of at least 1, not '0'"),
        (["--max-np", "2"], "--min-np is missing: how many ranks to begin with"),
        (["--min-np", "2", "--transport", "mpi"], "an elastic job cannot use MPI"),
    ],
)
def test_what_cannot_be_is_said(words, said):
    code, _, err = ended(node(0, 2, free_port(), *words, "true"))
    assert code == 2
    assert said in err


def test_a_node_with_another_secret_is_not_let_in(tmp_path):
    nodes = Nodes(tmp_path, 2, "--min-np", "1")
    nodes.until(lambda _: nodes.sizes() == [1])
    code, _, err = ended(nodes.start(1, secret="another" * 5))
    assert code == 2
    assert "RINGLET_SECRET and --nodes have to be the same for every node" in err
    assert nodes.finish() == [0]
    assert nodes.sizes() == [1]
