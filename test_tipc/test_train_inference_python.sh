#!/usr/bin/env bash
# Run a certification: bash test_tipc/test_train_inference_python.sh CONFIG MODE [GPU] [options of `mezzo tipc run`]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=test_tipc/common_func.sh
source test_tipc/common_func.sh
exec_tipc run "$@"
