"""What an output must match."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Grammar:
    """Travels as its source; whoever needs it compiles it: `kvasir.common.grammar_compiler`."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str
