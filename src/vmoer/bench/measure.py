"""Timing that can be compared: all variants in one process, interleaved, ratios taken within a round."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Work = Callable[[], Any]


def seconds(work: Work, device: str, repeats: int = 1) -> float:
    """Seconds of one run: by device events on a GPU; on a CPU by the clock, or by the process's own time where one thread works,
    which other processes do not disturb."""
    if device == "cpu":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        for _ in range(repeats):
            work()
        return (clock() - start) / repeats
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(repeats):
        work()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / repeats


def interleaved(
    variants: dict[str, Work], device: str, rounds: int, repeats: int = 1, warm_up: int = 1
) -> dict[str, list[float]]:
    """Each variant once a round, in a random order: what ran before changes clocks and caches."""
    names = list(variants)
    shuffle = random.Random(0).shuffle
    for name in names:
        seconds(variants[name], device, warm_up)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        shuffle(names)
        for name in names:
            times[name].append(seconds(variants[name], device, repeats))
    return times


def between(
    variants: dict[str, Work], base: Work, device: str, rounds: int, repeats: int = 1
) -> dict[str, list[tuple[float, float]]]:
    """Each variant once a round, in a random order, between two runs of the base: its seconds, and the mean of theirs.

    A chip's clock drifts by more than what is to be measured; over three runs it hardly does.
    """
    names = list(variants)
    shuffle = random.Random(0).shuffle
    for work in (base, *variants.values()):
        seconds(work, device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        shuffle(names)
        before = seconds(base, device, repeats)
        for name in names:
            own = seconds(variants[name], device, repeats)
            after = seconds(base, device, repeats)
            times[name].append((own, (before + after) / 2))
            before = after
    return times


def ratio(times: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratios, round by round."""
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    if len(ratios) < 3:
        return statistics.median(ratios), ratios[0], ratios[-1]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def captured(work: Work) -> Work:
    """The work as a CUDA graph: its replay. Work that synchronises with the host is refused before it spoils a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def ceilings(device: str) -> dict[str, float]:
    """What this machine does at best: bytes a second of a copy (read and written), FLOPs a second of a matrix product."""
    on_cpu = device == "cpu"
    size, dtype = (1 << 22, torch.float32) if on_cpu else (1 << 30, torch.bfloat16)
    a = torch.randn(size // (4 if on_cpu else 2), device=device, dtype=dtype)
    b = torch.empty_like(a)
    n = 512 if on_cpu else 8192
    x, y = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(x)
    copy = interleaved({"copy": lambda: b.copy_(a)}, device, 5, 4)["copy"]
    product = interleaved({"product": lambda: torch.mm(x, y, out=out)}, device, 5, 4)["product"]
    return {
        "bytes_per_second": 2 * a.numel() * a.element_size() / statistics.median(copy),
        "flops_per_second": 2 * n**3 / statistics.median(product),
    }
