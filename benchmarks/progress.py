"""How far a benchmark has come, on standard error: for loops, and for jobs that it starts.

``each`` is for work in this process. ``follow`` is for the parent of a job: rank 0 calls
``announce`` when it begins a piece, and the parent finds that in the job's standard output.
"""

import subprocess
import sys

from ringlet.cli.progress import Progress

_BEGINS = "ringlet benchmark begins: "


def each(function, items, name="{}"):
    """Yield ``function(item)`` for each of ``items``; show the one in work as ``name`` says."""
    with Progress(len(items)) as progress:
        for item in items:
            progress.begin(name.format(item))
            found = function(item)
            progress.end()
            progress.wipe()  # the caller may print what it gets
            yield found


def announce(what):
    """Tell the parent, which follows this rank's job, that ``what`` begins."""
    print(f"{_BEGINS}{what}", flush=True)


def follow(progress, about, command, **options):
    """Run ``command`` and show each piece that its ranks announce; pass on what else they print.

    Raises subprocess.CalledProcessError if it ends with another code than 0.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as job:
        for line in job.stdout:
            if line.startswith(_BEGINS):
                progress.begin(f"{about}, {line.removeprefix(_BEGINS).rstrip()}")
                progress.end()  # when the next one begins
            else:
                progress.wipe()
                sys.stdout.write(line)
                sys.stdout.flush()
    if job.returncode:
        raise subprocess.CalledProcessError(job.returncode, command)
