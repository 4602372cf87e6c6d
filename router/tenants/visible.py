"""What one tenant may see of metrics where tenants are isolated."""

import re

from kvasir.router.tenants.tenant import Tenant

_LABEL = re.compile(rb'[{,]tenant="((?:[^"\\]|\\.)*)"')


def visible_metrics(text: bytes, tenant: Tenant) -> bytes:
    """Prometheus text without the samples that name another tenant; an operator sees all of them."""
    if tenant.is_operator:
        return text
    own = tenant.name.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"").encode()

    def is_visible(line: bytes) -> bool:
        named = None if line.startswith(b"#") else _LABEL.search(line)
        return named is None or named[1] == own

    return b"\n".join(line for line in text.split(b"\n") if is_visible(line))
