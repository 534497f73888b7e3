"""`make serving-load`: the server with uncertainty against plain vLLM under load, some minutes; writes results/serving.

Both servers stand side by side and take turns, burst by burst, with the same prompts. Of each burst: answers a second, and the
CPU seconds of the server's processes, which other work on the machine does not disturb. Every answer is held against
`vmoer.record` on its prompt in transformers, so that one that is lost or mixed up with another is seen. The memory of the
server's processes is read after every burst.

python load.py [--requests 1000] [--burst 100] [--out FOLDER]
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import served
from conftest import Server, free_port  # type: ignore[attr-defined]

NEW, TOGETHER, WORDS = (
    16,
    64,
    ["the", "quick", "brown", "fox", "why", "is", "sky", "blue", "light", "air", "hello", "token"],
)
PROMPTS = [" ".join(WORDS[(i + j * (i % 5 + 1)) % len(WORDS)] for j in range(2 + i % 6)) for i in range(50)]
LEAST = 0.9
"""Of the plain server's throughput."""
GROWTH = 0.02
"""Of the memory, from a third of the requests to the end."""
KINDS = ("lost", "mixed", "other")
"""No answer; the answer to another prompt; numbers or tokens that are nobody's, as where rounding turns a near tie."""
SMALL_CACHE = ("--num-gpu-blocks-override", "160")
"""Blocks of the KV cache: in a large one every request would touch memory for the first time, and hide what is kept."""


def processes(server: Server) -> list[psutil.Process]:
    first = psutil.Process(server.process.pid)
    return [first, *first.children(recursive=True)]


def cpu_seconds(server: Server) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes(server))


def megabytes(server: Server) -> float:
    return sum(process.memory_info().rss for process in processes(server)) / 1e6


async def burst(server: Server, places: list[int], asks: bool) -> list[Any]:
    """The prompts of these places, `TOGETHER` at a time: the answers."""
    gate, limits = asyncio.Semaphore(TOGETHER), httpx.Limits(max_connections=TOGETHER)
    body = {"model": "tiny", "max_tokens": NEW, "min_tokens": NEW, "ignore_eos": True, "temperature": 0}
    body |= {"return_token_ids": True} | ({"uncertainty": True} if asks else {})

    async def one(http: httpx.AsyncClient, place: int) -> Any:
        async with gate:
            answer = await http.post(
                f"{server.url}/v1/completions", json=body | {"prompt": PROMPTS[place % len(PROMPTS)]}
            )
        return answer.raise_for_status().json()["choices"][0]

    async with httpx.AsyncClient(limits=limits, timeout=300) as http:
        return await asyncio.gather(*(one(http, place) for place in places), return_exceptions=True)


def wrong(answer: Any, want: dict[str, Any], asks: bool) -> bool:
    """Whether an answer is not that of its own prompt."""
    if isinstance(answer, BaseException) or answer["token_ids"] != want["ids"][want["prompt_tokens"] :]:
        return True
    if not asks:
        return False
    said = answer["uncertainty"]["tokens"]
    means = {name: np.array(value)[want["prompt_tokens"] - 1 :].mean(-1) for name, value in want["signals"].items()}
    return said.keys() != means.keys() or any(
        len(said[name]) != NEW or not np.allclose(said[name], mean, rtol=1e-4, atol=1e-6)
        for name, mean in means.items()
    )


def kind(answer: Any, place: int, expected: list[dict[str, Any]], asks: bool) -> str | None:
    """What is wrong with an answer, if anything."""
    want = expected[place % len(expected)]
    if isinstance(answer, BaseException):
        return "lost"
    if not wrong(answer, want, asks):
        return None
    if any(not wrong(answer, other, asks) for other in expected):
        return "mixed"
    print("other:", json.dumps({"prompt": want["prompt"], "ids": want["ids"], "answer": answer}), flush=True)
    return "other"


def measured(servers: dict[str, Server], expected: dict[str, list[Any]], requests: int, size: int) -> dict[str, Any]:
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for name, server in servers.items():  # first requests make buffers and caches
        asyncio.run(burst(server, list(range(len(PROMPTS))), name == "uncertainty"))
    for number, first in enumerate(range(0, requests, size)):
        for name in sorted(servers, reverse=bool(number % 2)):
            server, asks = servers[name], name == "uncertainty"
            places = list(range(first, min(first + size, requests)))
            before, start = cpu_seconds(server), time.perf_counter()
            answers = asyncio.run(burst(server, places, asks))
            seconds, cpu = time.perf_counter() - start, cpu_seconds(server) - before
            kinds = [kind(answer, place, expected[name], asks) for place, answer in zip(places, answers, strict=True)]
            bad = {what: float(kinds.count(what)) for what in KINDS}
            row = {
                "requests": len(places),
                "seconds": seconds,
                "cpu_seconds": cpu,
                **bad,
                "megabytes": megabytes(server),
            }
            rows[name].append(row)
            print(name, json.dumps({key: round(value, 2) for key, value in row.items()}), flush=True)
    return rows


def summary(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    def ratios(key: str) -> list[float]:
        return [plain[key] / ours[key] for plain, ours in zip(rows["plain"], rows["uncertainty"], strict=True)]

    third = len(rows["plain"]) // 3
    growth = {name: own[-1]["megabytes"] / own[third]["megabytes"] - 1 for name, own in rows.items()}
    return {
        "throughput": statistics.median(ratios("seconds")),
        "throughput_by_cpu_seconds": statistics.median(ratios("cpu_seconds")),
        "requests": sum(row["requests"] for row in rows["uncertainty"]),
        **{what: sum(row[what] for own in rows.values() for row in own) for what in KINDS},
        "growth": growth,
    }


def text(found: dict[str, Any], rows: dict[str, list[dict[str, float]]], versions: str) -> str:
    growth, count = found["growth"], len(rows["plain"])
    by_cpu = found["throughput_by_cpu_seconds"]
    lines = [
        "# Serving under load",
        "",
        f"`make serving-load` on {os.cpu_count()} CPU cores ({platform.machine()}); {versions}. A tiny Granite (4 layers,",
        f"8 experts, vglr-fc on two layers), float32, {NEW} new tokens a request, {TOGETHER} requests at once. Two servers side",
        "by side take turns: plain `vllm serve`, and `vmoer serve` asked for every signal. On a CPU the kernels of vLLM's model",
        "runner go through Triton's interpreter, for both alike, and take most of the time: the ratio says that nothing of the",
        "library waits or is done twice, and not what it costs on a GPU (`benchmarks/serving_operator.py`).",
        "",
        "| | |",
        "|:--|--:|",
        f"| throughput with uncertainty, of the plain server's: median of {count} pairs of bursts | {found['throughput']:.3f} |",
        f"| the same by the CPU seconds of the servers' processes | {by_cpu:.3f} |",
        f"| requests to each server | {found['requests']} |",
        f"| lost; the answer to another prompt | {found['lost']:g}; {found['mixed']:g} |",
        f"| other tokens or numbers than transformers has for the prompt | {found['other']:g} |",
        f"| memory at the end over that after a third, `vmoer serve` | {100 * growth['uncertainty']:+.1f}% |",
        f"| the same, plain | {100 * growth['plain']:+.1f}% |",
        "",
        "| burst | plain s | CPU s | MB | uncertainty s | CPU s | MB |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    columns = (("seconds", 2), ("cpu_seconds", 2), ("megabytes", 0))
    for number, pair in enumerate(zip(rows["plain"], rows["uncertainty"], strict=True)):
        cells = [f"{row[key]:.{digits}f}" for row in pair for key, digits in columns]
        lines.append(f"| {number + 1} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--burst", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "results" / "serving")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        base = served.build("granite", work / "base")
        run = served.train(base, "vglr-fc", work / "run")
        plain = served.train(base, "map", work / "map")
        servers = {
            name: Server(base, routers, work / f"{name}.log", free_port(), *SMALL_CACHE)
            for name, routers in (("plain", None), ("uncertainty", run))
        }
        try:
            expected = {
                name: served.recorded(base, own, PROMPTS, NEW) for name, own in (("plain", plain), ("uncertainty", run))
            }
            for server in servers.values():
                server.ready()
            rows = measured(servers, expected, args.requests, args.burst)
        finally:
            for server in servers.values():
                server.stop()
    import torch
    import vllm

    found = summary(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    versions = f"vLLM {vllm.__version__}, torch {torch.__version__}"
    (args.out / "serving.json").write_text(json.dumps({"summary": found, "bursts": rows}, indent=1) + "\n")
    (args.out / "README.md").write_text(text(found, rows, versions))
    print(text(found, rows, versions))
    bad = (
        found["lost"]
        or found["mixed"]
        or found["other"]
        or found["throughput"] < LEAST
        or found["growth"]["uncertainty"] > max(GROWTH, found["growth"]["plain"])
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
