"""Makes a file of a teacher's best tokens from what a server has replied.

usage: python -m launch.topk_file [--topk N] [--of prompt|completion] FILE [FILE ...] > topk.jsonl

A FILE holds replies of vLLM or SGLang as JSON: one, a list of them, or one a line. docs/distillation.md tells what to
ask a server for. To each reply may be added `prompt_length`, how many tokens are not trained on, and
`prompt_token_ids`, where the server has not told them. Nothing is written unless all replies can be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.datasets import replies
from launch.datasets.lines import SHOWN_BAD_LINES, DataError


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='launch.topk_file', description="Makes a file of a teacher's best tokens from replies of vLLM or SGLang."
    )
    parser.add_argument('files', nargs='+', type=Path, metavar='FILE', help='replies: one, a list, or one a line')
    parser.add_argument('--topk', type=int, metavar='N', help='keep the best N; default: all that there are')
    parser.add_argument('--of', choices=replies.PARTS, help='whose log-probs; default: of the prompt, if there are any')
    args = parser.parse_args(argv)
    if args.topk is not None and args.topk < 1:
        parser.error(f'--topk must be at least 1, got {args.topk}')
    lines, faults = [], []
    for path in args.files:
        try:
            for where, reply in read(path):
                try:
                    lines += replies.sequences(reply, args.of, args.topk)
                except DataError as e:
                    faults.append(f'{where}, {e}' if f'{e}'.startswith(('token', 'choice')) else f'{where}: {e}')
        except DataError as e:
            faults.append(f'{e}')
    if faults:
        more = [f'... and {len(faults) - SHOWN_BAD_LINES} more faults'] if len(faults) > SHOWN_BAD_LINES else []
        sys.exit('\n'.join(faults[:SHOWN_BAD_LINES] + more))
    for line in lines:
        print(json.dumps(line))


def read(path: Path) -> Iterator[tuple[str, Any]]:
    """The replies in a file, each with where it stands."""
    try:
        text = path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f'{path} cannot be read: {e}') from None
    try:
        whole = json.loads(text)
    except ValueError:
        yield from _lines(path, text)
        return
    for number, reply in enumerate(whole if isinstance(whole, list) else [whole], start=1):
        yield f'{path}, reply {number}', reply


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split('\n'), start=1):
        if line.strip():
            try:
                reply = json.loads(line)
            except ValueError as e:
                raise DataError(f'{path}, line {number}: not JSON: {e}') from None
            yield f'{path}, line {number}', reply


if __name__ == '__main__':
    main()
