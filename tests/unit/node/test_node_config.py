from pathlib import Path

import pytest

from kvasir.common.sizes import parse_bytes, parse_cpus
from kvasir.decode_node.config import DecodeConfig
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.node.build import build, connector_settings, engine_settings
from kvasir.prefill_node.config import PrefillConfig
from tests.unit.node.fakes import parts

LONG_OF_TWO = ["--max-long-partial-prefills", "2"]


@pytest.mark.parametrize(
    ("text", "amount"),
    [("2GiB", 2 << 30), ("400MiB", 400 << 20), ("1.5 GB", 1_500_000_000), ("64 kib", 65536), ("123", 123), (7, 7)],
)
def test_amounts_of_memory(text: str | int, amount: int) -> None:
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "GiB", "2 apples", "-1GiB", "1e9", "2GiBB", 1.5, float("inf"), True, [1], None])
def test_what_is_no_amount(text: object) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        parse_bytes(text)


def test_cpus() -> None:
    assert parse_cpus("0,2-4") == {0, 2, 3, 4}
    for bad in ("", "a", "1-", "3-2", "-1", "0-99999999999"):
        with pytest.raises(ValueError, match="CPU"):
            parse_cpus(bad)


def test_the_command_line_as_people_write_it() -> None:
    config = PrefillConfig.load(
        ["--model", "/m", "--join", "a:1", "--join", "b:2", "--kv-cache-memory", "400MiB", "--no-enable-prefix-caching"]
    )
    assert config.join == ["a:1", "b:2"]
    assert config.kv_cache_memory == 400 << 20
    assert not config.enable_prefix_caching
    assert config.max_num_batched_tokens == 512


def test_the_environment_and_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "decode.yaml"
    path.write_text("model: /from-file\nmax_num_seqs: 3\nkv_cache_memory: 1GiB\njoin: [c:3]\n")
    monkeypatch.setenv("KVASIR_DECODE_MAX_NUM_SEQS", "5")
    config = DecodeConfig.load(["--config", str(path)])
    assert (config.model, config.max_num_seqs, config.kv_cache_memory) == (Path("/from-file"), 5, 1 << 30)
    assert config.join == ["c:3"]
    monkeypatch.setenv("KVASIR_DECODE_JOIN", "a:1, b:2")
    assert DecodeConfig.load(["--config", str(path)]).join == ["a:1", "b:2"]
    path.write_text("model: /from-file\ncpus: 0\n")
    assert DecodeConfig.load(["--config", str(path)]).cpus == "0"


@pytest.mark.parametrize("line", ["kv_cache_memory: 1.5", "swap_space: yes", "kv_quota: .inf", "cpus: 0.5"])
def test_mistakes_in_the_file_are_explained(line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """YAML makes numbers and truths of some words: they came as a traceback, or passed for a byte."""
    (tmp_path / "decode.yaml").write_text(f"model: /m\n{line}\n")
    with pytest.raises(SystemExit):
        DecodeConfig.load(["--config", str(tmp_path / "decode.yaml")])
    assert capsys.readouterr().err.startswith(f"error: {line.partition(':')[0]}: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "model"),
        (["--model", "/m", "--join", "nowhere"], "host:port"),
        (["--model", "/m", "--listen", "50051"], "host:port"),
        (["--model", "/m", "--kv-cache-memory", "lots"], "amount of memory"),
        (["--model", "/m", "--max-num-seqs", "0"], "greater than 0"),
        (["--model", "/m", "--max-model-len", "most"], "auto"),
        (["--model", "/m", "--max-model-len", "1"], "greater than or equal to 2"),
        (["--model", "/m", "--cpus", "x"], "CPUs"),
        (["--model", "/m", "--priority-aging-s", "inf"], "priority_aging_s: Input should be a finite number"),
        (["--model", "/m", "--max-num-partial-prefills", "-1"], "greater than or equal to 0"),
        (["--model", "/m", *LONG_OF_TWO], "needs long_prefill_token_threshold"),
        (
            ["--model=/m", "--long-prefill-token-threshold=9", "--max-num-partial-prefills=1", *LONG_OF_TWO],
            "max_long_partial_prefills of 2 is more than max_num_partial_prefills of 1",
        ),
        (["--model", "/m", "--swap-space", "1GiB"], "unknown option --swap-space"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        PrefillConfig.load(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_a_connector_of_ones_own_gets_its_options() -> None:
    options = ["--kv-options", "colour=blue", "--kv-options", "size=a few"]
    config = PrefillConfig.load(["--model", "/m", "--connector", "docs.stream_connector:StreamConnector", *options])
    settings = connector_settings(config, "the secret")
    assert (settings.name, settings.secret) == ("docs.stream_connector:StreamConnector", "the secret")
    assert settings.options == {"colour": "blue", "size": "a few"}


def test_the_cost_rule_can_be_switched_off() -> None:
    settings = connector_settings(PrefillConfig.load(["--model", "/m"]), "")
    assert not settings.costs.is_worth_fetching(fetch_s=10.0, compute_s=1.0)
    settings = connector_settings(PrefillConfig.load(["--model", "/m", "--kv-fetch", "always"]), "")
    assert settings.costs.is_worth_fetching(fetch_s=10.0, compute_s=1.0)
    assert settings.costs.give_up_after_s(1.0) == float("inf")


def test_what_only_decode_nodes_have_reaches_the_engine() -> None:
    argv = ["--model", "/m", "--target-itl-ms", "40", "--swap-space", "1GiB", "--max-model-len", "auto"]
    settings = engine_settings(DecodeConfig.load([*argv, "--priority-aging-s", "5"]), "decode")
    assert (settings.target_itl_s, settings.swap_space, settings.max_model_len) == (0.04, 1 << 30, "auto")
    assert settings.priority_aging_s == 5
    assert engine_settings(DecodeConfig.load(["--model", "/m"]), "decode").swap_space is None
    assert engine_settings(PrefillConfig.load(["--model", "/m"]), "prefill").swap_space == 0


def test_seats_beyond_a_step_would_leave_nothing_for_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        DecodeConfig.load(["--model", "/m", "--max-num-seqs", "300"])
    assert "max_num_batched_tokens of 256 is less than max_num_seqs of 300" in capsys.readouterr().err


def test_speculative_decoding_as_json_in_the_environment_and_in_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    config = DecodeConfig.load(["--model", "/m", "--speculative-config", given])
    wanted = config.speculative_config
    assert wanted is not None
    assert (wanted.num_speculative_tokens, wanted.lookup) == (4, (2, 4))
    assert engine_settings(config, "decode").speculation == wanted
    path = tmp_path / "decode.yaml"
    path.write_text(f"model: /m\nspeculative_config: {given}\n")
    assert DecodeConfig.load(["--config", str(path)]).speculative_config == wanted
    monkeypatch.setenv("KVASIR_DECODE_SPECULATIVE_CONFIG", given)
    assert DecodeConfig.load(["--model", "/m"]).speculative_config == wanted
    with pytest.raises(SystemExit):
        DecodeConfig.load(["--model", "/m", "--speculative-config", given.replace("method", "methods")])
    assert "speculative_config.methods" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        PrefillConfig.load(["--model", "/m", "--speculative-config", given])


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--target-itl-ms", "inf", "target_itl_ms: Input should be a finite number"),
        ("--speculative-config", "ngram", "speculative_config: a JSON object is wanted, got 'ngram'"),
        (
            "--speculative-config",
            '{"method": "ngram"}',
            "error: speculative_config.num_speculative_tokens is wanted\n",
        ),
    ],
)
def test_mistakes_of_decode_nodes_are_explained(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        DecodeConfig.load(["--model", "/m", option, value])
    assert words in capsys.readouterr().err


def test_a_node_is_called_what_it_was_told_or_as_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = parts(ConnectorSettings(name="memory"))
    monkeypatch.setattr("kvasir.node.build.build_engine", lambda settings: (made.engine, made.memory, made.model))
    for given, name in (([], "fake"), (["--served-model-name", "served"], "served")):
        config = PrefillConfig.load(["--model", "/m", "--connector", "memory", *given])
        built = build(config, "prefill", None, lambda connector: None)
        assert built.model.name == name
        assert f'model_name="{name}"'.encode() in built.metrics.metrics.render()[0]
