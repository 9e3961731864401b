from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Session(_message.Message):
    __slots__ = ("token", "refusal")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    refusal: str
    def __init__(self, token: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("attach",)
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("region", "refusal")
    REGION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    region: int
    refusal: str
    def __init__(self, region: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...
