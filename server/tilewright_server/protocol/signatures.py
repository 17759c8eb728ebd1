"""Signatures of what is code, with errors of the server: see ``tilewright_native.signatures``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from tilewright_kit.types.errors import (
    AccessError,
    InvalidArgumentError,
    NotFoundError,
    TilewrightError,
    UnsupportedError,
)
from tilewright_native import signatures
from tilewright_native.signatures import SUFFIX, signature_path

__all__ = [
    "SUFFIX",
    "check_record",
    "check_signature",
    "read_private",
    "read_trusted",
    "sign",
    "signature_path",
    "signed_record",
]

P = ParamSpec("P")
T = TypeVar("T")
_CLASSES: tuple[type[TilewrightError], ...] = (AccessError, InvalidArgumentError, NotFoundError, UnsupportedError)
_BY_CODE = {item.code: item for item in _CLASSES}


def _raising(function: Callable[P, T]) -> Callable[P, T]:
    """The function, raising errors of the server."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except signatures.SignatureProblem as problem:
            raise _BY_CODE[problem.code](problem.reason, **problem.words) from problem.__cause__

    return call


check_record = _raising(signatures.check_record)
check_signature = _raising(signatures.check_signature)
read_private = _raising(signatures.read_private)
read_trusted = _raising(signatures.read_trusted)
sign = _raising(signatures.sign)
signed_record = _raising(signatures.signed_record)
