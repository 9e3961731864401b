"""Changes of the tiers of the daemon's store, for the operators of the whole daemon (ChangeTiers)."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Event, Thread
from typing import Any, Final

from grpc import StatusCode

from tiercache.core import DIGEST_BYTES, ObjectKey, PoolName
from tiercache.daemon.access import Refusal
from tiercache.daemon.call import Call
from tiercache.daemon.call_log import CURRENT, CallLog, CallRecord
from tiercache.errors import ConfigError, InputError, RefusedError, StorageError, TierCacheError, WireError
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.storage.tiers import NO_CHAIN, PREFIX, Progress, Report, TierControl, tier_control
from tiercache.text import shown
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

_log = logging.getLogger(__name__)

_KEPT: Final = 16
"""Number of changes whose end is remembered."""
_FIRST_WAIT: Final = 0.5
"""Seconds that the call which begins a change waits for its end."""
_MAX_WAIT: Final = 5.0
"""Maximum seconds that a call waits for news of a change."""
_MAX_NAMES: Final = 64
"""Maximum number of names in an order of tiers."""

Work = Callable[[TierControl, Report], None]


@dataclass(eq=False, slots=True)
class _Change:
    """One change of the tiers.

    Thread safety: the event loop's thread; any thread may read `is_given_up`.
    """

    what: str
    """The change in words, such as "remove tier 'ssd'"."""
    call: CallRecord | None = None
    """Call that asked for the change."""
    number: int = field(default_factory=lambda: secrets.randbits(63) | 1)
    """Number of the change, random so that a client notices a restart of the daemon."""
    progress: Progress | None = None
    error: Exception | None = None
    is_over: bool = False
    is_given_up: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is news; another event then takes its place."""

    def tell(self) -> None:
        """Wake everybody who waits for news."""
        self.news.set()
        self.news = asyncio.Event()

    def reply(self) -> pb.TierChangeReply:
        """Return what has become of the change."""
        error = pb.TIER_ERROR_NONE
        if self.error is not None:
            error = pb.TIER_ERROR_CONFIG if isinstance(self.error, InputError) else pb.TIER_ERROR_STORAGE
            error = pb.TIER_ERROR_REFUSED if isinstance(self.error, RefusedError) else error
        return pb.TierChangeReply(
            number=self.number, what=self.what, over=self.is_over, error=error, why=str(self.error or ""),
            progress=_progress(self.progress),
        )  # fmt: skip


class TierCalls:
    """Handlers of the calls that change the tiers of a store, one change at a time.

    A change runs on a thread of its own, and goes on when its client is gone. It ends when it is over, when
    an operator gives it up, or when the store is closed. The configuration of the daemon is not written, so a
    change lasts until the daemon ends. Each change is told in the log and the audit log.

    A principal without a tenant and without a list of namespaces needs the verb admin for it: with these
    calls, it can make the daemon open any directory and call any address.

    Thread safety: the event loop's thread.
    """

    def __init__(self, store: StorageBackend, instance: bytes, calls: CallLog | None = None) -> None:
        """Change the tiers of `store`; `instance` are the random bytes by which clients know this daemon."""
        self._store: Final = store
        self._calls: Final = calls or CallLog()
        self._instance: Final = instance
        self._question = b""
        """Layout digest in the keys of the present question; see `_comes_back`."""
        self._came_back: Final = Event()
        self._changes: dict[int, _Change] = {}

    def notice(self, keys: Sequence[ObjectKey]) -> None:
        """Note that a client asks for these keys; it may be a tier, with the question of `_comes_back`.

        Any thread may call.
        """
        if self._question and any(key.layout == self._question for key in keys):
            self._came_back.set()

    async def change(self, call: Call) -> None:
        """Serve ChangeTiers: begin a change, and wait a moment for its end."""
        _require_operator(call)
        request = await call.request(pb.ChangeTiersRequest)
        what, work, section = _read_change(request)
        await self._calls.begin("change_tiers", change=what)
        change = _Change(what, CURRENT.get())
        try:
            control = self._control()
            under_way = self._latest()
            if under_way is not None and not under_way.is_over:
                raise RefusedError(
                    f"another change is under way ({under_way.what}); try again when it is over, or give it"
                    " up"
                )
        except (ConfigError, RefusedError) as error:
            self._end(change, error)
        else:
            self._begin(change, lambda report: self._perform(control, work, section, report))
            await self._news(change, _FIRST_WAIT)
        await call.send(change.reply().SerializeToString())

    async def follow(self, call: Call) -> None:
        """Serve FollowTierChange: wait for news of a change, or give it up."""
        _require_operator(call)
        request = await call.request(pb.FollowTierChangeRequest)
        change = self._changes.get(request.number) if request.number else self._latest()
        if change is None:
            if not request.number:
                await call.send(pb.TierChangeReply(over=True).SerializeToString())
                return
            raise Refusal(
                StatusCode.FAILED_PRECONDITION,
                f"this daemon knows nothing of change {request.number:x}; it was restarted, or made {_KEPT}"
                " others since",
            )
        if request.give_up and not change.is_over and not change.is_given_up:
            await self._calls.begin("give_up_tier_change", change=change.what)
            change.is_given_up = True
        if not change.is_over and (_progress(change.progress) or pb.TierProgress()) == request.seen:
            await self._news(change, min(max(0.0, request.seconds), _MAX_WAIT))
        await call.send(change.reply().SerializeToString())

    def _latest(self) -> _Change | None:
        return next(reversed(self._changes.values()), None)

    async def _news(self, change: _Change, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await change.news.wait()

    def _control(self) -> TierControl:
        """Return the daemon's own chain; raises ConfigError if it has none."""
        try:
            control = tier_control(self._store)
        except ConfigError:
            raise ConfigError(NO_CHAIN) from None
        if hasattr(control, "ping"):
            raise ConfigError("the store of this daemon is another daemon; change the tiers of that one")
        return control

    def _begin(self, change: _Change, work: Callable[[Report], None]) -> None:
        """Run `work` on a thread, which goes on without its client."""
        loop = asyncio.get_running_loop()
        self._changes[change.number] = change
        while len(self._changes) > _KEPT:
            del self._changes[next(iter(self._changes))]

        def post(event: Callable[..., None], *arguments: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it everybody who waited
                loop.call_soon_threadsafe(event, *arguments)

        def report(progress: Progress) -> None:
            if change.is_given_up:
                raise RefusedError("the change was given up, so the tiers are as before")
            post(self._note, change, progress)

        def run() -> None:
            error: Exception | None = None
            try:
                work(report)
            except TierCacheError as caught:
                error = caught
            except Exception:  # noqa: BLE001
                # A bug in a store fails this change and is logged. It never ends the daemon.
                _log.exception("a change of the tiers failed: %s", change.what)
                error = StorageError("the change failed inside the daemon; its log has the details")
            post(self._end, change, error)

        Thread(target=run, name="tiercache-tiers", daemon=True).start()

    def _note(self, change: _Change, progress: Progress) -> None:
        change.progress = progress
        change.tell()

    def _end(self, change: _Change, error: Exception | None) -> None:
        change.is_over, change.error = True, error
        change.tell()
        self._calls.end("change_tiers", str(error or "done"), change.call, change=change.what)

    def _perform(
        self, control: TierControl, work: Work, section: Mapping[str, str] | None, report: Report
    ) -> None:
        if section is not None:
            self._check_other(section)
        work(control, report)

    def _check_other(self, section: Mapping[str, str]) -> None:
        """Raise ConfigError if a tier is this daemon, or has it as a tier: calls would go round for ever."""
        own = {name: value for name, value in section.items() if not name.startswith(PREFIX)}
        if own.get("type") != "grpc":
            return
        with suppress(StorageError), open_backend(own) as store:
            if getattr(store, "ping")().instance == self._instance.hex():  # noqa: B009  not of the contract
                raise ConfigError("this tier would be the daemon itself; name another daemon")
            if self._comes_back(store):
                raise ConfigError(
                    "the daemon of this tier has this daemon as a tier, perhaps through others, so calls"
                    " would go round for ever; remove this daemon from its tiers first"
                )

    def _comes_back(self, store: StorageBackend) -> bool:
        """Ask a store for an object that nobody has; return whether the question comes back to this daemon.

            1. this daemon asks the store      2. that daemon asks its own tiers, this daemon among them

        A daemon may rename the page of a key for its tiers, but never the layout.
        """
        layout, page = secrets.token_bytes(DIGEST_BYTES // 2), secrets.token_bytes(DIGEST_BYTES // 2)
        self._came_back.clear()
        self._question = layout
        try:
            with suppress(StorageError):
                store.exists([ObjectKey(PoolName.KV, layout + page)])
        finally:
            self._question = b""
        return self._came_back.is_set()


def _require_operator(call: Call) -> None:
    """Raise Refusal unless the caller may change the daemon itself."""
    permissions = call.caller.permissions
    if not permissions.operates:
        raise Refusal(
            StatusCode.PERMISSION_DENIED,
            f"{permissions.name} may not change the tiers of this daemon: that needs the verb admin without a"
            " tenant and without a list of namespaces",
        )


def _read_change(request: pb.ChangeTiersRequest) -> tuple[str, Work, Mapping[str, str] | None]:
    """Return a change in words, the change, and the section of the tier that it adds.

    Raises WireError for a message beyond the limits, or without a change.
    """
    match request.WhichOneof("change"):
        case "add":
            section = _read_section(request.add.tier)
            at = request.add.position if request.add.HasField("position") else None
            place = "last" if at is None else f"at {at}"
            return f"add tier {_words(section)} ({place})", lambda to, _: to.add_tier(section, at), section
        case "remove":
            name, keep = request.remove.name, not request.remove.drop
            what = f"remove tier {shown(name)}{'' if keep else ' and drop its objects'}"
            return (what, lambda to, report: to.remove_tier(name, keep_contents=keep, progress=report), None)
        case "replace":
            name, keep = request.replace.name, not request.replace.drop
            section = _read_section(request.replace.tier)
            what = (
                f"replace tier {shown(name)} by {_words(section)}{'' if keep else ', dropping its objects'}"
            )
            return (
                what,
                lambda to, report: to.replace_tier(name, section, keep_contents=keep, progress=report),
                section,
            )
        case "order":
            names = list(request.order.names[:_MAX_NAMES])
            return f"order tiers {shown(', '.join(names))}", lambda to, _: to.reorder(names), None
        case "set":
            name, settings = request.set.name, _read_section(request.set.settings)
            what = f"set {', '.join(map(shown, settings))} of tier {shown(name)}"
            return what, lambda to, _: to.change_tier(name, **settings), None
        case _:
            raise WireError("the message has no change that this daemon knows; is the client newer?")


def _read_section(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: str(value) for name, value in messages.read_mapping(texts, {}).items()}


def _words(section: Mapping[str, str]) -> str:
    """Return a tier in words, for the log: where it is, whole, and no setting that may be secret."""
    return repr(f"{section.get('type', '')}://{section.get('address', '')}{section.get('path', '')}")


def _progress(progress: Progress | None) -> pb.TierProgress | None:
    if progress is None:
        return None
    fields = asdict(progress)
    return pb.TierProgress(bytes=fields.pop("nbytes"), **fields)
