"""What a node takes to be ready, as far as a test can hold it without a clock."""

import subprocess
import sys
from pathlib import Path

from tests.unit.engine.checkpoints import save_checkpoint

_STEPS = """
import sys
from kvasir.engine.factory import build_engine
from kvasir.engine.settings import EngineSettings

build_engine(EngineSettings(model=sys.argv[1], kv_cache_memory=1 << 22))  # its warm-up decodes
print(sorted({"torch._dynamo", "torch.onnx", "sympy", "transformers"} & set(sys.modules)))
"""


def test_a_decode_step_on_a_cpu_imports_no_compiler_of_torch(tmp_path: Path) -> None:
    """It did, for a second, when the loops of the first one were recorded."""
    save_checkpoint(tmp_path)
    command = [sys.executable, "-c", _STEPS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
