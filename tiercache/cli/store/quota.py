"""The verbs `tiercache quota ...`: show what the tenants of a daemon have, and change their limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, cast

import typer

from tiercache.cli.store.options import StoreOption
from tiercache.cli.store.picture import tenant_table
from tiercache.cli.store.target import Target, opened, resolve_daemon
from tiercache.cli.terminal import Output, OutputOption, clean, console, records
from tiercache.errors import ConfigError, RefusedError
from tiercache.storage.shares import OwnerUse, QuotaControl
from tiercache.storage.wrappers import unwrap
from tiercache.text import exact_size, parse_size

quota = typer.Typer(no_args_is_help=True)

TenantArgument = Annotated[
    str, typer.Argument(metavar="TENANT", help="Name of the tenant, as `tiercache quota list` shows it.")
]


@quota.callback(
    help="""Show how much the tenants of a daemon have, and change their quotas and guarantees.

    A quota is the most bytes that a tenant's objects may take in the daemon's store, at any instant. A set
    beyond it evicts the tenant's own coldest objects. A guarantee is how many bytes of a tenant the sets of
    others do not evict. In a chain of tiers both are divided among the tiers by their capacities, and every
    copy counts.

    Each command names the daemon by its directory or address, as the other verbs do (--store). A principal
    of a tenant may read the quota of its own tenant, and one with the verb observe those of all. A change
    needs the verb admin, without a tenant or namespaces.

    The daemon does not write its configuration: a change lasts until the daemon ends, or reloads it. `set`
    prints the settings that make it last.
    """
)
def _group() -> None:
    pass


@quota.command("list")
def list_quotas(
    tenant: Annotated[
        str, typer.Argument(metavar="[TENANT]", help="Only this tenant.", show_default=False)
    ] = "",
    store: StoreOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what each tenant has, its quota and its guarantee.

    The sums of all tenants need not reach what the store has: objects of no
    tenant have no limits and are not shown. A principal of a tenant is shown
    that one:

        tiercache quota list -s grpc:///var/lib/tiercache/run

        tiercache quota list acme -s grpc://cache-1.example:7070

    JSON fields: tenant, used_bytes (what its objects take, with every copy in a tier),
    quota_bytes (null: no limit), guarantee_bytes, evicted_objects (by the
    tenant's own sets, because of its quota) and throttled_objects (because of
    its quota), both since the daemon started.
    """
    with _daemon(store) as (control, _):
        _report(control.quotas(tenant), output)


@quota.command("set")
def set_quota(
    tenant: TenantArgument,
    limit: Annotated[
        str, typer.Argument(metavar="[QUOTA]", help="New quota, such as 200GiB; `none` removes it.")
    ] = "",
    guarantee: Annotated[
        str, typer.Option("--guarantee", metavar="SIZE", help="New guarantee; `none` removes it.")
    ] = "",
    no_evict: Annotated[
        bool,
        typer.Option("--no-evict", help="Refuse a quota below what the tenant has, instead of evicting."),
    ] = False,
    store: StoreOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Change the quota of a tenant, its guarantee, or both.

    A quota below what the tenant has evicts its coldest objects at once:

        tiercache quota set acme 200GiB --guarantee 50GiB

        tiercache quota set acme 100GiB --no-evict

        tiercache quota set acme none

    Guarantees that add up to more than the store can hold are refused.

    JSON fields: as of `tiercache quota list`.
    """
    change: dict[str, int | None] = {}
    if limit:
        change["quota"] = None if limit == "none" else parse_size(limit)
    if guarantee:
        change["guarantee"] = 0 if guarantee == "none" else parse_size(guarantee)
    if not change:
        raise ConfigError("nothing to change; give a quota such as 200GiB, --guarantee SIZE, or both")
    with _daemon(store) as (control, target):
        try:
            use = control.set_quota(tenant, change, evict=not no_evict)
        except RefusedError as error:
            text = str(error).replace("allow that the coldest of it is evicted", "omit --no-evict")
            raise RefusedError(text) from error
        _report({tenant: use}, output)
        if output is Output.TABLE:
            _tell_settings(tenant, use, target)


@contextmanager
def _daemon(name: str) -> Iterator[tuple[QuotaControl, Target]]:
    """Yield the quotas of a daemon; raises ConfigError for a store that no daemon serves."""
    target = resolve_daemon(name, "only a daemon has tenants")
    with opened(target, tells=False) as store:
        control = unwrap(store)
        if not isinstance(control, QuotaControl):
            raise ConfigError(f"{target.name} is no daemon, and only a daemon has tenants; name a daemon")
        yield cast("QuotaControl", control), target


def _report(found: Mapping[str, OwnerUse], output: Output) -> None:
    rows = [{"tenant": name, **asdict(use)} for name, use in found.items()]
    if output is not Output.TABLE:
        records(rows, output)
    else:
        console().print(tenant_table(rows) if rows else "this daemon has no tenants")


def _tell_settings(tenant: str, use: OwnerUse, target: Target) -> None:
    """Say how to make a change last."""
    to = console()
    to.print(
        f"This lasts until the daemon {clean(target.name)} ends, or reloads its configuration. To make it"
        " last, set there:",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    lines = [f"[tenants.{clean(tenant)}]"]
    if use.quota_bytes is not None:
        lines.append(f'quota = "{exact_size(use.quota_bytes)}"')
    if use.guarantee_bytes:
        lines.append(f'guarantee = "{exact_size(use.guarantee_bytes)}"')
    to.print("\n".join(lines), markup=False, soft_wrap=True)
