"""The daemon's configuration: every rule, where a value comes from, one sentence for each mistake."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.examples import example_count
from tests.storage_backends.grpc.nodes import issue
from tiercache.config.document import description, document, every_setting, leaves
from tiercache.config.files import check_files, read_salt, read_secret, read_token
from tiercache.config.loading import find_file, load, resolve
from tiercache.config.models import Settings
from tiercache.config.rules import warnings
from tiercache.config.urls import parse_address
from tiercache.daemon.certificates import check_certificates
from tiercache.errors import ConfigError
from tiercache.text import exact_duration, exact_size, parse_duration, parse_size

MIB = 2**20
TLS = 'tls = {certificate = "/c", key = "/k"}\n'
MTLS = 'tls = {certificate = "/c", key = "/k", client_ca = "/a"}\n'
TOKEN = '[[principals]]\nname = "t"\ntoken_file = "/t"\n'


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TIERCACHE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def loaded(tmp_path):
    def write_and_load(text, **overrides):
        file = tmp_path / "node.toml"
        file.write_text(text)
        return load(file, overrides)

    return write_and_load


def refused(load, *arguments, **overrides):
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


# Defaults, sources, precedence


def test_the_defaults_fit_together():
    made = load()
    assert (made.directory, made.disk_bytes, made.host_bytes) == (
        Path("/var/lib/tiercache"),
        64 * 2**30,
        512 * MIB,
    )
    assert made.store_url == f"file:///var/lib/tiercache/store?capacity={64 * 2**30}"
    assert made.socket_directory == Path("/var/lib/tiercache/run")
    assert (made.unix, made.listen, made.insecure_bind, made.drain, made.tls) == (True, (), False, 10.0, None)
    assert (made.limits.idle, made.limits.call, made.limits.clients) == (10.0, 60.0, 512)
    assert list(warnings(made)) == []


@pytest.mark.parametrize("host", [32 * MIB, 33 * MIB + 1, 256 * MIB, 2**30, 2**40])
@pytest.mark.parametrize("principals", [0, 1, 2])
def test_by_default_an_object_fits_into_what_one_client_may_hold(host, principals):
    who = [{"name": f"p{n}", "uid": n} for n in range(principals)]
    made = load(None, {"host_bytes": host, "principals": who})
    assert made.object_bytes <= made.client_bytes <= made.principal_bytes <= made.payload_bytes <= host // 2
    assert made.limits.message_bytes <= made.client_bytes
    if principals > 1:
        assert made.principal_bytes <= host // 4
    if host == 2**40:
        assert (made.object_bytes, made.client_bytes) == (256 * MIB, host // 8)


def test_a_flag_comes_before_the_file_before_a_default(tmp_path):
    file = tmp_path / "node.toml"
    file.write_text('drain = "1s"\nhost_bytes = "64MiB"\n[limits]\nidle = "1s"\ncall = "1s"\nclients = 1\n')
    found = resolve(file, {"drain": "3s", "unix": None, "limits": {"call": 3.0, "idle": None}})
    made = found.settings
    assert (made.drain, made.limits.call, made.limits.idle) == (3.0, 3.0, 1.0)
    assert (made.limits.clients, made.limits.streams) == (1, 256)
    origins = {key: found.origin(key) for key, _ in leaves(document(made))}
    assert origins["limits", "clients"] == origins[("host_bytes",)] == "file"
    assert origins["limits", "streams"] == origins[("unix",)] == "default"


def test_the_store_is_one_url_or_a_list_of_tiers(loaded):
    assert Settings().store_urls == ("file:///var/lib/tiercache/store?capacity=68719476736",)
    one = loaded('storage = "file:///a,b?capacity=1GiB"')
    assert (one.store_url, one.store_urls) == ("file:///a,b?capacity=1GiB", ("file:///a,b?capacity=1GiB",))
    several = loaded('storage = ["memory://", "file:///d"]')
    assert several.store_url == several.store_urls == ("memory://", "file:///d")
    assert load(None, {"storage": "file:///a"}).storage == "file:///a"


def test_a_mistake_is_named_by_its_source(loaded):
    assert "node.toml: drain: 'soon' is not a duration" in refused(loaded, 'drain = "soon"')
    assert "--drain: 'soon' is not a duration" in refused(loaded, "", drain="soon")
    assert "--limits-idle: True is not a duration" in refused(loaded, "", limits={"idle": True})
    message = refused(loaded, 'tls.client_ca = "/c"\n', drain="1s")
    assert "node.toml with flags: tls.client_ca is given without tls.certificate" in message


def test_which_file(tmp_path, monkeypatch):
    assert find_file(tmp_path / "a") == tmp_path / "a"
    monkeypatch.setenv("TIERCACHE_CONFIG", "/b")
    assert find_file(None) == Path("/b")
    assert find_file(tmp_path / "a") == tmp_path / "a"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist; create it"), (b"a =", "is not TOML"), (b"a = 1\na = 2", "is not TOML"),
        (b"\xff", "is not UTF-8"), (b"a = " + b"9" * 5000, "is not TOML"),
        (b"a = " + b"[" * 100_000, "is nested too deeply"), (b" " * (MIB + 1), "is larger than 1MiB"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read(tmp_path, content, sentence):
    file = tmp_path / "no\nde.toml"
    if content is not None:
        file.write_bytes(content)
    message = refused(load, file)
    assert sentence in message
    assert "no\\nde.toml" in message
    assert "Is a directory" in refused(load, tmp_path)


# Keys and values


PRINCIPALS = '[[principals]]\nname = "a"\n{}\n[[principals]]\nname = "b"\n{}\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('limits.idel = "1s"', "limits.idel is not a setting; did you mean limits.idle?"),
        ("host-bytes = 1", "host-bytes is not a setting; did you mean host_bytes?"),
        ('idle = "1s"', "idle is not a setting; did you mean limits.idle?"),
        ("limits.host_bytes = 1", "limits.host_bytes is not a setting; did you mean host_bytes?"),
        ('tenants.a.salt = "hunter2"', "tenants.a.salt is not a setting; did you mean tenants.a.salt_file?"),
        ('[[principals]]\nname = "a"\ntoken = "hunter2"',
         "principals[0].token is not a setting; did you mean principals[0].token_file?"),
        ('_env_file = "/etc/passwd"', "_env_file is not a setting; the settings there are directory"),
        ('_secrets_dir = "/etc"', "_secrets_dir is not a setting"),
        ('"a\\nb" = 1', '"a\\nb" is not a setting'),
        ('model_config = "x"', "model_config is not a setting"),
        ("limits = 1", "limits is not a table"),
        ("tenants = []", "tenants is not a table"),
        ("tenants.a = 1", "tenants.a is not a table"),
        ("tenants.a = {}", "tenants.a.salt_file is missing"),
        ('tenants."a b".salt_file = "/s"', "is not a name"),
        ("principals = {}", "principals: {} is not a list"),
        ("principals = [1]", "principals[0] is not a table"),
        ("[[principals]]\nuid = 1", "principals[0].name is missing"),
        ('listen = "127.0.0.1:1"', "listen: '127.0.0.1:1' is not a list; put it into brackets"),
        ("host_bytes = true", "host_bytes: True is not a size"),
        ('host_bytes = "64GB/s"', "host_bytes: '64GB/s' is not a size"),
        ('host_bytes = "7MiB"', "host_bytes: '7MiB' is not possible; use 32MiB to 1024PiB"),
        (f"host_bytes = 0x{'f' * 9999}", "host_bytes: a number with thousands of digits is not possible"),
        ("host_bytes = -1", "host_bytes: -1 is not a size"),
        ("drain = 0", "drain: 0 is not possible"),
        ("drain = nan", "drain: nan is not a duration"),
        ("drain = inf", "drain: inf is not a duration"),
        (f"drain = 0x{'f' * 9999}", "drain: a number with thousands of digits is not possible"),
        ("limits.clients = 0", "limits.clients: 0 is not possible; use a whole number from 1 to"),
        ('limits.message_bytes = "2GiB"', "limits.message_bytes: '2GiB' is not possible"),
        ("unix = 1", "unix: 1 is neither true nor false"),
        ('directory = "tiercache"', "directory: this is not an absolute path"),
        ('directory = "/a\\u0000"', "directory: this is not an absolute path"),
        ("directory = 1", "directory: this is not an absolute path"),
        ('storage = "lmdb"', "storage: storage 'lmdb' is not a URL"),
        ('storage = "x://user:hunter2@host/"', "storage: a user or password in a x:// URL would be shown"),
        ("storage = 1979-05-27", "storage: datetime.date(1979, 5, 27) is not a line of text"),
        ("storage = []", "storage: a tier has no URL; list the URL of each tier, the fastest first"),
        ('storage = ["memory://", ""]', "storage: a tier has no URL"),
        ('storage = ["memory://", "lmdb"]', "storage: storage 'lmdb' is not a URL"),
        ('storage = ["memory://", "x://user:hunter2@host/"]', "a user or password in a x:// URL"),
        ('storage = ["memory://", ["file:///d"]]', "storage: ['file:///d'] is not a line of text"),
        ('[[principals]]\nname = "a"\nuid = -1', "principals[0].uid: -1 is not possible"),
        ('[[principals]]\nname = ""\nuid = 1', "principals[0].name: '' is not a name"),
        ('[[principals]]\nname = "a"\nsan = "*.example"',
         "principals[0].san: '*.example' is not a subject alternative name"),
        ('[[principals]]\nname = "a"\nsan = ""', "principals[0].san: '' is not a subject alternative name"),
        ('[[principals]]\nname = "a"\ntoken_file = "hunter2"',
         "principals[0].token_file: this is not an absolute path"),
        ('[[principals]]\nname = "a"\nuid = 1\nverbs = ["delete"]',
         "principals[0].verbs[0]: 'delete' is not possible; use read, write"),
        ('http.hosts = ["cache:9464"]', "http.hosts[0]: 'cache:9464' is not the name of a host"),
        ('http.hosts = ["a b"]', "http.hosts[0]: 'a b' is not the name of a host"),
        ('[[principals]]\nname = "a"\nuid = 1\nverbs = []',
         "principals[0].verbs: a principal without verbs can do nothing"),
        ('[[principals]]\nname = "a"\nuid = 1\nverbs = "read"', "principals[0].verbs: 'read' is not a list"),
        ('[[principals]]\nname = "a"\nuid = 1\nnamespaces = []',
         "principals[0].namespaces: give one or more different"),
        ('[[principals]]\nname = "a"\nuid = 1\nnamespaces = ["abc"]',
         "principals[0].namespaces[0]: 'abc' is not a namespace; write all"),
        ('[[principals]]\nname = "a"\nuid = 1\nnamespaces = ["*", "*"]',
         "principals[0].namespaces: give one or more different"),
        ('tls.certificate = "/c"', "tls.certificate is given without tls.key"),
        ('tls.key = "/c"', "tls.key is given without tls.certificate"),
        ('tls.client_ca = "/c"', "tls.client_ca is given without tls.certificate"),
        ("tls = {}", "[tls] is empty"),
        ('insecure_bind = true\nlisten = ["0.0.0.0:1"]\ntls.key = "/c"',
         "tls.key is given without tls.certificate"),
        ('insecure_bind = true\nlisten = ["0.0.0.0:1"]\ntls.client_ca = "/c"',
         "tls.client_ca is given without tls.certificate"),
        ('[[principals]]\nname = "a"\nsan = "a"',
         "principals[0].san: a is recognised by a certificate, which needs tls.certificate"),
        (TLS + '[[principals]]\nname = "a"\nsan = "a"',
         "principals[0].san: a is recognised by a certificate, which needs tls.client_ca"),
        ('[[principals]]\nname = "a"', "principals[0]: principal a has no credential; give exactly one"),
        ('[[principals]]\nname = "a"\nuid = 0\nsan = "x"',
         "principals[0]: principal a has 2 credentials (uid, san)"),
        (PRINCIPALS.format("uid = 1", "uid = 2").replace('"b"', '"a"'), "2 of them have the name a"),
        (PRINCIPALS.format("uid = 1", "uid = 1"), "principals: 2 of them have the uid 1"),
        (PRINCIPALS.format('token_file = "/t"', 'token_file = "/x/..//t"'),
         "principals: 2 of them have the token_file /t"),
        (MTLS + PRINCIPALS.format('san = "w.example"', 'san = "W.example"'),
         "principals: 2 of them have the san w.example"),
        ('[[principals]]\nname = "a"\nuid = 1\ntenant = "acme"',
         "principals[0].tenant: there is no tenant 'acme'; add [tenants.acme]"),
        ('listen = ["0.0.0.0:1"]', "other machines can reach 0.0.0.0:1 without authentication"),
        ('listen = ["node-1:1", "[::1]:1"]', "other machines can reach node-1:1 without authentication"),
        ('listen = ["0.0.0.0:1"]\n' + TLS, "without authentication"),
        ('listen = ["0.0.0.0:1"]\n' + TOKEN, "tokens would travel unencrypted"),
        ('listen = ["0.0.0.0:1"]\n[[principals]]\nname = "a"\nuid = 1', "without authentication"),
        ('listen = ["127.0.0.1:1", "127.0.0.1:1"]', "listen: 127.0.0.1:1 is given 2 times"),
        ('listen = ["127.0.0.1:1"]\nhttp.listen = "127.0.0.1:1"', "listen: 127.0.0.1:1 is given 2 times"),
        ("unix = false", "there is nothing to serve"),
        ('unix = false\nhttp.listen = "127.0.0.1:1"', "there is nothing to serve"),
        ('http.listen = "0.0.0.0:1"', "http.listen: other machines can reach 0.0.0.0:1"),
        ('http.listen = "0.0.0.0:1"\n' + TLS, "http.listen: other machines can reach 0.0.0.0:1"),
        ('http.listen = "0.0.0.0:1"\n' + TOKEN, "http.listen: other machines can reach 0.0.0.0:1"),
        ('events.endpoint = "tcp://0.0.0.0:1"', "events: tcp://0.0.0.0:1 can be reached from other machines"),
        ('events.endpoint = "127.0.0.1:1"', "is no address for KV events"),
        ('events.replay = "tcp://127.0.0.1:1"', "events.replay needs events.endpoint"),
        ('insecure_bind = true\nhttp.listen = "0.0.0.0:1"',
         "http.listen: other machines can reach 0.0.0.0:1"),
        (f'sockets = "/{"s" * 95}"',
         "would have 108 bytes, and the path of a unix socket has at most 107; use a directory"),
        (f'directory = "/{"ü" * 45}a"', "would have 108 bytes"),
        ('storage = "memory://"\ndisk_bytes = "64GiB"', "storage and disk_bytes cannot both be given"),
        ('storage = ["memory://"]\ndisk_bytes = "64GiB"', "storage and disk_bytes cannot both be given"),
        ('limits.object_bytes = "512MiB"',
         "limits.object_bytes (512MiB) is more than half of host_bytes (256MiB)"),
        ('host_bytes = "32MiB"\nlimits.message_bytes = "16MiB"',
         "limits.message_bytes (16MiB) is more than one client may hold (8MiB"),
    ],
)  # fmt: skip
def test_a_bad_key_or_value_and_what_does_not_fit_together_are_named(loaded, text, sentence):
    message = refused(loaded, text)
    assert re.match(r".*/node\.toml: ", message)
    assert sentence in message
    assert message.isprintable()
    assert len(message) < 500
    assert "hunter2" not in message


@pytest.mark.parametrize("nbytes", [1, 32, 48, 64])
def test_namespaces_have_the_lengths_that_stores_give_them(loaded, nbytes):
    made = loaded(f'[[principals]]\nname = "a"\nuid = 1\nnamespaces = ["{"Ab" * nbytes}"]')
    assert made.principals[0].namespaces == ("ab" * nbytes,), "they are written one way"
    assert any("has 2 digits" in line for line in warnings(made)) == (nbytes == 1)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:7070", "127.0.0.1", 7070, True), ("127.8.8.8:0", "127.8.8.8", 0, True),
        ("[::1]:65535", "::1", 65535, True), ("localhost:1", "localhost", 1, True),
        ("LOCALHOST:1", "LOCALHOST", 1, True), ("localhost.example:1", "localhost.example", 1, False),
        ("node-1:1", "node-1", 1, False), ("0.0.0.0:1", "0.0.0.0", 1, False), ("[::]:1", "::", 1, False),
        ("10.0.0.1:1", "10.0.0.1", 1, False),
    ],
)  # fmt: skip
def test_addresses(text, host, port, loopback):
    address = parse_address(text)
    assert (address.host, address.port, address.loopback, str(address)) == (host, port, loopback, text)


@pytest.mark.parametrize(
    "text",
    ["", "7070", ":7070", "*:7070", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1",
     "127.0.0.1:+1", "127.0.0.1:٣", "::1:7070",
     "[::1]", "[127.0.0.1]:1", "[::g]:1", "127.1:1", "256.0.0.1:1", "1.2.3.4.5:1", "a..b:1", "-a:1",
     "unix:/x:1", "http://a:1", "a b:1",
     "127.0.0.1:1\n", 7070, None],
)  # fmt: skip
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match=r"is not an address.*write host:port"):
        parse_address(text)


# What settings must obey together


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ('listen = ["0.0.0.0:1"]\n' + TLS + TOKEN, None),
        ('listen = ["0.0.0.0:1"]\n' + MTLS + '[[principals]]\nname = "a"\nsan = "a"', None),
        ('listen = ["0.0.0.0:1"]\n' + MTLS, "every client with a certificate that tls.client_ca has signed"),
        ('listen = ["0.0.0.0:1"]\ninsecure_bind = true',
         "every client that reaches 0.0.0.0:1 may read and change the cache"),
        ('listen = ["0.0.0.0:1"]\ninsecure_bind = true\n' + TLS,
         "every client that reaches 0.0.0.0:1 may read and change the cache"),
        ('listen = ["0.0.0.0:1"]\ninsecure_bind = true\n' + TOKEN, "tokens travel unencrypted to 0.0.0.0:1"),
        ('listen = ["127.0.0.1:1"]\n' + TOKEN, None),
        ('listen = ["127.0.0.1:1"]', "every user of this machine can call 127.0.0.1:1"),
        ('listen = ["127.0.0.1:0", "127.0.0.1:0"]\n' + TOKEN, None),
        ("insecure_bind = true", "insecure_bind is set, but no address needs it"),
        ('http = {listen = "0.0.0.0:1", public = true}', "reaches 0.0.0.0:1 can read metrics and status"),
        ('http.listen = "0.0.0.0:1"\n' + TLS + TOKEN, None),
        ('http.listen = "127.0.0.1:1"', None),
        ('http.listen = "127.0.0.1:1"\ntenants.t.salt_file = "/s"\n[[principals]]\nname = "a"\ntenant = "t"\n'
         'token_file = "/t"', "nobody can read the metrics at 127.0.0.1:1"),
        ('http.listen = "127.0.0.1:1"\ntenants.t.salt_file = "/s"\n[[principals]]\nname = "a"\ntenant = "t"\n'
         'uid = 1\n[[principals]]\nname = "b"\nverbs = ["observe"]\ntoken_file = "/t"', None),
        ('tenants.a.salt_file = "/s"', "no principal belongs to tenant a"),
        ('unix = false\nlisten = ["127.0.0.1:1"]\n' + PRINCIPALS.format("uid = 1", 'token_file = "/t"'),
         "principal a is recognised by a uid"),
        (MTLS + '[[principals]]\nname = "a"\nsan = "a"',
         "principal a is recognised by a certificate, and no TCP address"),
        (f'sockets = "/{"s" * 94}"', None),
        ('storage = "memory://"', None),
    ],
)  # fmt: skip
def test_what_is_allowed_and_what_is_said_about_it(loaded, text, warning):
    said = list(warnings(loaded(text)))
    assert len(said) == (warning is not None), said
    assert not said or warning in said[0]


def test_settings_are_frozen():
    made = Settings()
    with pytest.raises(ValidationError):
        made.drain = 1.0
    with pytest.raises(ValidationError):
        made.limits.idle = 1.0


# Files


def private(path, data, mode=0o600):
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_secrets_are_read_whole(tmp_path):
    assert read_token(private(tmp_path / "token", b" \n0123456789abcdef\r\n"), "t") == b"0123456789abcdef"
    assert read_salt(private(tmp_path / "salt", b" " * 32, 0o400), "s") == b" " * 32
    assert read_token(private(tmp_path / "longest", b"x" * 4096 + b"\n"), "t") == b"x" * 4096


@pytest.mark.parametrize("size", [0, 15, 4097, 100_000])
def test_secrets_of_other_sizes(tmp_path, size):
    path = private(tmp_path / "token", b"x" * size + b"\n")
    message = refused(read_token, path, "principals[0].token_file")
    assert message.startswith(f"principals[0].token_file: {path} holds ")
    assert "16 to 4096 are needed" in message
    assert "xxx" not in message


def test_a_token_is_not_cut_off(tmp_path):
    path = private(tmp_path / "token", b"x" * 16 + b" " * 5000 + b"y")
    assert "holds more than 4096 bytes" in refused(read_token, path, "t")


def test_what_is_no_private_file(tmp_path):
    good = private(tmp_path / "good", b"hunter2" * 5)
    (tmp_path / "link").symlink_to(good)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is a symbolic link" in refused(read_secret, tmp_path / "link", 1, 100, "x")
    assert "is not a regular file" in refused(read_secret, tmp_path / "pipe", 1, 100, "x")
    assert "is not a regular file" in refused(read_secret, tmp_path, 1, 100, "x")
    assert "does not exist" in refused(read_secret, tmp_path / "none", 1, 100, "x")
    assert "cannot be opened" in refused(read_secret, good / "x", 1, 100, "x")
    for mode in (0o640, 0o604, 0o620, 0o644, 0o610):
        good.chmod(mode)
        message = refused(read_secret, good, 1, 100, "x")
        assert f"(mode {mode:04o}); run chmod 600 {good}" in message
        assert "hunter2" not in message
    assert "printable ASCII" in refused(read_token, private(tmp_path / "binary", bytes(range(128, 160))), "x")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_secret_of_somebody_else(tmp_path):
    secret = private(tmp_path / "secret", b"x" * 32)
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        message = refused(read_secret, secret, 1, 100, "x")
    finally:
        os.seteuid(0)
    assert re.search("cannot be read by this user", message)


def test_the_files_of_a_configuration(tmp_path, loaded):
    for name in ("a.token", "b.token", "a.salt", "b.salt", "key"):
        private(tmp_path / name, name.encode() * 10)
    (tmp_path / "certificate").write_bytes(b"-----BEGIN CERTIFICATE-----")
    (tmp_path / "ca").symlink_to(tmp_path / "certificate")
    made = loaded(
        PRINCIPALS.format(f'token_file = "{tmp_path}/a.token"', f'token_file = "{tmp_path}/b.token"')
        + f'[tenants]\na.salt_file = "{tmp_path}/a.salt"\nb.salt_file = "{tmp_path}/b.salt"\n'
        + f'[tls]\ncertificate = "{tmp_path}/certificate"\nkey = "{tmp_path}/key"\nclient_ca ='
        f' "{tmp_path}/ca"\n'
    )
    check_files(made)
    private(tmp_path / "b.token", b"a.token" * 10 + b"\n")
    message = refused(check_files, made)
    assert "principals[0].token_file and principals[1].token_file hold the same tokens" in message
    assert "a.tokena.token" not in message
    private(tmp_path / "b.token", b"b.token" * 10)
    private(tmp_path / "b.salt", b"a.salt" * 10)
    assert "tenants.a.salt_file and tenants.b.salt_file hold the same salts" in refused(check_files, made)
    private(tmp_path / "b.salt", b"b.salt" * 10)
    for name, setting in (
        ("key", "tls.key"),
        ("ca", "tls.client_ca"),
        ("b.salt", "tenants.b.salt_file"),
        ("a.token", "principals[0].token_file"),
    ):
        os.rename(tmp_path / name, tmp_path / "away")
        assert refused(check_files, made).startswith(f"{setting}: {tmp_path}/{name} does not exist")
        os.rename(tmp_path / "away", tmp_path / name)
    (tmp_path / "key").chmod(0o644)
    assert "tls.key" in refused(check_files, made)


@pytest.mark.skipif(os.getuid() != 0, reason="the owner of a credential is root")
def test_a_credential_of_systemd_is_as_closed_as_a_secret(tmp_path, monkeypatch):
    """systemd 254 and later hand it over with mode 0440, where the group's right is the mask of an ACL."""
    path = tmp_path / "credential"
    path.write_bytes(b"x" * 20)
    path.chmod(0o440)
    assert "mode 0440" in refused(read_secret, path, 1, 100, "x")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "elsewhere"))
    assert "mode 0440" in refused(read_secret, path, 1, 100, "x")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_secret(path, 1, 100, "x") == b"x" * 20
    for mode in (0o444, 0o460, 0o640):
        path.chmod(mode)
        assert f"mode {mode:04o}" in refused(read_secret, path, 1, 100, "x")
    path.chmod(0o440)
    os.chown(path, 1000, -1)
    assert "mode 0440" in refused(read_secret, path, 1, 100, "x")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with the openssl command")
def test_certificates_are_certificates(tmp_path, loaded):
    for name in ("a", "b"):
        issue(tmp_path, name)
    text = 'tls = {{certificate = "{0}/a.pem", key = "{0}/{1}.key", client_ca = "{0}/{2}"}}'
    check_certificates(loaded(text.format(tmp_path, "a", "ca.pem")))
    said = refused(check_certificates, loaded(text.format(tmp_path, "b", "ca.pem")))
    assert "not a certificate and its unencrypted key" in said
    assert "tls.client_ca" in refused(check_certificates, loaded(text.format(tmp_path, "a", "a.key")))
    check_certificates(Settings())


def test_neither_contents_nor_inputs_show_in_a_repr(tmp_path, loaded):
    made = loaded(f'[[principals]]\nname = "a"\ntoken_file = "{private(tmp_path / "t", b"hunter2" * 4)}"')
    check_files(made)
    assert "hunter2" not in repr(made) + json.dumps(document(made))
    with pytest.raises(ValidationError) as caught:
        Settings(storage={"password": "hunter2"})
    assert "input_value" not in str(caught.value)


# As documents


def test_every_setting_has_a_description_and_a_default():
    found = {name: (default, said) for name, default, said in every_setting()}
    assert all(said for _, said in found.values())
    assert found["disk_bytes"][0] == "64GiB"
    assert found["limits.idle"][0] == "10s"
    assert found["principals[].verbs"][0] == ["read", "write"]
    assert found["tenants.NAME.salt_file"][0] is None
    assert description(("principals", 3, "uid")).startswith("Credential")
    assert description(("tenants", "limits", "salt_file")).startswith("File with 32 to 4096")


sizes = st.integers(0, 2**60)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,8}", fullmatch=True)
paths = st.text(st.characters(exclude_categories=("C", "Z")), max_size=12).map(lambda text: f"/{text}")


@given(sizes)
def test_a_size_is_written_so_that_it_reads_the_same(size):
    assert parse_size(exact_size(size)) == size


@given(st.floats(1e-9, 1e7) | st.integers(1, 10**6).map(lambda n: n / 1000))
@example(60.0)
@example(1e-07)
def test_a_duration_is_written_so_that_it_reads_the_same(seconds):
    assert parse_duration(exact_duration(seconds)) == seconds


@pytest.mark.parametrize(
    "text", ["9" * 400, "9" * 400 + ".5GiB", "9" * 5000, "1" * 30 + "x", "", " ", None, [], -1, 1.5, True]
)
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "ms", "-1s", "1 week", -1.0, float("nan"), float("inf"), False])
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration(text)


def principal(n, name):
    return {"name": name, "uid": n, "verbs": ["admin"]} if n % 2 else {"name": name, "token_file": f"/{n}"}


principals = st.lists(names, unique=True, max_size=3).map(
    lambda found: [principal(n, name) for n, name in enumerate(found)]
)
limits = st.fixed_dictionaries(
    {}, optional={"idle": st.floats(1e-6, 1e6), "clients": st.integers(1, 1000), "attached_bytes": sizes}
)
configurations = st.fixed_dictionaries(
    {},
    optional={
        "directory": paths.filter(lambda path: "," not in path),  # no gRPC client finds a socket there
        "host_bytes": st.integers(32 * MIB, 2**60),
        "drain": st.floats(1e-6, 1e6),
        "listen": st.lists(st.sampled_from(["127.0.0.1:1", "[::1]:1", "localhost:0"]), unique=True,
         max_size=3),
        "principals": principals,
        "tenants": st.dictionaries(names, paths.map(lambda path: {"salt_file": path}), max_size=2),
        "storage": st.sampled_from(["memory://?capacity=1GiB", ["memory://?capacity=1GiB", "file:///d"]]),
        "tls": st.just({"certificate": "/c", "key": "/k"}),
        "limits": limits,
        "http": st.just({"listen": "127.0.0.1:2", "hosts": ["cache-1.example"]}),
        "events": st.just({"endpoint": "tcp://127.0.0.1:3", "replay": "ipc:///run/replay", "buffer": 7}),
        "score": st.just({"objects": 9}),
    },
)  # fmt: skip


@given(configurations)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_settings_are_written_so_that_they_load_again(tmp_path, values):
    made = load(None, values)
    file = tmp_path / "again.toml"
    file.write_text(tomli_w.dumps(document(made)))
    assert load(file) == made


def outcome(file, overrides=None):
    """The message of the error, or nothing; any other exception is a bug."""
    try:
        assert isinstance(load(file, overrides), Settings)
    except ConfigError as error:
        return str(error)
    return ""


known = st.sampled_from(
    [*Settings.model_fields, "certificate", "key", "name", "uid", "token_file", "san", "verbs", "salt_file",
     "idle", "clients",
     "public", "_env_file", "self"]
)  # fmt: skip
likely = st.sampled_from(["/a", "64GiB", "1s", "127.0.0.1:1", "*", "read", "0.0.0.0:1", "memory://"])
anything = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
    | st.datetimes() | st.times() | st.none() | likely,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(known | st.text(max_size=4), inner,
     max_size=4),
    max_leaves=15,
)  # fmt: skip


@given(st.dictionaries(known | st.text(max_size=4), anything, max_size=4))
@settings(max_examples=example_count(400), deadline=None)
def test_any_table_is_settings_or_one_sentence(table):
    assert outcome(None, table).isprintable()
