"""What many tests of the engine start from."""

import pytest

from kvasir.engine.grammar import Grammars
from tests.tokenizers import save_byte_level
from tests.unit.engine.grammar_world import Vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(save_byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> Grammars:
    return vocabulary.grammars()
