"""The task of `make demo-grpo`: to end a line of code, of which the beginning is given, so that it parses as Python."""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from launch.datasets.lines import DataError
from launch.datasets.tokens import END, SPECIAL_IDS, START

MAX_TOKENS = 16
STOP = [SPECIAL_IDS[END]]
_PLAIN = re.compile(r'[ -~]{10,40}')
_BRACKET = re.compile(r'[(\[{]')
_NOT_PLAIN = re.compile(r'[#"\'\\;]')  # in a comment or a string anything goes, and a line must not become two


def code_lines(count: int) -> list[str]:
    """Different lines of Python's standard library that parse by themselves and hold a bracket, in a fixed order that
    has nothing to do with where they stand."""
    sources = sorted(Path(ast.__file__).parent.glob('*.py'))
    found = {line.strip() for source in sources for line in source.read_text(errors='ignore').splitlines()}
    plain = [s for s in found if _PLAIN.fullmatch(s) and _BRACKET.search(s) and not _NOT_PLAIN.search(s)]
    lines: list[str] = []
    for line in sorted(plain, key=lambda s: hashlib.sha256(s.encode()).hexdigest()):
        if parses(line):
            lines.append(line)
        if len(lines) == count:
            return lines
    raise DataError(f'the standard library in {Path(ast.__file__).parent} has {len(lines)} lines to use, not {count}')


def parses(line: str) -> bool:
    """Whether a line is a statement of Python, or the head of one that needs a body."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of the code in the line
        for text in (line, line + '\n  pass'):
            try:
                ast.parse(text)
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
            return True
    return False


def prompts_of(lines: Iterable[str], tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Different prompts: each the first tokens of a line, so many that they do not parse by themselves."""
    found: dict[tuple[int, ...], None] = {}
    for line in lines:
        ids = tokenizer.encode(line).ids
        cuts = [k for k in range(1, len(ids)) if not parses(tokenizer.decode(ids[:k]))]
        if cuts:
            cut = cuts[int(hashlib.sha256(line.encode()).hexdigest(), 16) % len(cuts)]
            found[SPECIAL_IDS[START], *ids[:cut]] = None
        if len(found) == count:
            return [list(prompt) for prompt in found]
    raise DataError(f'the lines give {len(found)} different prompts, not {count}')


def score(prompt: list[int], completion: list[int], tokenizer: Tokenizer) -> float:
    """The rule: 1 where the completion ends, and it and the beginning are one line that parses, else 0."""
    *tokens, last = completion
    line = tokenizer.decode([*prompt[1:], *tokens], skip_special_tokens=False)
    return float(last in STOP and line.isprintable() and '#' not in line and parses(line))
