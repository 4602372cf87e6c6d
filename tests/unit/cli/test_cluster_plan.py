from pathlib import Path

import pytest

from kvasir.cli.child import ChildSpec
from kvasir.cli.cluster_plan import Addresses, Machine, as_arguments, child_environment, plan_cluster
from kvasir.cli.serve_config import ServeConfig
from kvasir.common.speculative_config import SpeculativeConfig
from kvasir.decode_node.config import DecodeConfig

GIB = 1 << 30
SECRET = "a secret of the tests"


def plan(config: ServeConfig, redis_url: str | None = None, num_cores: int = 2) -> dict[str, ChildSpec]:
    machine = Machine(
        cpus=tuple(range(num_cores)), available_bytes=10 * GIB, weights_bytes=GIB, environment={"PATH": "/bin"}
    )
    ports = tuple(range(9100, 9100 + config.prefill + config.decode))
    addresses = Addresses(http_port=8000, grpc_port=8001, metrics_ports=ports)
    specs = plan_cluster(config, Path("/models/m"), machine, addresses, SECRET, redis_url, Path("/tmp/kv"))
    return {spec.name: spec for spec in specs}


def option(spec: ChildSpec, name: str) -> str:
    return spec.command[spec.command.index(name) + 1]


def test_one_of_each() -> None:
    specs = plan(ServeConfig())
    assert list(specs) == ["prefill-0", "decode-0", "router"], "the router is the last to start"
    assert [spec.command[2] for spec in specs.values()] == [
        "kvasir.prefill_node",
        "kvasir.decode_node",
        "kvasir.router",
    ]
    assert option(specs["router"], "--grpc-listen") == option(specs["decode-0"], "--join") == "127.0.0.1:8001"
    assert {option(spec, "--model") for spec in specs.values()} == {"/models/m"}
    assert [spec.health for spec in specs.values()] == [("127.0.0.1", port) for port in (9100, 9101, 8000)]
    assert option(specs["prefill-0"], "--kv-cache-memory") == str(2 * GIB)


def test_the_router_stops_first_and_is_the_only_one_not_restarted() -> None:
    specs = plan(ServeConfig())
    assert specs["router"].stop_order < specs["prefill-0"].stop_order == specs["decode-0"].stop_order
    assert [name for name, spec in specs.items() if not spec.can_restart] == ["router"]


def test_each_node_has_threads_and_cores_of_its_own() -> None:
    specs = plan(ServeConfig(prefill=2, decode=1), num_cores=5)
    for name, threads, cpus in (("prefill-0", "2", "0,1"), ("prefill-1", "2", "2,3"), ("decode-0", "1", "4")):
        assert (option(specs[name], "--threads"), option(specs[name], "--cpus")) == (threads, cpus)
    assert "--threads" not in specs["router"].command


def test_cores_are_shared_when_pinning_is_off_or_they_are_too_few() -> None:
    unpinned, crowded = plan(ServeConfig(pin_cores=False)), plan(ServeConfig(prefill=2, decode=2))
    for spec in (*unpinned.values(), *crowded.values()):
        assert "--cpus" not in spec.command


def test_all_share_the_secret_and_no_command_line_shows_it_or_a_key_or_a_password() -> None:
    config = ServeConfig(connector="redis", api_key=["client-key", "other"])
    specs = plan(config, redis_url="redis://:password@127.0.0.1:1/0")
    for spec in specs.values():
        assert spec.environment["KVASIR_CLUSTER_SECRET"] == SECRET
        shown = " ".join(spec.command)
        assert not any(word in shown for word in (SECRET, "client-key", "password"))
    assert specs["router"].environment["KVASIR_ROUTER_API_KEY"] == "client-key,other"
    assert specs["prefill-0"].environment["KVASIR_PREFILL_REDIS_URL"].startswith("redis://:password@")
    assert specs["decode-0"].environment["KVASIR_DECODE_REDIS_URL"].startswith("redis://:password@")
    assert "KVASIR_DECODE_REDIS_URL" not in specs["prefill-0"].environment, "a node refuses what it does not know"


def test_options_reach_those_they_are_for() -> None:
    config = ServeConfig(
        max_num_seqs=4,
        served_model_name=["a", "b"],
        connector="shared_storage",
        kv_cache_memory="1GiB",
        router_options={"policy": "round_robin"},
        decode_options={"max_num_seqs": 32, "enable_prefix_caching": False},
    )
    specs = plan(config)
    assert option(specs["prefill-0"], "--max-num-seqs") == "4"
    assert option(specs["decode-0"], "--max-num-seqs") == "32"
    assert "--no-enable-prefix-caching" in specs["decode-0"].command
    assert option(specs["decode-0"], "--kv-path") == "/tmp/kv"
    assert option(specs["decode-0"], "--kv-cache-memory") == "1GiB"
    assert option(specs["router"], "--policy") == "round_robin"
    assert specs["router"].command[-4:] == ("--served-model-name", "a", "--served-model-name", "b")
    assert "--max-num-seqs" not in specs["router"].command


def test_the_longest_request_may_be_what_fits_each_node() -> None:
    specs = plan(ServeConfig(max_model_len="auto"))
    assert option(specs["prefill-0"], "--max-model-len") == option(specs["decode-0"], "--max-model-len") == "auto"
    assert "--max-model-len" not in specs["router"].command


def test_the_folder_is_for_shared_storage_only() -> None:
    assert "--kv-path" not in plan(ServeConfig())["prefill-0"].command


def test_a_router_for_everybody_is_probed_on_loopback() -> None:
    assert plan(ServeConfig(host="0.0.0.0"))["router"].health == ("127.0.0.1", 8000)
    assert plan(ServeConfig(host="10.1.2.3"))["router"].health == ("10.1.2.3", 8000)


def test_our_own_options_are_not_inherited() -> None:
    ours = {"KVASIR_SERVE_PORT": "1", "KVASIR_CONFIG": "f.yaml", "KVASIR_ROUTER_POLICY": "x", "HOME": "/h"}
    assert set(child_environment(ours, SECRET)) >= {"KVASIR_ROUTER_POLICY", "HOME", "KVASIR_CLUSTER_SECRET"}
    assert not {"KVASIR_SERVE_PORT", "KVASIR_CONFIG"} & set(child_environment(ours, SECRET))


def test_as_arguments() -> None:
    arguments = as_arguments({"max_num_seqs": 8, "eager": True, "caching": False, "name": "x"})
    assert arguments == ["--max-num-seqs", "8", "--eager", "--no-caching", "--name", "x"]
    assert as_arguments({"isolate_tenants": "true", "eager": "false"}) == ["--isolate-tenants", "--no-eager"]


def test_config_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("prefill: 3\ndecode: 3\ndecode_options: {max_num_seqs: 2, flag: true}\n")
    monkeypatch.setenv("KVASIR_SERVE_DECODE", "2")
    config = ServeConfig.load(["--config", str(path), "--router-options", "policy=round_robin"])
    assert (config.prefill, config.decode) == (3, 2), "the environment goes before the file"
    assert config.decode_options == {"max_num_seqs": 2, "flag": True}
    assert config.router_options == {"policy": "round_robin"}


@pytest.mark.parametrize("argv", [["--decode", "0"], ["--conector", "tcp"]])
def test_bad_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        ServeConfig.load(argv)
    assert exit_info.value.code == 2
    assert capsys.readouterr().err


def test_decode_nodes_speculate() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    specs = plan(ServeConfig(speculative_config=given, decode=2))  # type: ignore[arg-type]
    for name in ("decode-0", "decode-1"):
        arguments = ["--model", "/m", "--speculative-config", option(specs[name], "--speculative-config")]
        assert DecodeConfig.load(arguments).speculative_config == SpeculativeConfig.model_validate(given)
    assert "--speculative-config" not in specs["prefill-0"].command
