"""Rewards of a user: each sample's id is a number, and its `extra` specifies the fault of the reward."""

import asyncio
import os
import sys
import threading
import time
from contextlib import suppress

from roll_opd.rewards import Failure, Score


def number(sample):
    return float(sample.id)


def plain(samples):
    return [number(sample) for sample in samples]


async def awaited(samples):
    await asyncio.sleep(0.2)
    parity = ("even", "odd")
    return [Score(n, {"half": n / 2}, parity[int(n) % 2]) for n in map(number, samples)]


def undecided(samples):
    return [None if sample.extra.get("trouble") else number(sample) for sample in samples]


async def unhurried(samples):
    await asyncio.sleep(3.0)
    return [number(sample) for sample in samples]


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def score(self, samples):
        return [self.factor * number(sample) for sample in samples]


def sleepy(samples):
    time.sleep(0.2 * len(samples))
    return plain(samples)


def moody(samples):
    """Quick with some."""
    time.sleep(0.2 * sum(bool(sample.extra.get("trouble")) for sample in samples))
    return plain(samples)


def brief(samples):
    time.sleep(0.015 * len(samples))
    return plain(samples)


def busy(samples):
    """Returns the number of its samples, after work that holds the interpreter lock."""
    end = time.thread_time() + 2e-4 * len(samples)
    while time.thread_time() < end:
        pass
    return [float(len(samples))] * len(samples)


def troubled(samples):
    """Records the scored samples, and executes the fault of each sample before it answers."""
    for sample in samples:
        if sample.extra.get("log"):
            with open(sample.extra["log"], "a") as file:
                file.write(f"{os.getpid()} {sample.id}\n")
        match sample.extra.get("trouble"):
            case "raise":
                raise KeyError(sample.id)
            case "hang":
                time.sleep(1000)
            case "die":
                os._exit(1)
            case "exit":
                sys.exit("enough")
            case "empty":
                next(iter(()))
            case "nap":
                time.sleep(0.3)
            case "sleep":
                time.sleep(1.0)
            case "nap and die":
                time.sleep(0.3)
                os._exit(1)
    return [float("nan") if sample.extra.get("trouble") == "nan" else number(sample) for sample in samples]


LOCK = threading.Lock()


def one_at_a_time(samples):
    """Fails if another call runs at the same time."""
    if not LOCK.acquire(blocking=False):
        return [-1.0] * len(samples)
    with_trouble = [sample for sample in samples if sample.extra.get("trouble")]
    try:
        time.sleep(0.02)
        if with_trouble:
            raise KeyError(with_trouble[0].id)
        return plain(samples)
    finally:
        LOCK.release()


async def leaves_early(samples):
    trouble = samples[0].extra.get("trouble")
    if trouble == "exit":
        sys.exit("enough")
    if trouble == "cancel":
        task = asyncio.ensure_future(asyncio.sleep(1))
        task.cancel()
        await task
    while trouble == "stay":
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)
    return plain(samples)


async def deaf(samples):
    """Blocks its process the first time, so that it does not respond."""
    (log,) = {sample.extra["log"] for sample in samples}
    if not os.path.exists(log):
        open(log, "w").close()
        time.sleep(1000)
    return plain(samples)


async def slow_to_await(samples):
    if any(sample.extra.get("trouble") == "hang" for sample in samples):
        await asyncio.sleep(1000)
    return plain(samples)


def failing(samples):
    """Returns failures for some samples, also after failed attempts."""
    down = Failure("http_500", "the endpoint is down", {"http_500": 3, "connect": 1})
    return [down if number(sample) % 2 else Score(1.0, errors={"http_429": 2}) for sample in samples]


def too_few(samples):
    return [1.0] * (len(samples) - 1)
