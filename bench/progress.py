"""How far a benchmark has come, on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvasir.bench.openai_client import Outcome


@contextmanager
def progress_bar(num_requests: int, enabled: bool = True) -> Iterator[Callable[[Outcome], None]]:
    """Gives the function to call with each outcome. Where stderr is no terminal, one line when all is done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), disable=not enabled) as progress:
        task = progress.add_task("requests", total=num_requests, tokens=0)
        num_tokens = 0

        def advance(outcome: Outcome) -> None:
            nonlocal num_tokens
            num_tokens += outcome.timeline.num_output_tokens if outcome.timeline else 0
            progress.update(task, advance=1, tokens=num_tokens)

        yield advance
