"""Changes of the tiers of a daemon's store: the contract's calls, each as a change that the daemon makes."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from tiercache.config.urls import section_of
from tiercache.errors import (
    ConfigError,
    RefusedError,
    StorageError,
    TierCacheError,
    UnansweredError,
    UnavailableError,
)
from tiercache.storage.tiers import Progress, Report, TierControl, ignore_progress
from tiercache.wire.v1 import storage_pb2 as pb

_POLL: Final = 1.0
"""Seconds that the daemon waits for news of a change before it answers."""
_GIVE_UPS: Final = 30
"""Maximum number of times that the daemon is asked whether a change that was given up is over."""


class RemoteTiers(TierControl):
    """Part of a store in a daemon: the tiers that the daemon has.

    A change goes on in the daemon if this process is killed or does not reach the daemon any more. If
    `progress` raises an exception, or the caller is interrupted, the change is given up.

    Thread safety: any thread.
    """

    @abstractmethod
    def _ask_of_tiers(self, name: str, request: Any) -> Any:
        """Return the reply to a call; raises UnavailableError, RefusedError or another StorageError."""

    def add_tier(self, spec: str | Mapping[str, Any], position: int | None = None) -> None:
        if position is not None and not 0 <= position < 2**31:
            raise ConfigError(f"position {position} is not possible; use 0 (first) to the number of tiers")
        self._change(pb.ChangeTiersRequest(add=pb.AddTier(tier=_section(spec), position=position)))

    def remove_tier(
        self, name: str, *, keep_contents: bool = True, progress: Report = ignore_progress
    ) -> None:
        change = pb.RemoveTier(name=_text(name), drop=not keep_contents)
        self._change(pb.ChangeTiersRequest(remove=change), progress)

    def replace_tier(
        self,
        name: str,
        spec: str | Mapping[str, Any],
        *,
        keep_contents: bool = True,
        progress: Report = ignore_progress,
    ) -> None:
        change = pb.ReplaceTier(name=_text(name), tier=_section(spec), drop=not keep_contents)
        self._change(pb.ChangeTiersRequest(replace=change), progress)

    def reorder(self, names: Sequence[str]) -> None:
        self._change(pb.ChangeTiersRequest(order=pb.OrderTiers(names=map(_text, names))))

    def change_tier(self, name: str, /, **settings: Any) -> None:
        change = pb.SetTier(name=_text(name), settings=_texts(settings))
        self._change(pb.ChangeTiersRequest(set=change))

    def give_up_change(self) -> str:
        """Give up the change that is under way in the daemon, whoever began it, and return it in words.

        Raises RefusedError if no change is under way, and StorageError if the change ended in another way.
        """
        reply = self._ask_of_tiers("FollowTierChange", pb.FollowTierChangeRequest(seconds=0))
        if reply.over:
            raise RefusedError("no change is under way")
        reply = self._follow_given_up(reply)
        if not reply.over:
            raise StorageError(f"the change ({reply.what}) does not end; it goes on, or ends by itself")
        if reply.error != pb.TIER_ERROR_REFUSED:
            _raise(reply)
            raise RefusedError(f"the change ({reply.what}) was over before it could be given up")
        return str(reply.what)

    def _change(self, request: pb.ChangeTiersRequest, report: Report = ignore_progress) -> None:
        """Let the daemon make a change, and follow it to its end; raises what ended it."""
        reply = self._ask_of_tiers("ChangeTiers", request)
        lost: StorageError | None = None
        try:
            while not reply.over and lost is None:
                if reply.HasField("progress"):
                    report(_read_progress(reply.progress))
                try:
                    reply = self._ask_of_tiers(
                        "FollowTierChange",
                        pb.FollowTierChangeRequest(number=reply.number, seen=reply.progress, seconds=_POLL),
                    )
                except StorageError as error:
                    lost = error
        except BaseException:  # an exception of `report`, or Ctrl-C: it is raised again
            with suppress(TierCacheError):
                self._follow_given_up(reply)
            raise
        if lost is not None:
            kind = UnansweredError if isinstance(lost, UnavailableError) else type(lost)
            raise kind(f"{lost}; the change goes on there ({reply.what})") from lost
        if reply.HasField("progress"):
            report(_read_progress(reply.progress))
        _raise(reply)

    def _follow_given_up(self, reply: Any) -> Any:
        """Give a change up, and return the last reply about it."""
        for _ in range(_GIVE_UPS):
            if reply.over:
                break
            follow = pb.FollowTierChangeRequest(
                number=reply.number, seen=reply.progress, give_up=True, seconds=_POLL
            )
            reply = self._ask_of_tiers("FollowTierChange", follow)
        return reply


def _raise(reply: Any) -> None:
    """Raise the error with which a change ended, if it did."""
    if reply.error == pb.TIER_ERROR_CONFIG:
        raise ConfigError(reply.why)
    if reply.error == pb.TIER_ERROR_REFUSED:
        raise RefusedError(reply.why)
    if reply.error:
        raise StorageError(reply.why)


def _section(spec: str | Mapping[str, Any]) -> dict[str, str]:
    return _texts(section_of(spec) if isinstance(spec, str) else spec)


def _texts(settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        _text(name): str(value).lower() if isinstance(value, bool) else _text(str(value))
        for name, value in settings.items()
    }


def _text(text: str) -> str:
    """Return a text for a message; raises ConfigError for a path that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{text!r} is not UTF-8, so a daemon cannot be told of it; rename it, or add it to the daemon's"
            " configuration"
        ) from error
    return text


def _read_progress(progress: pb.TierProgress) -> Progress:
    return Progress(progress.copied_objects, progress.copied_bytes, progress.objects, progress.bytes)
