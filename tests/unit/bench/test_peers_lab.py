"""What `kvasir bench peers` makes of its contenders: commands that answer by a script, and a server that does."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from kvasir.bench.lab.peers import Found, Peer, Workload, _peer, main
from kvasir.bench.lab.peers_report import as_markdown
from kvasir.bench.tokenizer import DirectoryTokenizer
from kvasir.cli.builtin_model import prepare_builtin_model
from tests.unit.bench.scripted_server import ScriptedServer

WORKLOAD = Workload(concurrency=(1, 3), input_len=5, num_tokens=4)
# Its tokens are the first ones of each prompt, plus argv[2] in the last answer of each batch.
ECHO = """
import json, sys
workload = json.load(open(sys.argv[1]))
for batch in workload["batches"]:
    token_ids = [prompt[: workload["num_tokens"]] for prompt in batch]
    token_ids[-1][-1] += int(sys.argv[2])
    rate = float(sys.argv[3]) * len(batch)
    line = {"concurrency": len(batch), "tokens_per_s": rate, "decode_tokens_per_s": 2 * rate, "token_ids": token_ids}
    print("a line of its own")
    print(json.dumps(line))
"""


@pytest.fixture
def echo(tmp_path: Path) -> str:
    (tmp_path / "echo.py").write_text(ECHO)
    return f"{sys.executable} {tmp_path / 'echo.py'} {{workload}}"


def test_rates_and_agreement(echo: str) -> None:
    found = Found((5, 4))
    peers = [Peer("transformers", f"{echo} 0 10"), Peer("other", f"{echo} 1 20"), Peer("kvasir-x", f"{echo} 1 30")]
    peers.append(Peer("exact", f"{echo} 0 25"))
    for _ in range(2):
        for peer in peers:
            found.take_turn(peer, WORKLOAD)
    table = as_markdown({"cpu": "x"}, 5, 4, found.measurements)
    assert "Medians of 2 to 2 rounds" in table
    assert "| transformers | 20.0 | 60.0 | 8 of 8 |" in table
    assert "| other | 40.0 | 120.0 | 4 of 8 |" in table, "of a batch of one none, of three two, twice"
    assert "| other | 20.0 | 60.0 | 4 of 8 |" in table, "from the prompts to the end"
    assert "| kvasir-x | 1.20 (exact) | 1.20 (exact) |" in table


def test_a_peer_that_agrees_less_is_no_rival(echo: str) -> None:
    found = Found((5, 4))
    for name, options in (("transformers", "0 10"), ("kvasir-x", "0 15"), ("fast", "1 100")):
        found.take_turn(Peer(name, f"{echo} {options}"), WORKLOAD)
    assert "| kvasir-x | 1.50 (transformers) |" in as_markdown({}, 5, 4, found.measurements)


def test_a_command_for_each_concurrency(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import sys\nprint('warming up: 3 tok/s')\nprint(f'{int(sys.argv[1]) * 1.5} tokens/s at the end')\n"
    )
    peer = Peer("plain", f"{sys.executable} {script} {{concurrency}} {{input_len}}")
    assert [said["tokens_per_s"] for said in peer.measure(WORKLOAD)] == [1.5, 4.5]


async def test_an_endpoint(scripted: ScriptedServer) -> None:
    scripted.gap_s = 0.02
    scripted.answer_together(1, 1, 1, 3, 3, 3)
    said = await asyncio.wait_for(asyncio.to_thread(Peer("server", scripted.url).measure, WORKLOAD), 60)
    assert [one["concurrency"] for one in said] == [1, 3]
    assert scripted.most_running == 3
    assert all(0 < one["tokens_per_s"] <= 4 * one["concurrency"] / (5 * 0.02) for one in said)


async def test_the_text_of_an_endpoint_is_compared(scripted: ScriptedServer) -> None:
    tokenizer = DirectoryTokenizer(prepare_builtin_model())
    texts = ("The answer is 42.", "The answer is 42.ẟ", "Another answer")
    same, cut, other = map(tokenizer.encode, texts)
    scripted.words = ("The", " answer", " is", " 42.", "\ufffd")
    found = Found((5, 4), reference={1: [other], 3: [same, cut[:-1], other]})
    await asyncio.wait_for(asyncio.to_thread(found.take_turn, Peer("server", scripted.url), WORKLOAD), 60)
    assert [(one.num_equal, one.num_compared) for one in found.measurements] == [(0, 1), (2, 3)]


def test_what_fails_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        Peer("bad", f"{sys.executable} -c 'raise SystemExit(3)' {{workload}}").measure(WORKLOAD)
    with pytest.raises(RuntimeError, match="did not answer for each concurrency"):
        Peer("silent", f"{sys.executable} -c pass {{workload}}").measure(WORKLOAD)
    with pytest.raises(RuntimeError, match="printed no tokens/s"):
        Peer("mute", f"{sys.executable} -c pass {{concurrency}}").measure(WORKLOAD)


def test_rounds_are_added_to_those_of_earlier_runs(echo: str, tmp_path: Path) -> None:
    argv = ["--ours", "--output", str(tmp_path), "--concurrency", "2", "--input-len", "5", "--output-len", "4"]
    for _ in range(2):
        assert main([f"other={echo} 0 10", *argv]) == 0
    written = json.loads((tmp_path / "peers.json").read_text())
    assert [one["round"] for one in written["measurements"]] == [0, 1]
    assert written["measurements"][0]["num_equal"] is None, "there is nothing to compare with"
    assert "| other | 40.0 | - |" in (tmp_path / "peers.md").read_text()
    assert main([f"transformers={echo} 0 5", *argv]) == 0
    assert main([f"other={echo} 0 10", *argv]) == 0
    assert "| other | 40.0 | 2 of 2 |" in (tmp_path / "peers.md").read_text(), "the reference's answers are kept"
    argv[argv.index("5")] = "6"
    assert main([f"other={echo} 0 10", *argv]) == 0
    assert len(json.loads((tmp_path / "peers.json").read_text())["measurements"]) == 1, "of another shape"


def test_a_first_run_compares_with_the_reference(echo: str, tmp_path: Path) -> None:
    argv = ["--ours", "--output", str(tmp_path), "--concurrency", "2", "--input-len", "5", "--output-len", "4"]
    assert main([f"other={echo} 1 10", f"transformers={echo} 0 5", *argv]) == 0
    assert "| other | 40.0 | 1 of 2 |" in (tmp_path / "peers.md").read_text(), "wherever it was named"


@pytest.mark.parametrize("text", ["other", "=x {workload}", "other=", "other=./run"])
def test_bad_peers_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([text])
    assert "wants" in capsys.readouterr().err


def test_a_url_may_hold_an_equals_sign() -> None:
    assert _peer("a=http://h/?x=y") == Peer("a", "http://h/?x=y")
