"""Two tenants on one daemon, over TLS: the workers of a tenant share, and the other tenant sees nothing.

    python examples/two_tenants.py /tmp/tenants      # the directory is made; needs openssl

The same prompt is served four times: by two workers of acme, then by two of globex.
"""

import json
import secrets
import subprocess
import sys
from pathlib import Path

from own_engine import PROMPT, Engine

CERTIFICATES = Path(__file__).parent.parent / "deploy/certificates.sh"
CONFIG = """
directory = "{place}"
disk_bytes = "64MiB"
unix = false
listen = ["127.0.0.1:0"]
[tls]
certificate = "{place}/tls/server.pem"
key = "{place}/tls/server.key"
"""
TENANT = """
[tenants.{name}]
salt_file = "{place}/{name}.salt"
[[principals]]
name = "{name}-worker"
tenant = "{name}"
token_file = "{place}/{name}.token"
"""


def main(place: Path) -> None:
    """Serve, and print what each worker restored."""
    place.mkdir(mode=0o700)
    subprocess.run(["sh", CERTIFICATES, place / "tls", "unused", "127.0.0.1"], check=True)
    config = CONFIG.format(place=place)
    for name in ("acme", "globex"):
        for kind in ("salt", "token"):
            secret = place / f"{name}.{kind}"
            secret.touch(0o600)
            secret.write_text(secrets.token_hex(32))
        config += TENANT.format(name=name, place=place)
    (place / "tiercache.toml").write_text(config)
    command = [sys.executable, "-m", "tiercache.cli", "serve", "-c", place / "tiercache.toml", "-o", "jsonl"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as daemon:
        try:
            address = json.loads(daemon.stdout.readline())["address"]  # printed once clients can connect
            for name in ("acme", "acme", "globex", "globex"):
                worker = Engine(f"grpc://{address}?ca={place}/tls/ca.pem&token_file={place}/{name}.token")
                restored, said = worker.serve(PROMPT)
                share = f"{restored} of {len(PROMPT)} tokens restored"
                print(f"a worker of {name}: {share}; the next token is {said}")
                worker.close()
        finally:
            daemon.terminate()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("give a directory, which is made, such as /tmp/tenants")
    main(Path(sys.argv[1]).absolute())
