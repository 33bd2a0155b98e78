#!/bin/bash
# What loading costs of the host's memory, for a model of 57 GiB: load_memory.c with North Mini Code's tables.
cd "$(dirname "$0")/../.." || exit 2
exec build/tests/north-mini-code/runtime/load_memory
