#!/bin/sh
# Brings production back and ends a stopped chain: chain_abort.sh [OUT] [--campaign DIR] [--again]
# Exit 0 restored and watched (or no marker), 3 failed, 4 alert only. Needs WINDOW_COORDINATOR.
set -eu
case "${1:-}" in
  "" | -*) ;;
  *) out=$1; shift; set -- --out "$out" "$@" ;;
esac
if [ -n "${DSV41_CHAIN_CAMPAIGN:-}" ]; then set -- --campaign "$DSV41_CHAIN_CAMPAIGN" "$@"; fi
exec "${DSV41_CHAIN_PY:-python3}" -m pytest_dsv41 chain abort "$@"
