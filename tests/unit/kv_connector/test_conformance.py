"""The conformance suite that third parties run, on every connector that needs nothing else installed.

All but its part with other processes, which is in test_conformance_processes.py.
"""

from kvasir.kv_connector.conformance import connect  # noqa: F401  (a fixture)
from kvasir.kv_connector.conformance.frames import *  # noqa: F403  (tests, all of them)
from kvasir.kv_connector.conformance.transfers import *  # noqa: F403
from kvasir.kv_connector.conformance.wires import *  # noqa: F403
