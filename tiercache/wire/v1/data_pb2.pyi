from tiercache.wire.v1 import storage_pb2 as _storage_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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

class DataSet(_message.Message):
    __slots__ = ("keys", "metas")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    keys: _storage_pb2.Keys
    metas: _containers.RepeatedCompositeFieldContainer[_storage_pb2.ObjectMeta]
    def __init__(self, keys: _Optional[_Union[_storage_pb2.Keys, _Mapping]] = ..., metas: _Optional[_Iterable[_Union[_storage_pb2.ObjectMeta, _Mapping]]] = ...) -> None: ...

class DataFailure(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: int
    text: str
    def __init__(self, code: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...
