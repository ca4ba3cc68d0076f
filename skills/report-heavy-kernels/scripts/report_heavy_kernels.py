#!/usr/bin/env python3
"""Kernels of a torch.profiler trace by kind, as CSV, and the share of time without any. The last line is PASS or FAIL.

Without kernels, which is a CPU's trace, operators stand for them: their own time, without that of those they call."""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from skill import ROOT, end, on_device, operators, read_trace, steps

SHOWN = 15  # rows printed; the CSV has all
KERNELS = "\n".join(file.read_text() for file in sorted((ROOT / "src/pithtrain/ops").glob("*kernels.py")))
OURS = re.findall(r"^@triton\.jit.*\ndef (\w+)", KERNELS, re.MULTILINE)
ATEN_POINTWISE = (
    r"add|sub|rsub|mul|div|neg|abs|exp|log\w*|sigmoid\w*|silu\w*|softplus|pow|r?sqrt|reciprocal|square|sum|mean|a?max|a?min"
    r"|where|clamp\w*|addcmul|addcdiv|lerp|eq|ne|lt|gt|le|ge|is\w+|bitwise_\w+|masked_fill|round|floor|cumsum|cos|sin"
)
KINDS = {  # in this order: the first that is found in a name is its kind
    "compiled": r"^triton_(?!tem)",  # inductor's: pointwise and reductions; their names list operators
    "our kernels": rf"^({'|'.join(OURS)})$",
    "communication": r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|record_param_comms",
    "attention": r"sdpa|fmha|flash|attention|attn|scaled_dot_product",
    "grouped GEMM": r"GroupProblemShape|grouped",
    "dense GEMM": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitK|^triton_tem|^aten::(mm|addmm|bmm|matmul|linear|dot)$",
    "copies": r"mem(cpy|set)|copy|fill|catarray|^aten::(cat|stack|clone|contiguous|zero_|zeros\w*|to|narrow_copy)$",
    "pointwise": rf"elementwise|reduce_kernel|norm|softmax|_foreach|multi_tensor|^aten::_?({ATEN_POINTWISE})_?$",
}


def kind(name: str) -> str:
    found = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
    return "pointwise" if found == "compiled" else found


def own_times(spans: Iterable[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Name and microseconds of each operator without those inside it, which are the ones of its thread that begin
    before it ends."""
    inside: list[tuple[object, float, str, list[float]]] = []  # thread, end, name, own microseconds
    for one in sorted(spans, key=lambda one: (str((one["pid"], one["tid"])), one["ts"], -one["dur"])):
        thread = one["pid"], one["tid"]
        while inside and (inside[-1][0] != thread or one["ts"] >= inside[-1][1]):
            _, _, name, own = inside.pop()
            yield name, max(own[0], 0.0)
        if inside:
            inside[-1][3][0] -= one["dur"]
        inside.append((thread, one["ts"] + one["dur"], one["name"], [one["dur"]]))
    for _, _, name, own in inside:
        yield name, max(own[0], 0.0)


def busy_us(spans: Iterable[dict[str, Any]]) -> float:
    """How long at least one of them ran."""
    total, until = 0.0, 0.0
    for one in sorted(spans, key=lambda one: one["ts"]):
        stop = one["ts"] + one["dur"]
        total += max(0.0, stop - max(one["ts"], until))
        until = max(until, stop)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="rank-R.json.gz of a run's profiles/, or any trace of torch.profiler")
    parser.add_argument("--csv", type=Path, help="TRACE.csv otherwise, beside it")
    given = parser.parse_args()

    trace = read_trace(given.trace)
    spans = on_device(trace)
    noun = "kernels"
    if not spans:
        gpus = [gpu.get("name") for gpu in trace.get("deviceProperties", [])]
        if gpus:
            end("FAIL", f"{given.trace} was taken beside {gpus[0]} and holds no kernel: capture it again without nsys")
        spans, noun = operators(trace), "operators"
    if not spans:
        end("FAIL", f"{given.trace} holds neither kernels nor operators")
    timed = own_times(spans) if noun == "operators" else ((one["name"], one["dur"]) for one in spans)
    table: dict[str, list[float]] = {}
    for name, us in timed:
        row = table.setdefault(name, [0, 0.0])
        row[0], row[1] = row[0] + 1, row[1] + us
    total = sum(us for _, us in table.values()) or 1.0
    kinds: dict[str, float] = {}
    for name, (_, us) in table.items():
        kinds[kind(name)] = kinds.get(kind(name), 0.0) + us
    ordered = sorted(table.items(), key=lambda row: (-kinds[kind(row[0])], kind(row[0]), -row[1][1]))

    out = given.csv or given.trace.with_name(f"{given.trace.name}.csv")
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kind", "name", "calls", "total_ms", "share", "mean_us"])
        for name, (calls, us) in ordered:
            numbers = f"{us / 1e3:.6f}", f"{us / total:.6f}", f"{us / calls:.3f}"
            writer.writerow([kind(name), name, int(calls), *numbers])
    for name, us in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"{us / total:7.2%}  {us / 1e3:10.3f} ms  {name}")
    print()
    for name, (calls, us) in sorted(table.items(), key=lambda row: -row[1][1])[:SHOWN]:
        print(f"{us / total:7.2%}  {us / 1e3:10.3f} ms  {int(calls):6d} x {us / calls:9.1f} us  {name[:100]}")
    window = max(one["ts"] + one["dur"] for one in spans) - min(one["ts"] for one in spans)
    idle = 1 - busy_us(spans) / window if window else 0.0
    print(f"\ncsv     {out}\nsteps   {steps(trace) or 'no ranges of steps'}")
    first = max(kinds, key=lambda name: kinds[name])
    said = f"{len(spans)} {noun} of {len(table)} names, {window / 1e3:.1f} ms, idle {idle:.1%}"
    end("PASS", f"{said}; most of it {first}, {kinds[first] / total:.1%}")


if __name__ == "__main__":
    main()
