"""Every error that we know has a status of its own."""

import pytest

from kvasir.common.errors import InvalidRequest, NumericalError, Overloaded, ServingError
from kvasir.router.openai.errors import (
    STATUS,
    HttpError,
    ModelNotFound,
    StoreUnavailable,
    error_body,
    error_response,
    status_of,
)


def all_subclasses(cls: type) -> set[type]:
    direct: list[type] = cls.__subclasses__()
    return set(direct).union(*map(all_subclasses, direct))


def test_every_serving_error_has_a_status() -> None:
    ours = {cls for cls in all_subclasses(ServingError) if cls.__module__ == ServingError.__module__}
    assert ours | {ServingError, StoreUnavailable} == STATUS.keys()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("no", "field", "why"), 400),
        (ModelNotFound("x"), 404),
        (Overloaded("full", 0.2), 503),
        (NumericalError("nan"), 500),
        (HttpError(413, "big"), 413),
        (ValueError("inside"), 500),
    ],
)
def test_bodies_have_all_four_keys(error: Exception, status: int) -> None:
    assert status_of(error) == status
    assert set(error_body(error)["error"]) == {"message", "type", "param", "code"}
    assert error_response(error).status_code == status


def test_only_what_may_be_tried_again_says_when() -> None:
    assert error_response(Overloaded("full", 2.1)).headers["retry-after"] == "3"
    assert error_response(Overloaded("full", 0.0)).headers["retry-after"] == "1"
    assert "retry-after" not in error_response(InvalidRequest("no")).headers
