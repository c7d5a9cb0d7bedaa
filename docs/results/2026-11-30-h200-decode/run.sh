# Issue C on one H200: servers, decode table, vllm bench serve, profile. The files beside it and those of the hand-out (gpu/) in .gpu.
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1
T0=$(date +%s); say() { echo "== $(( $(date +%s) - T0 )) s: $*"; }
bash .gpu/install_vllm.sh /tmp/w 2>&1 | tail -1
bash .gpu/dg.sh
PYTHONPATH=/tmp/site python3 .gpu/make_dummy_model.py /tmp/m8 8b 2>&1 | tail -1
mkdir -p /tmp/profs; say installed
PYTHONPATH=/tmp/dgsite:$PWD python3 -c "
from pathlib import Path
from replay import step_plugin
for n in ('a', 'b'): step_plugin.install(Path('/tmp/srv-' + n))"
serve() { # NAME PORT MODE
  PYTHONPATH=/tmp/srv-$1/plugin:/tmp/site DECODEGATE_STEPS=/tmp/srv-$1/steps VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 \
  setsid python3 -m vllm.entrypoints.openai.api_server --model /tmp/m8 --served-model-name m --load-format dummy --port $2 --host 127.0.0.1 \
    --max-model-len 8192 --gpu-memory-utilization 0.42 --kv-cache-memory-bytes 21474836480 --attention-backend FLASH_ATTN --max-num-seqs 64 \
    --kernel-config '{"enable_flashinfer_autotune":false}' --enable-per-request-metrics --enable-prompt-tokens-details --cudagraph-metrics \
    --profiler-config "{\"profiler\":\"torch\",\"torch_profiler_dir\":\"/tmp/profs\",\"torch_profiler_with_stack\":false,\"ignore_frontend\":true}" \
    --compilation-config "{\"cudagraph_mode\":\"$3\",\"cudagraph_capture_sizes\":[1,2,4,8,16,32,64]}" > /tmp/srv-$1/server.log 2>&1 &
  echo $! >> /tmp/pids; }
serve a 8001 PIECEWISE; serve b 8002 FULL_AND_PIECEWISE
for p in 8001 8002; do for i in $(seq 1 120); do curl -sf http://127.0.0.1:$p/health >/dev/null && break; sleep 1; done; done
tail -1 /tmp/srv-a/server.log; say ready
export PYTHONPATH=/tmp/dgsite:$PWD
timeout -s INT ${1:-300} python3 .gpu/run_dec.py .gpu/dec.yaml /tmp/dec 2>&1 | tail -45
say decode
bench() { PYTHONPATH=/tmp/site python3 -m vllm.entrypoints.cli.main bench serve --backend vllm --base-url http://127.0.0.1:$1 --model m --tokenizer /tmp/m8 \
  --dataset-name random --random-input-len 1 --random-output-len 256 --num-prompts $3 --max-concurrency $2 --ignore-eos --disable-tqdm > $OUT/bench-$1-$2.txt 2>&1; }
mkdir -p $OUT
bench 8001 1 1; bench 8002 1 1; bench 8001 32 32; bench 8002 32 32
grep -H "Mean TPOT\|Output token throughput" $OUT/bench-*.txt; say benched
timeout -s INT 120 python3 .gpu/run_prof.py .gpu/dec.yaml /tmp/prof /tmp/profs 30 2>&1 | tail -20
say profiled; ls -la /tmp/profs /tmp/prof/profiles/* 2>/dev/null
for p in $(cat /tmp/pids); do kill -INT -- -$p; done; sleep 3; for p in $(cat /tmp/pids); do kill -KILL -- -$p 2>/dev/null; done
tar czf $OUT/dec.tgz -C /tmp dec; tar cf - -C /tmp prof | split -b 15M - $OUT/prof.
cp /tmp/srv-a/server.log $OUT/a.log; ls -la $OUT; say end
