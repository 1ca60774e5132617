# shellcheck shell=bash
# Functions for the scripts of this folder.

# Print the interpreter: MEZZO_PYTHON if it is set, otherwise that of ./.venv, otherwise python3.
find_python() {
    if [ -n "${MEZZO_PYTHON:-}" ]; then
        printf '%s\n' "$MEZZO_PYTHON"
    elif [ -x .venv/bin/python ]; then
        printf '%s\n' .venv/bin/python
    else
        printf '%s\n' python3
    fi
}

# Replace the script by `mezzo tipc ...`.
exec_tipc() {
    local python
    python=$(find_python)
    exec "$python" -m mezzo tipc "$@"
}
