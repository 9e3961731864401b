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

class RemovalCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REMOVAL_CAUSE_UNSPECIFIED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_EVICTED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_DELETED: _ClassVar[RemovalCause]
    REMOVAL_CAUSE_CORRUPT: _ClassVar[RemovalCause]

class ReloadError(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELOAD_ERROR_NONE: _ClassVar[ReloadError]
    RELOAD_ERROR_CONFIG: _ClassVar[ReloadError]
    RELOAD_ERROR_REFUSED: _ClassVar[ReloadError]
    RELOAD_ERROR_STORAGE: _ClassVar[ReloadError]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_HIT: Outcome
OUTCOME_STORED: Outcome
OUTCOME_MISS: Outcome
OUTCOME_CORRUPT: Outcome
OUTCOME_THROTTLED: Outcome
OUTCOME_ERROR: Outcome
REMOVAL_CAUSE_UNSPECIFIED: RemovalCause
REMOVAL_CAUSE_EVICTED: RemovalCause
REMOVAL_CAUSE_DELETED: RemovalCause
REMOVAL_CAUSE_CORRUPT: RemovalCause
RELOAD_ERROR_NONE: ReloadError
RELOAD_ERROR_CONFIG: ReloadError
RELOAD_ERROR_REFUSED: ReloadError
RELOAD_ERROR_STORAGE: ReloadError

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
    __slots__ = ("namespace", "length", "checksum", "parent", "depth", "value", "worker")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    length: int
    checksum: bytes
    parent: bytes
    depth: int
    value: float
    worker: int
    def __init__(self, namespace: _Optional[bytes] = ..., length: _Optional[int] = ..., checksum: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., value: _Optional[float] = ..., worker: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("client",)
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    client: str
    def __init__(self, client: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("version", "instance", "principal", "tenant", "verbs", "store", "persistent", "bounded", "limits", "data", "unordered", "unlisted")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    VERBS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    PERSISTENT_FIELD_NUMBER: _ClassVar[int]
    BOUNDED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    UNORDERED_FIELD_NUMBER: _ClassVar[int]
    UNLISTED_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance: bytes
    principal: str
    tenant: str
    verbs: _containers.RepeatedScalarFieldContainer[str]
    store: str
    persistent: bool
    bounded: bool
    limits: Limits
    data: DataPort
    unordered: bool
    unlisted: bool
    def __init__(self, version: _Optional[str] = ..., instance: _Optional[bytes] = ..., principal: _Optional[str] = ..., tenant: _Optional[str] = ..., verbs: _Optional[_Iterable[str]] = ..., store: _Optional[str] = ..., persistent: _Optional[bool] = ..., bounded: _Optional[bool] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., data: _Optional[_Union[DataPort, _Mapping]] = ..., unordered: _Optional[bool] = ..., unlisted: _Optional[bool] = ...) -> None: ...

class DataPort(_message.Message):
    __slots__ = ("port", "token", "connections")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    port: int
    token: bytes
    connections: int
    def __init__(self, port: _Optional[int] = ..., token: _Optional[bytes] = ..., connections: _Optional[int] = ...) -> None: ...

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

class AdviseRequest(_message.Message):
    __slots__ = ("keys", "values", "worker")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    values: _containers.RepeatedScalarFieldContainer[float]
    worker: int
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., values: _Optional[_Iterable[float]] = ..., worker: _Optional[int] = ...) -> None: ...

class AdviseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OutcomesReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, str]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("keys", "lengths", "peek")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    lengths: _containers.RepeatedScalarFieldContainer[int]
    peek: bool
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ..., peek: _Optional[bool] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: GetHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[GetHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class GetHeader(_message.Message):
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
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: SetHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[SetHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class UnreadHeader(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    payload: bytes
    def __init__(self, header: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class SetHeader(_message.Message):
    __slots__ = ("keys", "metas")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    metas: _containers.RepeatedCompositeFieldContainer[ObjectMeta]
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., metas: _Optional[_Iterable[_Union[ObjectMeta, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("keys", "lengths", "places", "peek")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    lengths: _containers.RepeatedScalarFieldContainer[int]
    places: Places
    peek: bool
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ..., places: _Optional[_Union[Places, _Mapping]] = ..., peek: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("present", "metas", "stored_at", "keys", "tiers")
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    present: bytes
    metas: _containers.RepeatedCompositeFieldContainer[ObjectMeta]
    stored_at: _containers.RepeatedScalarFieldContainer[float]
    keys: Keys
    tiers: Tiers
    def __init__(self, present: _Optional[bytes] = ..., metas: _Optional[_Iterable[_Union[ObjectMeta, _Mapping]]] = ..., stored_at: _Optional[_Iterable[float]] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., tiers: _Optional[_Union[Tiers, _Mapping]] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("namespace", "cursor")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    cursor: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ScanReply(_message.Message):
    __slots__ = ("keys", "metas", "stored_at", "cursor", "tiers")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    METAS_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    metas: _containers.RepeatedCompositeFieldContainer[ObjectMeta]
    stored_at: _containers.RepeatedScalarFieldContainer[float]
    cursor: bytes
    tiers: Tiers
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., metas: _Optional[_Iterable[_Union[ObjectMeta, _Mapping]]] = ..., stored_at: _Optional[_Iterable[float]] = ..., cursor: _Optional[bytes] = ..., tiers: _Optional[_Union[Tiers, _Mapping]] = ...) -> None: ...

class Tiers(_message.Message):
    __slots__ = ("names", "tier_of")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TIER_OF_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    tier_of: bytes
    def __init__(self, names: _Optional[_Iterable[str]] = ..., tier_of: _Optional[bytes] = ...) -> None: ...

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

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("document",)
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    document: bytes
    def __init__(self, document: _Optional[bytes] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("keys", "pages")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    keys: Keys
    pages: bytes
    def __init__(self, keys: _Optional[_Union[Keys, _Mapping]] = ..., pages: _Optional[bytes] = ...) -> None: ...

class HistoryReply(_message.Message):
    __slots__ = ("tiers", "layouts", "pages", "layout_of", "tier_of", "causes", "times", "forgotten")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_OF_FIELD_NUMBER: _ClassVar[int]
    TIER_OF_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierHistory]
    layouts: _containers.RepeatedScalarFieldContainer[bytes]
    pages: _containers.RepeatedScalarFieldContainer[int]
    layout_of: _containers.RepeatedScalarFieldContainer[int]
    tier_of: _containers.RepeatedScalarFieldContainer[int]
    causes: _containers.RepeatedScalarFieldContainer[RemovalCause]
    times: _containers.RepeatedScalarFieldContainer[float]
    forgotten: float
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierHistory, _Mapping]]] = ..., layouts: _Optional[_Iterable[bytes]] = ..., pages: _Optional[_Iterable[int]] = ..., layout_of: _Optional[_Iterable[int]] = ..., tier_of: _Optional[_Iterable[int]] = ..., causes: _Optional[_Iterable[_Union[RemovalCause, str]]] = ..., times: _Optional[_Iterable[float]] = ..., forgotten: _Optional[float] = ...) -> None: ...

class TierHistory(_message.Message):
    __slots__ = ("name", "present", "since", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    present: bytes
    since: float
    why: str
    def __init__(self, name: _Optional[str] = ..., present: _Optional[bytes] = ..., since: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("since",)
    SINCE_FIELD_NUMBER: _ClassVar[int]
    since: float
    def __init__(self, since: _Optional[float] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("rows", "begun")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[AccountRow]
    begun: float
    def __init__(self, rows: _Optional[_Iterable[_Union[AccountRow, _Mapping]]] = ..., begun: _Optional[float] = ...) -> None: ...

class AccountRow(_message.Message):
    __slots__ = ("hour", "tenant", "written_objects", "written_bytes", "read_objects", "read_bytes", "missed_objects", "found_objects", "absent_objects", "restored_tokens", "unpriced_tokens", "saved_flops", "asked_tokens", "unsized_objects", "timed_tokens", "prefill_seconds", "read_seconds")
    HOUR_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    MISSED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    FOUND_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNPRICED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FLOPS_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNSIZED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    TIMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
    hour: int
    tenant: str
    written_objects: int
    written_bytes: int
    read_objects: int
    read_bytes: int
    missed_objects: int
    found_objects: int
    absent_objects: int
    restored_tokens: int
    unpriced_tokens: int
    saved_flops: float
    asked_tokens: int
    unsized_objects: int
    timed_tokens: int
    prefill_seconds: float
    read_seconds: float
    def __init__(self, hour: _Optional[int] = ..., tenant: _Optional[str] = ..., written_objects: _Optional[int] = ..., written_bytes: _Optional[int] = ..., read_objects: _Optional[int] = ..., read_bytes: _Optional[int] = ..., missed_objects: _Optional[int] = ..., found_objects: _Optional[int] = ..., absent_objects: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., unpriced_tokens: _Optional[int] = ..., saved_flops: _Optional[float] = ..., asked_tokens: _Optional[int] = ..., unsized_objects: _Optional[int] = ..., timed_tokens: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., read_seconds: _Optional[float] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UsageReply(_message.Message):
    __slots__ = ("objects", "payload_bytes", "used_bytes", "capacity_bytes", "texts", "numbers", "tiers")
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
    TIERS_FIELD_NUMBER: _ClassVar[int]
    objects: int
    payload_bytes: int
    used_bytes: int
    capacity_bytes: int
    texts: _containers.ScalarMap[str, str]
    numbers: _containers.ScalarMap[str, int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierReport]
    def __init__(self, objects: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., texts: _Optional[_Mapping[str, str]] = ..., numbers: _Optional[_Mapping[str, int]] = ..., tiers: _Optional[_Iterable[_Union[TierReport, _Mapping]]] = ...) -> None: ...

class TierReport(_message.Message):
    __slots__ = ("name", "kind", "health", "why", "objects", "payload_bytes", "used_bytes", "capacity_bytes", "read_objects", "read_bytes", "written_objects", "written_bytes", "waiting", "dropped", "lost_calls", "last_read", "texts", "numbers")
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
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    LOST_CALLS_FIELD_NUMBER: _ClassVar[int]
    LAST_READ_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    health: str
    why: str
    objects: int
    payload_bytes: int
    used_bytes: int
    capacity_bytes: int
    read_objects: int
    read_bytes: int
    written_objects: int
    written_bytes: int
    waiting: int
    dropped: int
    lost_calls: int
    last_read: float
    texts: _containers.ScalarMap[str, str]
    numbers: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., health: _Optional[str] = ..., why: _Optional[str] = ..., objects: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., read_objects: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_objects: _Optional[int] = ..., written_bytes: _Optional[int] = ..., waiting: _Optional[int] = ..., dropped: _Optional[int] = ..., lost_calls: _Optional[int] = ..., last_read: _Optional[float] = ..., texts: _Optional[_Mapping[str, str]] = ..., numbers: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("drop",)
    DROP_FIELD_NUMBER: _ClassVar[int]
    drop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, drop: _Optional[_Iterable[str]] = ...) -> None: ...

class ReloadReply(_message.Message):
    __slots__ = ("error", "why", "changed", "at_next_start")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    AT_NEXT_START_FIELD_NUMBER: _ClassVar[int]
    error: ReloadError
    why: str
    changed: _containers.RepeatedScalarFieldContainer[str]
    at_next_start: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, error: _Optional[_Union[ReloadError, str]] = ..., why: _Optional[str] = ..., changed: _Optional[_Iterable[str]] = ..., at_next_start: _Optional[_Iterable[str]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
