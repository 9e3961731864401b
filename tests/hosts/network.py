"""Hosts in one machine: a network namespace for each, joined by a bridge, with delay, loss and partitions.

    with Hosts(3) as hosts:
        server = hosts[2].run(["python", "-m", "http.server"])
        hosts.shape(delay=0.005)
        hosts.silence(hosts[2])

The namespaces have no names: each exists as long as a process runs in it. The first process of each reads a
pipe of this process, so that it ends with this one, even after a kill -9. They belong to a user namespace,
so none of this needs root where the kernel lets users make one.

Frames are switched by the kernel's bridge. With a delay or a loss, the program `wire` switches them instead:
many kernels are built without netem. It delays and drops real frames, so the kernels of both hosts see what
TCP sees on a slow line.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

GUARD = 60
"""Seconds after which a command of the network is taken to hang."""

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
"""Constants of linux/sched.h."""
PR_SET_PDEATHSIG = 1
"""Constant of linux/prctl.h."""


class NoHostsError(Exception):
    """This machine cannot make hosts; the message says why."""


@dataclass
class Host:
    """One host: its processes see its own loopback and one interface, `eth0`."""

    number: int
    holder: int
    """Process id of the process that keeps the namespaces."""
    started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def port(self) -> str:
        """Name of the interface at the other end of this host's cable."""
        return f"port{self.number}"

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this host, killed when the calling thread ends."""
        return [*_inside(self.holder), "setpriv", "--pdeathsig", "KILL", *command]

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host; `options` are those of Popen. It is killed when the hosts end."""
        process = subprocess.Popen(self.command(command), **options)
        self.started.append(process)
        return process

    def traffic(self) -> tuple[int, int]:
        """Return the bytes that this host has received and sent, with the headers of the frames."""
        command = [*_inside(self.holder), "ip", "-s", "-j", "link", "show", "eth0"]
        [link] = json.loads(subprocess.check_output(command, timeout=GUARD))
        return link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"]

    def processes(self) -> list[int]:
        """Return the ids of all processes on this host, but its holder."""
        mine = _network(self.holder)
        found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
        return [pid for pid in found if pid != self.holder and _network(pid) == mine]


class Hosts:
    """Hosts on one bridge, of which nothing is left at the end; NoHostsError where there can be none."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ends = ExitStack()
        self._wire: subprocess.Popen[str] | None = None
        self._hosts: list[Host] = []
        self._silent: set[int] = set()
        self._delay = self._loss = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            switch = _hold(ends, ["unshare", "--user", "--map-root-user", "--net"])
            self._switch = Host(-1, switch)
            self._ip(switch, "link add name bridge type bridge", "link set bridge up")
            for number in range(self._count):
                host = Host(number, _hold(ends, [*_inside(switch, "--user"), "unshare", "--net"]))
                self._hosts.append(host)
                self._ip(
                    switch,
                    f"link add name {host.port} type veth peer name eth0 netns {host.holder}",
                    f"link set {host.port} addrgenmode none master bridge up",
                )
                self._ip(
                    host.holder,
                    "link set lo up",
                    "link set eth0 addrgenmode none up",
                    f"address add {host.address}/24 dev eth0",
                )
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._ends:
            for host in (*self._hosts, self._switch):
                for pid in host.processes():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                for process in host.started:
                    process.__exit__(None, None, None)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def shape(self, delay: float = 0.0, loss: float = 0.0) -> None:
        """Delay every frame by `delay` seconds each way, and lose it with the probability `loss`."""
        self._delay, self._loss = delay, loss
        for host in self._hosts:  # a frame that is lost is then one packet, and not up to 64 KiB at once
            self._ip(host.holder, f"link set eth0 gso_max_segs {1 if loss else 65535}")
        self._switch_frames()

    def silence(self, host: Host) -> None:
        """Partition a host: its frames vanish, and it is not told."""
        self._silent.add(host.number)
        self._switch_frames()

    def unplug(self, host: Host) -> None:
        """Partition a host by pulling its cable: its interface has no carrier."""
        self._ip(self._switch.holder, f"link set {host.port} down")

    def heal(self, host: Host) -> None:
        """End a partition of either kind."""
        self._silent.discard(host.number)
        self._ip(self._switch.holder, f"link set {host.port} up")
        self._switch_frames()

    def _switch_frames(self) -> None:
        """Give the ports of all hosts that are not silent to the bridge or to the program `wire`."""
        if self._wire is not None:
            with self._wire:
                self._wire.kill()
            self._wire = None
        ports = [host.port for host in self._hosts if host.number not in self._silent]
        wired = bool(self._delay or self._loss)
        self._ip(
            self._switch.holder,
            *(
                f"link set {host.port} {'nomaster' if wired or host.port not in ports else 'master bridge'}"
                for host in self._hosts
            ),
        )
        if wired:
            program = [sys.executable, "-m", "tests.hosts.wire", str(self._delay), str(self._loss), *ports]
            self._wire = self._switch.run(program, stdout=subprocess.PIPE, text=True)
            assert self._wire.stdout is not None
            if not self._wire.stdout.readline():
                raise NoHostsError("the program that delays frames has ended; its traceback says why")

    def _ip(self, holder: int, *lines: str) -> None:
        """Run commands of `ip` in a namespace."""
        done = subprocess.run(
            [*_inside(holder), "ip", "-batch", "-"],
            input="\n".join(lines), capture_output=True, text=True, timeout=GUARD, check=False,
        )  # fmt: skip
        if done.returncode:
            raise NoHostsError(f"ip {'; '.join(lines)}: {done.stderr.strip()}")


@cache
def missing() -> str:
    """Return why this machine cannot make hosts, as the reason to skip a test; empty if it can."""
    try:
        with Hosts(2) as hosts:
            hosts.shape(delay=0.001)
    except (NoHostsError, OSError) as error:
        return f"no hosts in namespaces: {error}"
    return ""


def enter(holder: int) -> None:
    """Move this process to a host. It must have one thread, and it is killed when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, flag in (("user", CLONE_NEWUSER), ("net", CLONE_NEWNET)):
        with open(f"/proc/{holder}/ns/{name}") as space:
            if libc.setns(space.fileno(), flag):
                raise OSError(ctypes.get_errno(), f"setns to the {name} namespace of {holder}")
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _inside(holder: int, *spaces: str) -> list[str]:
    """Return the beginning of a command line that runs in a holder's namespaces."""
    chosen = spaces or ("--user", "--net")
    return ["nsenter", "--preserve-credentials", "--target", str(holder), *chosen]


def _hold(ends: ExitStack, maker: Sequence[str]) -> int:
    """Start a process in new namespaces, and return its id. It ends with this process."""
    process = subprocess.Popen(
        [*maker, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ends.enter_context(process)
    ends.callback(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        print("ready", file=process.stdin, flush=True)
        said = process.stdout.readline()
    except BrokenPipeError:
        said = ""
    if said != "ready\n":
        raise NoHostsError(process.stderr.read().strip())
    return process.pid


def _network(pid: int) -> str:
    """Return the network namespace of a process; empty for one that has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""
