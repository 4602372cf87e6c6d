from hashlib import sha256
from pathlib import Path

import pytest

from kvasir.router.tenants.tenant import Limits, Tenant, read_tenants, tenant_of_key

DIGEST = sha256(b"the key").hexdigest()


def test_a_file_names_tenants_by_the_digest_of_their_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{name: a, sha256: {DIGEST}, tokens_per_minute: 0}}\n- {{name: b, sha256: {'a' * 64}}}\n")
    defaults = Limits(requests_per_minute=5, tokens_per_minute=7)
    a, b = read_tenants(path, defaults)
    assert (a.name, a.digest) == ("a", tenant_of_key("the key", defaults).digest)
    assert a.limits == Limits(requests_per_minute=5)
    assert b.limits == defaults


@pytest.mark.parametrize(
    "content",
    [
        "- {name: a}",
        "- {name: a, sha256: abc}",
        "- {name: a, key: plain}",
        f"- {{name: a, sha256: {DIGEST}, rpm: 3}}",
        f"- {{name: a, sha256: {DIGEST}, requests_per_minute: -1}}",
        f"- {{name: a, sha256: {DIGEST}}}\n- {{name: a, sha256: {'a' * 64}}}",
        f"- {{name: a, sha256: {DIGEST}}}\n- {{name: b, sha256: {DIGEST}}}",
        "name: [",
        "just text",
    ],
)
def test_a_file_that_says_anything_else_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"keys\.yaml"):
        read_tenants(path, Limits())


def test_the_salts_of_two_tenants_never_meet() -> None:
    a, b = Tenant("a", b"1"), Tenant("b", b"2")
    assert len({tenant.salted(salt) for tenant in (a, b) for salt in ("", "x")}) == 4
    assert a.salted("x") == a.salted("x")
