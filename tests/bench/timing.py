"""Timing in turn: what is compared runs side by side, round by round, so that a slow minute hits all of it."""
import statistics
import time


def in_turn(variants, rounds, warm_up=0, clock=time.perf_counter):
    "Median seconds of each of `variants` (name: function), without the first `warm_up` rounds; by `time.process_time`, those of this process alone."
    seconds = {name: [] for name in variants}
    for _ in range(warm_up + rounds):
        for name, run in variants.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: statistics.median(s[warm_up:]) for name, s in seconds.items()}
