"""Parts of a page in Markdown, as lists of lines."""

import statistics
from collections.abc import Iterable, Mapping, Sequence


def table(header: str, rows: Iterable[Sequence[object]], num_texts: int = 1) -> list[str]:
    """header: "name | ms | ratio". The first `num_texts` columns hold text; the others numbers, on the right."""
    num_numbers = header.count("|") + 1 - num_texts
    lines = [" | ".join(map(str, row)) for row in rows]
    head, *body = (f"| {line} |".replace("|  |", "| |") for line in (header, *lines))
    return [head, "|" + "---|" * num_texts + "---:|" * num_numbers, *body]


def facts(about: Mapping[str, object]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.items())


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median (least to most)."""
    least, median, most = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{median} ({least} to {most})"
