"""How many functions are called: what a step costs, without a clock."""

import sys


def calls_of(function, counted):
    """Return what ``function`` returns, and append to ``counted`` how many functions it calls.

    Python's and C's count, on this thread.
    """
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        return function()
    finally:
        sys.setprofile(None)
        counted.append(count)


def number_of_calls(function):
    """Return how many functions ``function`` calls."""
    counted = []
    calls_of(function, counted)
    return counted[0]
