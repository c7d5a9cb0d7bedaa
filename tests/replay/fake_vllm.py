"""Plays ``vllm serve`` in a fraction of a second: python fake_vllm.py serve MODEL --port N [what to play]."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PREFIX = "(APIServer pid=7) INFO 11-30 12:00:00 [api.py:1] "
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--additional-config", type=json.loads, default={})
    parser.add_argument("--play-slow", type=float, default=0.0, help="seconds to load")
    parser.add_argument("--play-log", type=Path, help="a log to print, then end with --play-exit")
    parser.add_argument("--play-exit", type=int, default=1)
    parser.add_argument("--play-stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--play-orphan", action="store_true", help="leave a stubborn grandchild in its own session")
    parser.add_argument("--play-reads-key", action="store_true", help="know additional-config.decode_backend")
    parser.add_argument("--play-refuse", type=int, help="answer completions with this status")
    parser.add_argument("--play-die-serving", action="store_true", help="die at the second completion")
    args, _ = parser.parse_known_args()

    print(f"{PREFIX}non-default args: {sys.argv[1:]}", flush=True)
    print("steps:", os.environ.get("DECODEGATE_STEPS"), flush=True)
    if args.play_stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if args.play_orphan:
        words = [sys.executable, "-c", STUBBORN]
        orphan = f"import subprocess; subprocess.Popen({words!r}, start_new_session=True)"
        subprocess.run([sys.executable, "-c", orphan], check=True)
    deadline = time.monotonic() + args.play_slow
    while time.monotonic() < deadline:
        print(f"{PREFIX}Loading safetensors checkpoint shards", flush=True)
        time.sleep(0.1)
    if args.play_log is not None:
        print(args.play_log.read_text(), flush=True)
        sys.exit(args.play_exit)
    if args.play_reads_key and args.additional_config.get("decode_backend", "auto") not in (
        "auto",
        "latency_specialized",
    ):
        sys.exit("ValueError: Supported decode_backend values are auto/latency_specialized")
    serve(args)


def serve(args: argparse.Namespace) -> None:
    names = [args.served_model_name or args.model]
    completions = 0

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer(200, {})

        def do_POST(self) -> None:
            nonlocal completions
            completions += 1
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if args.play_die_serving and completions > 1:
                print("(EngineCore pid=8) ERROR 11-30 12:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.")
                sys.stdout.flush()
                os._exit(1)
            if args.play_refuse:
                self.answer(args.play_refuse, {"error": "not today"})
            elif asked["model"] not in names:
                self.answer(404, {"error": f"The model `{asked['model']}` does not exist."})
            else:
                self.answer(200, {"choices": [{"text": " a"}]})

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
