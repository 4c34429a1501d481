#!/bin/sh
# One sentence for each thing that a fresh machine may lack, before anything is installed.
PYTHON=${PYTHON:-python3}
if ! command -v "$PYTHON" >/dev/null 2>&1; then
    echo "bitwright: no $PYTHON here: install Python 3.11 or newer, or run: make PYTHON=/path/to/python3" >&2
    exit 1
fi
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "bitwright: $PYTHON is older than 3.11: install Python 3.11 or newer, or run: make PYTHON=python3.11" >&2
    exit 1
fi
if ! "$PYTHON" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    echo "bitwright: $PYTHON cannot make virtual environments: install its venv package (Debian, Ubuntu: apt install python3-venv)" >&2
    exit 1
fi
for cxx in ${CXX:-c++ g++ clang++}; do
    if command -v "$cxx" >/dev/null 2>&1; then exit 0; fi
done
echo "bitwright: no C++ compiler found, and llama.cpp is built from source: install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)" >&2
exit 1
