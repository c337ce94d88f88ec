"""The plan of a launch: ports, addresses, threads and the secret."""

import socket

import pytest

from twostroke.cli.up.plan import LaunchPlan, make_plan, reachable
from twostroke.cli.up.ports import PortPicker, fault
from twostroke.protocol.config import ClusterConfig, EngineConfig, KVCacheConfig, RouterConfig, SecurityConfig
from twostroke.protocol.errors import ConfigError


def plan_of(cores: int = 8, **sections: object) -> LaunchPlan:
    """A plan with two context servers and one generation server unless told otherwise."""
    given = {"context": EngineConfig(replicas=2), "router": RouterConfig(port=0)} | sections
    return make_plan(ClusterConfig(**given), PortPicker(), "/launch/secret", cores)  # type: ignore[arg-type]  # sections


def test_each_server_has_its_own_ports_and_the_router_knows_their_addresses() -> None:
    """No port is given out twice, and none is left to chance at a restart."""
    plan = plan_of()
    assert [part.name for part in plan.servers] == ["context-0", "context-1", "generation-0"]
    assert [part.command for part in plan.servers] == ["context-server", "context-server", "generation-server"]
    engines = [part.config.context for part in plan.servers[:2]] + [plan.servers[2].config.generation]
    addresses = [address for engine in engines for address in (engine.worker_bind, engine.transfer.bind)]
    ports = [address.rpartition(":")[2] for address in addresses] + [str(engine.port) for engine in engines]
    assert len(set(ports)) == 9
    assert "0" not in ports
    assert plan.router.config.workers.context == tuple(engine.worker_bind for engine in engines[:2])
    assert plan.router.config.workers.generation == (engines[2].worker_bind,)
    assert [part.http for part in plan.servers] == [f"http://127.0.0.1:{engine.port}" for engine in engines]


def test_cores_are_shared_among_engines_and_each_gets_at_least_one() -> None:
    """A number of threads in the configuration is left alone."""
    assert [part.config.context.threads for part in plan_of(cores=8).servers[:2]] == [2, 2]
    assert plan_of(cores=1).servers[2].config.generation.threads == 1
    named = plan_of(generation=EngineConfig(threads=5))
    assert named.servers[2].config.generation.threads == 5


def test_worlds_get_five_seconds_to_stop() -> None:
    """`up` stops all in ten."""
    assert {part.config.context.shutdown_s for part in plan_of().servers[:2]} == {5.0}


def test_all_parts_share_the_launch_secret_unless_one_is_named() -> None:
    """A named file serves clusters that span hosts."""
    plan = plan_of()
    assert {part.config.security.secret_file for part in (*plan.servers, plan.router)} == {"/launch/secret"}
    named = plan_of(security=SecurityConfig(secret_file="/mine"))  # noqa: S106  (a path)
    assert named.router.config.security.secret_file == "/mine"  # noqa: S105  (a path)


def test_a_named_port_counts_up_over_replicas() -> None:
    """So that a range can be opened in a firewall."""
    first = PortPicker().pick("127.0.0.1")
    plan = plan_of(context=EngineConfig(replicas=2, worker_bind=f"tcp://127.0.0.1:{first}"))
    assert [part.config.context.worker_bind for part in plan.servers[:2]] == [
        f"tcp://127.0.0.1:{first}",
        f"tcp://127.0.0.1:{first + 1}",
    ]


def test_a_taken_port_is_refused_with_its_setting() -> None:
    """Before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert fault("127.0.0.1", port) == "Address already in use"
        with pytest.raises(
            ConfigError, match=rf"router.port: port {port} at 127.0.0.1 cannot be used: Address already"
        ):
            plan_of(router=RouterConfig(port=port))
        with pytest.raises(
            ConfigError, match=rf"router.admin_port: port {port} .*: Address already in use; name another"
        ):
            plan_of(router=RouterConfig(port=0, admin_port=port))


def test_two_settings_cannot_share_a_port() -> None:
    """It would be free when asked, and taken when the second part starts."""
    port = PortPicker().pick("127.0.0.1")
    with pytest.raises(ConfigError, match=r"router.admin_port: .* this launch uses it already"):
        plan_of(router=RouterConfig(port=port, admin_port=port))


def test_a_host_that_is_not_this_one_is_refused() -> None:
    """With the system's reason."""
    with pytest.raises(ConfigError, match=r"router.port: port 8000 at 192.0.2.1 cannot be used: Cannot assign"):
        plan_of(router=RouterConfig(host="192.0.2.1", port=8000))


def test_an_address_of_another_form_is_refused() -> None:
    """`up` fixes ports, so it must understand the address."""
    with pytest.raises(ConfigError, match=r"generation.worker_bind: expected tcp://host:port, got ipc:///x"):
        plan_of(generation=EngineConfig(worker_bind="ipc:///x"))


def test_roles_with_different_block_sizes_are_refused_at_once() -> None:
    """Their caches could never exchange a block, so `up` does not wait for a cluster that cannot become ready."""
    context = EngineConfig(kv_cache=KVCacheConfig(block_size=16))
    generation = EngineConfig(kv_cache=KVCacheConfig(block_size=32))
    with pytest.raises(
        ConfigError, match=r"context\.kv_cache\.block_size is 16, generation\.kv_cache\.block_size is 32"
    ):
        plan_of(context=context, generation=generation)


def test_a_wildcard_is_reached_over_loopback() -> None:
    """What is printed and given to the router must be an address that connects."""
    assert reachable("0.0.0.0") == "127.0.0.1"  # noqa: S104  (nothing is bound)
    assert reachable("10.1.2.3") == "10.1.2.3"


def test_picked_ports_lie_below_those_of_outgoing_connections() -> None:
    """Else a connection could take a server's port while it restarts."""
    picker = PortPicker(seed=1)
    picked = [picker.pick("127.0.0.1") for _ in range(50)]
    assert len(set(picked)) == 50
    assert all(20_000 <= port < 32_000 for port in picked)
