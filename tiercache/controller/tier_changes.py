"""Changes of the tiers of a controller's storage, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final

from tiercache.errors import ConfigError
from tiercache.storage.base import StorageBackend
from tiercache.storage.tiers import Report, TierControl, ignore_progress, tier_control


class TierChanges:
    """The changes of `TierControl` for an engine that must not wait: each returns a future at once.

    The result of the future is None, or the error that ended the change, also for bad input. `progress` is
    called on the thread of the change; an exception that it raises gives the change up.

    Thread safety: any thread.
    """

    def __init__(self, storage: StorageBackend | None, over: Callable[[], None]) -> None:
        """Change the tiers of `storage`; `over` is called on a background thread after each change."""
        self._storage: Final = storage
        self._over: Final = over

    def add_tier(self, spec: str | Mapping[str, Any], position: int | None = None) -> Future[None]:
        """Begin to add a tier; see `TierControl.add_tier`."""
        return self._begin(lambda control: control.add_tier(spec, position))

    def remove_tier(
        self, name: str, *, keep_contents: bool = True, progress: Report = ignore_progress
    ) -> Future[None]:
        """Begin to remove a tier; see `TierControl.remove_tier`."""
        return self._begin(
            lambda control: control.remove_tier(name, keep_contents=keep_contents, progress=progress)
        )

    def replace_tier(
        self,
        name: str,
        spec: str | Mapping[str, Any],
        *,
        keep_contents: bool = True,
        progress: Report = ignore_progress,
    ) -> Future[None]:
        """Begin to replace a tier; see `TierControl.replace_tier`."""
        return self._begin(
            lambda control: control.replace_tier(name, spec, keep_contents=keep_contents, progress=progress)
        )

    def reorder(self, names: Sequence[str]) -> Future[None]:
        """Begin to bring the tiers into another order; see `TierControl.reorder`."""
        return self._begin(lambda control: control.reorder(names))

    def change_tier(self, name: str, /, **settings: Any) -> Future[None]:
        """Begin to change settings of a tier; see `TierControl.change_tier`."""
        return self._begin(lambda control: control.change_tier(name, **settings))

    def _begin(self, change: Callable[[TierControl], None]) -> Future[None]:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            error: BaseException | None = None
            try:
                change(self._control())
            except BaseException as caught:  # noqa: BLE001  the future raises it
                error = caught
            self._over()  # first, so that whoever waits for the future finds it done
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        threading.Thread(target=run, name="tiercache-tiers", daemon=True).start()
        return future

    def _control(self) -> TierControl:
        if self._storage is None:
            raise ConfigError(
                "this controller was made without storage and cannot get one; make it with a list of one"
                " small store, such as [memory://?capacity=64MiB], to add tiers later"
            )
        return tier_control(self._storage)
