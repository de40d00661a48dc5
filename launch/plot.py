"""Curves of one or several runs beside each other.

    python -m launch.plot runs/one runs/other --key held_out_loss_nats --out curves.png

Reads the `metrics.jsonl` of each folder, also of a run that is still going on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.figures.progress import Curve, draw_panels, read_figures

USUAL = ('train_loss_nats', 'held_out_loss_nats', 'loss', 'held_out_loss', 'reward', 'grad_norm')


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 2, with one message, for a wrong call."""
    parser = argparse.ArgumentParser(prog='python -m launch.plot', description=(__doc__ or '').split('\n')[0])
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help='folder of a run, with its metrics.jsonl')
    parser.add_argument('--key', action='append', metavar='NAME', help='a figure to draw; may be given several times')
    parser.add_argument(
        '--out',
        type=Path,
        default=Path('curves.png'),
        help='the picture, of any kind that matplotlib writes; without a suffix .png (%(default)s)',
    )
    given = parser.parse_args(argv)
    try:
        out = draw(given.runs, given.key, given.out)
    except (OSError, ValueError) as error:
        print(f'python -m launch.plot: error: {error}', file=sys.stderr)
        return 2
    print(f'picture        {out}')
    return 0


def draw(runs: Sequence[Path], keys: Sequence[str] | None, out: Path) -> Path:
    """Draws the curves, and returns where: `out`, with .png where that has no suffix.

    ValueError for figures that are not there or not readable, and for a kind of picture that matplotlib does not write;
    OSError where there can be no file `out`.
    """
    if out.is_dir():
        raise ValueError(f'{out} is a folder; --out must be a file, such as {out / "curves.png"}')
    out = out if out.suffix else out.with_name(f'{out.name}.png')
    found = {run: read(run) for run in runs}
    colors = [f'C{number % 10}' for number in range(len(found))]
    panels: dict[str, list[Curve]] = {
        key: [(str(run), color, lines, key) for (run, lines), color in zip(found.items(), colors)]
        for key in chosen(found, keys)
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_panels(out, panels, '', from_zero=False)
    return out


def read(run: Path) -> list[dict[str, Any]]:
    """The figures of a run; without a last line that is not whole yet. ValueError where there are none."""
    path = run / 'metrics.jsonl' if run.is_dir() else run
    if not path.is_file():
        raise ValueError(f'there is no {path}; a RUN is the folder of one, such as runs/python-reference-tp2-pp2')
    lines = path.read_text(errors='replace').splitlines()
    if lines and not lines[-1].endswith('}'):
        lines.pop()
    found = [_figures(line, f'{path}, line {number}') for number, line in enumerate(lines, 1)]
    if not found:
        raise ValueError(f'{path} has no figures yet')
    return found


def _figures(line: str, where: str) -> dict[str, Any]:
    try:
        return read_figures(line)
    except json.JSONDecodeError as error:
        raise ValueError(f'{where} is not JSON: {error}') from None
    except ValueError as error:
        raise ValueError(f'{where} {error}') from None


def chosen(found: dict[Path, list[dict[str, Any]]], keys: Sequence[str] | None) -> list[str]:
    """The figures to draw: those asked for, or of the usual ones those that there are. ValueError for others."""
    there = {
        name
        for lines in found.values()
        for line in lines
        for name, value in line.items()
        if isinstance(value, int | float) and name != 'step'
    }
    unknown = [key for key in keys or () if key not in there]
    if unknown:
        raise ValueError(f'no run has the figure {unknown[0]!r}; there are {", ".join(sorted(there))}')
    usual = [name for name in USUAL if name in there][:3]
    if not keys and not usual:
        raise ValueError(f'none of the usual figures is there; name one by --key: {", ".join(sorted(there))}')
    return list(keys or usual)


if __name__ == '__main__':
    sys.exit(main())
