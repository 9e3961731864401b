"""Image, compose file and chart: what they tell the daemon is what it takes."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.base import DEPLOY, parsed, run, tool
from tiercache import __version__
from tiercache.config.loading import resolve
from tiercache.config.models import Settings
from tiercache.daemon import server
from tiercache.text import parse_duration, parse_size

ROOT = DEPLOY.parent
CONTAINERFILE = (DEPLOY / "container/Containerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
CHART = DEPLOY / "helm/tiercache"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
GUARDED = """
[tls]
certificate = "/run/secrets/tiercache/server.pem"
key = "/run/secrets/tiercache/server.key"

[[principals]]
name = "worker-1"
token_file = "/run/secrets/tiercache/token"
"""


def environment() -> dict[str, str]:
    """The variables that the image sets."""
    [said] = re.findall(r"(?m)^ENV ((?:.*\\\n)*.*)$", CONTAINERFILE)
    return dict(word.split("=", 1) for word in shlex.split(said.replace("\\\n", " ")))


def settings(tmp_path: Path, text: str) -> Settings:
    """Settings of a daemon with this file."""
    (tmp_path / "tiercache.toml").write_text(text)
    return resolve(tmp_path / "tiercache.toml").settings


# -- the image


def test_the_image_serves_as_nobody_s_user_and_is_asked_by_ping(tmp_path) -> None:
    [text] = re.findall(r"echo '(.*)' > /etc/tiercache/tiercache.toml", CONTAINERFILE)
    found = settings(tmp_path, text)
    sockets, store = str(found.socket_directory), str(found.directory)
    assert environment()["TIERCACHE_STORE"] == f"grpc://{sockets}"
    assert re.search(rf"install -d -m 0700 -o 65532 -g 65532 {store} {sockets}$", CONTAINERFILE, re.M)
    assert json.loads(re.findall(r"(?m)^VOLUME (.*)$", CONTAINERFILE)[0]) == [store, sockets]
    [health] = re.findall(r"(?m)^HEALTHCHECK .* CMD (.*)$", CONTAINERFILE)
    assert parsed(*json.loads(health))["count"] == 1
    [entry], [command] = (re.findall(rf"(?m)^{word} (.*)$", CONTAINERFILE) for word in ("ENTRYPOINT", "CMD"))
    parsed(*json.loads(entry), *json.loads(command))
    assert "USER 65532:65532" in CONTAINERFILE


def test_the_image_is_made_of_what_is_pinned() -> None:
    [base] = re.findall(r"(?m)^ARG PYTHON=(.*)$", CONTAINERFILE)
    assert re.fullmatch(r"[\w./-]+:3\.\d+\.\d+-slim-\w+", base)
    assert set(re.findall(r"(?m)^FROM (\S+)", CONTAINERFILE)) == {"${PYTHON}"}
    assert "--require-hashes -r /build/requirements.txt" in CONTAINERFILE
    assert '--no-index "${wheel}[http]"' in CONTAINERFILE
    assert "-c /build/constraints-dev.txt" in CONTAINERFILE
    [copied] = re.findall(r"(?m)^COPY (.+) /build/$", CONTAINERFILE)
    ignored = (ROOT / ".containerignore").read_text().split("\n")
    assert [line for line in ignored if line and line[0] != "#"] == [
        "*",
        *(f"!{it}" for it in copied.split()),
    ]
    assert all((ROOT / path).is_file() for path in copied.split()[:-1])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*re.findall(r"\$\{wheel\}\[(\w+)\]", CONTAINERFILE)} == {"http", "worker"} & {*extras}


def test_only_the_demo_s_image_has_the_lab() -> None:
    [asked] = re.findall(r"(?m)^ARG DEMO=(.*)$", CONTAINERFILE)
    assert asked == ""
    assert re.search(r'if \[ -n "\$\{DEMO\}" \]; then [^;]*/build/tiercache_lab-\*\.whl; ', CONTAINERFILE)
    assert CONTAINERFILE.count("tiercache_lab") == 1
    given = {name: (it.get("build") or {}).get("args") for name, it in COMPOSE["services"].items()}
    assert [name for name, args in given.items() if args] == ["worker-1", "worker-2"]


def test_hadolint_has_nothing_to_say() -> None:
    run(tool("hadolint", "make test-deploy installs it"), DEPLOY / "container/Containerfile")


# -- compose


def test_the_services_of_compose_fit_the_daemon(tmp_path) -> None:
    services = COMPOSE["services"]
    daemon = services["daemon"]
    assert daemon["configs"] == [{"source": "daemon", "target": "/etc/tiercache/tiercache.toml"}]
    found = settings(tmp_path, COMPOSE["configs"]["daemon"]["content"])
    assert parse_duration(daemon["stop_grace_period"]) > 3 * found.drain + 5
    assert parse_size(daemon["mem_limit"].replace("g", "GiB")) >= found.host_bytes + parse_size("512MiB")
    assert {volume.partition(":")[2] for volume in daemon["volumes"]} == {
        str(found.directory), str(found.socket_directory),
    }  # fmt: skip
    for name in ("worker-1", "worker-2"):
        worker = services[name]
        assert parsed("tiercache", *worker["command"])["storage"] == [f"grpc://{found.socket_directory}"]
        assert {*worker["volumes"]} <= {*daemon["volumes"]}
    assert daemon["image"].endswith(f":{__version__}")
    scrape = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
    [job] = scrape["scrape_configs"]
    assert found.http.address is not None
    assert job == {
        "job_name": "tiercache",
        "static_configs": [{"targets": [f"daemon:{found.http.address.port}"]}],
    }
    inside = {v.split(":")[1] for v in services["prometheus"]["volumes"]}
    assert {*scrape["rule_files"], "/etc/prometheus/prometheus.yml"} == inside
    [provider] = yaml.safe_load((DEPLOY / "compose/dashboards.yml").read_text())["providers"]
    assert f"../grafana:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


def test_everything_in_compose_is_closed_and_there() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service["volumes"]:
            if volume.startswith("."):
                assert (DEPLOY / "compose" / volume.split(":")[0]).exists()
            else:
                assert volume.split(":")[0] in COMPOSE["volumes"]
    for name in ("daemon", "worker-1", "worker-2"):
        service = COMPOSE["services"][name]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]


# -- the chart


@cache
def rendered(values: str) -> list[dict[str, Any]]:
    """The manifests of the chart, written by Helm itself; `values` as JSON."""
    chart = pytest.importorskip("helm_python.chart", reason="make test-deploy installs Helm's renderer")
    texts = chart.Chart.load(str(CHART)).render(json.loads(values), name="kv", namespace="default")
    return [one for text in texts.values() for one in yaml.safe_load_all(text) if one]


MODES = {
    "node": {},
    "node with principals": {
        "secret": "kv", "settings": 'disk_bytes = "1GiB"\n[[principals]]\nname = "e"\nuid = 1000\n',
        "http": {"serviceMonitor": True},
    },
    "service with TLS": {"mode": "service", "secret": "kv", "settings": VALUES["settings"] + GUARDED,
                         "networkPolicy": {"workers": [{"podSelector": {"matchLabels": {"app": "engine"}}}]}},
    "service open to all": {"mode": "service", "settings": "insecure_bind = true",
        "service": {"storageClassName": "fast"}, "nodeSelector": {"disk": "nvme"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}}, "imagePullSecrets": [{"name": "r"}],
        "image": {"digest": "sha256:" + "0" * 64}},
}  # fmt: skip


@pytest.fixture(params=MODES)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(json.dumps(MODES[request.param]))


def workload(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return next(one for one in manifests if one["kind"] in ("DaemonSet", "StatefulSet"))


def test_kubernetes_knows_every_field(manifests) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs the schemas")
    for one in manifests:
        if one["kind"] != "ServiceMonitor":  # its schema is the operator's
            validate.validate(one, "1.33", strict=True)


def test_the_daemon_takes_the_chart_s_file_and_its_pod_fits_it(manifests, tmp_path) -> None:
    [config] = [one for one in manifests if one["kind"] == "ConfigMap"]
    found = settings(tmp_path, config["data"]["tiercache.toml"])
    work = workload(manifests)
    pod = work["spec"]["template"]["spec"]
    [daemon] = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in daemon["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in work["spec"].get("volumeClaimTemplates", ())}
    assert {*mounts.values()} <= {*volumes, *claims}
    assert {str(found.directory), str(found.socket_directory), "/etc/tiercache"} <= {*mounts}
    assert parsed("tiercache", *daemon["args"])["config"] == Path("/etc/tiercache/tiercache.toml")
    assert pod["terminationGracePeriodSeconds"] > 3 * found.drain + 5
    start = daemon["startupProbe"]
    # private: how long `start` may take is no setting
    assert start["failureThreshold"] * start["periodSeconds"] > server._START_SECONDS
    ports = {port["name"]: port["containerPort"] for port in daemon["ports"]}
    assert found.http.address is not None
    assert ports["http"] == found.http.address.port
    assert ports.get("grpc") == next((address.port for address in found.addresses), None)
    memory = daemon["resources"]["limits"]["memory"]
    assert parse_size(f"{memory}B") >= found.host_bytes + parse_size("512MiB")
    assert ports.get("data", 0) == found.data_port
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = daemon[probe]["httpGet"]
        assert asked == {
            "path": "/readyz" if probe == "readinessProbe" else "/healthz",
            "port": "http",
            "scheme": "HTTPS" if found.tls else "HTTP",
        }
    for tls in filter(None, [found.tls]):
        assert str(tls.key.parent) in mounts


def test_the_pods_of_the_chart_are_confined(manifests) -> None:
    pod = workload(manifests)["spec"]["template"]["spec"]
    assert not {"hostIPC", "hostPID", "hostNetwork"} & {*pod}
    assert pod["securityContext"]["runAsNonRoot"]
    assert not any(v.get("hostPath", {}).get("path") == "/dev/shm" for v in pod["volumes"])
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"]["drop"] == ["ALL"]
        assert not context["allowPrivilegeEscalation"]
        root = context.get("runAsUser") == 0
        assert root == (container["name"] == "directories")
        assert context["capabilities"].get("add", []) == (["CHOWN"] if root else [])
    [policy] = [one for one in manifests if one["kind"] == "NetworkPolicy"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    callers = [rule for rule in policy["spec"]["ingress"] if {"port": "grpc"} in rule["ports"]]
    assert all(rule["from"] and {"port": "data"} in rule["ports"] for rule in callers)


def test_secrets_arrive_as_files_that_the_daemon_accepts(tmp_path: Path) -> None:
    """The command of the chart, run on a folder as a Secret's volume is: links to files for the group."""
    from tiercache.config.files import read_token

    there, here = tmp_path / "secret", tmp_path / "secrets"
    (there / "..data").mkdir(parents=True)
    here.mkdir()
    (there / "..data/token").write_text("0123456789abcdef")
    (there / "..data/token").chmod(0o440)
    (there / "token").symlink_to("..data/token")
    [copy] = re.findall(
        r'command: \[sh, -c, "(install .*)"\]', (CHART / "templates/_helpers.tpl").read_text()
    )
    copy = copy.replace("/run/secrets/tiercache/", f"{here}/").replace("/secret/", f"{there}/")
    run("sh", "-c", copy)
    assert [file.name for file in here.iterdir()] == ["token"]
    assert read_token(here / "token", "token_file") == b"0123456789abcdef"


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "cluster"}, {"settings": "unix = false"}, {"settings": "[http]\npublic = true"},
        {"settings": {"listen": []}}, {"user": 0}, {"hostIPC": True}, {"image": {"digest": "latest"}},
        {"node": {"sockets": "relative"}}, {"terminationGracePeriodSeconds": 5}, {"service": {"size": "80"}},
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    errors = pytest.importorskip("helm_python.errors", reason="make test-deploy installs Helm's renderer")
    with pytest.raises(errors.HelmValuesError):
        rendered(json.dumps(values))
