from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DataOpen(_message.Message):
    __slots__ = ("token", "authorization")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZATION_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    authorization: str
    def __init__(self, token: _Optional[bytes] = ..., authorization: _Optional[str] = ...) -> None: ...

class DataCall(_message.Message):
    __slots__ = ("method", "seconds", "request")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    method: str
    seconds: float
    request: bytes
    def __init__(self, method: _Optional[str] = ..., seconds: _Optional[float] = ..., request: _Optional[bytes] = ...) -> None: ...

class DataFailure(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: int
    text: str
    def __init__(self, code: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...
