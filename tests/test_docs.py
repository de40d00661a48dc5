"""The pages of docs/: their examples run, and their tables say what the constructors do."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

from twinkle_megatron.arguments import ALIASES, by_name
from twinkle_megatron.loss.build import LOSSES
from twinkle_megatron.metric.build import METRICS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / 'docs'
LOSS_PAGES, METRIC_PAGES = (sorted((DOCS / folder).glob('*.md')) for folder in ('losses', 'metrics'))
PAGES = [DOCS / 'index.md', DOCS / 'which-hook.md', *LOSS_PAGES, *METRIC_PAGES]
CLASSES = [(cls, LOSS_PAGES) for cls in LOSSES.values()] + [(cls, METRIC_PAGES) for cls in METRICS.values()]


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.mark.parametrize('page', PAGES, ids=name_of)
def test_the_examples_of_a_page_run_in_order(page):
    blocks = re.findall(r'^```python\n(.*?)^```$', page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks, 'a page shows how to call what it describes'
    torch.manual_seed(0)
    namespace: dict[str, object] = {'__name__': page.stem}
    for number, block in enumerate(blocks):
        exec(compile(block, f'{name_of(page)}, block {number}', 'exec'), namespace)


@pytest.mark.parametrize(('cls', 'pages'), CLASSES, ids=[cls.__name__ for cls, _ in CLASSES])
def test_a_page_lists_the_parameters_of_every_class_with_their_defaults(cls, pages):
    rows = table_of(cls.__name__, pages)
    named = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert [(row[0], row[1]) for row in rows] == [(f'`{p.name}`', f'`{p.default!r}`') for p in named]
    for alias, targets in ALIASES.items():
        owner, _, name = alias.rpartition('.')
        mine = [row for row in rows if row[0].strip('`') in targets]
        if pages is LOSS_PAGES and owner in ('', cls.__name__) and {row[0].strip('`') for row in mine} == set(targets):
            assert all(f'`{name}`' in row[-1] for row in mine), f'{name} is another name of {targets}'


@pytest.mark.parametrize('page', [*LOSS_PAGES, *METRIC_PAGES], ids=name_of)
def test_the_name_by_which_a_page_hands_its_class_to_the_model_is_one_of_its_classes(page):
    text = page.read_text()
    described = set(re.findall(r'^## Parameters of `(\w+)`$', text, flags=re.MULTILINE))
    assert described
    found = {by_name(name, LOSSES, 'loss').__name__ for name in re.findall(r"model\.set_loss\('(\w+)'", text)}
    found |= {by_name(name, METRICS, 'metric').__name__ for name in re.findall(r"model\.add_metric\('(\w+)'", text)}
    assert found <= described


def table_of(name: str, pages: list[Path]) -> list[list[str]]:
    """The rows, without the head, of the table under the title of a class's parameters."""
    title = f'## Parameters of `{name}`\n'
    texts = [page.read_text() for page in pages if title in page.read_text()]
    assert len(texts) == 1, f'{name} must have one page under docs/, with the title {title.strip()!r}, got {len(texts)}'
    section = texts[0].partition(title)[2].partition('\n## ')[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith('|')]
    return [[cell.strip() for cell in row.strip('|').split('|')] for row in rows]


@pytest.mark.parametrize('source', sorted(DOCS.rglob('*.md')), ids=name_of)
def test_links_lead_to_files_that_are_there_and_stay_within_docs(source):
    for target in re.findall(r'\]\(([^)#]+)(?:#[^)]*)?\)', source.read_text()):
        if not target.startswith('https://'):
            found = (source.parent / target).resolve()
            assert found.is_file(), f'{name_of(source)} links to {target}'
            assert found.is_relative_to(DOCS), f'{name_of(source)} links to {target}, which the site has not'


def test_every_page_is_in_the_navigation():
    listed = re.findall(r'[\w/-]+\.md', (ROOT / 'mkdocs.yml').read_text())
    assert sorted(listed) == sorted(name_of(page) for page in DOCS.rglob('*.md'))
