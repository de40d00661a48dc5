"""What a server says of a teacher's best tokens, in vLLM's and SGLang's replies.

Known are, each with the request that asks for it:

- vLLM, `prompt_logprobs=k`: of each prompt token `{id: {'logprob', 'rank', 'decoded_token'}}`, None for the first; the
  ids of the prompt with `return_token_ids=True`. In a completion they are in each choice, in a chat beside them.
- vLLM, `logprobs=k` and `return_tokens_as_token_ids=True`: of each completion token, `top_logprobs` with the names
  'token_id:5'; in a chat as a list under `content`.
- SGLang, `top_logprobs_num=k`: of each completion token `[logprob, id, text]` for each of the best; with
  `logprob_start_len=0` of each prompt token too, None for the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from launch.datasets.lines import DataError, kind_of

PARTS = ('prompt', 'completion')
NOTHING = -9999.0  # what vLLM writes for −inf, which JSON does not know
Best = list[tuple[int, float]]
"""Ids with their log-probs."""


def sequences(reply: Any, part: str | None = None, topk: int | None = None) -> list[dict[str, Any]]:
    """Lines of a file of best tokens: one for each sequence that the reply tells of.

    `part` says whether these are the log-probs of the prompt or of completions; None: of the prompt, if there are any.
    `topk`: how many to keep, at most. DataError, which names the place, for what is not understood.
    """
    if not isinstance(reply, dict):
        raise DataError(f'must be a JSON object, got {kind_of(reply)}')
    if 'meta_info' in reply:
        found = [_of_sglang(reply, part)]
    elif isinstance(reply.get('choices'), list):
        found = list(_of_vllm(reply, part))
    elif 'error' in reply or reply.get('object') == 'error':
        raise DataError(f'is an error of the server: {json.dumps(reply.get("message", reply.get("error")))[:120]}')
    else:
        raise DataError('has neither "choices", as replies of vLLM, nor "meta_info", as those of SGLang')
    return [_line(*one, reply, topk) for one in found]


def _line(
    ids: list[int], places: list[Best | None], prompt_length: int | None, reply: dict[str, Any], topk: int | None
) -> dict[str, Any]:
    told = [None if best is None else _kept(best, place, topk) for place, best in enumerate(places)]
    given = reply.get('prompt_length', prompt_length)
    return {
        'input_ids': ids,
        **({} if given is None else {'prompt_length': given}),
        'topk_logprobs': [None if best is None else [x for _, x in best] for best in told],
        'topk_indices': [None if best is None else [token for token, _ in best] for best in told],
    }


def _kept(best: Best, place: int, topk: int | None) -> Best:
    for token, x in best:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise DataError(f'token {place}: an id must be a whole number of at least 0, got {json.dumps(token)[:40]}')
        if not isinstance(x, int | float) or isinstance(x, bool) or math.isnan(x):
            raise DataError(f'token {place}: the log-prob of id {token} must be a number, got {json.dumps(x)[:40]}')
    if len({token for token, _ in best}) != len(best):
        raise DataError(f'token {place}: an id occurs twice among its log-probs')
    kept = sorted(((token, x) for token, x in best if x > NOTHING), key=lambda one: -one[1])[:topk]
    if not kept:
        raise DataError(f'token {place}: has no log-prob of a best token; ask for at least 1')
    return kept


def _of_vllm(reply: dict[str, Any], part: str | None) -> Iterator[tuple[list[int], list[Best | None], int | None]]:
    if reply.get('prompt_logprobs') and part != 'completion':  # of a chat, whose choices have one prompt
        yield _prompt_of_vllm(reply)
        return
    for number, choice in enumerate(reply['choices']):
        if not isinstance(choice, dict):
            raise DataError(f'"choices" must hold objects, got {kind_of(choice)}')
        try:
            prompt = choice.get('prompt_logprobs')
            if part == 'prompt' or (part is None and prompt):
                yield _prompt_of_vllm({'prompt_token_ids': reply.get('prompt_token_ids'), **choice})
            else:
                yield _completion_of_vllm(choice, choice.get('prompt_token_ids') or reply.get('prompt_token_ids'))
        except DataError as e:
            raise DataError(f'choice {number}, {e}' if len(reply['choices']) > 1 else f'{e}') from None


def _prompt_of_vllm(of: dict[str, Any]) -> tuple[list[int], list[Best | None], int | None]:
    rows, ids = of.get('prompt_logprobs'), of.get('prompt_token_ids')
    if not rows:
        raise DataError('has no "prompt_logprobs"; ask with "prompt_logprobs": 20')
    ids = _prompt_ids(ids)
    _check_length('prompt_logprobs', rows, ids)
    places: list[Best | None] = []
    for place, (row, token) in enumerate(zip(rows, ids)):
        if row is None:
            places.append(None)
            continue
        if not isinstance(row, dict) or not all(isinstance(told, dict) for told in row.values()):
            raise DataError(f'token {place}: must be an object of objects by token id, got {json.dumps(row)[:40]}')
        if str(token) not in row:
            raise DataError(f'token {place}: {token} of the prompt is not among its own log-probs; is it this prompt?')
        # The token of the prompt is there too, though it is not one of the best.
        best = [(key, told) for key, told in row.items() if (told.get('rank') or 1) <= len(row)]
        places.append([(_number(key, place), told.get('logprob')) for key, told in best])
    return ids, places, None


def _completion_of_vllm(choice: dict[str, Any], prompt: list[int] | None) -> tuple[list[int], list[Best | None], int]:
    told = choice.get('logprobs')
    if not isinstance(told, dict) or not (told.get('content') or told.get('top_logprobs')):
        raise DataError(
            'has log-probs neither of its prompt nor of its completion; ask with "prompt_logprobs": 20 and '
            '"return_token_ids": true, or "logprobs": 20 and "return_tokens_as_token_ids": true'
        )
    names: list[Any]
    rows: list[list[tuple[Any, Any]] | None]
    if told.get('content'):
        names = [one.get('token') for one in told['content']]
        rows = [
            [(top.get('token'), top.get('logprob')) for top in one.get('top_logprobs') or ()] for one in told['content']
        ]
    else:
        names = told.get('tokens') or []
        if not names:
            raise DataError(f'"tokens" must be a list, got {kind_of(told.get("tokens"))}')
        rows = [None if row is None else list(row.items()) for row in told['top_logprobs']]
        _check_length('top_logprobs', rows, names)
    prompt = _prompt_ids(prompt)
    if rows[0] is None:  # echo: the prompt stands among them
        names, rows = names[len(prompt) :], rows[len(prompt) :]
    n = len(prompt)
    ids = [_named(name, n + i) for i, name in enumerate(names)]
    places = [[(_named(name, n + i), x) for name, x in row or ()] for i, row in enumerate(rows)]
    return [*prompt, *ids], [*[None] * n, *places], n


def _of_sglang(reply: dict[str, Any], part: str | None) -> tuple[list[int], list[Best | None], int | None]:
    meta = reply['meta_info']
    if not isinstance(meta, dict):
        raise DataError(f'"meta_info" must be an object, got {kind_of(meta)}')
    prompt_rows = meta.get('input_top_logprobs') or []
    # Of a request for completions alone there may be one entry, which tells nothing.
    part = part or ('prompt' if any(prompt_rows) else 'completion')
    given = reply.get('prompt_token_ids')
    prompt = _ids_of_prompt(meta) if given is None else _prompt_ids(given)
    kind = 'input' if part == 'prompt' else 'output'
    tokens, rows = meta.get(f'{kind}_token_logprobs'), meta.get(f'{kind}_top_logprobs')
    if not tokens or not rows:
        more = ' and "logprob_start_len": 0' if part == 'prompt' else ''
        raise DataError(
            f'has no "{kind}_top_logprobs"; ask with "return_logprob": true and "top_logprobs_num": 20{more}'
        )
    _check_length(f'{kind}_top_logprobs', rows, tokens)
    before = len(prompt) - len(tokens) if part == 'prompt' else len(prompt)
    mine = [_triple(token, before + i)[1] for i, token in enumerate(tokens)]
    if part == 'prompt' and prompt[before:] != mine:
        raise DataError('"prompt_token_ids" must end with the tokens of "input_token_logprobs"')
    places = [
        None if row is None else [(token, x) for x, token in (_triple(one, before + i) for one in row)]
        for i, row in enumerate(rows)
    ]
    ids = prompt if part == 'prompt' else [*prompt, *mine]
    return ids, [*[None] * before, *places], None if part == 'prompt' else before


def _prompt_ids(ids: Any) -> list[int]:
    if ids is None:
        raise DataError('has no "prompt_token_ids"; ask with "return_token_ids": true, or add them')
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise DataError(f'"prompt_token_ids" must be a list of ids, got {json.dumps(ids)[:40]}')
    return ids


def _ids_of_prompt(meta: dict[str, Any]) -> list[int]:
    tokens = meta.get('input_token_logprobs') or []
    if not tokens or len(tokens) != meta.get('prompt_tokens', len(tokens)):
        raise DataError(
            f'has ids of {len(tokens)} of the {meta.get("prompt_tokens", "")} prompt tokens; ask with '
            '"logprob_start_len": 0, or add "prompt_token_ids"'
        )
    return [_triple(token, place)[1] for place, token in enumerate(tokens)]


def _triple(one: Any, place: int) -> tuple[Any, int]:
    """Log-prob and id of `[logprob, id, text]`."""
    if not isinstance(one, list) or len(one) < 2 or not isinstance(one[1], int):
        raise DataError(f'token {place}: must be [log-prob, id, text], got {json.dumps(one)[:40]}')
    return one[0], one[1]


def _named(name: Any, place: int) -> int:
    """The id of 'token_id:5'."""
    text = name.removeprefix('token_id:') if isinstance(name, str) else ''
    if text == name or not text:
        raise DataError(
            f'token {place}: must be told by its id, got {json.dumps(name)[:40]}; ask with '
            '"return_tokens_as_token_ids": true'
        )
    return _number(text, place)


def _number(text: str, place: int) -> int:
    if not (text.isascii() and text.isdigit()):
        raise DataError(f'token {place}: must be told by its id, got {json.dumps(text)[:40]}')
    return int(text)


def _check_length(name: str, rows: Any, tokens: Sequence[Any]) -> None:
    if not isinstance(rows, list) or len(rows) != len(tokens):
        got = f'{len(rows)}' if isinstance(rows, list) else kind_of(rows)
        raise DataError(f'"{name}" must have an entry for each of the {len(tokens)} tokens, got {got}')
