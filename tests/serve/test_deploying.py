"""What is shown of deployment fits the server: keys, ports, paths, secrets, time-outs, memory."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from tests.serve.http.fake_backend import FakeBackend

from vertumnus.serve.config import SECRETS, ServeConfig, config_from
from vertumnus.serve.http import HttpConfig, create_app
from vertumnus.serve.supervisor import KILL_AFTER_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = {
    manifest["kind"]: manifest
    for manifest in yaml.safe_load_all((ROOT / "deploy/kubernetes/vertumnus.yaml").read_text(encoding="utf-8"))
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
CONFIG = config_from(tomllib.loads(MANIFESTS["ConfigMap"]["data"]["serve.toml"]))
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy/systemd/vertumnus.service").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/deploying.md").read_text(encoding="utf-8")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
LONGEST_END_S = CONFIG.drain_timeout_s + KILL_AFTER_S


@pytest.fixture(scope="module")
def paths():
    config = HttpConfig(model_name="any", max_context_tokens=1, vocab_size=1)
    return set(create_app(FakeBackend(), None, config).api.openapi()["paths"])


# The page


def test_page_has_every_key_with_its_default_and_no_other():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) *\|", PAGE, re.MULTILINE))
    assert list(rows) == list(ServeConfig.model_fields)
    for key, field in ServeConfig.model_fields.items():
        if field.is_required():
            assert rows[key] == ""
        elif (default := field.get_default(call_default_factory=True)) is not None:
            shown = re.match(r"`(.*)`$", rows[key])
            assert shown is not None, key
            assert tomllib.loads(f"x = {shown[1]}")["x"] == default, key
        else:
            assert "`" not in rows[key], f"{key} has no default to quote"


def test_page_names_every_secrets_variable_and_toml_that_is_accepted():
    assert all(f"`VERTUMNUS_{key.upper()}`" in PAGE for key in SECRETS)
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert config_from(tomllib.loads(example)).launcher == "external"


# Kubernetes


def test_probes_ask_for_what_the_server_answers(paths):
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    for probe in PROBES:
        asked = CONTAINER[probe]["httpGet"]
        assert asked["path"] in paths
        assert ports[asked["port"]] == CONFIG.port
    assert CONTAINER["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/health"
    service = MANIFESTS["Service"]["spec"]
    assert [port["targetPort"] for port in service["ports"]] == list(ports)
    assert service["selector"].items() <= MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    annotations = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in paths
    assert annotations["prometheus.io/port"] == str(CONFIG.port)
    assert CONFIG.public_metrics


def test_starting_and_ending_may_take_what_the_server_takes():
    startup = CONTAINER["startupProbe"]
    # Sockets and settings before, a profile that is measured after.
    assert startup["periodSeconds"] * startup["failureThreshold"] >= CONFIG.start_timeout_s + 30
    command = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    assert POD["terminationGracePeriodSeconds"] >= int(command[1]) + LONGEST_END_S


def test_configuration_is_where_the_server_is_told_to_look_and_is_reachable():
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in POD["volumes"]}
    assert CONTAINER["args"] == ["--config", f"{mounts['config']}/serve.toml"]
    assert str(CONFIG.model) == mounts["model"]
    assert CONFIG.host == "0.0.0.0"
    assert POD["volumes"][0]["configMap"]["name"] == MANIFESTS["ConfigMap"]["metadata"]["name"]


def test_secrets_are_the_servers_and_in_no_manifest():
    names = {each["name"] for each in CONTAINER["env"]}
    assert names <= {f"VERTUMNUS_{key.upper()}" for key in SECRETS}
    assert all(each.keys() == {"name", "valueFrom"} for each in CONTAINER["env"])
    assert not any(getattr(CONFIG, key) for key in SECRETS)
    assert "Secret" not in MANIFESTS


def test_memory_holds_all_kv_and_some_more():
    gib = {
        limit: int(re.fullmatch(r"(\d+)Gi", CONTAINER["resources"][limit]["memory"])[1])
        for limit in ("requests", "limits")
    }
    num_ranks = CONFIG.ranks + CONFIG.decode_ranks
    assert gib["requests"] == gib["limits"] >= num_ranks * CONFIG.kv_mib_per_rank / 1024 + 2
    assert int(CONTAINER["resources"]["requests"]["cpu"]) >= num_ranks * CONFIG.threads_per_rank + 1


def test_nobody_is_root():
    assert POD["securityContext"]["runAsNonRoot"]
    assert f"USER {POD['securityContext']['runAsUser']}" in DOCKERFILE
    assert CONTAINER["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


# Docker and systemd


def test_image_serves_probes_and_ends_as_the_server_does(paths):
    port = ServeConfig.model_fields["port"].default
    assert f"EXPOSE {port}" in DOCKERFILE
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE
    (probed,) = re.findall(rf"http://127\.0\.0\.1:{port}(/\w+)", DOCKERFILE)
    assert probed in paths
    for step in ("ENTRYPOINT", "CMD"):
        assert re.search(rf"^\s*{step} \[", DOCKERFILE, re.MULTILINE), f"{step} in exec form gets signals itself"
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)
    context = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()
        assert f"!{name}" in context


def test_the_unit_waits_for_the_drain():
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[1]) >= LONGEST_END_S
    assert "serve --config" in UNIT
