from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_HIT: _ClassVar[Outcome]
    OUTCOME_STORED: _ClassVar[Outcome]
    OUTCOME_MISS: _ClassVar[Outcome]
    OUTCOME_CORRUPT: _ClassVar[Outcome]
    OUTCOME_THROTTLED: _ClassVar[Outcome]
    OUTCOME_ERROR: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_HIT: Outcome
OUTCOME_STORED: Outcome
OUTCOME_MISS: Outcome
OUTCOME_CORRUPT: Outcome
OUTCOME_THROTTLED: Outcome
OUTCOME_ERROR: Outcome

class Keys(_message.Message):
    __slots__ = ("digests", "pools", "pool_of")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    POOL_OF_FIELD_NUMBER: _ClassVar[int]
    digests: bytes
    pools: _containers.RepeatedScalarFieldContainer[str]
    pool_of: bytes
    def __init__(self, digests: _Optional[bytes] = ..., pools: _Optional[_Iterable[str]] = ..., pool_of: _Optional[bytes] = ...) -> None: ...

class ObjectMeta(_message.Message):
    __slots__ = ("namespace", "length", "checksum", "parent", "depth")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    length: int
    checksum: bytes
    parent: bytes
    depth: int
    def __init__(self, namespace: _Optional[bytes] = ..., length: _Optional[int] = ..., checksum: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: str
    def __init__(self, client: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("version", "instance", "principal", "tenant", "verbs", "store", "persistent", "bounded", "limits")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    VERBS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    BOUNDED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance: bytes
    principal: str
    tenant: str
    verbs: _containers.RepeatedScalarFieldContainer[str]
    store: str
    persistent: bool
    bounded: bool
    limits: Limits
    def __init__(self, version: _Optional[str] = ..., instance: _Optional[bytes] = ..., principal: _Optional[str] = ..., tenant: _Optional[str] = ..., verbs: _Optional[_Iterable[str]] = ..., store: _Optional[str] = ..., persistent: _Optional[bool] = ..., bounded: _Optional[bool] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("keys", "message_bytes", "object_bytes", "client_bytes", "streams", "call_seconds")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    CALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    keys: int
    message_bytes: int
    object_bytes: int
    client_bytes: int
    streams: int
    call_seconds: float
    def __init__(self, keys: _Optional[int] = ..., message_bytes: _Optional[int] = ..., object_bytes: _Optional[int] = ..., client_bytes: _Optional[int] = ..., streams: _Optional[int] = ..., call_seconds: _Optional[float] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class BitmapReply(_message.Message):
    __slots__ = ("bits",)
    BITS_FIELD_NUMBER: _ClassVar[int]
    bits: bytes
    def __init__(self, bits: _Optional[bytes] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class OutcomesReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("keys", "lengths")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("pieces", "payload")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    pieces: GetPieces
    payload: bytes
    def __init__(self, pieces: _Optional[_Union[GetPieces, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class GetPieces(_message.Message):
    __slots__ = ("items", "outcomes", "sizes", "checksums")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedScalarFieldContainer[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    checksums: bytes
    def __init__(self, items: _Optional[_Iterable[int]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ..., sizes: _Optional[_Iterable[int]] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class SetRequest(_message.Message):
    __slots__ = ("pieces", "payload")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    pieces: SetPieces
    payload: bytes
    def __init__(self, pieces: _Optional[_Union[SetPieces, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class SetPieces(_message.Message):
    __slots__ = ("sizes", "begins", "keys", "metas")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    begins: _containers.RepeatedScalarFieldContainer[bool]
    keys: Keys
    metas: _containers.RepeatedCompositeFieldContainer[ObjectMeta]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., begins: _Optional[_Iterable[bool]] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., metas: _Optional[_Iterable[_Union[ObjectMeta, _Mapping]]] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("counts", "regions", "offsets", "sizes")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    regions: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., regions: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class GetIntoRequest(_message.Message):
    __slots__ = ("keys", "lengths", "places")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    lengths: _containers.RepeatedScalarFieldContainer[int]
    places: Places
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ..., places: _Optional[_Union[Places, _Mapping]] = ...) -> None: ...

class SetFromRequest(_message.Message):
    __slots__ = ("keys", "metas", "places")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    metas: _containers.RepeatedCompositeFieldContainer[ObjectMeta]
    places: Places
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., metas: _Optional[_Iterable[_Union[ObjectMeta, _Mapping]]] = ..., places: _Optional[_Union[Places, _Mapping]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("present", "metas", "stored_at", "keys")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    present: bytes
    metas: _containers.RepeatedCompositeFieldContainer[ObjectMeta]
    stored_at: _containers.RepeatedScalarFieldContainer[float]
    keys: Keys
    def __init__(self, present: _Optional[bytes] = ..., metas: _Optional[_Iterable[_Union[ObjectMeta, _Mapping]]] = ..., stored_at: _Optional[_Iterable[float]] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("namespace", "cursor")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    cursor: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ScanReply(_message.Message):
    __slots__ = ("keys", "metas", "stored_at", "cursor")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    metas: _containers.RepeatedCompositeFieldContainer[ObjectMeta]
    stored_at: _containers.RepeatedScalarFieldContainer[float]
    cursor: bytes
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., metas: _Optional[_Iterable[_Union[ObjectMeta, _Mapping]]] = ..., stored_at: _Optional[_Iterable[float]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("namespace", "texts", "numbers", "states")
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    texts: _containers.ScalarMap[str, str]
    numbers: _containers.ScalarMap[str, int]
    states: bool
    def __init__(self, namespace: _Optional[bytes] = ..., texts: _Optional[_Mapping[str, str]] = ..., numbers: _Optional[_Mapping[str, int]] = ..., states: _Optional[bool] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[Namespace]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[Namespace, _Mapping]]] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UsageReply(_message.Message):
    __slots__ = ("objects", "payload_bytes", "used_bytes", "capacity_bytes", "texts", "numbers")
    class TextsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    objects: int
    payload_bytes: int
    used_bytes: int
    capacity_bytes: int
    texts: _containers.ScalarMap[str, str]
    numbers: _containers.ScalarMap[str, int]
    def __init__(self, objects: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., texts: _Optional[_Mapping[str, str]] = ..., numbers: _Optional[_Mapping[str, int]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
