#!/bin/sh
# The gate before a chain's next window: chain_prev_ok.sh SUMMARY [--campaign DIR] [--wait SECONDS]
# Exit 0 admits, 2 refuses, 3 is CHAIN STOPPED: PRODUCTION DOWN (the recovery has run by then).
# Needs WINDOW_COORDINATOR. SUMMARY may also stand in PREV_FILE.
set -eu
previous=${1:-${PREV_FILE:-}}
[ $# -eq 0 ] || shift
[ -n "$previous" ] || { echo "chain_prev_ok.sh: which previous summary? SUMMARY or PREV_FILE" >&2; exit 4; }
if [ -n "${DSV41_CHAIN_CAMPAIGN:-}" ]; then set -- --campaign "$DSV41_CHAIN_CAMPAIGN" "$@"; fi
exec "${DSV41_CHAIN_PY:-python3}" -m pytest_dsv41 chain gate --prev "$previous" "$@"
