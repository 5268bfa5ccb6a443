"""Timing in turn: what is compared runs side by side, round by round, so that a slow minute hits all of it."""
import statistics
import time


def in_turn(variants, rounds, warm_up=0):
    "Median seconds of each of `variants` (name: function), without the first `warm_up` rounds."
    seconds = {name: [] for name in variants}
    for _ in range(warm_up + rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s[warm_up:]) for name, s in seconds.items()}
