"""What `patches/megatron-lm` puts into pretrain_gpt.py: options of its own command line, and the schedules' losses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .attach_options import Wanted, add_options, wanted

PREFIX = '--twinkle-'


def with_arguments(provider: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """The script's `extra_args_provider` with the group 'twinkle' beside what it adds itself.

    Megatron-LM keeps these arguments with its own, in its log and in its checkpoints. What they say is checked as they
    are parsed: a wrong one is one message and exit code 2 before anything is built.
    """

    def add(parser: Any) -> Any:
        parser = parser if provider is None else provider(parser)
        group = parser.add_argument_group('twinkle', 'losses and metrics of twinkle_megatron')
        add_options(group, PREFIX, None)
        parse = parser.parse_known_args

        @functools.wraps(parse)
        def parse_and_check(*args: Any, **kwargs: Any) -> Any:
            found = parse(*args, **kwargs)
            try:
                wanted(found[0], PREFIX)
            except ValueError as error:
                parser.error(str(error))
            return found

        parser.parse_known_args = parse_and_check  # `parse_args` calls it, too
        return parser

    return add


def with_losses(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's `pretrain`, with the loss and the metrics that the parsed arguments ask for; as it was without
    `--twinkle-loss`. See `attach` for what the loss may be. Metrics are printed as by `twinkle_megatron.run`."""

    @functools.wraps(pretrain)
    def run(*args: Any, **kwargs: Any) -> Any:
        from .reporter import Reporter, patched

        reporter = Reporter(_asked)
        with patched(reporter):
            result = pretrain(*args, **kwargs)
            reporter.finish()
            return result

    return run


def _asked() -> Wanted | None:
    """What the arguments say, once they are parsed, which older versions do inside of `pretrain`."""
    from megatron.training import get_args  # pyright: ignore[reportMissingImports]

    return wanted(get_args(), PREFIX)
