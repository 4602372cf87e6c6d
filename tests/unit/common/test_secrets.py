from pathlib import Path

import pytest

from kvasir.common.addresses import join_address, split_address
from kvasir.common.secrets import cluster_secret, is_loopback, new_secret, same_secret

SECRET = "0123456789abcdef"


def test_the_file_comes_before_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    environ = {"KVASIR_CLUSTER_SECRET": SECRET[::-1]}
    assert cluster_secret(environ, str(path)) == SECRET
    assert cluster_secret(environ) == SECRET[::-1]
    assert cluster_secret({}) is None


@pytest.mark.parametrize("bad", ["", "short", "x" * 15, "schlüssel" * 3, "two\nlines" * 3])
def test_a_weak_or_unsendable_secret_is_refused_without_showing_it(bad: str) -> None:
    with pytest.raises(ValueError, match="KVASIR_CLUSTER_SECRET") as refused:
        cluster_secret({"KVASIR_CLUSTER_SECRET": bad})
    assert not bad or bad not in str(refused.value)


def test_new_secrets_are_accepted_and_differ() -> None:
    first, second = new_secret(), new_secret()
    assert first != second
    assert cluster_secret({"KVASIR_CLUSTER_SECRET": first}) == first


def test_same_secret() -> None:
    assert same_secret(SECRET, SECRET)
    assert same_secret(SECRET.encode(), SECRET)
    assert not same_secret(None, SECRET)
    assert not same_secret("ü" * 16, SECRET)
    assert not same_secret(SECRET[:-1], SECRET)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-1", "localhost.example"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("address", "pair"), [("127.0.0.1:50051", ("127.0.0.1", 50051)), ("node:0", ("node", 0)), ("[::1]:8", ("::1", 8))]
)
def test_addresses(address: str, pair: tuple[str, int]) -> None:
    assert split_address(address) == pair
    assert join_address(*pair) == address


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:-1", "host:65536"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
