"""Parts of a page in Markdown, as lists of lines."""

import statistics
from collections.abc import Iterable, Mapping, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], num_texts: int = 1) -> list[str]:
    """The first `num_texts` columns hold text; the others numbers, which stand to the right."""
    rule = "|" + "---|" * num_texts + "---:|" * (len(header) - num_texts)
    head, *others = (f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |") for cells in (header, *rows))
    return [head, rule, *others]


def facts(about: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median (least to most)."""
    least, median, most = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{median} ({least} to {most})"
