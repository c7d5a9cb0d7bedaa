# installs decodegate's own dependencies beside vLLM, in a site of its own
set -e
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/dgsite .gpu/whl/*.whl 2>&1 | tail -2
mkdir -p /tmp/dgsite/decodegate-0.1.0.dist-info && printf 'Metadata-Version: 2.1\nName: decodegate\nVersion: 0.1.0\n' > /tmp/dgsite/decodegate-0.1.0.dist-info/METADATA
