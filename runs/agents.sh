#!/bin/sh
# Real coding agents against the gateway: installs Claude Code (Anthropic's API) and pi (both APIs)
# into a folder (a new one, unless one is named) and runs tests/gateway/test_agents.py with them.
# Needs npm and Node.js 20.6 or newer.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-$(mktemp -d)}
npm install --silent --no-fund --no-audit --prefix "$folder" \
	@anthropic-ai/claude-code@2.1.332 @mariozechner/pi-coding-agent@0.73.1
STANCHION_AGENTS="$folder/node_modules/.bin" \
	"${PYTHON:-.venv/bin/python}" -m pytest -q tests/gateway/test_agents.py
