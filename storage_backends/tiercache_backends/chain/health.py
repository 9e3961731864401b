"""Health of one store of a chain: it is opened, examined, left out while it is sick, and comes back."""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import (
    ClosedError,
    ConfigError,
    RefusedError,
    StorageError,
    UnavailableError,
    UnlistedError,
)
from tiercache.keys import KEY_BYTES as DIGEST_BYTES
from tiercache.storage.attached import AttachedMemory
from tiercache.storage.base import (
    Capabilities,
    GetItem,
    NamespaceRecord,
    SetItem,
    SharedMemory,
    StorageBackend,
)
from tiercache.storage.env import Env
from tiercache.storage.guard import GiveUp, Guard, NoThreadError, PendingCall
from tiercache.storage.shares import Shares
from tiercache.storage.tiers import SET_READ_ONLY, STUCK
from tiercache_backends.chain.figures import Figures
from tiercache_backends.chain.settings import CANARY, TierSettings

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CANARY_BYTES: Final = 64
_SUSPECTED_S: Final = 1.0
"""Minimum seconds from one examination of a store to the next, if it is suspected to be sick."""
_READ_ONLY_S: Final = 10.0
"""Seconds from one examination of a store that takes no new objects to the next."""
_MAX_EXAMINATIONS: Final = 8
"""Maximum number of examinations in a row; each makes up for what came during the one before."""
_MAX_DELETIONS: Final = 1 << 16
"""Maximum number of deletions that are remembered for a store that is left out."""
_SHARE_BYTES: Final = 8 << 30
"""Bytes of payload that count for a change of shares, which may evict many objects."""
KEY_BYTES: Final = 16 << 10
"""Bytes of payload that count for each key of a call without payload, so that large batches get more time."""


class Health(enum.StrEnum):
    """Whether a tier takes part in the calls of its chain."""

    SERVING = "serving"
    READ_ONLY = "read-only"
    """The tier is read, but takes no new objects."""
    OUT = "out"
    """The tier does not answer, or answers wrongly; it is examined from time to time."""


class MonitoredStore:
    """Store of a tier, with threads and deadlines of its own, which is used only while it is well.

    A call that takes too long is given up, and its thread is replaced. The store is then *out* until an
    examination (set, get and delete of a small object, the *canary*) succeeds. Deletions and namespaces that
    it misses meanwhile are made up for before it serves again.

    Thread safety: any thread.
    """

    def __init__(
        self,
        settings: TierSettings,
        open_store: Callable[[], StorageBackend],
        capabilities: Capabilities,
        env: Env,
    ) -> None:
        self.settings = settings
        self.leaving = ""
        """Progress of a tier that leaves the chain, and takes no new objects; empty if it stays."""
        self.name: Final = settings.name
        self.kind: Final = str(settings.section.get("type", ""))
        self.figures: Final = Figures(env, settings.write_per_day)
        self._declared: Final = capabilities
        self._open: Final = open_store
        self._env: Final = env
        self._guard: Final = Guard(
            f"tier {settings.name}",
            settings.threads,
            settings.deadline,
            on_hang=self.leave_out,
            on_return=self._note_returned,
            clock=env.monotonic,
        )
        self._lock: Final = threading.Lock()  # guards the fields from here on
        self._store: StorageBackend | None = None
        self._takes_writes = not settings.read_only
        self._suspected = False
        self._examined_at = 0.0
        self._is_examining = False
        self._hung_sets = 0
        self._unclosed: StorageBackend | None = None  # the store of a closed tier in which a call hangs
        self._closed = False
        # What the store has to know before it serves:
        self._deletions: Final[dict[bytes, ObjectKey]] = {}  # those that it has not made
        self._namespaces: Final[dict[bytes, NamespaceRecord]] = {}
        self._memories: tuple[AttachedMemory, ...] = ()
        self._shares: Shares | None = None
        self._is_told = True
        """Whether namespaces, memories and shares are as the last examination began to tell them."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the store; before it is open, those that its settings tell."""
        store = self._store
        return self._declared if store is None else store.capabilities

    @property
    def health(self) -> Health:
        """Whether the tier takes part in calls."""
        if self._store is None or self._guard.is_left_out:
            return Health.OUT
        return Health.SERVING if self._takes_writes and not self.leaving else Health.READ_ONLY

    @property
    def is_readable(self) -> bool:
        """Whether the tier is asked."""
        return self.health is not Health.OUT

    @property
    def is_writable(self) -> bool:
        """Whether the tier takes new objects."""
        return self.health is Health.SERVING and self.figures.has_budget()

    @property
    def why(self) -> str:
        """Reason why the tier is not serving; empty while it is."""
        if self.leaving:
            return self.leaving if self.is_readable else f"{STUCK}: {self._guard.why}"
        return "" if self.health is Health.SERVING else self._guard.why

    @property
    def opened(self) -> StorageBackend | None:
        """The store, if it is open, also while the tier is left out; calls of it have no deadline."""
        return self._store

    @property
    def memories(self) -> list[SharedMemory]:
        """Memory that is attached."""
        return [attached.memory for attached in self._memories]

    # --- examinations
    # --------------------------------------------------------------------------------------------------------

    def begin_open(self) -> Callable[[], None]:
        """Begin to open the store and to examine it; the function that is returned waits for the end.

        A tier that cannot be opened is out until it can. That function raises ConfigError for a setting that
        the store refuses.
        """
        examination = self._begin_examination()

        def end() -> None:
            try:
                self._end(examination)
            except ConfigError:
                self._guard.close()
                raise
            except (StorageError, ClosedError) as error:
                self.leave_out(str(error))

        return end

    def configure(self, settings: TierSettings) -> None:
        """Change settings that can change while the tier serves, and examine it."""
        self.settings = settings
        self.figures.limit(settings.write_per_day)
        if self.is_readable:
            try:
                self._end(self._begin_examination())
            except (StorageError, ClosedError) as error:
                self.leave_out(str(error))

    def tick(self) -> bool:
        """Examine the tier if that is due; return whether it has come back."""
        was = self.health
        if was is Health.OUT:
            if self._hung_sets or not self._guard.is_probe_due():
                return False
            try:
                return self._return()
            except (StorageError, ClosedError, ConfigError) as error:
                self._guard.why = str(error)
                return False
            finally:
                self._guard.probed(False)  # changes nothing after a probe that succeeded
        since = self._env.monotonic() - self._examined_at
        is_stuck = was is Health.READ_ONLY and not self.settings.read_only
        if not ((self._suspected and since >= _SUSPECTED_S) or (is_stuck and since >= _READ_ONLY_S)):
            return False
        self._suspected = False
        try:
            self._end(self._begin_examination())
        except NoThreadError:
            self._suspected = True  # it is busy; examine it another time
            return False
        except (StorageError, ClosedError) as error:
            self.leave_out(str(error))
        return was is not Health.SERVING and self.is_writable

    def _return(self) -> bool:
        """Examine a store that is out until it has made up for everything; return whether it is back.

        1. examination: takes the deletions that wait, and makes them
        2. delete: notes another one, because the store is out, and returns
        3. here: the store must not serve that object, and is examined again
        """
        for _ in range(_MAX_EXAMINATIONS):
            self._end(self._begin_examination())
            with self._lock:
                if self._is_told and not self._deletions:
                    self._guard.probed(True)
                    return True
        self._guard.why = "deletions, namespaces or memory came while it was examined"
        return False

    def _begin_examination(self) -> PendingCall[None]:
        """Begin to open the store if it is not open, to examine it, and to make up for what it has missed."""
        nbytes = len(self._deletions) * KEY_BYTES
        return self._guard.begin("an examination", self._background_examine, nbytes)

    def _background_examine(self) -> None:
        with self._lock:
            if self._is_examining:
                raise UnavailableError("an earlier examination has not returned")
            self._is_examining = True
        try:
            self._examine(self._store or self._open())
        finally:
            self._is_examining = False

    def _examine(self, store: StorageBackend) -> None:
        try:
            if self.settings.read_only:
                takes_writes = False
                _ask(store)
            else:
                takes_writes = _takes_objects(store)
            deletions = self._tell(store, takes_writes=takes_writes)
        except BaseException:  # whatever it is, a store opened for nothing is closed, and it is raised again
            if self._store is not store:
                store.close()
            raise
        with self._lock:
            for key in deletions:
                self._deletions.pop(key.digest, None)
            closed_meanwhile = self._closed and self._store is None
            if not closed_meanwhile:
                self._store = store
            self._takes_writes = takes_writes
            self._guard.why = "" if takes_writes else "it takes no new objects: it is full or read-only"
            if self.settings.read_only:
                self._guard.why = SET_READ_ONLY
            self._examined_at = self._env.monotonic()
        if closed_meanwhile:
            store.close()

    def _tell(self, store: StorageBackend, *, takes_writes: bool) -> Sequence[ObjectKey]:
        """Tell the store what it has to know; return the deletions that it has made. Raises StorageError."""
        with self._lock:
            deletions, namespaces = list(self._deletions.values()), list(self._namespaces.values())
            memories, shares, self._is_told = self._memories, self._shares, True
        if deletions:
            try:
                store.delete(deletions)
            except RefusedError as error:  # it would refuse them again
                _log.warning("tier %s keeps objects deleted while it was out: %s", self.name, error)
        for record in namespaces if takes_writes else ():
            store.register_namespace(record)
        for attached in memories:
            store.attach(attached.memory)
        if shares is not None:
            store.share(shares)
        return deletions

    def leave_out(self, why: str) -> None:
        """Leave the tier out until an examination succeeds; `why` is for people."""
        self._guard.leave_out(why)

    def suspect(self) -> None:
        """Examine the store soon, without leaving it out before."""
        self._suspected = True

    # --- what the store is told now, or when it is back
    # --------------------------------------------------------------------------------------------------------

    def register_namespace(self, record: NamespaceRecord) -> None:
        """Register a namespace."""
        with self._lock:
            known = self._namespaces.get(record.namespace)
            record = record.over(known)
            if record != known:
                self._namespaces[record.namespace], self._is_told = record, False
        if not self.is_writable:
            return
        try:
            self.call("register_namespace", lambda store: store.register_namespace(record))
        except NoThreadError:
            self._suspected = True  # the next examination registers it
        except StorageError as error:
            self.leave_out(f"a namespace could not be registered: {error}")

    def learn_namespaces(self, others: Iterable[MonitoredStore]) -> None:
        """Register the namespaces that other tiers know and this one does not, as far as they answer.

        Without this, the names of objects would leave the chain with the tier that brought them.
        """
        with suppress(StorageError):
            known = {found.namespace: found for found in self.call("namespaces", _namespaces)}
            for other in others:
                with suppress(StorageError):
                    for record in other.call("namespaces", _namespaces) if other.is_readable else ():
                        mine = known.get(record.namespace)
                        known[record.namespace] = record if mine is None else mine.over(record)
                        if known[record.namespace] != mine:
                            self.register_namespace(known[record.namespace])

    def attach(self, memory: SharedMemory) -> None:
        """Tell the store of memory that buffers may lie in."""
        with self._lock:
            others = [attached for attached in self._memories if attached.memory is not memory]
            self._memories = (*others, AttachedMemory(memory, memory.address, memory.nbytes))
            self._is_told = False
        if self.is_readable:
            try:
                self.call("attach", lambda store: store.attach(memory))
            except StorageError as error:
                self.leave_out(f"memory could not be attached: {error}")

    def share(self, shares: Shares) -> None:
        """Let the store keep these shares; raises ConfigError, with nothing changed, if it refuses them."""
        refused: list[ConfigError] = []

        def work(store: StorageBackend) -> None:
            try:
                store.share(shares)
            except ConfigError as error:  # the tier is well
                refused.append(error)

        with self._lock:
            was, self._shares, self._is_told = self._shares, shares, False
        if self.is_readable:
            try:
                self.call("share", work, _SHARE_BYTES)
            except StorageError as error:
                self.leave_out(f"shares could not be given: {error}")
        if refused:
            with self._lock:
                self._shares = was
            raise refused[0]

    def note_deletions(self, keys: Sequence[ObjectKey], why: str = "") -> bool:
        """Remember deletions that the store has missed, and leave it out until it has made them.

        `why` it is left out; if it is out already, nothing, and this returns False, with nothing remembered,
        if it is back by now. Raises UnavailableError if too many deletions wait.
        """
        with self._lock:
            if not why and self.is_readable:
                return False
            self._deletions.update((key.digest, key) for key in keys)
            fits = len(self._deletions) <= _MAX_DELETIONS
            while len(self._deletions) > _MAX_DELETIONS:
                self._deletions.popitem()
            # It may answer again at once, or be opened, and must not serve objects that were deleted.
            self.leave_out(why or self._guard.why)
        if not fits:
            raise UnavailableError(
                f"tier {self.name!r} is left out ({self._guard.why}), and more deletions wait for it than are"
                " remembered; delete again when it is back"
            )
        return True

    # --- the end
    # --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the store within the tier's deadline; a store in which a call hangs is closed afterwards."""
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
            self._guard.why = "it is closed"
            if self._guard.hung:
                self._unclosed, store = store, None
        if store is not None:
            with suppress(StorageError, ClosedError):
                self._end(self._guard.begin("close", store.close))
        self._guard.close()

    def _note_returned(self) -> None:
        """Close the store of a closed tier when the last call that hung has returned."""
        with self._lock:
            if self._guard.hung:
                return
            store, self._unclosed = self._unclosed, None
        if store is not None:
            with suppress(StorageError):
                store.close()

    # --- calls
    # --------------------------------------------------------------------------------------------------------

    def call(self, operation: str, work: Callable[[StorageBackend], T], nbytes: int = 0) -> T:
        """Make a call that uses no memory of the caller's; raises StorageError if it fails or takes too long.

        `nbytes`: payload that the call moves, for which it gets more time.
        """
        return self._end(self._begin(operation, work, nbytes))

    def _begin(
        self,
        operation: str,
        work: Callable[[StorageBackend], T],
        nbytes: int = 0,
        give_up: GiveUp | None = None,
        over: Callable[[], None] = lambda: None,
        *,
        seconds: float | None = None,
    ) -> PendingCall[T]:
        """Begin a call; `over` is called once, when it is over or if it cannot begin.

        `seconds`: as for `Guard.begin`.
        """
        store = self._store
        if store is None or self._guard.is_left_out:
            over()
            raise UnavailableError(f"tier {self.name!r} is left out: {self._guard.why}")
        return self._guard.begin(
            operation, partial(work, store), nbytes, give_up=give_up, over=over, seconds=seconds
        )

    def _end(self, call: PendingCall[T]) -> T:
        """Return the value of a call; raises StorageError, and tells the breaker what it was like."""
        try:
            return call.result()
        except (NoThreadError, UnlistedError):
            raise  # the tier has not been asked, or answers as well as it can
        except ClosedError as error:
            raise UnavailableError(f"tier {self.name!r} was closed") from error
        except (StorageError, ConfigError) as error:
            self._guard.failed(str(error))
            raise
        except Exception as error:
            _log.exception("tier %s: a call breaks the contract of a store", self.name)
            self._guard.failed(f"a call raised {type(error).__name__}: {error}")
            raise UnavailableError(f"tier {self.name!r} raised {error!r}") from error


def _namespaces(store: StorageBackend) -> list[NamespaceRecord]:
    return store.namespaces()


def _ask(store: StorageBackend) -> None:
    """Ask a store for an object that no store has; raises StorageError if the store does not answer."""
    store.exists([_canary()])


def _takes_objects(store: StorageBackend) -> bool:
    """Store, read and delete a canary; return False if the store answers, but takes no new objects.

    Raises StorageError if the store does not answer, or returns other bytes than it was given.
    """
    key, payload, read = _canary(), os.urandom(_CANARY_BYTES), bytearray(_CANARY_BYTES)
    meta = ObjectMeta(CANARY, _CANARY_BYTES, b"")
    [stored] = store.set([SetItem(key, [memoryview(payload)], meta)])
    if stored is not Outcome.STORED:
        _ask(store)  # a store that cannot be reached says why
        if stored is Outcome.UNAVAILABLE:
            raise UnavailableError("it takes no objects, though it answers")
        return False
    [found] = store.get([GetItem(key, [memoryview(read)], _CANARY_BYTES)])
    store.delete([key])
    if found is not Outcome.HIT or read != payload:
        raise StorageError(f"it does not return what it has just stored ({found})")
    return True


def _canary() -> ObjectKey:
    """Return a key that no other object and no other process has."""
    return ObjectKey(PoolName.KV, CANARY.ljust(DIGEST_BYTES, b"\0") + os.urandom(DIGEST_BYTES))
