"""The same cases for other harnesses, where they are installed. Nothing is installed here.

Where to look: DECODEGATE_PEER_AX (a virtual environment with agentx-harness, which brings aiperf), DECODEGATE_PEER_VLLM
(with vllm) and DECODEGATE_PEER_GUIDELLM (with guidellm); by default the folders of ../shared/bench/run_peers.sh.
DECODEGATE_PEER_TOKENIZER: a local tokenizer folder, which all of them need. Command lines as in that script.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

from tests.benchmarks.wire_cases import instant_server, paced_server

TOKENIZER = Path(os.environ.get("DECODEGATE_PEER_TOKENIZER", "/tmp/models/smollm2-135m"))
PROGRAMS = {
    "aiperf": Path(os.environ.get("DECODEGATE_PEER_AX", "/tmp/ax-venv")) / "bin" / "aiperf",
    "vllm bench serve": Path(os.environ.get("DECODEGATE_PEER_VLLM", "/tmp/vllm-venv")) / "bin" / "vllm",
    "guidellm": Path(os.environ.get("DECODEGATE_PEER_GUIDELLM", "/tmp/gl-venv")) / "bin" / "guidellm",
}
SHAPES = (("instant", 64, 4000, 8), ("instant", 64, 1000, 512), ("paced", 64, 320, 128), ("paced", 256, 1280, 128))
"""Server, streams, requests, output tokens: those of wire_cases."""
FIGURES = re.compile(
    r"Request [Tt]hroughput|Output [Tt]oken [Tt]hroughput|Mean TTFT|Time to First Token|Mean ITL|Inter Token Lat"
    r"|^\| concurrent"
)


def run() -> None:
    """Run every peer that is there over every shape, and print its own figures as it words them."""
    there = {name: program for name, program in PROGRAMS.items() if program.exists()}
    for name in PROGRAMS.keys() - there.keys():
        print(f"  {name}: skipped, not installed at {PROGRAMS[name]}")
    if there and not TOKENIZER.exists():
        print(f"  all skipped: no tokenizer at {TOKENIZER} (set DECODEGATE_PEER_TOKENIZER)")
        return
    for name, program in there.items():
        for kind, streams, requests, tokens in SHAPES:
            print(f"  {name}: {kind}, {streams} streams, {requests} requests, {tokens} tokens", flush=True)
            with paced_server() if kind == "paced" else instant_server() as url, tempfile.TemporaryDirectory() as out:
                for text in _figures([str(program), *_arguments(name, url, streams, requests, tokens, out)]):
                    print(f"    {text}", flush=True)


def _arguments(name: str, url: str, streams: int, requests: int, tokens: int, out: str) -> list[str]:
    if name == "aiperf":
        text = (
            f"profile --url {url} --model tiny --tokenizer {TOKENIZER} --endpoint-type chat --streaming --ui none"
            f" --no-gpu-telemetry --no-server-metrics --use-server-token-count --random-seed 1 --concurrency {streams}"
            f" --request-count {requests} --isl 32 --osl {tokens} --output-artifact-dir {out}"
        )
    elif name == "vllm bench serve":
        text = (
            f"bench serve --backend openai --base-url {url} --model tiny --tokenizer {TOKENIZER} --dataset-name random"
            f" --ignore-eos --disable-tqdm --max-concurrency {streams} --num-prompts {requests} --random-input-len 32"
            f" --random-output-len {tokens}"
        )
    else:
        text = (
            f"run --disable-progress --backend kind=openai_http,target={url},model=tiny"
            f" --tokenizer kind=hf_auto,model={TOKENIZER} --profile kind=concurrent,streams={streams}"
            f" --constraint kind=max_requests,count={requests}"
            f" --data kind=synthetic_text,prompt_tokens=32,output_tokens={tokens}"
            f" --output kind=json,path={out}/out.json"
        )
    return text.split()


def _figures(command: list[str]) -> list[str]:
    # aiperf takes a local tokenizer folder for a repository of the hub when told to stay offline
    environment = {
        key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    }
    environment |= {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        return ["gave up after 600 s"]
    found = [text.strip()[:118] for text in done.stdout.splitlines() if FIGURES.search(text)]
    return found or [f"no figures; exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"]
