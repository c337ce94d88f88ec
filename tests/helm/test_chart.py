"""The chart, rendered by a real helm, checked against the schemas of Kubernetes and twostroke's configuration."""

import base64
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from twostroke.protocol.config import ClusterConfig, RoutingPolicy, parse_config

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
VALUES = sorted((CHART / "ci").glob("*.yaml"))
KUBERNETES = "1.37"
TIMEOUT_S = 60

Manifest = Mapping[str, Any]  # plain YAML, checked against Kubernetes' schemas below


@pytest.fixture(scope="session")
def helm() -> str:
    """A real helm; that there is none is a failure."""
    done = subprocess.run([ROOT / "scripts" / "fetch-helm"], capture_output=True, text=True, check=True, timeout=120)
    return f"{done.stdout.strip()}/helm"


def run_helm(helm: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm without a cluster."""
    return subprocess.run([helm, *arguments], capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def render(helm: str, *arguments: str | Path) -> list[Manifest]:
    """All manifests of a release named `demo`."""
    done = run_helm(helm, "template", "demo", CHART, "--namespace", "prod", *arguments)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of this kind and name."""
    (found,) = (one for one in manifests if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def cluster_config(manifests: list[Manifest], name: str) -> ClusterConfig:
    """The configuration that the pods will read."""
    return parse_config(yaml.safe_load(find(manifests, "ConfigMap", name)["data"]["cluster.yaml"]), "cluster.yaml")


def pod(manifests: list[Manifest], name: str) -> Manifest:
    """The pod template's spec of a deployment."""
    spec: Manifest = find(manifests, "Deployment", name)["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_helm_finds_nothing_to_complain_about(helm: str, values: Path) -> None:
    """`helm lint --strict`, with each set of values."""
    done = run_helm(helm, "lint", "--strict", CHART, "--values", values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_kubernetes_accepts_every_manifest(helm: str, values: Path) -> None:
    """Strictly: unknown fields are errors."""
    manifests = render(helm, "--values", values)
    assert {"Deployment", "Service", "ConfigMap"} <= {manifest["kind"] for manifest in manifests}
    for manifest in manifests:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_every_selector_finds_the_pods_of_its_component(helm: str, values: Path) -> None:
    """Services and disruption budgets that select nothing would go unnoticed."""
    manifests = render(helm, "--values", values)
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in manifests if one["kind"] == "Deployment"]
    selectors = [one["spec"]["selector"] for one in manifests if one["kind"] == "Service"]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in manifests if one["kind"] == "PodDisruptionBudget"]
    assert len(selectors) >= 4
    for selector in selectors:
        assert sum(selector.items() <= labels.items() for labels in pods) == 1


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_pods_run_without_privileges(helm: str, values: Path) -> None:
    """No root, no writable root file system, no token, no way up."""
    manifests = render(helm, "--values", values)
    for spec in (one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "Deployment"):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_the_configuration_in_the_chart_is_one_that_twostroke_accepts(helm: str) -> None:
    """Addresses agree with the services that lead to them."""
    manifests = render(helm, "--values", CHART / "ci" / "minimal.yaml")
    config = cluster_config(manifests, "demo")
    assert config.model.path == "/models/demo"
    assert config.workers.context == ("dns://demo-context-headless:7000",)
    assert config.workers.generation == ("dns://demo-generation-headless:7000",)
    for role, engine in (("context", config.context), ("generation", config.generation)):
        service = find(manifests, "Service", f"demo-{role}-headless")["spec"]
        assert service["clusterIP"] == "None"
        ports = {
            port["name"]: port["containerPort"] for port in pod(manifests, f"demo-{role}")["containers"][0]["ports"]
        }
        assert ports["http"] == engine.port
        assert engine.worker_bind == f"tcp://0.0.0.0:{ports['worker']}"
        assert engine.transfer.bind == f"tcp://0.0.0.0:{ports['transfer']}"
    ports = {port["name"]: port["containerPort"] for port in pod(manifests, "demo-router")["containers"][0]["ports"]}
    assert ports == {"http": config.router.port, "admin": config.router.admin_port}


def test_files_that_the_configuration_names_are_mounted(helm: str) -> None:
    """Under exactly those paths."""
    manifests = render(helm, "--values", CHART / "ci" / "gpu.yaml")
    security = cluster_config(manifests, "llm").security
    spec = pod(manifests, "llm-router")
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {
        f"{mount['mountPath']}/{item['path']}"
        for mount in spec["containers"][0]["volumeMounts"]
        for item in volumes[mount["name"]].get("secret", {}).get("items", [])
    }
    assert mounted == {security.secret_file, security.api_keys_file}


def test_settings_of_the_user_reach_the_configuration(helm: str) -> None:
    """Beside what the chart decides."""
    config = cluster_config(render(helm, "--values", CHART / "ci" / "gpu.yaml"), "llm")
    assert config.model.name == "big"
    assert config.model.generation_config.value == "ignore"
    assert config.frontend.max_in_flight == 512
    assert config.router.policy.context is RoutingPolicy.ROUND_ROBIN
    assert config.context.max_batched_tokens == 8192
    assert config.context.kv_cache.memory_fraction == 0.9
    assert config.context.transfer.lease_s == 30
    assert config.context.transfer.bind == "tcp://0.0.0.0:7100"
    assert config.generation.max_batched_tokens == 2048


def test_gpus_and_limits_stand_side_by_side(helm: str) -> None:
    """And a role without GPUs asks for none."""
    gpu = pod(render(helm, "--values", CHART / "ci" / "gpu.yaml"), "llm-context")
    assert gpu["containers"][0]["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert gpu["runtimeClassName"] == "nvidia"
    cpu = pod(render(helm, "--values", CHART / "ci" / "minimal.yaml"), "demo-context")
    assert cpu["containers"][0]["resources"]["limits"] == {}


def test_scaling_changes_nothing_but_the_number(helm: str) -> None:
    """No pod restarts because another was added: the configuration and its checksum stay."""
    one = render(helm, "--values", CHART / "ci" / "gpu.yaml")
    more = render(helm, "--values", CHART / "ci" / "gpu.yaml", "--set", "context.replicas=7")
    assert find(more, "Deployment", "llm-context")["spec"]["replicas"] == 7
    assert find(one, "ConfigMap", "llm") == find(more, "ConfigMap", "llm")
    assert "replicas" not in find(one, "Deployment", "llm-generation")["spec"]


def test_only_the_release_reaches_its_servers(helm: str) -> None:
    """KV and control traffic: from this release's pods, and metrics from named places."""
    manifests = render(helm, "--values", CHART / "ci" / "gpu.yaml")
    router, servers, metrics = find(manifests, "NetworkPolicy", "llm-servers")["spec"]["ingress"]
    assert [port["port"] for port in router["ports"]] == [7000]
    assert router["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    assert "ports" not in servers
    release = {"app.kubernetes.io/name": "twostroke", "app.kubernetes.io/instance": "demo"}
    assert [peer["podSelector"]["matchLabels"] for peer in servers["from"]] == [release]
    assert [port["port"] for port in metrics["ports"]] == [8080]


def test_the_admin_port_is_not_on_the_public_service(helm: str) -> None:
    """However the public one is exposed."""
    manifests = render(helm, "--values", CHART / "ci" / "gpu.yaml")
    public = find(manifests, "Service", "llm-router")["spec"]
    assert public["type"] == "LoadBalancer"
    assert [port["name"] for port in public["ports"]] == ["http"]
    assert find(manifests, "Service", "llm-router-admin")["spec"]["type"] == "ClusterIP"


def test_a_secret_is_made_unless_one_exists(helm: str) -> None:
    """64 hex digits, another one each time."""
    secrets = []
    for _ in range(2):
        manifest = find(render(helm, "--values", CHART / "ci" / "minimal.yaml"), "Secret", "demo-cluster")
        secrets.append(base64.b64decode(manifest["data"]["secret"]).decode())
    assert [len(bytes.fromhex(secret)) for secret in secrets] == [32, 32]
    assert secrets[0] != secrets[1]
    assert "Secret" not in {one["kind"] for one in render(helm, "--values", CHART / "ci" / "gpu.yaml")}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("context.replica=3", "additional properties 'replica' not allowed"),
        ("context.replicas=-1", "minimum: got -1, want 0"),
        ("model.dtype=int8", "value must be one of 'auto', 'float32', 'bfloat16', 'float16'"),
        ("generation.config.worker_bind=x", "generation.config.worker_bind: the chart decides this"),
        ("router.config.port=1", "router.config.port: the chart decides this"),
        ("model.volume.existingClaim=a,model.volume.hostPath=/b", "name existingClaim or hostPath, not both"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: str, setting: str, message: str) -> None:
    """Before anything reaches a cluster."""
    done = run_helm(helm, "template", "demo", CHART, "--set", setting)
    assert done.returncode != 0
    assert message in done.stderr
