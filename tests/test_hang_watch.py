"""What takes too long is ended, and where it was is told."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BEGIN = f"""
import ctypes, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import hang_watch

def goes_on():
    while True:
        eval("list(map(str, range(50)))")

def waits():
    threading.Event().wait()

def keeps_the_lock():
    ctypes.PyDLL(None).sleep(600)

with hang_watch.ended_after(60):
    pass
"""


@pytest.mark.parametrize(
    ("before", "where", "told"),
    [
        ("threading.Thread(target=goes_on, daemon=True).start()", "goes_on", "0.5 s"),
        ("", "waits", "0.5 s"),
        ("hang_watch.HELD = 0.5", "keeps_the_lock", "0:00:01"),
    ],
)
def test_it_is_told_where_something_takes_too_long(before, where, told):
    program = f"{BEGIN}{before}\nwith hang_watch.ended_after(0.5):\n    {where}()\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"Timeout ({told})!\n")
    assert f" in {where}\n" in done.stderr


def test_time_in_which_the_process_stood_still_does_not_count():
    program = f"""{BEGIN}
with hang_watch.ended_after(1):
    print("begun", flush=True)
    sys.stdin.readline()
    time.sleep(0.3)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate("\n")
    assert process.returncode == 0, said
