"""README: every command in it runs, and its key table is the experiment's own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.emulator import process
from replay.emulator.settings import EmulatorSettings
from tests.readme import README, updated

TEXT = README.read_text()
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
INLINE = re.findall(r"`(decodegate [a-z]+ --?[^`]+|decodegate [a-z]+ [a-z]+ -[^`]+)`", TEXT)


def decodegate(command: str, folder: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    asked, _, file = command.partition(" > ")
    words = shlex.split(asked)
    assert words[0] == "decodegate"
    done = subprocess.run(
        [sys.executable, "-m", "decodegate", *words[1:]], cwd=folder, capture_output=True, text=True, timeout=timeout
    )
    if file:
        (folder / file.strip()).write_text(done.stdout)
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the README's experiment file, its two servers emulated, and some sessions as its traces."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "traces").mkdir()
    shutil.copy(README.parent / "workloads" / "demo.jsonl", folder / "traces")
    blocks = re.findall(r"```yaml (\S+)\n(.*?)```", TEXT, re.DOTALL)
    assert [name for name, _ in blocks] == ["experiment.yaml", "kimi-k3.yaml"]
    (folder / "kimi-k3.yaml").write_text(blocks[1][1])
    servers = [
        process.start(
            EmulatorSettings(time_scale=10, model="kimi-k3", decode_backend=backend), folder / f"log-{backend}"
        )
        for backend in ("auto", "latency_specialized")
    ]
    text = blocks[0][1]
    for url, server in zip(("http://vllm-a:8000", "http://vllm-b:8000"), servers, strict=True):
        assert url in text
        text = text.replace(url, server.url)
    text = text.replace("pause_cap_s: 60", "pause_cap_s: 0.1")  # pauses need not be waited out
    (folder / "experiment.yaml").write_text(text)
    yield folder
    for server in servers:
        process.stop(server)


def test_the_commands_run_in_order(place: Path) -> None:
    """To their ends; the two servers are emulators behind URLs, and the report must say so."""
    ours = [command for command in COMMANDS if command.startswith("decodegate ")]
    assert len(ours) == 11
    for command in ours:
        done = decodegate(command, place)
        page = place / "runs" / "first" / "report.json"
        judged = "report:" in done.stdout
        assert judged == ("report" in command or "--run" in command), (command, done.stdout, done.stderr)
        # a busy machine may well make the run inconclusive; then the exit code must say so
        outcome = json.loads(page.read_text())["conclusion"]["outcome"] if judged else ""
        assert done.returncode == (2 if outcome == "INCONCLUSIVE" else 0), (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
    assert "EMULATED" in (place / "runs" / "first" / "report.html").read_text()


def test_the_worked_example_says_what_the_readme_shows(place: Path) -> None:
    """And refuses the two changes that it names."""
    shown = re.search(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert shown is not None
    command = "decodegate check kimi-k3.yaml --offline"
    assert decodegate(command, place).stdout == shown[1]
    example = place / "kimi-k3.yaml"
    text = example.read_text()
    fewer = text.replace("size: 8", "size: 4").replace("count: 8", "count: 4").replace("tp: 8", "tp: 4")
    fewer = fewer.replace("[0, 1, 2, 3, 4, 5, 6, 7]", "[0, 1, 2, 3]")
    other = text.replace(
        "decode_backend: auto\n", "decode_backend: auto\n    serve: {options: {kv-cache-dtype: auto}}\n"
    )
    for changed, words in (
        (fewer, "candidate: tensor-parallel-size 4 is not supported: 8 or 16"),
        (other, "kv-cache-dtype: auto against fp8: other attention kernels"),
    ):
        assert changed != text
        example.write_text(changed)
        refused = decodegate(command, place)
        assert refused.returncode == 3
        assert words in refused.stdout
    assert "candidate: tensor-parallel-size 4 is not supported: 8 or 16" in TEXT
    example.write_text(text)


def test_the_commands_in_the_text_run(tmp_path: Path) -> None:
    assert len(INLINE) == 2
    generate = next(command for command in INLINE if "generate" in command)
    assert decodegate(generate, tmp_path).returncode == 0
    assert len((tmp_path / "sessions.jsonl").read_text().splitlines()) == 24
    emulate = next(command for command in INLINE if "emulate" in command)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = shlex.split(emulate.replace("8000", str(port)))
    server = subprocess.Popen([sys.executable, "-m", "decodegate", *words[1:]], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert f"127.0.0.1:{port}" in server.stdout.readline()
    finally:
        server.terminate()
        server.wait(20)
    schema = json.loads(decodegate("decodegate schema", tmp_path).stdout)
    assert set(schema["required"]) == {"model", "backends"}


def test_make_knows_the_named_targets() -> None:
    named = set(re.findall(r"make (?:PYTHON=\S+ )?([a-z]+)", TEXT))
    targets = {"demo", "test", "lint", "bench"}
    assert targets <= named
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=README.parent, check=True, capture_output=True)


def test_the_key_table_is_up_to_date() -> None:
    assert updated(TEXT) == TEXT, "run: python -m tests.readme"


@pytest.mark.slow
def test_the_demo_ends_in_a_sign_off_that_says_emulated(tmp_path: Path) -> None:
    """What `make demo` runs; a second plan with the same seed has the same digest."""
    pytest.importorskip("lm_eval")
    done = decodegate("decodegate demo --run demo", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EMULATED" in done.stdout
    assert "P90 interactivity" in done.stdout
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("EMULATED") > 5
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?https?://", page)
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["conclusion"]["outcome"] == "candidate faster"
    document = (tmp_path / "demo" / "signoff.html").read_text()
    assert document.count("EMULATED") > 5
    signoff = json.loads((tmp_path / "demo" / "signoff.json").read_text())
    assert {task["task"]: task["outcome"] for task in signoff["tasks"]} == dict.fromkeys(
        ("aime25", "gpqa_diamond", "mrcr"), "PASS"
    )
    assert signoff["outcome"] == "INCONCLUSIVE"
    assert {gate["title"] for gate in signoff["gates"] if gate["outcome"] != "PASS"} == {"Every part was measured"}
    (reason,) = signoff["reasons"]
    assert "no output parity was measured: decodegate parity" in reason
    digest = json.loads((tmp_path / "demo" / "manifest.json").read_text())["plan_digest"]
    again = tmp_path / "again.yaml"
    shutil.copy(README.parent / "replay" / "demo.yaml", again)
    dry = decodegate("decodegate compare again.yaml --dry-run", tmp_path)
    assert f"plan      {digest[:12]}" in dry.stdout
