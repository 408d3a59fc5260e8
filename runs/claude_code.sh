#!/bin/sh
# Claude Code, the agent, against the gateway: installs it into a folder (a new one, unless one is
# named) and runs tests/gateway/test_agent.py with it. Needs npm and Node.js 18 or newer.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-$(mktemp -d)}
npm install --silent --no-fund --no-audit --prefix "$folder" @anthropic-ai/claude-code@2.1.332
STANCHION_CLAUDE="$folder/node_modules/.bin/claude" \
	"${PYTHON:-.venv/bin/python}" -m pytest -q tests/gateway/test_agent.py
