# shellcheck shell=bash
# What the scripts of this folder share; they source it, it does nothing by itself.

# Print the interpreter: MEZZO_PYTHON where it is set, else that of ./.venv, else python3.
find_python() {
    if [ -n "${MEZZO_PYTHON:-}" ]; then
        printf '%s\n' "$MEZZO_PYTHON"
    elif [ -x .venv/bin/python ]; then
        printf '%s\n' .venv/bin/python
    else
        printf '%s\n' python3
    fi
}

# Become `mezzo tipc ...`: its exit status is that of the script.
exec_tipc() {
    local python
    python=$(find_python)
    exec "$python" -m mezzo tipc "$@"
}
