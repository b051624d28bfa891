# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mii_zmq import errors
from mii_zmq.errors import InternalError, MiiError, RequestError, ServiceError, from_wire


def every_class(root: type[MiiError] = MiiError) -> list[type[MiiError]]:
    subclasses = [cls for cls in root.__subclasses__() if cls.__module__ == "mii_zmq.errors"]
    return [root, *(found for cls in subclasses for found in every_class(cls))]


@pytest.mark.parametrize("cls", every_class(), ids=lambda cls: cls.__name__)
def test_an_error_survives_the_wire(cls: type[MiiError]) -> None:
    error = cls("what and why", param="top_p", retry_after_ms=250, emitted_tokens=7)
    copy = from_wire(error.to_wire())
    assert (copy.message, copy.param, copy.retry_after_ms, copy.emitted_tokens) == ("what and why", "top_p", 250, 7)
    assert (copy.code, copy.retryable, str(copy)) == (cls.code, cls.retryable, "what and why")
    if cls not in (MiiError, RequestError):
        assert type(copy) is cls


def test_absent_facts_stay_out_of_the_wire_form() -> None:
    assert errors.NoWorkers("none").to_wire() == {
        "code": "no_workers",
        "message": "none",
        "retryable": True,
        "emitted_tokens": 0,
    }


def test_an_unknown_code_keeps_its_meaning_for_the_caller() -> None:
    assert type(from_wire({"code": "from_the_future", "message": "later", "retryable": True})) is ServiceError
    assert type(from_wire({"code": "from_the_future", "message": "never"})) is InternalError


@pytest.mark.parametrize("wire", [{}, {"code": 5, "message": None, "param": 3, "retry_after_ms": "x"}])
def test_malformed_wire_forms_still_give_an_error(wire: dict[str, object]) -> None:
    error = from_wire(wire)
    assert isinstance(error, InternalError)
    assert (error.param, error.retry_after_ms) == (None, None)


def test_status_codes_separate_the_callers_faults_from_ours() -> None:
    for cls in every_class(RequestError):
        assert 400 <= cls.http_status < 500 or cls in (errors.DeadlineExceeded, errors.Overloaded)
    for cls in every_class(ServiceError):
        assert cls.http_status >= 500
