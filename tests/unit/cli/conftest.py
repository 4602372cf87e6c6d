from tests.unit.bench.conftest import scripted

__all__ = ["scripted"]
