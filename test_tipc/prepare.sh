#!/usr/bin/env bash
# Prepare the data of a certification: bash test_tipc/prepare.sh CONFIG MODE [options of `mezzo tipc prepare`]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=test_tipc/common_func.sh
source test_tipc/common_func.sh
exec_tipc prepare "$@"
