"""Loss curves of runs beside that of the first one, in figures and as a picture.

    .venv/bin/python benchmarks/fp8_parity.py runs/bf16 runs/rowwise runs/blockwise [--svg docs/fp8-parity.svg]

The runs have the same seed and data and a line per step (`--set logging.interval=1`). Told of each: how far the mean of
the last 50 losses lies from the first run's, and the step that lies furthest from it, both of losses averaged over 10
steps, since single batches scatter. Exit code 1 beyond 0.5 % at the end or 2 % at any step.
"""

import argparse
import sys
from pathlib import Path

from pithtrain.rundir import RunDir, read_lines

WINDOW, LAST = 10, 50
AT_END, AT_ANY = 0.5, 2.0  # percent
WIDTH, HEIGHT, EDGE = 720, 360, 40
COLOURS = ("#333333", "#c0392b", "#2471a3", "#1e8449")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    losses = {path.name: [row["loss"] for row in read_lines(RunDir(path).metrics)] for path in arguments.runs}
    smooth = {name: averaged(curve) for name, curve in losses.items()}
    (first, base), *others = smooth.items()
    print(f"{first}: {len(losses[first])} steps, {losses[first][0]:.4f} to {mean(losses[first][-LAST:]):.4f}")
    bad = False
    for name, curve in others:
        end = 100 * (mean(losses[name][-LAST:]) / mean(losses[first][-LAST:]) - 1)
        away = [100 * (a / b - 1) for a, b in zip(curve, base, strict=True)]
        worst = max(range(len(away)), key=lambda step: abs(away[step]))
        bad |= abs(end) > AT_END or abs(away[worst]) > AT_ANY
        print(f"{name}: last {LAST} {end:+.3f} %, furthest {away[worst]:+.3f} % at step {worst + WINDOW}")
    if arguments.svg:
        arguments.svg.write_text(picture(smooth))
    sys.exit(bad)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def averaged(curve: list[float]) -> list[float]:
    """Over WINDOW steps each."""
    return [mean(curve[i : i + WINDOW]) for i in range(len(curve) - WINDOW + 1)]


def picture(curves: dict[str, list[float]]) -> str:
    """An SVG: a line a run, marks at the ends of both axes."""
    every = [loss for curve in curves.values() for loss in curve]
    low, high, steps = min(every), max(every), max(map(len, curves.values()))

    def at(step: int, loss: float) -> str:
        x = EDGE + (WIDTH - 2 * EDGE) * step / max(steps - 1, 1)
        return f"{x:.1f},{EDGE + (HEIGHT - 2 * EDGE) * (high - loss) / ((high - low) or 1):.1f}"

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    lines += [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    bottom = HEIGHT - EDGE
    lines += [f'<path d="M{EDGE} {EDGE}V{bottom}H{WIDTH - EDGE}" fill="none" stroke="#999999"/>']
    for y, text in ((EDGE, f"{high:.2f}"), (bottom, f"{low:.2f}")):
        lines.append(f'<text x="{EDGE - 4}" y="{y}" font-size="11" text-anchor="end">{text}</text>')
    lines.append(f'<text x="{WIDTH - EDGE}" y="{bottom + 16}" font-size="11" text-anchor="end">{steps} steps</text>')
    for place, (name, curve) in enumerate(curves.items()):
        colour, points = COLOURS[place % len(COLOURS)], " ".join(at(step, loss) for step, loss in enumerate(curve))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        y = EDGE + 16 * place
        lines.append(f'<text x="{WIDTH - EDGE}" y="{y}" font-size="12" text-anchor="end" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    main()
