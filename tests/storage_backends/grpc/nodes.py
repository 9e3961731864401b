"""Configurations of daemons and of their clients: directories, tokens, certificates, addresses."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tiercache.config.models import Settings as DaemonSettings

HOST_BYTES = 96 << 20


@cache
def scratch() -> Path:
    """A directory of this process, whose path is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="tc-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def secret(path: Path, text: str) -> Path:
    """Write a file that its owner alone can read."""
    path.touch(0o600)
    path.write_text(text)
    return path


@cache
def token_file() -> Path:
    return secret(scratch() / "token", "0123456789abcdef" * 2)


@cache
def certificates(name: str = "localhost") -> tuple[Path, Path]:
    """(key, certificate) of 127.0.0.1 and this name; the certificate is its own authority."""
    directory = scratch() / f"tls-{name}"
    directory.mkdir()
    return make_certificate(directory, name)


def make_certificate(directory: Path, name: str = "localhost") -> tuple[Path, Path]:
    """Make a key and a certificate in a directory, and return their paths."""
    key, certificate = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days",
         "2", "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=IP:127.0.0.1,DNS:{name}", "-keyout", str(key), "-out",
         str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    key.chmod(0o600)
    return key, certificate


def issue(
    directory: Path, name: str, *, san: str = "IP:127.0.0.1,DNS:localhost", ca: str = "ca", days: int = 2
) -> None:
    """Make NAME.key and NAME.pem of the authority `ca`, made if need be; negative `days` are over."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    if not (directory / f"{ca}.pem").exists():
        openssl("req", "-x509", *key, "-subj", f"/CN={ca}", "-keyout", f"{ca}.key", "-out", f"{ca}.pem")
    (directory / f"{name}.ext").write_text(f"subjectAltName={san}\n")
    openssl("req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", str(days))
    openssl("x509", "-req", "-in", f"{name}.csr", *signer, "-extfile", f"{name}.ext", "-out", f"{name}.pem")
    (directory / f"{name}.key").chmod(0o600)


def daemon_settings(transport: str, sockets: Path | None = None, **more: Any) -> DaemonSettings:
    """A daemon on unix sockets, TCP or TLS."""
    run = sockets or Path(tempfile.mkdtemp(dir=scratch()))
    values: dict[str, Any] = {
        "directory": run, "sockets": run, "host_bytes": HOST_BYTES, "drain": 3.0,
        "unix": transport == "unix", **more,
    }  # fmt: skip
    if transport != "unix":
        values.setdefault("listen", ("127.0.0.1:0",))
        values.setdefault(
            "principals",
            ({"name": "worker", "token_file": token_file(), "verbs": ("read", "write", "admin")},),
        )
    if transport == "tls":
        key, certificate = certificates()
        values.setdefault("tls", {"certificate": certificate, "key": key})
    return DaemonSettings(**values).check()


def section(transport: str, where: str, **more: Any) -> dict[str, Any]:
    """A client's section; `where`: the directory of the sockets, or host:port."""
    if transport == "unix":
        return {"path": where, **more}
    tls = {"ca": str(certificates()[1])} if transport == "tls" else {}
    return {"address": where, "token_file": str(token_file()), **tls, **more}
