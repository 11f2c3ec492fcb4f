"""The level of logger "ringlet", and who shows what it says."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ringlet.ring.log import LEVELS, check_level, level_from, show

LOG = logging.getLogger("ringlet")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    level, handlers, above = LOG.level, LOG.handlers[:], logging.getLogger().handlers[:]
    yield
    LOG.setLevel(level)
    LOG.handlers[:] = handlers
    logging.getLogger().handlers[:] = above


def test_levels_by_name() -> None:
    assert level_from({}) is None
    assert level_from({"HOROVOD_LOG_LEVEL": ""}) is None
    assert level_from({"HOROVOD_LOG_LEVEL": "fatal"}) == logging.CRITICAL
    assert level_from({"HOROVOD_LOG_LEVEL": "x", "RINGLET_LOG_LEVEL": "Info"}) == logging.INFO
    numbers = [check_level(name, "it") for name in LEVELS]
    assert numbers == sorted(numbers)
    names = "trace, debug, info, warning, error, fatal"
    with pytest.raises(ValueError, match=f"HOROVOD_LOG_LEVEL='loud' is not a log level: {names}"):
        level_from({"HOROVOD_LOG_LEVEL": "loud"})


def test_lines_carry_the_rank_unless_the_application_logs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    above = logging.getLogger()
    above.handlers.clear()
    show(logging.DEBUG, 4)
    show(LEVELS["trace"], 3)  # as when init is called again
    LOG.log(LEVELS["trace"], "small")
    LOG.getChild("part").warning("large")
    assert capsys.readouterr().err == (
        "[ringlet, rank 3] TRACE: small\n[ringlet, rank 3] WARNING: large\n"
    )
    above.addHandler(logging.NullHandler())  # configured only now: the application shows it
    LOG.warning("twice")
    assert capsys.readouterr().err == ""
    show(logging.ERROR, 3)
    assert not LOG.handlers
    assert LOG.level == logging.ERROR
    show(None, 3)
    assert LOG.level == logging.ERROR


def init(level: str) -> subprocess.CompletedProcess[str]:
    code = "from ringlet.job import session; import ringlet.ring, logging; session.init()\n"
    code += "logging.getLogger('ringlet').info('from a rank')\n"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RINGLET_LOG_LEVEL": level},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_init_reads_the_level() -> None:
    assert "[ringlet, rank 0] INFO: from a rank\n" in init("info").stderr
    assert init("warning").stderr == ""
    wrong = init("loud")
    assert wrong.returncode == 1
    assert "ValueError: RINGLET_LOG_LEVEL='loud' is not a log level: trace, debug," in wrong.stderr


def test_the_command_line_knows_the_names() -> None:
    command = [sys.executable, "-m", "ringlet", "run", "--log-level", "loud", "-np", "1", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--log-level='loud' is not a log level: trace, debug, info" in done.stderr
