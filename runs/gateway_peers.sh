#!/usr/bin/env bash
# The router that `stanchion bench gateway --peers FOLDER` is measured beside, in an environment of
# its own: runs/gateway_peers.sh FOLDER
set -euo pipefail
folder="${1:?usage: runs/gateway_peers.sh FOLDER}"
python3.11 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check sglang-router==0.3.2
"$folder/bin/python" -c "import sglang_router" && echo "sglang-router 0.3.2 is in $folder"
